"""Memory that the packer makes known to CUDA: chunks it imports, timeline pages and segments it registers.

Each is undone through the closer (packer_service.devices.closer says why), and what fails midway is undone as well. Nothing
here copies or waits.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable

from packer_service.devices.calls import DeviceCall
from packer_service.devices.closer import Closer, nothing
from packer_service.devices.driver import call, driver, handle_from
from packer_service.errors import DeviceError
from packer_service.memory.timeline import TimelinePage

REGISTER_BYTES = 64 << 20  # one registration; larger ones delay copies that run beside them


class ImportedCudaChunk:
    """A worker's chunk behind its IPC handle. The import keeps the memory alive even when the worker is gone."""

    def __init__(self, handle: bytes, nbytes: int, closer: Closer) -> None:
        self._closer = closer
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self.pointer = int(call(driver.cuIpcOpenMemHandle, handle_from(driver.CUipcMemHandle, handle), flags))
        self.nbytes = nbytes
        try:
            _, allocated = call(driver.cuMemGetAddressRange, self.pointer)
            if int(allocated) < nbytes:
                raise DeviceError(f"a chunk that is said to have {nbytes} bytes has {int(allocated)}")
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
        except BaseException:
            page.close()
            raise
        try:
            self.pointer = int(call(driver.cuMemHostGetDevicePointer, page.address, 0))
        except BaseException:
            self.close()  # the page is registered, and may be unmapped only after that is undone
            raise

    def close(self) -> None:
        self._closer.close_later(lambda: call(driver.cuMemHostUnregister, self.page.address), self.page.close)


class Registrations:
    """Host memory that is registered as a target of fast copies. One copy may not cross from one registration to another.

    Any thread may call. ``_lock`` guards the table, and is held for no driver call.
    """

    def __init__(self, closer: Closer) -> None:
        self._closer = closer
        self._lock = threading.Lock()
        self._starts: list[int] = []  # of every registration, sorted
        self._sizes: dict[int, int] = {}

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

    def end(self, address: int) -> int:
        """Where the registration that holds ``address`` ends."""
        with self._lock:
            start = self._starts[bisect.bisect_right(self._starts, address) - 1]
            return start + self._sizes[start]
