"""The worker's part of the hand-off that the doctor tries, in a process that ``packer_service.doctor.handover`` starts.

    python -m packer_service.doctor.exporter DEVICE SOCKET_FD NBYTES [events]

It allocates memory as a worker's arena does, and tells who imports it where that is (one JSON object, with the descriptors).
When it is sent a seed, it has its device write the bytes that follow from it, and then the counter of the timeline. It ends
when the other side hangs up. It never touches a packer.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import socket
import sys
from typing import Protocol

from packer_service.devices import device_named
from packer_service.devices.driver import call, driver, handle_bytes, visible_gpu
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage

PATIENCE_S = 60.0  # of either side, for a message of the other
READY = 1  # the value of the timeline at which the bytes are complete


def contents(seed: bytes, nbytes: int) -> bytes:
    """The bytes that both sides know, and nobody else has written before."""
    return hashlib.shake_256(seed).digest(nbytes)


class Export(Protocol):
    """Memory that another process can import. ``fds`` are for the importer: the timeline's, and the memory's on the host."""

    handle: bytes
    fds: list[int]

    def write(self, data: bytes) -> bytes:
        """Have the device write ``data`` and then the counter; the handle of an event behind them, where there is to be one."""
        ...

    def close(self) -> None: ...


class HostExport:
    """As ``worker_shim.worker.device_host``: a memfd, and a counter that the CPU writes."""

    handle = b""

    def __init__(self, nbytes: int) -> None:
        self._page = TimelinePage.create()
        self._memory = SharedMemory.create("packer-doctor", nbytes)
        self.fds = [self._page.fd, self._memory.fd]

    def write(self, data: bytes) -> bytes:
        self._memory.buffer[: len(data)] = data
        self._page.counter = READY
        return b""

    def close(self) -> None:
        self._memory.close()
        self._page.close()


class CudaExport:
    """As ``worker_shim.worker.device_cuda``, without torch: a driver allocation, and a counter that the stream writes."""

    def __init__(self, which: str, nbytes: int, *, events: bool) -> None:
        with contextlib.ExitStack() as opened:
            call(driver.cuInit, 0)
            device = visible_gpu(which)
            context = call(driver.cuDevicePrimaryCtxRetain, device)
            opened.callback(call, driver.cuDevicePrimaryCtxRelease, device)
            call(driver.cuCtxSetCurrent, context)
            self._page = TimelinePage.create()
            opened.callback(self._page.close)
            call(driver.cuMemHostRegister, self._page.address, self._page.nbytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
            opened.callback(call, driver.cuMemHostUnregister, self._page.address)
            self._counter = int(call(driver.cuMemHostGetDevicePointer, self._page.address, 0))
            self._memory = int(call(driver.cuMemAlloc, nbytes))
            opened.callback(call, driver.cuMemFree, self._memory)
            call(driver.cuMemsetD8, self._memory, 0, nbytes)
            call(driver.cuCtxSynchronize)
            self.handle = handle_bytes(call(driver.cuIpcGetMemHandle, self._memory))
            self.fds = [self._page.fd]
            self._stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            opened.callback(call, driver.cuStreamDestroy, self._stream)
            self._event = None
            if events:
                flags = driver.CUevent_flags.CU_EVENT_INTERPROCESS | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
                self._event = call(driver.cuEventCreate, flags)
                opened.callback(call, driver.cuEventDestroy, self._event)
            self._opened = opened.pop_all()

    def write(self, data: bytes) -> bytes:
        source = ctypes.create_string_buffer(data, len(data))
        call(driver.cuMemcpyHtoDAsync, self._memory, ctypes.addressof(source), len(data), self._stream)
        call(driver.cuStreamWriteValue64, self._stream, self._counter, READY, 0)
        handle = b""
        if self._event is not None:
            handle = handle_bytes(call(driver.cuIpcGetEventHandle, self._event))
            call(driver.cuEventRecord, self._event, self._stream)
        call(driver.cuStreamSynchronize, self._stream)
        return handle

    def close(self) -> None:
        self._opened.close()


def open_export(device: str, nbytes: int, *, events: bool) -> Export:
    kind, which = device_named(device)
    return HostExport(nbytes) if kind == "host" else CudaExport(which, nbytes, events=events)


def main(device: str, fd: str, nbytes: str, *options: str) -> None:
    with socket.socket(fileno=int(fd)) as importer:
        importer.settimeout(PATIENCE_S)
        try:
            with contextlib.closing(open_export(device, int(nbytes), events="events" in options)) as export:
                socket.send_fds(importer, [json.dumps({"handle": export.handle.hex()}).encode()], export.fds)
                if seed := importer.recv(64):
                    event = export.write(contents(seed, int(nbytes)))
                    importer.send(json.dumps({"event": event.hex()}).encode())
                    importer.recv(1)  # until it hangs up: the memory must stay until it is imported no more
        except Exception as error:  # the importer says it: nobody reads what this process prints
            importer.send(json.dumps({"failed": f"{error} ({type(error).__name__})"}).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
