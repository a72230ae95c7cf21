"""The engine's end of a packer: OUTPUT_READY messages in, outputs over leased memory out. Knows nothing of vllm-omni.

Note [A full descriptor table]
Each descriptor that comes with an output is mapped and closed at once: it needs room for a moment. A ``SpareDescriptor``
keeps that: an engine that may open nothing more still gets every output. Where somebody else was quicker, the message stays
in the connection until there is room again (see Note [A descriptor that finds no room] in packer_service.wire.channel), for
``_ROOM_S``; then what needs it fails, and says which limit to raise. A segment is asked for again when the next output
lies in it.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import time
from collections.abc import Callable

from packer_service.errors import DescriptorLost, PackerError, PeerClosed
from packer_service.wire import protocol
from packer_service.wire.channel import close_fds
from packer_service.wire.protocol import Describe, Described, OutputComing, OutputGone, OutputReady
from worker_shim.connection import Connection
from worker_shim.engine.assembly import Assembled, Assembler, Received
from worker_shim.engine.counts import ErrorKind
from worker_shim.engine.leases import LeaseBook, Segments
from worker_shim.log import get_logger

logger = get_logger(__name__)

_ROOM_S = 5.0
_ROOM_POLL_S = 0.01
_REMEMBERED = 1 << 16
_NO_ANSWER = "unknown: the packer did not answer"


class Delivered:
    """The ids of outputs that the engine has: of one that comes twice, by whichever way, only the first counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: collections.OrderedDict[str, None] = collections.OrderedDict()

    def first(self, output_id: str) -> bool:
        """True the first time it is asked about ``output_id``."""
        with self._lock:
            if output_id in self._ids:
                return False
            self._ids[output_id] = None
            if len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)
            return True

    def __contains__(self, output_id: str) -> bool:
        return output_id in self._ids


class Questions:
    """How far a packer is with an output: asked on any thread, answered on the one that receives.

    ``_answered`` guards ``_states`` and ``overdue``.
    """

    def __init__(self, connection: Connection) -> None:
        self.overdue = False  # an answer did not come in time, and none has since
        self._connection = connection
        self._answered = threading.Condition()
        self._states: dict[str, str] = {}  # of outputs that were asked about; empty: no answer yet

    def ask(self, output_id: str) -> Callable[[float], str]:
        """What this returns waits for the answer, until a time of ``time.monotonic()``. Any thread but the one that receives.

        While an earlier answer is overdue nothing is asked: whoever looks into many outputs waits for a packer once.
        """
        with self._answered:
            if self.overdue:
                return lambda deadline: _NO_ANSWER
            self._states[output_id] = ""
        self._connection.post(Describe(output_id))
        return functools.partial(self._wait, output_id)

    def _wait(self, output_id: str, deadline: float) -> str:
        with self._answered:
            timeout_s = max(deadline - time.monotonic(), 0.0)
            self.overdue = not self._answered.wait_for(lambda: self._states.get(output_id, ""), timeout_s)
            return self._states.pop(output_id, "") or _NO_ANSWER

    def take_answer(self, message: Described) -> None:
        """For the thread that receives."""
        with self._answered:
            self.overdue = False
            if message.output in self._states:
                self._states[message.output] = message.state
                self._answered.notify_all()


