"""Where the pieces of an output are from staging to its end, and how that memory is given back.

Note [Held until the ack]
Each piece of an output is flat device memory: a slot of the arena; a clone beside a full arena, until slots come back; or, of
an output larger than the arena may grow, its own memory where it lies ("direct"). It is held until the ack, whatever becomes
of the packer: the output is exported from it again to the next packer, or falls back, rebuilt from it and sent vllm-omni's
own way (see Note [What a restart means to the worker]). Only a direct piece can be overwritten by a later forward of a pipeline
that reuses its buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from packer_service.config import Settings
from packer_service.errors import DeviceError
from packer_service.memory.extents import align
from packer_service.memory.memfd import SharedMemory
from packer_service.wire.protocol import MapChunk, Piece
from worker_shim.log import get_logger
from worker_shim.outputs.arrays import ARRAY_ALIGNMENT, Place, flat_bytes
from worker_shim.worker.arena import Arena, Slot
from worker_shim.worker.device import Chunk, ExportDevice, Signal, record_lazy_use
from worker_shim.worker.imports import Imports
from worker_shim.worker.in_flight import NO_SIGNAL, Event, InFlight

logger = get_logger(__name__)

# An array this large is a piece of its own, and so a lease of its own; smaller ones share a piece.
OWN_PIECE_BYTES = 1 << 20

Copy = tuple[torch.Tensor, torch.Tensor, int]
"""(tensor, flat memory, offset in it): see ``device.copy_into``."""


def plan(sizes: list[int]) -> tuple[list[Place], list[int]]:
    """Where arrays of these sizes (bytes) go: large ones each into a piece of their own, small ones together into one."""
    places: list[Place] = []
    pieces: list[int] = []
    shared = -1
    for nbytes in sizes:
        if nbytes >= OWN_PIECE_BYTES:
            places.append(Place(len(pieces), 0))
            pieces.append(nbytes)
            continue
        if shared < 0:
            shared = len(pieces)
            pieces.append(0)
        offset = align(pieces[shared], ARRAY_ALIGNMENT)
        places.append(Place(shared, offset))
        pieces[shared] = offset + max(nbytes, 1)
    return places, pieces


def piece_of(slot: Slot) -> Piece:
    return Piece(slot.chunk, slot.offset, slot.nbytes)


class Placement:
    """The memory of all outputs in flight. The main thread places; any thread gives back.

    ``lock``, the link's, guards ``overflow_left``, and the memory of an output while it is given back. Where room is short
    ``reclaim`` is called, which settles the outputs that are delivered.
    """

    def __init__(
        self,
        device: ExportDevice,
        settings: Settings,
        lock: threading.RLock,
        imports: Imports,
        reclaim: Callable[[], None],
    ) -> None:
        self.arena = Arena(device, settings.arena_max_bytes, settings.arena_step_bytes, self._map_chunk, reclaim)
        self.overflow_left = settings.overflow_max_bytes
        self._device = device
        self._wait_s = settings.wait_s
        self._lock = lock
        self._imports = imports
        self._next_import = 1 << 32  # numbers of direct pieces' allocations, beside the arena's chunks
        self._leaving: dict[int, Chunk] = {}  # main thread only: out of the arena, and not yet free

    def _map_chunk(self, number: int, chunk: Chunk) -> None:
        self._imports.map(MapChunk(number, chunk.tensor.numel(), chunk.handle), chunk.fd)

    def place(self, output: InFlight, sizes: list[int], *, aside: bool) -> list[Copy] | None:
        """Find memory for pieces of these ``sizes``, one of the three ways of Note [Held until the ack].

        ``aside``: only beside the arena, as where that is full. Returns what has yet to be copied where; None where no way is
        open, and a log says why.
        """
        if sum(map(align, sizes)) > self.arena.max_bytes:
            return None if aside else self._place_directly(output, sizes)
        slots = None if aside else self.arena.allocate(sizes)
        if slots is not None:
            output.slots = slots
            output.pieces = tuple(map(piece_of, slots))
            return [
                (tensor, slots[piece].memory, slots[piece].offset + offset) for tensor, (piece, offset) in output.arrays
            ]
        if self._take_overflow(sum(sizes)):
            output.on(Event.CLONE)
            output.overflow_bytes = sum(sizes)
            device = output.arrays[0][0].device
            output.beside = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            return [(tensor, output.beside[piece], offset) for tensor, (piece, offset) in output.arrays]
        logger.warning(
            "output %s finds no room to wait in: see arena_max_bytes and overflow_max_bytes", output.output_id
        )
        return None

    def _place_directly(self, output: InFlight, sizes: list[int]) -> list[Copy] | None:
        """Export each piece where it lies; small arrays, which share a piece, and other layouts are copied by torch first."""
        copies: list[Copy] = []
        try:
            for piece, size in enumerate(sizes):
                owners = [(tensor, place) for tensor, place in output.arrays if place.piece == piece]
                if size >= OWN_PIECE_BYTES and len(owners) == 1:
                    view = flat_bytes(owners[0][0])
                    record_lazy_use(self._device, owners[0][0])  # where it had to be made dense
                else:
                    view = torch.empty(size, dtype=torch.uint8, device=owners[0][0].device)
                    copies += [(tensor, view, place.offset) for tensor, place in owners]
                output.beside.append(view)
            allocations = [self._device.find_allocation(view) for view in output.beside]
        except DeviceError as error:
            logger.warning("output %s exceeds arena_max_bytes and cannot leave directly: %s", output.output_id, error)
            return None
        output.imports = tuple(range(self._next_import, self._next_import + len(sizes)))
        self._next_import += len(sizes)
        pieces = list(zip(output.imports, allocations, sizes, strict=True))
        for number, allocation, _ in pieces:
            self._imports.map(MapChunk(number, allocation.nbytes, allocation.handle))
        output.pieces = tuple(Piece(number, allocation.offset, size) for number, allocation, size in pieces)
        return copies

    def place_late(self, output: InFlight) -> str:
        """Give clones their slots as soon as some come back. Why that was in vain; empty where it was not. Waits ``wait_s``."""
        slots = self.arena.wait_allocate([clone.numel() for clone in output.beside], self._wait_s)
        if slots is None:
            return f"no room in the arena for {self._wait_s:g} s (settings arena_max_bytes, wait_s)"
        try:
            with self._device.after(output.signal.ready), torch.no_grad():
                for slot, clone in zip(slots, output.beside, strict=True):
                    slot.view.copy_(clone)
        except BaseException:
            self.arena.release(slots)
            raise
        output.slots, output.beside = slots, []
        output.pieces = tuple(map(piece_of, slots))
        with self._lock:
            self.overflow_left += output.overflow_bytes
            output.overflow_bytes = 0
        return ""

    def _take_overflow(self, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self.overflow_left:
                return False
            self.overflow_left -= nbytes
            return True

    def give_back(self, *outputs: InFlight) -> None:
        """Take from outputs all that they still hold: slots, clones, host memory, events. Any thread."""
        slots: list[Slot] = []
        hosts: list[SharedMemory] = []
        signals: list[Signal] = []
        with self._lock:
            for output in outputs:
                slots += output.slots
                if output.host is not None:
                    hosts.append(output.host)
                if output.signal.ready:
                    signals.append(output.signal)
                output.slots, output.host, output.signal = [], None, NO_SIGNAL
                output.beside, output.content, output.arrays = [], None, []
                self.overflow_left += output.overflow_bytes
                output.overflow_bytes = 0
                if output.imports:
                    self._imports.forget(output.imports)
        self.arena.release(slots)
        for host in hosts:
            host.close()
        for signal in signals:
            self._device.retire(signal)

    def give_back_arena(self, timeout_s: float) -> None:
        """Free the chunks that hold nothing, so that the device has the memory: the packer closes its imports first."""
        self._leaving |= self.arena.take_idle()
        if not self._imports.unmap(self._leaving.keys(), timeout_s):
            logger.error(
                "the packer did not close its imports within %g s; %d chunks stay", timeout_s, len(self._leaving)
            )
            return  # the next time
        while self._leaving:  # what a device that breaks did not free is not freed twice
            self._device.free(self._leaving.popitem()[1])

    def close(self) -> None:
        """Free every chunk. The packer must have closed its imports, or be gone."""
        for chunk in self._leaving.values():
            self._device.free(chunk)
        self.arena.close()
