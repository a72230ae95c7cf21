"""How a pool grows and shrinks: ahead of need on a thread of its own, and back to its start when nobody uses it.

It decides when, and how much. It never says whose bytes are whose: that is the pool's (packer_service.pool.pool).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from packer_service.devices.base import Device
from packer_service.errors import DeviceError, PoolExhausted
from packer_service.memory.extents import ALIGNMENT, align
from packer_service.pool.budget import LEFT_TO_OTHERS, Budget
from packer_service.pool.segment import Segment

logger = logging.getLogger(__name__)

_RETRY_GROWTH_S = 5.0


class Grower:
    """The segments of one pool, and the thread that adds to them and gives idle ones back.

    ``lock`` is the pool's and guards everything here. Who calls the methods of the first part holds it. Segments are made and
    closed without it, so that allocations and releases go on meanwhile. ``on_end`` is called with it, as growth ends, and told
    whether a segment came; ``on_trim`` without it, before a segment leaves. ``label`` says for the log whose pool it is.
    """

    def __init__(
        self,
        device: Device,
        budget: Budget,
        lock: threading.Lock,
        *,
        on_end: Callable[[bool], None],
        on_trim: Callable[[int], None],
        label: Callable[[], str],
        keep_bytes: int,
        step_bytes: int,
        idle_s: float,
    ) -> None:
        self.segments: list[Segment] = []
        self._device = device
        self._budget = budget
        self._on_end = on_end
        self._on_trim = on_trim
        self._label = label
        self._keep_bytes = keep_bytes
        self._step_bytes = align(step_bytes)
        self._idle_s = idle_s
        self._lock = lock
        self._work = threading.Condition(lock)  # there is something for the thread
        self._next_segment = 0
        self._largest_request = 0  # of the last idle_s, so that a size which came once is not kept ready for ever
        self._largest_at = 0.0
        self._last_use = time.monotonic()
        self._wanted = 0  # bytes to add next
        self._growing = False
        self._blocked_until = 0.0  # no growth before, because it failed
        self._error = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pool-grower", daemon=True)
        self._thread.start()

    # -- what the pool asks, holding its lock --------------------------------------------------------------------------

    def note_request(self, nbytes: int, now: float) -> None:
        """The pool is used, for an output of this size."""
        self._last_use = now
        if nbytes >= self._largest_request or now >= self._largest_at + self._idle_s:
            self._largest_request, self._largest_at = nbytes, now

    def look_ahead(self) -> None:
        """Grow ahead of need, where another output as large as the largest would find no room."""
        if max(segment.extents.largest_free for segment in self.segments) < self._largest_request:
            self.ask_for(self._largest_request)

    def ask_for(self, nbytes: int) -> bool:
        """Have room for ``nbytes`` added; False where the budget or a recent failure forbids it."""
        if self._growing or self._wanted:
            return True
        if time.monotonic() < self._blocked_until or self._budget.left < align(nbytes):
            return False
        self._wanted = align(nbytes)
        self._work.notify()
        return True

    def others_hold(self, nbytes: int) -> bool:
        """Whether growth would be possible without the pools of other engines, one of which may be leaving just now."""
        fits = self.total_bytes + align(nbytes) <= self._budget.max_bytes
        return time.monotonic() >= self._blocked_until and fits

    def why_no_room(self) -> str:
        return self._error or f"at its limit {self._budget.describe()}"

    @property
    def total_bytes(self) -> int:
        return sum(segment.memory.nbytes for segment in self.segments)

    # -- growth --------------------------------------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """Add one segment of ``nbytes`` now, on the calling thread. Raises what stopped it, with nothing half-made."""
        nbytes = align(nbytes)
        if not self._budget.take(nbytes):
            raise PoolExhausted(f"{nbytes} more bytes exceed pool_max_bytes = {self._budget.max_bytes}")
        try:
            if (left := self._budget.left_of_cgroup) < 0:
                raise MemoryError(
                    f"{nbytes} more bytes for the pool would leave less than {LEFT_TO_OTHERS} of the cgroup's memory limit,"
                    f" of which {left + nbytes + LEFT_TO_OTHERS:.0f} are free: lower pool_bytes and pool_max_bytes, or raise"
                    " that limit (systemd MemoryMax, container memory limit)"
                )
            with self._lock:
                number, self._next_segment = self._next_segment, self._next_segment + 1
            segment = Segment(self._device, number, nbytes)
        except BaseException:
            self._budget.give_back(nbytes)
            raise
        self._budget.populated(nbytes)
        with self._lock:
            self.segments.append(segment)
            self._on_end(True)
            total = self.total_bytes
        logger.info("pool grew by %d MiB to %d MiB%s", nbytes >> 20, total >> 20, self._label())

    def stop(self) -> list[Segment]:
        """End the thread; the segments, which are the caller's to close."""
        with self._lock:
            self._stopping = True
            self._work.notify()
        self._thread.join()
        with self._lock:
            segments, self.segments = self.segments, []
        return segments

    def _run(self) -> None:
        try:
            self._grow_and_trim()
        except Exception as error:  # the device broke, most likely: then the packer ends soon
            logger.exception("the pool does not grow any more%s", self._label())
            with self._lock:
                self._wanted, self._growing = 0, False
                self._error, self._blocked_until = f"unable to grow ({error!r})", math.inf
                self._on_end(False)

    def _grow_and_trim(self) -> None:
        self._device.bind_thread()
        while True:
            with self._lock:
                while not self._wanted and not self._stopping and not (surplus := self._take_surplus()):
                    self._work.wait(self._until_surplus())
                if self._stopping:
                    return
                wanted, self._wanted, self._growing = self._wanted, 0, bool(self._wanted)
            if wanted:
                self._grow_by_demand(wanted)
            else:
                self._discard(surplus)

    def _grow_by_demand(self, wanted: int) -> None:
        error = ""
        try:
            room = min(self._step_bytes, self._budget.left, self._budget.left_of_cgroup)
            self.grow(max(wanted, int(room) & -ALIGNMENT))
        except (DeviceError, MemoryError, OSError, PoolExhausted) as caught:
            error = f"unable to grow ({caught}); see pool_max_bytes and the memory limit of this process's cgroup"
            with self._lock:
                total = self.total_bytes
            logger.warning("the pool stays at %d MiB: %s", total >> 20, error)
        with self._lock:
            self._growing = False
            self._error = error
            self._blocked_until = time.monotonic() + _RETRY_GROWTH_S if error else 0.0
            self._on_end(False)
            self._work.notify()  # its sleep has an end from here on

    def _until_surplus(self) -> float | None:
        """Seconds until an idle segment may leave; None where there is nothing to give back."""
        if self.total_bytes <= self._keep_bytes:
            return None
        return max(self._last_use + self._idle_s - time.monotonic(), 0.0) or self._idle_s

    def _take_surplus(self) -> list[Segment]:
        """Empty segments beyond ``keep_bytes`` of a pool that nobody used for ``idle_s``, taken out of it."""
        if time.monotonic() < self._last_use + self._idle_s:
            return []
        total, surplus = self.total_bytes, []
        for segment in self.segments[::-1]:
            if segment.extents.idle and total - segment.memory.nbytes >= self._keep_bytes:
                total -= segment.memory.nbytes
                self.segments.remove(segment)
                surplus.append(segment)
        return surplus

    def _discard(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._on_trim(segment.number)
            self._budget.close_segment(segment)
            logger.info("pool gives %d MiB back, idle for %g s", segment.memory.nbytes >> 20, self._idle_s)
