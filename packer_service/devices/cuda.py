"""CUDA through the driver API: no torch, no runtime library; about 120 MB resident, most of it the driver's own.

Note [Waiting without burning a core or a connection]
The context is made with blocking synchronization: a thread that waits for a copy sleeps in the kernel. A stream that waits
for a forward occupies a hardware connection, and whatever else was put on that connection waits with it. Each connection
costs the process 10 MB of resident memory and 17 ms of its start, so there are few: ``_WAITING_STREAMS`` sessions have a
stream, and with it a connection, of their own; all others share one more, on which nothing ever waits: their outputs are
submitted when the forward is over, which somebody has to poll for (DeviceBusy).

Note [The end of a copy]
Waking a sleeping thread costs about 0.1 ms, as much as a small copy itself. How long a forward takes nobody knows, so its
end is slept for; how long a copy takes follows from its bytes, so the thread sleeps until shortly before and polls the rest,
for at most ``_SPIN_S``. That is the only polling there is, and a packer that waits for a forward burns nothing. What a copy
took is known only if its end was seen: who sleeps too long measures that sleep, and would sleep as long the next time. So a
look that was on time and came too late makes the next one earlier, and a thread that was held up learns nothing.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from packer_service.devices import affinity
from packer_service.devices.base import ImportedChunk, Timeline, nothing
from packer_service.devices.calls import DeviceCall
from packer_service.devices.closer import Closer
from packer_service.errors import DeviceBusy, DeviceError
from packer_service.memory.timeline import TimelinePage

REGISTER_BYTES = 64 << 20  # one registration; larger ones delay copies that run beside them
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_WAITING_STREAMS = 3
_SPIN_S = 0.0004
_FIRST_GUESS_BYTES_PER_S = 50e9  # PCIe 5 x16; too high a guess only means an earlier look
_TELLING_BYTES = 8 << 20
_STEP = 9 / 8  # what one copy may change the rate by at most

try:
    from cuda.bindings import driver
except ImportError:  # no GPU stack here; CudaDevice says so
    driver = None
else:
    _NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
    _GEQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _EVENT_FLAGS = driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING


def call(function: Any, *arguments: Any) -> Any:
    """One driver call: its result (None, one value or a tuple). DeviceError with the driver's own name for what went wrong."""
    status, *results = function(*arguments)
    if status:
        raise DeviceError(f"{function.__name__} answered {status.name} ({int(status)})")
    return results[0] if len(results) == 1 else tuple(results) or None


def context_failure(stream: int = 0) -> str:
    """The driver's name for what broke this thread's context; empty while it works.

    What a kernel or a copy died of is sticky: from then on every call answers it, the query of a stream too.
    """
    (status,) = driver.cuStreamQuery(stream)
    of_this_thread = (
        status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT or 900 <= int(status) <= 909
    )  # a graph capture's
    return "" if status in (driver.CUresult.CUDA_SUCCESS, _NOT_READY) or of_this_thread else str(status.name)


def handle_bytes(handle: Any) -> bytes:
    """The 64 bytes of an IPC memory or event handle."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from(kind: Any, data: bytes) -> Any:
    """The IPC handle (``driver.CUipcMemHandle`` or ``CUipcEventHandle``) that ``data`` carries."""
    if len(data) != HANDLE_BYTES:
        raise DeviceError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(data)}")
    handle = kind()
    ctypes.memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle


def device_uuid(device: Any) -> str:
    """The UUID of a GPU, or of a MIG slice of one; the same in every process, whatever CUDA_VISIBLE_DEVICES says.

    As nvidia-smi prints it, but that a slice has the prefix of a GPU too: the driver does not say which it is.
    """
    # Of a slice, cuDeviceGetUuid answers the GPU's own in cuda-bindings 12. In 13 it is what 12 calls _v2.
    get = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    uuid = call(get, device)  # owns the bytes that getPtr points to
    digits = ctypes.string_at(uuid.getPtr(), 16).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


class CudaChunk:
    """A worker's chunk behind its IPC handle. The import keeps the memory alive even when the worker is gone."""

    def __init__(self, handle: bytes, nbytes: int, closer: Closer) -> None:
        self._closer = closer
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.pointer = int(call(driver.cuIpcOpenMemHandle, handle_from(driver.CUipcMemHandle, handle), flags))
        self.nbytes = nbytes
        try:
            _, allocated = call(driver.cuMemGetAddressRange, self.pointer)
            if int(allocated) < nbytes:
                raise DeviceError(f"a chunk announced as {nbytes} bytes has {int(allocated)}")
        except BaseException:
            self.close()
            raise

    def close(self, then: Callable[[], None] = nothing) -> None:
        self._closer.close_later(lambda: call(driver.cuIpcCloseMemHandle, self.pointer), then)


