"""The segments of a pool, and how it grows and shrinks: ahead of need on a thread of its own, and back when nobody uses it.

It decides when, and how much. It never says whose bytes are whose: that is the pool's (packer_service.pool.pool).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable

from packer_service.devices.base import Device
from packer_service.devices.closer import nothing
from packer_service.errors import DeviceError, PoolExhausted
from packer_service.memory.extents import ALIGNMENT, Extents, align
from packer_service.memory.memfd import SharedMemory
from packer_service.pool.budget import LEFT_TO_OTHERS, Budget

logger = logging.getLogger(__name__)

_RETRY_GROWTH_S = 5.0
_POPULATE_THREADS = 8


class Segment:
    """One memfd: populated, then registered. It owns both; ``close`` undoes both, soon (see ``Closer.drain``)."""

    def __init__(self, device: Device, number: int, nbytes: int) -> None:
        self.number = number
        self.memory = SharedMemory.create(f"packer-segment-{number}", nbytes)
        self.extents = Extents(nbytes)
        self._device = device
        try:
            self.memory.populate(_POPULATE_THREADS)
            device.register(self.memory.address, nbytes)
        except BaseException:
            self.memory.close()
            raise

    def close(self, then: Callable[[], None] = nothing) -> None:
        def unmap() -> None:
            self.memory.close()
            then()

        self._device.unregister(self.memory.address, self.memory.nbytes, unmap)


class Segments:
    """What a pool is beneath its regions: its segments, and the thread that adds to them and gives idle ones back.

    ``_lock`` guards everything here, and the fields that ``Pool`` adds. Who calls the methods of the first part holds it.
    Segments are made and closed without it, so that allocations and releases go on meanwhile.
    """

    def __init__(self, device: Device, budget: Budget, *, keep_bytes: int, step_bytes: int, idle_s: float) -> None:
        self.owner = ""  # the engine session; none yet for the pool that is ready before its engine comes
        self.on_wait: Callable[[], None] = lambda: None  # told of each allocation that waits, with the lock held
        self.on_trim: Callable[[int], None] = lambda number: None  # told the number of a segment before that leaves
        self._device = device
        self._budget = budget
        self.keep_bytes = keep_bytes
        self._step_bytes = align(step_bytes)
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._space = threading.Condition(self._lock)  # something was released, or growth ended
        self._work = threading.Condition(self._lock)  # there is something for the thread
        self._segments: list[Segment] = []
        self._next_segment = 0
        self._largest_request = 0  # of the last idle_s, so that a size which came once is not kept ready for ever
        self._largest_at = 0.0
        self._last_use = time.monotonic()
        self._in_vain = False  # an allocation waited in vain, and nothing came back since
        self._wanted = 0  # bytes to add next
        self._growing = False
        self._blocked_until = 0.0  # no growth before, because it failed
        self._error = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pool-grower", daemon=True)
        self._thread.start()

    # -- what the pool asks, holding the lock --------------------------------------------------------------------------

    def _note_request(self, nbytes: int, now: float) -> None:
        """The pool is used, for an output of this size."""
        self._last_use = now
        if nbytes >= self._largest_request or now >= self._largest_at + self._idle_s:
            self._largest_request, self._largest_at = nbytes, now

    def _look_ahead(self) -> None:
        """Grow ahead of need, where another output as large as the largest would find no room."""
        if max(segment.extents.largest_free for segment in self._segments) < self._largest_request:
            self._ask_for(self._largest_request)

    def _ask_for(self, nbytes: int) -> bool:
        """Have room for ``nbytes`` added; False where the budget or a recent failure forbids it."""
        if self._growing or self._wanted:
            return True
        if time.monotonic() < self._blocked_until or self._budget.left_for(self) < align(nbytes):
            return False
        self._wanted = align(nbytes)
        self._work.notify()
        return True

    def _others_hold(self, nbytes: int) -> bool:
        """Whether growth would be possible without the pools of other engines, one of which may be leaving just now."""
        fits = self._total_bytes + align(nbytes) <= self._budget.max_bytes
        return time.monotonic() >= self._blocked_until and fits

    @property
    def _total_bytes(self) -> int:
        return sum(segment.memory.nbytes for segment in self._segments)

    # -- growth ------------------------------------------------------------------------------------------------------

    def grow(self, nbytes: int) -> None:
        """Add one segment of ``nbytes`` now, on the calling thread. Raises what stopped it, with nothing half-made."""
        nbytes = align(nbytes)
        if not self._budget.take(self, nbytes):
            raise PoolExhausted(
                f"{nbytes} more bytes exceed pool_max_bytes = {self._budget.max_bytes}, less what other engines are promised"
            )
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
            self._budget.give_back(self, nbytes)
            raise
        self._budget.populated(nbytes)
        with self._lock:
            self._segments.append(segment)
            self._in_vain = False
            self._space.notify_all()
            total = self._total_bytes
        logger.info("pool grew by %d MiB to %d MiB%s", nbytes >> 20, total >> 20, self._label())

    def _stop(self) -> None:
        """End the thread, and close all segments."""
        with self._lock:
            self._stopping = True
            self._work.notify()
        self._thread.join()
        with self._lock:
            segments, self._segments = self._segments, []
        for segment in segments:
            self._close(segment)

    def _close(self, segment: Segment) -> None:
        """Soon. Its bytes are free once that is done: it waits for the forwards that streams wait for."""
        self._budget.returning(segment.memory.nbytes)
        segment.close(functools.partial(self._budget.returned, self, segment.memory.nbytes))

    def describe(self) -> str:
        """Who holds how much of this pool, and since when."""
        raise NotImplementedError

    def _label(self) -> str:
        return f" (engine {self.owner})" if self.owner else ""

    def _run(self) -> None:
        try:
            self._grow_and_trim()
        except Exception as error:  # the device broke, most likely: then the packer ends soon
            logger.exception("the pool does not grow any more%s", self._label())
            with self._lock:
                self._wanted, self._growing = 0, False
                self._error, self._blocked_until = f"unable to grow ({error!r})", math.inf
                self._space.notify_all()

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
                continue
            for segment in surplus:
                self.on_trim(segment.number)
                self._close(segment)
                logger.info("pool gives %d MiB back, idle for %g s", segment.memory.nbytes >> 20, self._idle_s)

    def _grow_by_demand(self, wanted: int) -> None:
        error = ""
        try:
            room = min(self._step_bytes, self._budget.left_for(self), self._budget.left_of_cgroup)
            self.grow(max(wanted, int(room) & -ALIGNMENT))
        except (DeviceError, MemoryError, OSError, PoolExhausted) as caught:
            error = f"unable to grow ({caught}); see pool_max_bytes and the memory limit of this process's cgroup"
            with self._lock:
                total = self._total_bytes
            logger.warning("the pool stays at %d MiB: %s", total >> 20, error)
        with self._lock:
            self._growing = False
            self._error = error
            self._blocked_until = time.monotonic() + _RETRY_GROWTH_S if error else 0.0
            self._space.notify_all()
            self._work.notify()  # its sleep has an end from here on

    def _until_surplus(self) -> float | None:
        """Seconds until an idle segment may leave; None where there is nothing to give back."""
        if self._total_bytes <= self.keep_bytes:
            return None
        return max(self._last_use + self._idle_s - time.monotonic(), 0.0) or self._idle_s

    def _take_surplus(self) -> list[Segment]:
        """Empty segments beyond ``keep_bytes`` of a pool that nobody used for ``idle_s``, taken out of it."""
        if time.monotonic() < self._last_use + self._idle_s:
            return []
        total, surplus = self._total_bytes, []
        for segment in self._segments[::-1]:
            if segment.extents.idle and total - segment.memory.nbytes >= self.keep_bytes:
                total -= segment.memory.nbytes
                self._segments.remove(segment)
                surplus.append(segment)
        return surplus
