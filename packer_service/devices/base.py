"""What a packer needs of a device. Sessions know this protocol and nothing below it.

Memory is named by plain addresses; who owns it is said where it is made. Every method may raise DeviceError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from packer_service.devices.closer import Closer, nothing
from packer_service.memory.timeline import TimelinePage


class ImportedChunk(Protocol):
    """One chunk of a worker's arena, imported. The import is the packer's to close; the memory stays the worker's."""

    nbytes: int

    def close(self, then: Callable[[], None] = nothing) -> None:
        """Close it soon: see ``Closer.drain``. ``then`` is called after that, on another thread, and may not wait."""


class Timeline(Protocol):
    """A worker's timeline page that this device's streams can wait for. It owns the page."""

    page: TimelinePage

    def close(self) -> None:
        """Close it soon: see ``Closer.drain``."""


class Marker(Protocol):
    """The end of what was submitted to a stream when it was recorded. ``began``: when ``synchronize`` saw the wait before it
    end, in seconds of ``time.perf_counter``."""

    began: float

    def synchronize(self) -> None:
        """Block, without burning a core, until the stream has passed the marker."""


class Stream(Protocol):
    """Work in order, beside other streams. Submitting never waits for the work."""

    def wait_timeline(self, timeline: Timeline, value: int) -> None:
        """Have the stream wait until the counter reaches ``value``. DeviceBusy where it may not wait now."""

    def wait_event(self, handle: bytes) -> None:
        """The same for the worker's interprocess event behind ``handle``. DeviceBusy until that is complete, as last recorded.

        An event that is not complete when its process dies never is, and a stream that waits for it never goes on
        (benchmarks/dead_worker.py).
        """

    def copy_to_host(self, address: int, chunk: ImportedChunk, offset: int, nbytes: int) -> None:
        """Copy ``nbytes`` at ``offset`` of ``chunk`` to registered host memory at ``address``."""

    def record(self) -> Marker: ...

    def close(self) -> None:
        """Close it soon: see ``Closer.drain``. It must have passed all that was submitted.

        None of its waits counts from here on, whatever a worker writes to its timeline.
        """


class Device(Protocol):
    """One device of this process."""

    kind: str
    uuid: str
    name: str
    closer: Closer  # of everything that is closed soon

    def bind_thread(self) -> None:
        """Call once on every thread that uses the device."""

    def register(self, address: int, nbytes: int) -> None:
        """Make host memory a target of fast copies. ``unregister`` undoes it."""

    def unregister(self, address: int, nbytes: int, then: Callable[[], None] = nothing) -> None:
        """As ``ImportedChunk.close``: the memory must stay mapped until ``then`` is called."""

    def open_chunk(self, handle: bytes, fds: list[int], nbytes: int) -> ImportedChunk:
        """Import a worker's chunk and check that it really holds ``nbytes``. Takes the descriptors out of ``fds`` it keeps."""

    def open_timeline(self, page: TimelinePage) -> Timeline:
        """Take over a worker's page, also when it raises."""

    def open_stream(self) -> Stream: ...

    def failure(self) -> str:
        """Why no call to this device will work any more; empty while it does."""

    def close(self) -> None: ...
