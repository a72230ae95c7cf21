"""The worker's side of a device: memory that a packer can import, and the markers it waits for.

Note [Timeline and streams]
The timeline is one counter; value n means that the n-th export is complete. Two streams could write it out of order, and a
wait for 5 would then be met by a 6 that came first. So a stream that did not write the last value first waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from packer_service.devices.driver import call, context_failure, device_uuid, driver, handle_bytes
from packer_service.errors import DeviceError
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage

if driver is not None:
    _GEQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ


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
    """The marker of one export: the timeline value, and the handle of a CUDA IPC event where those are in use."""

    value: int
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

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        """Submit a copy between two addresses of this device, on the current stream."""
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

    def reached(self, value: int) -> bool:
        """Whether the device has passed that signal, as the CPU sees it now."""
        ...

    def failure(self) -> str:
        """Why no signal will come any more; empty while the device works. On a thread that was bound."""
        ...

    @contextmanager
    def after(self, value: int) -> Iterator[None]:
        """Wait until the device has passed ``value``, run torch work on a stream of its own, and wait for that at the end. Any
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
        device.copy_bytes(memory.data_ptr() + offset, source, nbytes)
        device.record_use(tensor)
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


class HostExportDevice:
    """No GPU: memory is memfds, and a signal is a store."""

    kind = "host"
    uuid = "host"

    def __init__(self) -> None:
        self.timeline = TimelinePage.create()
        self._value = 0
        self._chunks: dict[int, SharedMemory] = {}  # by address

    def bind_thread(self) -> None:
        pass

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def allocate(self, nbytes: int) -> Chunk:
        memory = SharedMemory.create("packer-arena", nbytes)
        tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
        self._chunks[tensor.data_ptr()] = memory
        return Chunk(tensor, b"", memory.fd)

    def free(self, chunk: Chunk) -> None:
        self._chunks.pop(chunk.tensor.data_ptr()).close()

    def find_allocation(self, tensor: torch.Tensor) -> Allocation:
        raise DeviceError("host memory cannot be exported where it lies, only staged")

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def record_use(self, tensor: torch.Tensor) -> None:
        pass

    def next_signal(self) -> Signal:
        return Signal(self._value + 1)

    def signal(self) -> Signal:
        self._value += 1
        self.timeline.counter = self._value
        return Signal(self._value)

    def retire(self, signal: Signal) -> None:
        pass

    def reached(self, value: int) -> bool:
        return value <= self._value

    def failure(self) -> str:
        return ""

    @contextmanager
    def after(self, value: int) -> Iterator[None]:
        yield

    def close(self) -> None:
        for memory in self._chunks.values():
            memory.close()
        self._chunks.clear()
        self.timeline.close()


