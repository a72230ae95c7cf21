"""The ack page: where a packer notes which outputs are delivered, without waking anybody.

A worker wants its slots back when it runs out of room, not at the moment an output is delivered: a message would wake a
thread of it in the middle of a forward, for the GIL (measured on an H200: 0.15-0.35 ms of an 18 ms forward). So acks that
can wait are words of a page of shared memory, and the worker reads them when it looks for room, and a few times a second.

    byte 0     taken   u64, written by the worker: how many acks it has taken
    byte 64    ring    128 u64, written by the packer: word i % 128 is the ``ready`` of the export that ack i is of

Each connection has a page of its own, because a packer that hung may still write to that of an earlier one. A ``ready`` is a
value of the worker's timeline, which only grows, so a word is a new ack when it is not what it was a round ago: nothing but
that word has to become visible.
"""

from __future__ import annotations

import ctypes
import threading

from packer_service.memory.memfd import SharedMemory

ACK_PAGE_BYTES = 4096
WORDS = 128
_RING_AT = 64  # a cache line of its own


class AckPage:
    """Either side's mapping of the page. ``create`` and ``take`` in the worker, ``attach`` and ``put`` in the packer.

    ``_next`` is the ack that this side puts or takes next. ``_lock`` guards the packer's; the worker's caller locks, and only
    the worker has ``_seen``, the words of the round before. ``close()`` gives the descriptor back; the mapping goes with the
    object.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        # These are whole words, each read and written by one instruction.
        self._taken = ctypes.c_uint64.from_buffer(memory.buffer, 0)
        self._ring = (ctypes.c_uint64 * WORDS).from_buffer(memory.buffer, _RING_AT)
        self._next = 0
        self._seen = [0] * WORDS
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> AckPage:
        return cls(SharedMemory.create("packer-acks", ACK_PAGE_BYTES))

    @classmethod
    def attach(cls, fd: int) -> AckPage:
        """Map a worker's page. Takes over ``fd``. ProtocolError where it is none."""
        return cls(SharedMemory.attach(fd, ACK_PAGE_BYTES))

    @property
    def fd(self) -> int:
        return self._memory.fd

    def put(self, ready: int) -> bool:
        """The packer's: note the ack of the export with this ``ready``. Any thread may call it.

        False where the page is full, or ``ready`` is 0, which a word holds before its first ack.
        """
        with self._lock:
            if not ready or self._next - self._taken.value >= WORDS:
                return False
            self._ring[self._next % WORDS] = ready
            self._next += 1
            return True

    def take(self) -> list[int]:
        """The worker's: what was put since the last time, in order. One thread at a time."""
        taken: list[int] = []
        while self._is_new(self._next):
            ready = self._seen[self._next % WORDS] = self._ring[self._next % WORDS]
            self._next += 1
            taken.append(ready)
        if taken:
            self._taken.value = self._next
        return taken

    @property
    def waiting(self) -> int:
        """The worker's: how many were put and not taken yet."""
        number = 0
        while number < WORDS and self._is_new(self._next + number):
            number += 1
        return number

    def _is_new(self, index: int) -> bool:
        return self._ring[index % WORDS] != self._seen[index % WORDS]

    def close(self) -> None:
        self._memory.close()
