"""The faults that no signal gives: points at which a packer waits, and calls of the system or the device that fail."""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packer_service import memory, protocol, transport
from packer_service.devices import host
from packer_service.errors import DeviceError

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
    host.HostDevice.register = _failing("register", DeviceError("CUDA_ERROR_OUT_OF_MEMORY"))  # type: ignore[method-assign]
    host.HostDevice.failure = lambda self: "CUDA_ERROR_ILLEGAL_ADDRESS" * _is_set("sticky")  # type: ignore[method-assign]
    memory.create_memfd = _failing("memfd", OSError(errno.EMFILE, "injected"), memory.create_memfd)
    memory.mmap.mmap = _failing("mmap", OSError(errno.ENOMEM, "injected"), memory.mmap.mmap)  # type: ignore[misc]
    memory.ThreadPoolExecutor.submit = _failing(  # type: ignore[method-assign]
        "threads", RuntimeError("can't start new thread"), memory.ThreadPoolExecutor.submit
    )
    send = transport.Channel.send

    def send_after_gate(self: Any, message: Any, fd: int | None = None) -> None:
        if isinstance(message, protocol.Ack):
            _wait_while_set("ack")
        send(self, message, fd)

    transport.Channel.send = send_after_gate  # type: ignore[method-assign]


def _failing(fault: str, error: Exception, function: Callable[..., Any] = lambda *args: None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_set(fault):
            raise error
        return function(*args, **kwargs)

    return call


_open = host.HostDevice.__init__


def _open_device(self: Any) -> None:
    if _is_set("context"):
        raise DeviceError("cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE")
    _open(self)


def _copy_to_host(self: Any, address: int, arena: Any, offset: int, nbytes: int) -> None:
    """The copy in two halves, with the point "copy" between them."""

    def copy() -> None:
        if _is_set("sticky"):
            raise DeviceError("CUDA_ERROR_ILLEGAL_ADDRESS")
        half, source = nbytes // 2, arena.address + offset
        ctypes.memmove(address, source, half)
        _wait_while_set("copy")
        ctypes.memmove(address + half, source + half, nbytes - half)

    self._calls.append(copy)