class _ExportedMemory:
    """A driver allocation as torch can look at it (the CUDA array interface)."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


class CudaExportDevice:
    """One GPU. Arena memory comes from the driver, not from torch's allocator: expandable segments and sleep pools cannot
    be exported, and a driver allocation is never moved or reused behind our back."""

    kind = "cuda"

    def __init__(self, index: int, *, events: bool = False) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        torch.cuda.init()
        torch.cuda.set_device(self.device)
        self._handle = call(driver.cuDeviceGet, index)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self._handle)
        call(driver.cuCtxSetCurrent, self._context)
        self.uuid = device_uuid(self._handle)
        self.timeline = TimelinePage.create()
        call(driver.cuMemHostRegister, self.timeline.address, self.timeline.nbytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
        self._pointer = int(call(driver.cuMemHostGetDevicePointer, self.timeline.address, 0))
        self._value = 0
        self._last_stream: int | None = None
        # The stream that read something last: the driver's handle, and torch's object.
        self._reader: tuple[int, Any] = (-1, None)
        self._use_events = events
        self._idle_events: list[tuple[Any, bytes]] = []
        self._busy_events: dict[bytes, Any] = {}
        self._side_stream = torch.cuda.Stream(self.device)

    def bind_thread(self) -> None:
        call(driver.cuCtxSetCurrent, self._context)
        torch.cuda.set_device(self.device)
        # Else what this thread does would break a CUDA graph capture of the main thread, and fail.
        call(driver.cuThreadExchangeStreamCaptureMode, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def allocate(self, nbytes: int) -> Chunk:
        pointer = int(call(driver.cuMemAlloc, nbytes))
        try:
            handle = handle_bytes(call(driver.cuIpcGetMemHandle, pointer))
            tensor = torch.as_tensor(_ExportedMemory(pointer, nbytes), device=self.device)
        except BaseException:
            driver.cuMemFree(pointer)
            raise
        return Chunk(tensor, handle, None)

    def free(self, chunk: Chunk) -> None:
        call(driver.cuMemFree, chunk.tensor.data_ptr())

    def find_allocation(self, tensor: torch.Tensor) -> Allocation:
        base, nbytes = call(driver.cuMemGetAddressRange, tensor.data_ptr())
        handle = handle_bytes(call(driver.cuIpcGetMemHandle, base))
        return Allocation(handle, int(nbytes), tensor.data_ptr() - int(base))

    def _current_stream(self) -> int:
        # torch.cuda.current_stream makes an object for it, once for each copy
        return torch._C._cuda_getCurrentRawStream(self._index)

    def copy_bytes(self, target: int, source: int, nbytes: int) -> None:
        call(driver.cuMemcpyDtoDAsync, target, source, nbytes, self._current_stream())

    def record_use(self, tensor: torch.Tensor) -> None:
        stream = self._current_stream()
        if self._reader[0] != stream:
            self._reader = stream, torch.cuda.current_stream(self.device)
        tensor.record_stream(self._reader[1])  # torch does nothing where that stream allocated it

    def next_signal(self) -> Signal | None:
        return None if self._use_events else Signal(self._value + 1)

    def signal(self) -> Signal:
        stream = self._current_stream()
        if stream != self._last_stream and self._last_stream is not None:  # Note [Timeline and streams]
            call(driver.cuStreamWaitValue64, stream, self._pointer, self._value, _GEQ)
        self._last_stream = stream
        call(driver.cuStreamWriteValue64, stream, self._pointer, self._value + 1, 0)
        self._value += 1
        return Signal(self._value, self._record_event(stream) if self._use_events else b"")

    def _record_event(self, stream: int) -> bytes:
        if self._idle_events:
            event, handle = self._idle_events.pop()
        else:
            flags = driver.CUevent_flags.CU_EVENT_INTERPROCESS | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            event = call(driver.cuEventCreate, flags)
            handle = handle_bytes(call(driver.cuIpcGetEventHandle, event))
        call(driver.cuEventRecord, event, stream)
        self._busy_events[handle] = event  # must live until its importer is done with it
        return handle

    def retire(self, signal: Signal) -> None:
        if signal.event:
            self._idle_events.append((self._busy_events.pop(signal.event), signal.event))

    def reached(self, value: int) -> bool:
        return self.timeline.counter >= value

    def failure(self) -> str:
        return context_failure(self._side_stream.cuda_stream)

    @contextmanager
    def after(self, value: int) -> Iterator[None]:
        call(driver.cuStreamWaitValue64, self._side_stream.cuda_stream, self._pointer, value, _GEQ)
        passed = torch.cuda.Event(blocking=True)  # else the CPU would spin for as long as the forward takes
        passed.record(self._side_stream)
        passed.synchronize()
        with torch.cuda.stream(self._side_stream):
            yield
        self._side_stream.synchronize()

    def close(self) -> None:
        for event in (*(event for event, _ in self._idle_events), *self._busy_events.values()):
            driver.cuEventDestroy(event)
        call(driver.cuMemHostUnregister, self.timeline.address)
        self.timeline.close()
        call(driver.cuDevicePrimaryCtxRelease, self._handle)


def open_export_device(device: torch.device, *, events: bool) -> ExportDevice:
    """The export side of the worker's device. DeviceError where it cannot export."""
    if device.type == "cuda":
        return CudaExportDevice(device.index or 0, events=events)
    return HostExportDevice()