class CudaTimeline:
    """A counter in a page that both processes have registered: the worker's stream writes it, ours waits for it."""

    def __init__(self, page: TimelinePage, closer: Closer) -> None:
        self.page = page
        self._closer = closer
        try:
            call(driver.cuMemHostRegister, page.address, page.nbytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
            self.pointer = int(call(driver.cuMemHostGetDevicePointer, page.address, 0))
        except BaseException:
            page.close()
            raise

    def close(self) -> None:
        self._closer.close_later(lambda: call(driver.cuMemHostUnregister, self.page.address), self.page.close)


class CopyRate:
    """How many bytes a second one stream copies. See Note [The end of a copy]. One thread uses it."""

    def __init__(self) -> None:
        self._bytes_per_s = _FIRST_GUESS_BYTES_PER_S

    def expected_s(self, nbytes: int) -> float:
        return nbytes / self._bytes_per_s

    def saw_end(self, nbytes: int, elapsed_s: float) -> None:
        if nbytes >= _TELLING_BYTES:
            lowest, highest = self._bytes_per_s / _STEP, self._bytes_per_s * _STEP
            self._bytes_per_s = min(max(nbytes / elapsed_s, lowest), highest)

    def looked_too_late(self) -> None:
        """When the copy was expected to end, it had ended."""
        self._bytes_per_s *= _STEP


class CudaMarker:
    """The end of one output's copies: an event before them and one behind. See Note [The end of a copy]."""

    def __init__(self, stream: CudaStream, started: Any, done: Any, nbytes: int) -> None:
        self._stream = stream
        self._started = started
        self._done = done
        self._nbytes = nbytes

    def synchronize(self) -> None:
        call(driver.cuEventSynchronize, self._started)
        begin = time.perf_counter()
        expected_s = self._stream.rate.expected_s(self._nbytes)
        slept = expected_s > _SPIN_S
        if slept:
            time.sleep(expected_s - _SPIN_S / 2)
        looked = time.perf_counter()
        status = driver.cuEventQuery(self._done)[0]
        seen = status == _NOT_READY  # else it ended before anybody looked
        while status == _NOT_READY and time.perf_counter() < looked + _SPIN_S:
            status = driver.cuEventQuery(self._done)[0]
        if status:
            call(driver.cuEventSynchronize, self._done)
        if seen:
            self._stream.rate.saw_end(self._nbytes, time.perf_counter() - begin)
        elif slept and looked - begin < expected_s + _SPIN_S:
            self._stream.rate.looked_too_late()
        self._stream.finished(self._started, self._done)


class CudaStream:
    """One session's use of a stream. Copies are cut where the registrations of host memory end (``CudaDevice.register``).

    One thread submits at a time, one synchronizes markers; the list of idle events is the only thing they share.
    """

    def __init__(self, device: CudaDevice, closer: Closer, stream: Any, *, may_wait: bool) -> None:
        self.rate = CopyRate()
        self._device = device
        self._closer = closer
        self._stream = stream
        self._may_wait = may_wait  # for a forward: see Note [Waiting without burning a core or a connection]
        self._imported: dict[bytes, Any] = {}  # the worker's events
        self._idle: list[Any] = []  # our own events
        self._started: Any = None  # of the output being submitted
        self._nbytes = 0
        self._closed = False

    def wait_timeline(self, timeline: Timeline, value: int) -> None:
        assert isinstance(timeline, CudaTimeline)
        if not self._may_wait and timeline.page.counter < value:
            raise DeviceBusy("other sessions have the streams that may wait")
        self._closer.submit_wait(
            lambda: self._closed or timeline.page.counter >= value,
            lambda: call(driver.cuStreamWaitValue64, self._stream, timeline.pointer, value, _GEQ),
        )
        self._started, self._nbytes = self._event(), 0

    def wait_event(self, handle: bytes) -> None:
        event = self._imported.get(handle)
        if event is None:
            event = call(driver.cuIpcOpenEventHandle, handle_from(driver.CUipcEventHandle, handle))
            self._imported[handle] = event
        if driver.cuEventQuery(event)[0] == _NOT_READY:
            raise DeviceBusy("the worker's event is not complete")
        call(driver.cuStreamWaitEvent, self._stream, event, 0)
        self._started, self._nbytes = self._event(), 0

    def copy_to_host(self, address: int, chunk: ImportedChunk, offset: int, nbytes: int) -> None:
        assert isinstance(chunk, CudaChunk)
        source, end = chunk.pointer + offset, address + nbytes
        while address < end:
            part = min(end, self._device.registration_end(address)) - address
            call(driver.cuMemcpyDtoHAsync, address, source, part, self._stream)
            address, source = address + part, source + part
        self._nbytes += nbytes

    def record(self) -> CudaMarker:
        started = self._event() if self._started is None else self._started  # None: the wait itself was refused
        self._started = None
        return CudaMarker(self, started, self._event(), self._nbytes)

    def _event(self) -> Any:
        """An event recorded now, whose waiter sleeps."""
        try:
            event = self._idle.pop()
        except IndexError:
            event = call(driver.cuEventCreate, _EVENT_FLAGS)
        call(driver.cuEventRecord, event, self._stream)
        return event

    def finished(self, started: Any, done: Any) -> None:
        """Take a marker's events back."""
        self._idle += (started, done)

    def close(self) -> None:
        self._closed = True
        self._closer.close_later(self._close)

    def _close(self) -> None:
        for event in (*self._imported.values(), *self._idle):
            driver.cuEventDestroy(event)
        if self._may_wait:
            self._device.take_back(self._stream)


class CudaDevice:
    """One GPU and this process's primary context on it."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        if driver is None:
            raise DeviceError("cuda-bindings is not installed: pip install 'packer-service[cuda]'")
        # Read by the driver when it is initialized; whatever was set, it has to be the number of our streams.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(_WAITING_STREAMS + 1)
        try:
            call(driver.cuInit, 0)
            count = int(call(driver.cuDeviceGetCount))
        except (DeviceError, RuntimeError) as error:
            raise DeviceError(
                f"there is no CUDA driver to talk to: install NVIDIA's, or try without a GPU with the setting device = host"
                f" ({error})"
            ) from error
        if index >= count:
            raise DeviceError(f"cuda:{index} was asked for and {count} GPU(s) are visible: see CUDA_VISIBLE_DEVICES")
        self._device = call(driver.cuDeviceGet, index)
        affinity.pin_near(call(driver.cuDeviceGetPCIBusId, 32, self._device).split(b"\0")[0].decode())
        flags = driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC
        call(driver.cuDevicePrimaryCtxSetFlags, self._device, flags)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self._device)
        self.bind_thread()
        self.uuid = device_uuid(self._device)
        self.name = call(driver.cuDeviceGetName, 96, self._device).split(b"\0")[0].decode()
        self._lock = threading.Lock()  # guards _starts, _sizes and _waiting_streams
        self._starts: list[int] = []  # of every registration, sorted
        self._sizes: dict[int, int] = {}
        self._closer = Closer(self.bind_thread)
        self._shared_stream, *self._waiting_streams = (
            call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            for _ in range(_WAITING_STREAMS + 1)
        )

    def bind_thread(self) -> None:
        call(driver.cuCtxSetCurrent, self._context)

    def register(self, address: int, nbytes: int) -> None:
        """Register ``nbytes`` at ``address`` in pieces of 64 MiB: all of them, or none and DeviceError."""
        done: list[int] = []
        try:
            with DeviceCall("the registration of %d bytes", nbytes):
                for offset in range(0, nbytes, REGISTER_BYTES):
                    size = min(REGISTER_BYTES, nbytes - offset)
                    call(driver.cuMemHostRegister, address + offset, size, driver.CU_MEMHOSTREGISTER_PORTABLE)
                    done.append(address + offset)
        except BaseException:
            for start in done:
                self._unregister(start)
            self._closer.drain()
            raise
        with self._lock:
            for start in done:
                bisect.insort(self._starts, start)
                self._sizes[start] = min(REGISTER_BYTES, address + nbytes - start)

    def unregister(self, address: int, nbytes: int, then: Callable[[], None] = nothing) -> None:
        """Undo ``register(address, nbytes)``."""
        starts = range(address, address + nbytes, REGISTER_BYTES)
        with self._lock:
            for start in starts:
                self._starts.remove(start)
                del self._sizes[start]
        for start in starts:
            self._unregister(start)
        self._closer.close_later(nothing, then)

    def _unregister(self, start: int) -> None:
        self._closer.close_later(lambda: call(driver.cuMemHostUnregister, start))

    def registration_end(self, address: int) -> int:
        """Where the registration that holds ``address`` ends."""
        with self._lock:
            start = self._starts[bisect.bisect_right(self._starts, address) - 1]
            return start + self._sizes[start]

    def open_chunk(self, handle: bytes, fds: list[int], nbytes: int) -> CudaChunk:
        return CudaChunk(handle, nbytes, self._closer)

    def open_timeline(self, page: TimelinePage) -> CudaTimeline:
        return CudaTimeline(page, self._closer)

    def open_stream(self) -> CudaStream:
        with self._lock:
            if self._waiting_streams:
                return CudaStream(self, self._closer, self._waiting_streams.pop(), may_wait=True)
        return CudaStream(self, self._closer, self._shared_stream, may_wait=False)

    def take_back(self, stream: Any) -> None:
        """Of a session that is closed, and had ``stream`` to itself: the next one's."""
        with self._lock:
            self._waiting_streams.append(stream)

    def failure(self) -> str:
        return context_failure()

    def drain(self) -> bool:
        return self._closer.drain()

    def leave(self) -> None:
        self._closer.leave()

    def close(self) -> None:
        self._closer.stop()
        call(driver.cuDevicePrimaryCtxRelease, self._device)
