"""The segments of one packer's pool as the engine has them mapped, and those that it could not map."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from packer_service.errors import ProtocolError
from packer_service.memory.memfd import SharedMemory
from packer_service.wire.protocol import Lease, MapSegment, SegmentLost
from worker_shim.connection import Connection
from worker_shim.engine import fork
from worker_shim.engine.fork import Child
from worker_shim.log import get_logger

logger = get_logger(__name__)


class Segments:
    """The thread that receives adds and removes them. No forked child inherits their memory or their descriptors.

    ``mapped`` changes under ``fork.lock``: a child could inherit what is not hidden yet, and keep the whole segment for it.
    """

    def __init__(self, connection: Connection) -> None:
        self.mapped: dict[int, SharedMemory] = {}
        self._connection = connection
        self._lost: dict[int, Exception] = {}  # why they could not be mapped
        self._asked: set[int] = set()  # for which of them again
        with fork.lock:
            fork.holders.add(self)

    def add(self, message: MapSegment, fds: list[int], lost: Exception | None) -> None:
        """Map a segment. Takes over its descriptor. ``lost``: why that is not here."""
        self._asked.discard(message.segment)
        if lost is None:
            try:
                self._map(message, fds)
                self._lost.pop(message.segment, None)
                return
            except OSError as error:
                lost = error
        logger.error("segment %d of the packer's pool cannot be mapped: %s", message.segment, lost)
        self._lost[message.segment] = lost

    def _map(self, message: MapSegment, fds: list[int]) -> None:
        if not fds or message.segment in self.mapped:
            raise ProtocolError(f"segment {message.segment} came twice or without its memfd")
        with fork.lock:
            memory = SharedMemory.attach(fds.pop(), message.nbytes, keep_fd=True)
            self.mapped[message.segment] = memory
            fork.hide(memory.address, memory.nbytes)

    def remove(self, number: int) -> None:
        """Unmap a segment that the packer took out of its pool; nothing in it is leased."""
        self._lost.pop(number, None)
        with fork.lock:
            if (memory := self.mapped.pop(number, None)) is not None:
                memory.close()

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise what kept a segment of these from being mapped, once it was asked for again."""
        if not self._lost:
            return
        for lost in self._lost.keys() & {lease.segment for lease in leases}:
            if lost not in self._asked:
                self._asked.add(lost)
                self._connection.post(SegmentLost(lost))
            raise self._lost[lost]

    def before_fork(self, make_child: Callable[[], Child]) -> None:
        """See ``fork.Holder``. All of it is hidden but what is leased."""

    def after_fork_in_child(self) -> None:
        """See ``fork.Holder``."""
        self._close_all()

    def close(self) -> None:
        """Unmap all. Arrays that are out stay valid: they hold the mapping. Close the leases first. Idempotent."""
        with fork.lock:
            fork.holders.discard(self)
            self._close_all()

    def _close_all(self) -> None:
        for memory in self.mapped.values():
            memory.close()
        self.mapped.clear()
