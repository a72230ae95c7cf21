"""The worker's side of a device: what the exporter asks of it, and how a tensor gets into memory that a packer can import.

Note [Timeline and streams]
The timeline is one counter, and value n says that the n-th export is complete. Two streams could write it out of order, and a
wait for 5 would then be met by a 6 that came first. So a stream that did not write the last value first waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from packer_service.memory.timeline import TimelinePage


class Chunk(NamedTuple):
    """Device memory as the arena uses it: a flat uint8 ``tensor``, and what a packer needs to import it."""

    tensor: torch.Tensor
    handle: bytes
    fd: int | None


class Allocation(NamedTuple):
    """Somebody's device memory as a packer can import it: its handle, its size, and where in it the bytes start."""

    handle: bytes
    nbytes: int
    offset: int


class Signal(NamedTuple):
    """What says that an export is complete: its timeline value, and the handle of a CUDA IPC event where those are in use."""

    ready: int
    event: bytes = b""


class ExportDevice(Protocol):
    """Where the worker's outputs are. One thread (the worker's main thread) allocates, copies and signals."""

    kind: str
    uuid: str
    timeline: TimelinePage

    def bind_thread(self) -> None:
        """Call once on every thread but the main one that uses the device."""
        ...

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in this device's memory."""
        ...

    def allocate(self, nbytes: int) -> Chunk: ...

    def free(self, chunk: Chunk) -> None: ...

    def find_allocation(self, tensor: torch.Tensor) -> Allocation:
        """The allocation that a dense tensor lies in. DeviceError where it cannot be exported (expandable segments)."""
        ...

    def copy_bytes(self, target: int, source: int, nbytes: int, owner: torch.Tensor) -> None:
        """Submit a copy between two addresses of this device, on the current stream, and ``record_use`` of ``owner``, in whose
        memory the source is."""
        ...

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep the memory of ``tensor``, whichever stream allocated it, until the current stream has passed its work so far."""
        ...

    def next_signal(self) -> Signal | None:
        """What ``signal`` will return next, where a packer may wait for it already; None where it may not (events)."""
        ...

    def signal(self) -> Signal:
        """Mark what the current stream was given so far."""
        ...

    def retire(self, signal: Signal) -> None:
        """Nobody waits for ``signal`` any more."""
        ...

    def reached(self, ready: int) -> bool:
        """Whether the device has passed the signal with this ``ready``, as the CPU sees it at this moment."""
        ...

    def failure(self) -> str:
        """Why no signal will come any more; empty while the device works. On a thread that was bound."""
        ...

    @contextmanager
    def after(self, ready: int) -> Iterator[None]:
        """Wait until the device has passed ``ready``, run torch work on a stream of its own, and wait for that at the end. Any
        thread but the main one."""
        ...

    def close(self) -> None: ...


def copy_into(device: ExportDevice, tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> None:
    """Submit a copy of the values of ``tensor``, densely and in order, into flat uint8 ``memory`` at ``offset`` (bytes).

    On the current stream. A tensor that is dense as it lies costs one driver call and none of torch's; any other layout, and
    lazy conj and neg, are torch's to resolve.
    """
    nbytes = tensor.nbytes
    assert offset + nbytes <= memory.numel(), "a plan gives every array room"
    if not nbytes:
        return
    dense = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    source = tensor.data_ptr() if dense else 0
    if source:  # a tensor of lazy zeros has no memory either
        device.copy_bytes(memory.data_ptr() + offset, source, nbytes, tensor)
    else:
        with torch.no_grad():
            memory[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        record_lazy_use(device, tensor)


def record_lazy_use(device: ExportDevice, tensor: torch.Tensor) -> None:
    """``record_use`` of a tensor that may be lazy: of what torch resolves it to, torch would record the use."""
    with torch.no_grad():
        plain = tensor.conj() if tensor.is_conj() else tensor
        plain = torch._neg_view(plain) if plain.is_neg() else plain
    if plain.data_ptr():  # lazy zeros have no memory
        device.record_use(plain)