class SpareDescriptor:
    """A descriptor that is held for nothing but its place in this process's table: see Note [A full descriptor table]."""

    def __init__(self) -> None:
        self._fd = -1
        self.take()

    def take(self) -> bool:
        """Have one, if it may be had. Whether there is one now."""
        if self._fd < 0:
            try:
                self._fd = os.eventfd(0)
            except OSError:
                return False
        return True

    def give(self) -> bool:
        """Give its place to whatever comes next. False where it was given already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return fd >= 0


class Receiver:
    """One engine session's reader. One thread calls ``receive``; outputs hold their leases themselves (``leases``)."""

    def __init__(
        self,
        connection: Connection,
        mac_key: bytes,
        delivered: Delivered,
        *,
        on_worker_gone: Callable[[], None] = lambda: None,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self._segments = Segments(connection)
        self.leases = LeaseBook(connection, self._segments)
        self.questions = Questions(connection)
        self.broken = ""  # why nothing more will come
        self.packer_pid = connection.packer_pid
        self._connection = connection
        self._on_worker_gone, self._on_leaving = on_worker_gone, on_leaving
        self._assembler = Assembler(mac_key, self._segments, self.leases)
        self._delivered = delivered
        # Outputs that are coming, by their first lease, a number never used twice: bytes not there yet, leases not ours.
        self._coming: dict[int, Assembled] = {}
        self._spare = SpareDescriptor()
        self._no_room_until = 0.0  # until when a message waits for a descriptor; 0: there is room

    def receive(self, timeout_s: float) -> Received | None:
        """The next output. None where none came in time, or at once where none will come any more."""
        deadline = time.monotonic() + timeout_s
        while not self.broken:
            try:
                received = self._next(deadline)
                if received is None:
                    return None
                message, fds, lost = received
                try:
                    output = self._take(message, fds, lost)
                finally:
                    close_fds(fds)
            except (PackerError, OSError) as error:
                self._break(error)
            else:
                if output is not None:
                    return output
        return None

    def _next(self, deadline: float) -> tuple[protocol.Message, list[int], DescriptorLost | None] | None:
        """The next message, its descriptors, and why they are not here. None where none came in time.

        See Note [A full descriptor table].
        """
        if self._spare.take():
            self._no_room_until = 0.0
        while True:
            try:
                received = self._connection.receive(max(deadline - time.monotonic(), 0.0))
                return None if received is None else (*received, None)
            except DescriptorLost as error:
                if self._spare.give():
                    continue
                now = time.monotonic()
                if not self._no_room_until:
                    self._no_room_until = now + _ROOM_S
                    logger.error("what the packer sends waits for up to %g s: %s", _ROOM_S, error)
                if now >= self._no_room_until:
                    self._connection.skip()
                    return error.message, [], error
                if now >= deadline:
                    return None
                time.sleep(_ROOM_POLL_S)

    def _break(self, error: Exception) -> None:
        if not isinstance(error, PeerClosed):
            logger.error("the packer is disconnected: %s", error)
        self._connection.shutdown()
        self.broken = str(error)

    def _take(self, message: protocol.Message, fds: list[int], lost: DescriptorLost | None) -> Received | None:
        """One message; None for those that carry no output. Takes out of ``fds`` the descriptors it keeps.

        ``lost``: its descriptor was to be in ``fds`` and could not be had.
        """
        if isinstance(message, protocol.MapSegment):
            self._segments.add(message, fds, lost)
        elif isinstance(message, protocol.UnmapSegment):
            self._segments.remove(message.segment)
        elif isinstance(message, protocol.WorkerGone):
            self._on_worker_gone()
        elif isinstance(message, protocol.Leaving):
            logger.info("packer %d ends soon: %s", self.packer_pid, message.reason)
            self._on_leaving()
        elif isinstance(message, Described):
            self.questions.take_answer(message)
        elif isinstance(message, protocol.Refused):
            logger.error("the packer refused this engine: %s", message.reason)
        elif isinstance(message, OutputComing):
            self._coming[message.leases[0].lease] = self._assembler.assemble(message, fds, lost)
        elif isinstance(message, OutputGone):
            if (gone := self._coming.pop(message.lease, None)) is not None:
                self.leases.forget_leases(gone.leases)
        else:
            assert isinstance(message, OutputReady)
            return self._take_ready(message, fds, lost)
        return None

    def _take_ready(self, message: OutputReady, fds: list[int], lost: DescriptorLost | None) -> Received | None:
        if message.error:
            failed = Received(message.output, error=message.error, error_kind=ErrorKind.PACKER)
            return failed if self._is_first(message.output) else None
        assembled = self._coming.pop(message.leases[0].lease, None) if message.leases else None
        if assembled is None:
            assembled = self._assembler.assemble(message, fds, lost)
        for lease in assembled.unused.values():
            self.leases.give_back(lease)
        return assembled.received if self._is_first(message.output) else None

    def _is_first(self, output_id: str) -> bool:
        first = self._delivered.first(output_id)
        if not first:
            logger.info("output %s came a second time and is dropped", output_id)
        return first

    def close(self) -> None:
        """End the session: the packer frees what no tensor here still looks at. Tensors that are out stay valid."""
        self._connection.shutdown()
        self._coming.clear()
        self.leases.close()
        self._segments.close()
        self._connection.close()
        self._spare.give()
