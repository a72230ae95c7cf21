"""A session's use of one CUDA stream: it waits for the worker's device, copies, and says when the copies have ended.

It owns no stream: ``CudaDevice`` hands one out and takes it back. It never blocks the thread that submits.

Note [The end of a copy]
Waking a sleeping thread costs about 0.1 ms, as much as a small copy itself. How long a forward takes nobody knows, so its
end is slept for; how long a copy takes follows from its bytes, so the thread sleeps until shortly before and polls the rest,
for at most ``_SPIN_S``. That is the only polling there is, and a packer that waits for a forward burns nothing. What a copy
took is known only if its end was seen. A thread that slept past the end would measure its own sleep, and sleep as long the next
time. So where the first look comes after the end, the next sleep is shorter; where the thread was held up, nothing is learned.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from packer_service.devices.base import ImportedChunk, Timeline
from packer_service.devices.closer import Closer, nothing
from packer_service.devices.cuda_memory import CudaTimeline, ImportedCudaChunk, Registrations
from packer_service.devices.driver import call, driver, handle_from
from packer_service.errors import DeviceBusy

_SPIN_S = 0.0004
_FIRST_GUESS_BYTES_PER_S = 50e9  # PCIe 5 x16; too high a guess only means an earlier look
_TELLING_BYTES = 8 << 20
_STEP = 9 / 8  # what one copy may change the rate by at most

if driver is not None:
    _NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
    _GEQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _EVENT_FLAGS = driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING


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
        self.began = 0.0

    def synchronize(self) -> None:
        call(driver.cuEventSynchronize, self._started)
        begin = self.began = time.perf_counter()
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
    """One session's use of a stream. Copies are cut where the registrations of host memory end (``Registrations``).

    One thread submits at a time, one synchronizes markers; the list of idle events is the only thing they share.
    """

    def __init__(
        self,
        registrations: Registrations,
        closer: Closer,
        stream: Any,
        *,
        may_wait: bool,
        give_back: Callable[[], None] = nothing,
    ) -> None:
        self.rate = CopyRate()
        self._registrations = registrations
        self._give_back = give_back  # called once the session uses ``stream`` no more
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
        assert isinstance(chunk, ImportedCudaChunk)
        source, end = chunk.pointer + offset, address + nbytes
        while address < end:
            part = min(end, self._registrations.end(address)) - address
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
        self._give_back()
