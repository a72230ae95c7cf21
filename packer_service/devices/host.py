"""A device for a machine with no GPU: a chunk is a worker's memfd, a copy is a memmove, a stream is a list of calls.

Everything else of the packer runs unchanged over it, in tests, in demos and in CI. It is no faster than vllm-omni's own
path and is not meant for production. It never touches a GPU.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

from packer_service.devices.base import ImportedChunk, Timeline
from packer_service.devices.calls import DeviceCall
from packer_service.devices.closer import Closer, nothing
from packer_service.errors import DeviceError, ProtocolError
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage

_POLL_S = 0.0005


class ImportedHostChunk:
    """A worker's memfd, mapped here."""

    def __init__(self, memory: SharedMemory, closer: Closer) -> None:
        self._memory = memory
        self._closer = closer
        self.address = memory.address
        self.nbytes = memory.nbytes

    def close(self, then: Callable[[], None] = nothing) -> None:
        self._closer.close_later(self._memory.close, then)


class HostTimeline:
    """A counter that CPUs alone read and write."""

    def __init__(self, page: TimelinePage, closer: Closer) -> None:
        self.page = page
        self._closer = closer
        self._closed = threading.Event()

    def wait(self, value: int) -> None:
        while self.page.counter < value and not self._closed.wait(_POLL_S):
            pass

    def close(self) -> None:
        self._closed.set()
        self._closer.close_later(self.page.close)


class HostMarker:
    """The calls submitted before it; the thread that synchronizes runs them."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self._calls = calls
        self.began = 0.0

    def synchronize(self) -> None:
        calls, self._calls = self._calls, []
        for number, call in enumerate(calls):
            call()
            if number == 0:  # the wait
                self.began = time.perf_counter()


class HostStream:
    """Calls in order. Markers must be synchronized in the order they were recorded, by one thread."""

    def __init__(self, closer: Closer) -> None:
        self._closer = closer
        self._calls: list[Callable[[], object]] = []
        self._closed = False

    def wait_timeline(self, timeline: Timeline, value: int) -> None:
        assert isinstance(timeline, HostTimeline)
        self._closer.submit_wait(
            lambda: self._closed or timeline.page.counter >= value,
            lambda: self._calls.append(lambda: timeline.wait(value)),
        )

    def wait_event(self, handle: bytes) -> None:
        raise DeviceError("the host device has no events: leave the setting event at 'timeline'")

    def copy_to_host(self, address: int, chunk: ImportedChunk, offset: int, nbytes: int) -> None:
        assert isinstance(chunk, ImportedHostChunk)
        source = chunk.address + offset
        self._calls.append(lambda: ctypes.memmove(address, source, nbytes))  # releases the GIL

    def record(self) -> HostMarker:
        calls, self._calls = self._calls, []
        return HostMarker(calls)

    def close(self) -> None:
        self._closed = True
        self._calls.clear()


class HostDevice:
    """The host's own memory, as a device."""

    kind = "host"
    uuid = "host"
    name = "host memory"

    def __init__(self) -> None:
        # To close holds up nobody here. It comes later all the same, so that the packer is what it is on a GPU.
        self.closer = Closer(self.bind_thread)

    def bind_thread(self) -> None:
        pass

    def register(self, address: int, nbytes: int) -> None:
        with DeviceCall("the registration of %d bytes", nbytes):
            self._pin(address, nbytes)

    def _pin(self, address: int, nbytes: int) -> None:
        """Where the driver would be asked to."""

    def unregister(self, address: int, nbytes: int, then: Callable[[], None] = nothing) -> None:
        self.closer.close_later(nothing, then)

    def open_chunk(self, handle: bytes, fds: list[int], nbytes: int) -> ImportedHostChunk:
        if not fds:
            raise ProtocolError("a host chunk came without its memfd")
        return ImportedHostChunk(SharedMemory.attach(fds.pop(), nbytes), self.closer)

    def open_timeline(self, page: TimelinePage) -> HostTimeline:
        return HostTimeline(page, self.closer)

    def open_stream(self) -> HostStream:
        return HostStream(self.closer)

    def failure(self) -> str:
        return ""

    def close(self) -> None:
        self.closer.stop()
