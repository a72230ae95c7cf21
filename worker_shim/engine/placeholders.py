"""Outputs that were promised to the engine and that it may never ask for.

vllm-omni awaits any ``DiffusionOutput`` that carries an ``async_output_id``: a placeholder. It also throws some away: the
chunks of a warm-up, what a client that left would have had. Their outputs would be kept for it for ever.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput

from worker_shim.engine.counts import Counts, EngineCounts
from worker_shim.log import get_logger
from worker_shim.outputs.own_path import OwnPathReason
from worker_shim.outputs.replies import in_reply

logger = get_logger(__name__)


class Unclaimed:
    """The ids whose placeholder lives and that nobody has asked for yet. ``drop`` is called for those that nobody will.

    A finalizer runs wherever the garbage collector happens to be, so it only puts the id into a queue; a thread does the
    rest. ``_lock`` guards ``_ids``. ``drop`` is a bound method, held weakly: an executor in a cycle would be taken apart by
    the garbage collector, in any order, and the end of its message queue's zmq context then waits for ever for its sockets.
    """

    def __init__(self, drop: Callable[[str], None], counts: Counts | None = None) -> None:
        self._drop = weakref.WeakMethod(drop)
        self._counts = counts or EngineCounts().new()
        self._lock = threading.Lock()
        self._ids: set[str] = set()
        self._deaths: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._drop_dead, name="packer-unclaimed", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        with self._lock:
            return len(self._ids)

    def watch(self, placeholder: DiffusionOutput) -> None:
        """From now on its output is dropped when it dies, unless somebody has taken the id by then."""
        output_id = placeholder.async_output_id
        assert output_id is not None
        with self._lock:
            self._ids.add(output_id)
        weakref.finalize(placeholder, self._deaths.put, output_id).atexit = False

    def watch_reply(self, reply: Any) -> Any:
        """Watch the placeholders in a worker's synchronous reply. What is to be used in its stead."""
        if isinstance(reply, dict) and any(output.async_output_id is not None for output in in_reply(reply)):
            # a copy: the pump that read a wave's reply keeps its message until the next one comes
            reply = {**reply, "output": dataclasses.replace(reply["output"])}
        for output in in_reply(reply):
            if output.async_output_id is not None:
                self.watch(output)
            elif output.error is None and not output.aborted and not output.request_started:
                self._counts.own_path[OwnPathReason.IN_REPLY.value] += 1
        return reply

    def watch_parts(self, parts: Iterable[Any]) -> None:
        """Give each part of a batch's output that has only an id a placeholder, where vllm-omni would make one later that
        nobody watches.

        A part without its output's id beside it (a DP wave's) gets that: vllm-omni drops it by that id after an abort.
        """
        for part in parts:
            if part.result is None and part.async_output_id is not None:
                part.result = DiffusionOutput(async_output_id=part.async_output_id)
                self.watch(part.result)
            elif part.result is not None:
                part.async_output_id = part.result.async_output_id

    def take(self, output_id: str) -> bool:
        """Somebody waits for this output, or has dropped it. False where that was known."""
        with self._lock:
            known = output_id in self._ids
            self._ids.discard(output_id)
        return known

    def _drop_dead(self) -> None:
        while (output_id := self._deaths.get()) is not None:
            drop = self._drop()
            if self.take(output_id) and drop is not None:
                logger.debug("output %s is dropped: nobody asked for it", output_id)
                try:
                    drop(output_id)
                except Exception:  # it stays; were this thread to end, so would every later one
                    logger.exception("output %s cannot be dropped", output_id)
            del drop

    def close(self) -> None:
        """Stop. Idempotent."""
        self._deaths.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
