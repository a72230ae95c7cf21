"""The faults that no signal gives: points at which a packer waits, and calls of the system or the device that fail."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packer_service.devices import calls, closer, cuda, host
from packer_service.devices.driver import call, driver
from packer_service.errors import DeviceBusy, DeviceError
from packer_service.memory import ack_page, memfd
from packer_service.wire import protocol
from packer_service.wire.channel import Channel

_FAULTS = Path(os.environ["PACKER_FAULTS"])


def _is_set(fault: str) -> bool:
    return (_FAULTS / fault).exists()


def _wait_while_set(fault: str) -> None:
    """Say that this point is reached, by a file "<fault>.reached", and go on when the fault is gone."""
    if _is_set(fault):
        (_FAULTS / f"{fault}.reached").touch()
        while _is_set(fault):
            time.sleep(0.001)


def install() -> None:
    if _is_set("version"):
        protocol.VERSION += 1
    host.HostStream.copy_to_host = _copy_to_host  # type: ignore[method-assign]
    host.HostDevice.__init__ = _open_device  # type: ignore[method-assign]
    host.HostDevice._pin = _hanging(  # type: ignore[method-assign]
        "registration", _failing("register", DeviceError("CUDA_ERROR_OUT_OF_MEMORY"))
    )
    host.HostStream.record = _hanging("submission", host.HostStream.record)  # type: ignore[method-assign]
    host.HostStream.wait_event = _wait_event  # type: ignore[method-assign]
    host.HostDevice.open_chunk = _hanging("import", host.HostDevice.open_chunk)  # type: ignore[method-assign]
    host.ImportedHostChunk.close = _close_arena  # type: ignore[method-assign]
    calls.Watch.stuck = _failing("look", RuntimeError("injected"), calls.Watch.stuck)  # type: ignore[method-assign]
    host.HostDevice.failure = lambda self: _failure()  # type: ignore[method-assign]
    host.HostTimeline.wait = _wait_timeline  # type: ignore[method-assign]
    host.HostDevice.open_timeline = _open_timeline  # type: ignore[method-assign]
    cuda.CudaDevice.__init__ = _open_cuda_device  # type: ignore[method-assign]
    memfd.create_memfd = _failing("memfd", OSError(errno.EMFILE, "injected"), memfd.create_memfd)
    memfd.mmap.mmap = _failing("mmap", OSError(errno.ENOMEM, "injected"), memfd.mmap.mmap)  # type: ignore[misc]
    memfd.ThreadPoolExecutor.submit = _failing(  # type: ignore[method-assign]
        "threads", RuntimeError("can't start new thread"), memfd.ThreadPoolExecutor.submit
    )
    send, put = Channel.send, ack_page.AckPage.put

    def put_after_gate(self: Any, ready: int) -> bool:
        _wait_while_set("ack")
        return put(self, ready)

    def send_after_gate(self: Any, message: Any, fd: int | None = None) -> None:
        if isinstance(message, protocol.Ack):
            _wait_while_set("ack")
        send(self, message, fd)

    Channel.send = send_after_gate  # type: ignore[method-assign]
    ack_page.AckPage.put = put_after_gate  # type: ignore[method-assign]


def _failing(fault: str, error: Exception, function: Callable[..., Any] = lambda *args: None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_set(fault):
            raise error
        return function(*args, **kwargs)

    return call


def _hanging(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A call that does not return while the fault is set, as one of the driver's that waits for a device which does nothing."""

    def call(*args: Any, **kwargs: Any) -> Any:
        _wait_while_set(point)
        return function(*args, **kwargs)

    return call


_wait_host_event = host.HostStream.wait_event


def _wait_event(self: Any, handle: bytes) -> None:
    """An event that is not complete, and never will be if its process is dead."""
    if _is_set("event"):
        raise DeviceBusy("the event is not complete")
    _wait_host_event(self, handle)


def _close_arena(self: Any, then: Callable[[], None] = closer.nothing) -> None:
    self._closer.close_later(_hanging("close", self._memory.close), then)


_open = host.HostDevice.__init__


def _open_device(self: Any) -> None:
    if _is_set("context"):
        raise DeviceError("cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE")
    _open(self)
    if _is_set("another device"):
        self.uuid = "another device"
    _break_when_told(_trapped.set)


def _copy_to_host(self: Any, address: int, chunk: Any, offset: int, nbytes: int) -> None:
    """The copy in two halves, with the point "copy" between them."""

    def copy() -> None:
        _raise_failure()
        half, source = nbytes // 2, chunk.address + offset
        ctypes.memmove(address, source, half)
        _wait_while_set("copy")
        _raise_failure()
        ctypes.memmove(address + half, source + half, nbytes - half)

    self._calls.append(copy)


# -- a device that breaks for good -------------------------------------------------------------------------------------

_trapped = threading.Event()  # the host device, by the fault "trap"


def _failure() -> str:
    return "CUDA_ERROR_ILLEGAL_ADDRESS" if _trapped.is_set() or _is_set("sticky") else ""


def _raise_failure() -> None:
    if failure := _failure():
        raise DeviceError(failure)


_open_host_timeline = host.HostDevice.open_timeline


def _open_timeline(self: Any, page: Any) -> Any:
    """As the driver registers the page."""
    _raise_failure()
    return _open_host_timeline(self, page)


def _wait_timeline(self: Any, value: int) -> None:
    """As a stream waits: also until the device breaks."""
    while self.page.counter < value and not self._closed.wait(0.0005):
        if _trapped.is_set():
            _raise_failure()


_KERNELS = ctypes.create_string_buffer(
    b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry idle() { ret; }
.visible .entry break_context() { trap; }
"""
)
_open_cuda = cuda.CudaDevice.__init__


def _open_cuda_device(self: Any, index: int) -> None:
    """The real device, and the fault "trap": a kernel of the packer's own that traps, which breaks its context for good.

    On the stream on which nothing waits, for on another it might never run. Loaded and run once for nothing here: whatever
    the driver does the first time could wait for a stream that waits.
    """
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"
    _open_cuda(self, index)
    module = call(driver.cuModuleLoadData, ctypes.addressof(_KERNELS))
    idle, trap = (call(driver.cuModuleGetFunction, module, name) for name in (b"idle", b"break_context"))

    def launch(kernel: Any) -> None:
        call(driver.cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, self._shared_stream, 0, 0)

    def break_context() -> None:
        self.bind_thread()
        launch(trap)

    launch(idle)
    call(driver.cuStreamSynchronize, self._shared_stream)
    _break_when_told(break_context)


def _break_when_told(break_device: Callable[[], None]) -> None:
    """Once, for one "trap": the packer that comes next shall work."""

    def watch() -> None:
        while not _is_set("trap"):
            time.sleep(0.001)
        (_FAULTS / "trap").unlink()
        break_device()
        (_FAULTS / "trap.reached").touch()

    threading.Thread(target=watch, name="trap", daemon=True).start()
