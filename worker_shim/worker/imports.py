"""What the packer imports of a worker's memory, on one connection after another, and when that is closed again.

Nothing here allocates or frees memory: it only says when a packer cannot reach it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set

from packer_service.wire.protocol import MapChunk, UnmapChunk
from worker_shim.link import Link, Packet


class Imports:
    """By the number of a chunk, or of another allocation. The link's lock guards all of it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._mapped: dict[int, Packet] = {}
        self._closed: set[int] = set()  # what the packer said of those that ``unmap`` waits for
        self._changed = threading.Condition(link.lock)

    def map(self, message: MapChunk, fd: int | None = None) -> None:
        """Have the packer import that, and every later one too."""
        with self._link.lock:
            self._mapped[message.chunk] = message, fd
            self._link.post(message, fd)

    def packets(self) -> Iterable[Packet]:
        """What a new connection's packer has to import."""
        return self._mapped.values()

    def forget(self, numbers: Iterable[int]) -> None:
        """The packer has closed these imports by itself, or there is none."""
        with self._link.lock:
            for number in numbers:
                self._mapped.pop(number, None)

    def unmap(self, numbers: Set[int], timeout_s: float) -> bool:
        """Have the packer close its imports; whether it has none of them any more. Any thread that may wait.

        A connection that ended takes its imports with it: one to a packer that hangs, as soon as that comes to itself or is
        killed, and the driver keeps the memory until then.
        """
        with self._changed:
            connection = self._link.connections
            self.forget(numbers)
            for number in numbers:
                self._link.post(UnmapChunk(number))

        def closed() -> bool:
            ended = self._link.connections != connection or not self._link.connected
            return ended or self._closed >= numbers

        with self._changed:
            free = self._changed.wait_for(closed, timeout_s)
            self._closed -= numbers
            return free

    def closed(self, number: int) -> None:
        """The packer has closed that import."""
        with self._changed:
            self._closed.add(number)
            self._changed.notify_all()

    def end_connection(self) -> None:
        with self._changed:
            self._changed.notify_all()
