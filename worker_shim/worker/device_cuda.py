"""A worker's GPU: chunks and events that it exports by their handles, and the timeline that its streams write.

Memory is released by whoever allocated it; nothing here waits for the device but ``after``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from packer_service.devices.driver import call, context_failure, device_uuid, driver, handle_bytes
from packer_service.memory.timeline import TimelinePage
from worker_shim.worker.device import Allocation, Chunk, Signal

if driver is not None:
    _GEQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ


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
    """One GPU. See ``ExportDevice`` for what each method does.

    Arena memory comes from the driver, not from torch's allocator: expandable segments and sleep pools cannot be exported, and
    a driver allocation is never moved or reused behind our back.
    """

    kind = "cuda"

    def __init__(self, index: int, *, events: bool = False) -> None:
        self.device = torch.device("cuda", index)
        self._index = index
        self._value = 0
        self._last_stream: int | None = None
        # The stream that read something last: the driver's handle, and torch's object.
        self._reader: tuple[int, Any] = (-1, None)
        self._use_events = events
        self._idle_events: list[tuple[Any, bytes]] = []
        self._busy_events: dict[bytes, Any] = {}
        torch.cuda.init()
        torch.cuda.set_device(self.device)
        handle = call(driver.cuDeviceGet, index)
        with contextlib.ExitStack() as opened:
            self._context = call(driver.cuDevicePrimaryCtxRetain, handle)
            opened.callback(call, driver.cuDevicePrimaryCtxRelease, handle)
            call(driver.cuCtxSetCurrent, self._context)
            self.uuid = device_uuid(handle)
            self.timeline = TimelinePage.create()
            opened.callback(self.timeline.close)
            address, mapped = self.timeline.address, driver.CU_MEMHOSTREGISTER_DEVICEMAP
            call(driver.cuMemHostRegister, address, self.timeline.nbytes, mapped)
            opened.callback(call, driver.cuMemHostUnregister, address)
            self._pointer = int(call(driver.cuMemHostGetDevicePointer, address, 0))
            self._side_stream = torch.cuda.Stream(self.device)
            self._opened = opened.pop_all()

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
        # torch.cuda.current_stream would make an object for it, once for each copy.
        return torch._C._cuda_getCurrentRawStream(self._index)

    def copy_bytes(self, target: int, source: int, nbytes: int, owner: torch.Tensor) -> None:
        stream = self._current_stream()
        call(driver.cuMemcpyDtoDAsync, target, source, nbytes, stream)
        self._record_use(owner, stream)

    def record_use(self, tensor: torch.Tensor) -> None:
        self._record_use(tensor, self._current_stream())

    def _record_use(self, tensor: torch.Tensor, stream: int) -> None:
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

    def reached(self, ready: int) -> bool:
        return self.timeline.counter >= ready

    def failure(self) -> str:
        return context_failure(self._side_stream.cuda_stream)

    @contextmanager
    def after(self, ready: int) -> Iterator[None]:
        call(driver.cuStreamWaitValue64, self._side_stream.cuda_stream, self._pointer, ready, _GEQ)
        passed = torch.cuda.Event(blocking=True)  # else the CPU would spin for as long as the forward takes
        passed.record(self._side_stream)
        passed.synchronize()
        with torch.cuda.stream(self._side_stream):
            yield
        self._side_stream.synchronize()

    def close(self) -> None:
        for event in (*(event for event, _ in self._idle_events), *self._busy_events.values()):
            driver.cuEventDestroy(event)
        self._opened.close()
