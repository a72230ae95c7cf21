"""The engine's end of a packer: OUTPUT_READY messages in, outputs over leased memory out. Knows nothing of vllm-omni.

Note [A full descriptor table]
Each descriptor that comes with an output is mapped and closed at once: it needs room for a moment. A ``SpareDescriptor``
keeps that: an engine that may open nothing more still gets every output. Where somebody else was quicker, the message stays
in the connection until there is room again (see Note [A descriptor that finds no room] in packer_service.wire.channel), for
``_ROOM_S``; then what needs it fails, and says which limit to raise. A segment is asked for again when the next output
lies in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from packer_service.errors import DescriptorLost, PackerError, PeerClosed
from packer_service.wire import protocol
from packer_service.wire.channel import close_fds
from packer_service.wire.protocol import OutputComing, OutputGone, OutputReady
from worker_shim.connection import Connection
from worker_shim.engine.assembly import Assembled, Assembler, Received
from worker_shim.engine.delivered import Delivered
from worker_shim.engine.leases import LeaseBook
from worker_shim.engine.questions import Questions
from worker_shim.engine.segments import Segments
from worker_shim.engine.spare_descriptor import SpareDescriptor
from worker_shim.log import get_logger

logger = get_logger(__name__)

_ROOM_S = 5.0
_ROOM_POLL_S = 0.01


class Receiver:
    """One engine session's reader. One thread calls ``receive``; outputs hold their leases themselves (``leases``)."""

    def __init__(
        self,
        connection: Connection,
        mac_key: bytes,
        delivered: Delivered,
        *,
        on_worker_gone: Callable[[], None] = lambda: None,
    ) -> None:
        self._segments = Segments(connection)
        self.leases = LeaseBook(connection, self._segments)
        self.questions = Questions(connection)
        self.broken = ""  # why nothing more will come
        self.packer_pid = connection.packer_pid
        self._connection = connection
        self._on_worker_gone = on_worker_gone
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
            return None
        if isinstance(message, protocol.UnmapSegment):
            self._segments.remove(message.segment)
            return None
        if isinstance(message, protocol.WorkerGone):
            self._on_worker_gone()
            return None
        if isinstance(message, protocol.Described):
            self.questions.take_answer(message)
            return None
        if isinstance(message, protocol.Refused):
            logger.error("the packer refused this engine: %s", message.reason)
            return None
        if isinstance(message, OutputComing):
            self._coming[message.leases[0].lease] = self._assembler.assemble(message, fds, lost)
            return None
        if isinstance(message, OutputGone):
            if (gone := self._coming.pop(message.lease, None)) is not None:
                self.leases.forget_leases(gone.leases)
            return None
        assert isinstance(message, OutputReady)
        if message.error:
            return Received(message.output, error=message.error) if self._is_first(message.output) else None
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
