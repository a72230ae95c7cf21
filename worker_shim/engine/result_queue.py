"""The queues that vllm-omni's result pumps read: a packer's, the late one of step mode, and a worker's own.

A pump asks one thing of a queue: ``dequeue(timeout)``, a message or TimeoutError. It runs on a thread of its own, which is
thereby the reader of the engine's connection: one wake-up from the packer's send to the request's future.
"""

from __future__ import annotations

import collections
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection as pipes
from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm

from worker_shim.connection import Connection
from worker_shim.engine.assembly import Received
from worker_shim.engine.counts import Counts, EngineCounts
from worker_shim.engine.receiver import Delivered, Receiver
from worker_shim.link import Client, Packet

_QUIET_S = 0.05
_WATCH_S = 0.2


class PackerResultQueue(Client):
    """One packer's queue, across its restarts: the client of its link. Where a packer is given up, the worker
    sends what waited for it.

    Only the pump thread may call ``dequeue``. Until its first call the link's thread reads: workers load their weights for
    minutes before vllm-omni starts pumps, and a packer may come and go meanwhile.

    ``_changed`` guards the receiver of the present connection, None while there is none.
    """

    def __init__(self, mac_key: bytes, delivered: Delivered, counts: Counts | None = None) -> None:
        self.worker_gone = threading.Event()  # the packer is done with a worker that died
        self.outputs = 0  # that came, errors included; written by the pump thread
        self.on_leaving: Callable[[], None] = lambda: None  # the packer said that it ends soon
        self._counts = counts or EngineCounts().new()
        self._mac_key = mac_key
        self._delivered = delivered
        self._changed = threading.Condition()
        self._receiver: Receiver | None = None
        self._opened: Receiver  # the last one, for the link's thread to close
        self._ends: queue.SimpleQueue[str] = queue.SimpleQueue()  # why each connection ended
        self._pumped = False  # the pump reads; it says so before it asks for ``_watching``
        self._watching = threading.Lock()  # held by the link's thread while it reads
        self._early: collections.deque[Received] = collections.deque()  # what came then
        self._quiet = True
        self._awaits_last = False  # an empty queue does not end the pump now

    # -- the link's client ---------------------------------------------------------------------------------------------

    def resume(self, connection: Connection) -> Iterable[Packet]:
        callbacks = {"on_worker_gone": self.worker_gone.set, "on_leaving": self.on_leaving}
        receiver = Receiver(connection, self._mac_key, self._delivered, **callbacks)
        with self._changed:
            self.worker_gone.clear()  # a worker that lives has connected anew
            self._receiver = self._opened = receiver
            self._changed.notify_all()
        return ()

    def read(self, connection: Connection) -> str:
        while self._ends.empty() and self._watch():
            pass
        reason = self._ends.get()
        self._opened.close()
        return reason

    def suspend(self) -> None:
        with self._changed:
            self._receiver = None

    def _watch(self) -> bool:
        """Read in the pump's stead for a moment; False once there is a pump."""
        with self._watching:
            if self._pumped:
                return False
            received = self._receive(_WATCH_S)
            if received is not None:
                self._early.append(received)
            return True

    # -- the pump ------------------------------------------------------------------------------------------------------

    @property
    def packer_pid(self) -> int | None:
        """The process that serves now; None while none does."""
        receiver = self._receiver
        return receiver.packer_pid if receiver is not None else None

    def dequeue(self, timeout: float | None = None) -> AsyncDiffusionOutput:
        """The next OUTPUT_READY. TimeoutError where none came in ``timeout`` seconds.

        After ~50 ms of quiet it returns one empty message: the pump's locals would otherwise hold the last output, and its
        lease, until the next one comes.
        """
        timeout = 3600.0 if timeout is None else timeout
        if not self._pumped:
            self._pumped = True
            with self._watching:  # its last look ends
                pass
        received = self._early.popleft() if self._early else None
        if received is None:
            received = self._receive(timeout if self._quiet else min(_QUIET_S, timeout))
        if received is not None:
            self._quiet = False
            self.outputs += 1
            if received.error_kind is None:
                self._counts.add_output(received.nbytes)
            else:
                self._counts.add_error(received.error_kind)
            return AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY,
                async_output_id=received.output_id,
                output=received.output,
                error=received.error or None,
            )
        if not self._quiet or self._awaits_last:
            self._quiet = True
            return AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY)
        raise TimeoutError

    def _receive(self, timeout_s: float) -> Received | None:
        with self._changed:
            if self._receiver is None:
                self._changed.wait(timeout_s)
            receiver = self._receiver
        if receiver is None:
            return None
        received = receiver.receive(timeout_s)
        if receiver.broken:
            with self._changed:
                self._receiver = None
            self._ends.put(receiver.broken)
        return received

    def leases(self) -> list[tuple[int, float]]:
        """Bytes and age in seconds of each lease of the present connection, those included that are coming."""
        receiver = self._receiver
        return receiver.leases.usage() if receiver is not None else []

    def ask(self, output_id: str) -> Callable[[float], str]:
        """Ask how far the packer is with an output; see ``Questions.ask``."""
        receiver = self._receiver
        if receiver is None:
            return lambda deadline: "waiting for the packer to come back"
        return receiver.questions.ask(output_id)

    def await_last_outputs(self, timeout_s: float) -> None:
        """A worker died: wait until what it had finished was dequeued, which another thread goes on doing meanwhile."""
        self._awaits_last = True  # the pump of a failed executor ends at the first TimeoutError
        try:
            if self._receiver is not None:
                self.worker_gone.wait(timeout_s)
        finally:
            self._awaits_last = False

    def close(self) -> None:
        """Let the link's thread end the session. Tensors that are out stay valid."""
        self._ends.put("this side closed")


class LateQueue:
    """The reading end of the pipe through which late messages come in step mode. One thread calls ``dequeue``.

    There vllm-omni has no pump: the engine's thread reads a worker's queue itself, for the reply to each step, and must find
    nothing else there. So what comes after its reply and not through the packer (an output that falls back, an error) has a
    pipe of its own, and the steps keep vllm-omni's way, cost included.
    """

    def __init__(self, reader: pipes.Connection) -> None:
        self._reader = reader
        self._ended = False

    def dequeue(self, timeout: float | None = None) -> AsyncDiffusionOutput:
        """The next message. TimeoutError where none came in ``timeout`` seconds, or where none will come any more."""
        try:
            data = self._reader.recv_bytes() if not self._ended and self._reader.poll(timeout) else None
        except (EOFError, OSError):
            self._ended, data = True, None  # every worker is gone
        if data is not None:
            message: AsyncDiffusionOutput = pickle.loads(data)  # our own workers' pipe
            return message
        if self._ended and timeout is not None:
            time.sleep(timeout)  # do not spin
        raise TimeoutError

    def close(self) -> None:
        self._reader.close()


class OnceQueue:
    """A worker's own result queue, less the outputs that the packer delivered first. It counts the others."""

    def __init__(self, result_mq: Any, delivered: Delivered, counts: Counts) -> None:
        self._result_mq = result_mq
        self._delivered = delivered
        self._counts = counts

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            message = self._result_mq.dequeue(*args, **kwargs)
            if (
                not isinstance(message, AsyncDiffusionOutput)
                or message.kind is not AsyncOutputKind.OUTPUT_READY
                or message.async_output_id is None
            ):
                return message
            if self._delivered.first(message.async_output_id):
                self._counts.add_own_path(message)
                return message
            unpack_diffusion_output_shm(message.output)  # for nothing: that is what removes its named SHM segments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result_mq, name)
