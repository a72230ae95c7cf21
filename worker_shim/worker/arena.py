"""The arena: device memory the worker owns, in exported chunks, carved into slots where outputs wait for the packer.

Grown on the worker's main thread only: an allocation on another thread would break a CUDA graph capture there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from packer_service.errors import DeviceError
from packer_service.memory.extents import Extents, align
from worker_shim.log import get_logger
from worker_shim.worker.device import Chunk, ExportDevice

logger = get_logger(__name__)

CHUNK_ALIGNMENT = 2 << 20
_RETRY_GROWTH_S = 5.0
_RECLAIM_POLL_S = 0.005


class Slot(NamedTuple):
    """``nbytes`` of chunk ``chunk`` at ``offset``; ``memory`` is all of that chunk, as flat uint8."""

    chunk: int
    offset: int
    nbytes: int
    memory: torch.Tensor

    @property
    def view(self) -> torch.Tensor:
        """Exactly the slot's bytes. Made on demand: the copy into a slot needs none."""
        return self.memory[self.offset : self.offset + self.nbytes]


class Arena:
    """Slots for outputs in flight. The main thread allocates and grows, whoever hears of acks releases; one lock.

    ``map_chunk(number, chunk)`` is called for each new chunk before any of its slots is handed out. A number names a chunk
    for good. ``reclaim()`` is called without the lock where room is short: it releases the slots of delivered outputs.
    """

    def __init__(
        self,
        device: ExportDevice,
        max_bytes: int,
        step_bytes: int,
        map_chunk: Callable[[int, Chunk], None],
        reclaim: Callable[[], None],
    ) -> None:
        self.max_bytes = max_bytes & -CHUNK_ALIGNMENT
        self._device = device
        self._step_bytes = step_bytes
        self._map_chunk = map_chunk
        self._reclaim = reclaim
        # Taken by itself where every output passes: a Condition's own ``with`` is Python.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._chunks: dict[int, tuple[Chunk, Extents]] = {}
        self._next_chunk = 0
        self._blocked_until = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all chunks."""
        with self._changed:
            return sum(extents.nbytes for _, extents in self._chunks.values())

    @property
    def idle(self) -> bool:
        """True while no slot is out."""
        with self._changed:
            return all(extents.idle for _, extents in self._chunks.values())

    def has_room(self, nbytes: int) -> bool:
        """Whether one free range holds that much. A guess at the next ``allocate``, which may spread its pieces."""
        with self._lock:
            return any(extents.largest_free >= nbytes for _, extents in self._chunks.values())

    def allocate(self, sizes: Sequence[int]) -> list[Slot] | None:
        """One slot for each of ``sizes`` (bytes), growing where needed; None where the arena is full. Main thread only."""
        slots = self._try_allocate(sizes)
        if slots is None:
            self._reclaim()
            slots = self._try_allocate(sizes)
        if slots is None and self._grow(sum(align(size) for size in sizes)):
            slots = self._try_allocate(sizes)
        return slots

    def wait_allocate(self, sizes: Sequence[int], timeout_s: float) -> list[Slot] | None:
        """As ``allocate``, without growing: wait up to ``timeout_s`` for slots to come back, and ``reclaim`` meanwhile. None in
        the end, and at once where no slot is out. Any thread."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._reclaim()
            with self._changed:
                slots = self._try_allocate(sizes)
                remaining = deadline - time.monotonic()
                if slots is not None or remaining <= 0 or all(e.idle for _, e in self._chunks.values()):
                    return slots
                self._changed.wait(min(remaining, _RECLAIM_POLL_S))

    def release(self, slots: Sequence[Slot]) -> None:
        with self._changed:
            for slot in slots:
                self._chunks[slot.chunk][1].release(slot.offset)
            self._changed.notify_all()

    def _try_allocate(self, sizes: Sequence[int]) -> list[Slot] | None:
        """All of them or none."""
        slots: list[Slot] = []
        with self._lock:
            for size in sizes:
                for number, (chunk, extents) in self._chunks.items():
                    offset = extents.allocate(size)
                    if offset is not None:
                        slots.append(Slot(number, offset, size, chunk.tensor))
                        break
                else:
                    for slot in slots:
                        self._chunks[slot.chunk][1].release(slot.offset)
                    return None
        return slots

    def reserve(self) -> None:
        """Grow to ``max_bytes`` now, so that whoever measures the device counts it. Main thread only."""
        left = self.max_bytes - self.nbytes
        if left:
            self._grow(left)

    def _grow(self, nbytes: int) -> bool:
        """Add a chunk with room for ``nbytes``: twice that where the limit allows, so that the next output finds room too."""
        left = self.max_bytes - self.nbytes
        if nbytes > left or time.monotonic() < self._blocked_until:
            return False
        size = min(align(max(2 * nbytes, self._step_bytes), CHUNK_ALIGNMENT), left)
        try:
            # Else nobody outside of inference mode could write to it, and the export thread is never in it.
            with torch.inference_mode(False):
                chunk = self._device.allocate(size)
        except (DeviceError, OSError, MemoryError) as error:
            self._blocked_until = time.monotonic() + _RETRY_GROWTH_S
            logger.warning("the arena stays at %d MiB: %s (setting arena_max_bytes)", self.nbytes >> 20, error)
            return False
        number, self._next_chunk = self._next_chunk, self._next_chunk + 1
        self._map_chunk(number, chunk)  # without the lock: it takes another
        with self._lock:
            self._chunks[number] = (chunk, Extents(size))
        logger.info("arena grew by %d MiB to %d MiB", size >> 20, self.nbytes >> 20)
        return True

    def take_idle(self) -> dict[int, Chunk]:
        """Take every chunk without slots out of the arena; the caller frees them once the packer has let go."""
        with self._changed:
            idle = {number: chunk for number, (chunk, extents) in self._chunks.items() if extents.idle}
            for number in idle:
                del self._chunks[number]
        return idle

    def close(self) -> None:
        """Free every chunk. The packer must have closed its imports, or be gone."""
        with self._changed:
            chunks, self._chunks = self._chunks, {}
        for chunk, _ in chunks.values():
            self._device.free(chunk)
