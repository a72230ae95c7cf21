"""Outputs that were promised to the engine and that it may never ask for.

vllm-omni awaits any ``DiffusionOutput`` that carries an ``async_output_id``: a placeholder. It also throws some away: the
chunks of a warm-up, what a client that left would have had. Their outputs would be kept for it for ever.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

from worker_shim.log import get_logger

logger = get_logger(__name__)


class Unclaimed:
    """The ids whose placeholder lives and that nobody has asked for yet. ``drop`` is called for those that nobody will.

    A finalizer runs wherever the garbage collector happens to be, so it only puts the id into a queue; a thread does the
    rest. ``_lock`` guards ``_ids``. ``drop`` is a bound method, held weakly: an executor in a cycle would be taken apart by
    the garbage collector, in any order, and the end of its message queue's zmq context then waits for ever for its sockets.
    """

    def __init__(self, drop: Callable[[str], None]) -> None:
        self._drop = weakref.WeakMethod(drop)
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


def in_reply(reply: Any) -> Iterator[DiffusionOutput]:
    """The outputs in a synchronous reply of a worker: those of a step, or of one rank's part in a DP wave."""
    if isinstance(reply, BatchRunnerOutput):
        for part in reply.runner_outputs:
            if part.result is not None:
                yield part.result
    elif isinstance(reply, RunnerOutput):
        if reply.result is not None:
            yield reply.result
    elif isinstance(reply, dict) and "dp_rank" in reply and isinstance(reply.get("output"), DiffusionOutput):
        yield reply["output"]


def replace_in_reply(reply: Any, replace: Callable[[DiffusionOutput], DiffusionOutput]) -> None:
    """Put ``replace(output)`` where each output of the reply is; a part that then holds a placeholder carries its id too.

    With the id beside it vllm-omni itself drops the output of a request that was aborted meanwhile.
    """
    if isinstance(reply, dict):
        for output in in_reply(reply):
            reply["output"] = replace(output)
        return
    parts = reply.runner_outputs if isinstance(reply, BatchRunnerOutput) else [reply]
    for part in parts:
        if isinstance(part, RunnerOutput) and part.result is not None:
            part.result = replace(part.result)
            part.async_output_id = part.result.async_output_id
