"""A device for a machine with no GPU: an arena is a worker's memfd, a copy is a memmove, a stream is a list of calls.

Everything else of the packer runs unchanged over it, in tests, in demos and in CI. It is no faster than vllm-omni's own
path and is not meant for production.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable

from packer_service.devices.base import Arena, Timeline
from packer_service.errors import DeviceError, ProtocolError
from packer_service.memory import SharedMemory

TIMELINE_BYTES = 4096
_COUNTER = struct.Struct("<Q")
_POLL_S = 0.0005


class HostArena:
    """A worker's memfd, mapped here."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.address = memory.address
        self.nbytes = memory.nbytes

    def close(self) -> None:
        self._memory.close()


class HostTimeline:
    """A counter in a shared page, read and written by CPUs only."""

    def __init__(self, page: SharedMemory) -> None:
        self._page = page
        self._closed = threading.Event()
        self._forced = 0

    def value(self) -> int:
        return int(_COUNTER.unpack_from(self._page.buffer)[0])

    def force(self, value: int) -> None:
        self._forced = value  # a worker that still lives can write to the page, but not to this
        _COUNTER.pack_into(self._page.buffer, 0, value)

    def wait(self, value: int) -> None:
        while max(self.value(), self._forced) < value and not self._closed.wait(_POLL_S):
            pass

    def close(self) -> None:
        self._closed.set()
        self._page.close()


class HostMarker:
    """The calls submitted before it; the thread that synchronizes runs them."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self._calls = calls

    def synchronize(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


class HostStream:
    """Calls in order. Markers must be synchronized in the order they were recorded, by one thread."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []

    def wait_timeline(self, timeline: Timeline, value: int) -> None:
        assert isinstance(timeline, HostTimeline)
        self._calls.append(lambda: timeline.wait(value))

    def wait_event(self, handle: bytes) -> None:
        raise DeviceError("the host device has no events: leave the setting event at 'timeline'")

    def copy_to_host(self, address: int, arena: Arena, offset: int, nbytes: int) -> None:
        assert isinstance(arena, HostArena)
        source = arena.address + offset
        self._calls.append(lambda: ctypes.memmove(address, source, nbytes))  # releases the GIL

    def record(self) -> HostMarker:
        calls, self._calls = self._calls, []
        return HostMarker(calls)

    def close(self) -> None:
        self._calls.clear()


class HostDevice:
    """The host's own memory, as a device."""

    kind = "host"
    uuid = "host"
    name = "host memory"

    def bind_thread(self) -> None:
        pass

    def register(self, address: int, nbytes: int) -> None:
        pass

    def unregister(self, address: int, nbytes: int) -> None:
        pass

    def open_arena(self, handle: bytes, fds: list[int], nbytes: int) -> HostArena:
        if not fds:
            raise ProtocolError("a host arena came without its memfd")
        return HostArena(SharedMemory.attach(fds.pop(), nbytes))

    def open_timeline(self, page: SharedMemory) -> HostTimeline:
        return HostTimeline(page)

    def open_stream(self) -> HostStream:
        return HostStream()

    def close(self) -> None:
        pass
