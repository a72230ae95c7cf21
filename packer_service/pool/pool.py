"""The pool: pinned host memory of one engine session, in segments that grow ahead of need, carved into regions.

    segment 0  (memfd, sealed, populated, registered with the device, mapped by the engine)
    +-----------+---------------+--------------------+
    | region 7  | region 9      | free               |      region = the packer's while it copies,
    +-----------+---------------+--------------------+               the engine's (a lease) from OUTPUT_READY to Release
    segment 1  ...

A region is named by a number that is never used twice, so that a lease returned twice touches nobody else.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from packer_service.devices.base import Device, nothing
from packer_service.errors import DeviceError, PoolExhausted, ProtocolError
from packer_service.memory.extents import ALIGNMENT, Extents, align
from packer_service.memory.memfd import SharedMemory
from packer_service.pool.cgroup import memory_left

logger = logging.getLogger(__name__)

POPULATE_THREADS = 8
_RETRY_GROWTH_S = 5.0
_OTHERS_POLL_S = 0.02
_COMPLAINT_S = 10.0
_LEFT_TO_OTHERS = 64 << 20  # of a cgroup's memory: beyond its limit the kernel kills a process of it, and any of them


class Budget:
    """Bytes that all pools of a packer may take together, and those pools, so that each can name who holds what."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._returning = 0  # of those that are taken: of segments that are being closed
        self._coming = 0  # of those that are taken: of segments whose pages the kernel is giving
        self._pools: list[Pool] = []
        self._lock = threading.Lock()

    def enter(self, pool: Pool) -> None:
        with self._lock:
            self._pools.append(pool)

    def leave(self, pool: Pool) -> None:
        with self._lock:
            self._pools.remove(pool)

    @property
    def pools(self) -> list[Pool]:
        with self._lock:
            return list(self._pools)

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if self._taken + nbytes > self.max_bytes:
                return False
            self._taken += nbytes
            self._coming += nbytes
            return True

    def populated(self, nbytes: int) -> None:
        """Of ``nbytes`` that were taken the kernel counts every page now."""
        with self._lock:
            self._coming -= nbytes

    def give_back(self, nbytes: int) -> None:
        """``nbytes`` that were taken come to nothing."""
        with self._lock:
            self._taken -= nbytes
            self._coming -= nbytes

    def close_segment(self, segment: Segment) -> None:
        """Its bytes are free once it is closed: that waits for the forwards that streams wait for."""
        with self._lock:
            self._returning += segment.memory.nbytes
        segment.close(functools.partial(self._returned, segment.memory.nbytes))

    def _returned(self, nbytes: int) -> None:
        with self._lock:
            self._returning -= nbytes
            self._taken -= nbytes

    @property
    def left(self) -> int:
        with self._lock:
            return self.max_bytes - self._taken

    @property
    def left_of_cgroup(self) -> float:
        """Bytes that the memory cgroups of this process allow beside all that is taken, less what is left to others."""
        left = memory_left()
        with self._lock:
            return math.inf if left is None else left - _LEFT_TO_OTHERS - self._coming

    def describe(self) -> str:
        """The limit, and how much of it is on its way back."""
        with self._lock:
            returning = f" ({self._returning} bytes of it are being given back)" if self._returning else ""
        return f"pool_max_bytes = {self.max_bytes}{returning}"


class Segment:
    """One memfd: populated, then registered. Owns both; ``close()`` undoes both, soon (see ``Device.drain``)."""

    def __init__(self, device: Device, number: int, nbytes: int) -> None:
        self.number = number
        self.memory = SharedMemory.create(f"packer-segment-{number}", nbytes)
        self.extents = Extents(nbytes)
        self._device = device
        try:
            self.memory.populate(POPULATE_THREADS)
            device.register(self.memory.address, nbytes)
        except BaseException:
            self.memory.close()
            raise

    def close(self, then: Callable[[], None] = nothing) -> None:
        def unmap() -> None:
            self.memory.close()
            then()

        self._device.unregister(self.memory.address, self.memory.nbytes, unmap)


@dataclass(frozen=True)
class Region:
    """``nbytes`` of ``segment`` at ``offset``; ``number`` names it for good. ``granted_at`` is ``time.monotonic()``."""

    number: int
    segment: Segment
    offset: int
    nbytes: int
    granted_at: float

    @property
    def address(self) -> int:
        return self.segment.memory.address + self.offset


class Pool:
    """Allocates regions, grows in the background, gives idle segments back, closes when its engine is gone.

    One lock guards everything. One thread grows and trims: populating and registering happen outside the lock, so that
    allocations and releases go on meanwhile. ``on_trim`` is told the number of each segment that leaves, before it does.
    """

    def __init__(self, device: Device, budget: Budget, *, keep_bytes: int, step_bytes: int, idle_s: float) -> None:
        self.on_trim: Callable[[int], None] = lambda number: None
        self.waits = 0  # allocations that had to wait, and for how long in all
        self.waited_s = 0.0
        self.exhausted = 0  # outputs that were handed back because there was no room
        self.owner = ""  # the engine session; none yet for the pool that is ready before its engine comes
        self._device = device
        self._budget = budget
        self._keep_bytes = keep_bytes
        self._step_bytes = align(step_bytes)
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._space = threading.Condition(self._lock)  # something was released, or growth ended
        self._work = threading.Condition(self._lock)  # there is something for the grower
        self._segments: list[Segment] = []
        self._regions: dict[int, Region] = {}
        self._leased: set[int] = set()  # those of them that the engine may give back
        self._complained_at = -_COMPLAINT_S
        self._next_region = 1
        self._next_segment = 0
        self._largest_request = 0  # of the last idle_s, so that a size which came once is not kept ready for ever
        self._largest_at = 0.0
        self._wanted = 0  # bytes the grower should add next
        self._growing = False
        self._blocked_until = 0.0
        self._growth_error = ""
        self._in_vain = False  # an allocation waited in vain, and nothing came back since
        self._last_use = time.monotonic()
        self._refusing = False  # no more grants
        self._closed = False
        self._grower = threading.Thread(target=self._run_grower, name="pool-grower", daemon=True)
        self._grower.start()
        budget.enter(self)

    # -- regions -------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, timeout_s: float = 0.0) -> Region:
        """A region of ``nbytes``, waiting up to ``timeout_s`` for growth or for leases to return. PoolExhausted otherwise.

        Leases are not waited for once that was in vain, until one returns: outputs that come behind would each wait as long.
        """
        begin = time.monotonic()
        with self._lock:
            self._last_use = begin
            if nbytes >= self._largest_request or begin >= self._largest_at + self._idle_s:
                self._largest_request, self._largest_at = nbytes, begin
            waited = False
            try:
                while True:
                    if self._refusing:
                        raise PoolExhausted("the pool is closed: its engine is gone")
                    region = self._try_allocate(nbytes)
                    if region is not None:
                        if max(s.extents.largest_free for s in self._segments) < self._largest_request:
                            self._ask_for(self._largest_request)  # ahead of need
                        return region
                    could_grow = self._ask_for(nbytes)
                    remaining = begin + timeout_s - time.monotonic()
                    others = not could_grow and self._others_hold(nbytes)
                    hopeful = could_grow or others or (self._regions and not self._in_vain)
                    if remaining <= 0 or not hopeful:
                        self._in_vain = self._in_vain or waited
                        raise PoolExhausted(self._why_exhausted(nbytes))
                    waited = True
                    self._space.wait(min(remaining, _OTHERS_POLL_S) if others else remaining)
            finally:
                if waited:
                    self.waits += 1
                    self.waited_s += time.monotonic() - begin

    def _try_allocate(self, nbytes: int) -> Region | None:
        for segment in self._segments:
            offset = segment.extents.allocate(nbytes)
            if offset is not None:
                region = Region(self._next_region, segment, offset, nbytes, time.monotonic())
                self._next_region += 1
                self._regions[region.number] = region
                return region
        return None

    def release(self, number: int) -> None:
        """Give a region back. ProtocolError where it is not out: released twice, or never granted."""
        with self._lock:
            self._release(number)

    def _release(self, number: int) -> None:
        region = self._regions.pop(number, None)
        if region is None:
            raise ProtocolError(f"lease {number} is not out: it was returned twice or never granted")
        region.segment.extents.release(region.offset)
        self._in_vain = False
        self._space.notify_all()

    def lease(self, regions: list[Region]) -> None:
        """Make them the engine's, before it hears of them: it may give them back the moment it does."""
        with self._lock:
            self._leased.update(region.number for region in regions)

    def reclaim(self, regions: list[Region]) -> list[Region]:
        """Undo ``lease``: the engine could not be told. Those of ``regions`` that are the packer's again.

        Not always all: an engine that breaks the protocol may have guessed a number and given it back.
        """
        with self._lock:
            ours = [region for region in regions if region.number in self._leased]
            self._leased.difference_update(region.number for region in ours)
            return ours

    def end_lease(self, number: int) -> None:
        """The engine gives a lease back. ProtocolError where it has none of that number, be it even a region we copy into."""
        with self._lock:
            if number not in self._leased:
                raise ProtocolError(f"lease {number} is not out: it was returned twice or never granted")
            self._leased.remove(number)
            self._release(number)

    # -- exhaustion ----------------------------------------------------------------------------------------------------

    def _why_exhausted(self, nbytes: int) -> str:
        reason = self._growth_error or f"at its limit {self._budget.describe()}"
        return (
            f"no room for {nbytes} bytes: {self._holds()} and the pool is {reason}."
            " Raise pool_max_bytes, or let the engine drop finished outputs sooner"
        )

    def _holds(self) -> str:
        used = sum(region.nbytes for region in self._regions.values())
        total = sum(segment.memory.nbytes for segment in self._segments)
        who = f"engine {self.owner}" if self.owner else "a pool without an engine"
        held = (
            f"{who} holds {used} of {total} bytes in {len(self._regions)} regions ({len(self._leased)} of them leases)"
        )
        if not self._regions:
            return held
        oldest = next(iter(self._regions.values()))  # granted in this order
        return f"{held}, the oldest for {time.monotonic() - oldest.granted_at:.1f} s"

    def _of_owner(self) -> str:
        return f" (engine {self.owner})" if self.owner else ""

    def describe(self) -> str:
        """Who holds how much of this pool, and since when."""
        with self._lock:
            return self._holds()

    def complain(self) -> None:
        """An output found no room and is handed back: count it, and say who holds what, now and then."""
        now = time.monotonic()
        with self._lock:
            self.exhausted += 1
            if self._refusing or now < self._complained_at + _COMPLAINT_S:
                return
            self._complained_at = now
            count = self.exhausted
        holders = "; ".join(pool.describe() for pool in self._budget.pools)  # each takes its own lock: not under ours
        logger.warning("the pool is exhausted, %d outputs were handed back so far: %s", count, holders)

    # -- growth --------------------------------------------------------------------------------------------------------

    def _ask_for(self, nbytes: int) -> bool:
        """Have the grower add room for ``nbytes``; False where the budget or a recent failure forbids it."""
        if self._growing or self._wanted:
            return True
        if time.monotonic() < self._blocked_until or self._budget.left < align(nbytes):
            return False
        self._wanted = align(nbytes)
        self._work.notify()
        return True

    def _others_hold(self, nbytes: int) -> bool:
        """Whether growth would be possible without the pools of other engines, one of which may be leaving just now."""
        own = sum(segment.memory.nbytes for segment in self._segments)
        return time.monotonic() >= self._blocked_until and own + align(nbytes) <= self._budget.max_bytes

    def grow(self, nbytes: int) -> None:
        """Add one segment of ``nbytes`` now, on the calling thread. Raises what stopped it, with nothing half-made."""
        nbytes = align(nbytes)
        if not self._budget.take(nbytes):
            raise PoolExhausted(f"{nbytes} more bytes exceed pool_max_bytes = {self._budget.max_bytes}")
        try:
            if (left := self._budget.left_of_cgroup) < 0:
                raise MemoryError(
                    f"{nbytes} more bytes for the pool would leave less than {_LEFT_TO_OTHERS} of the cgroup's memory limit,"
                    f" of which {left + nbytes + _LEFT_TO_OTHERS:.0f} are free: lower pool_bytes and pool_max_bytes, or raise"
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
            self._segments.append(segment)
            self._in_vain = False
            self._space.notify_all()
        logger.info("pool grew by %d MiB to %d MiB%s", nbytes >> 20, self.nbytes >> 20, self._of_owner())

    def _run_grower(self) -> None:
        try:
            self._grow_and_trim()
        except Exception as error:  # the device broke, most likely: then the packer ends soon
            logger.exception("the pool does not grow any more%s", self._of_owner())
            with self._lock:
                self._wanted, self._growing = 0, False
                self._growth_error, self._blocked_until = f"unable to grow ({error!r})", math.inf
                self._space.notify_all()

    def _grow_and_trim(self) -> None:
        self._device.bind_thread()
        while True:
            with self._lock:
                while not self._wanted and not self._closed and not (surplus := self._take_surplus()):
                    self._work.wait(self._until_surplus())
                if self._closed:
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
            logger.warning("the pool stays at %d MiB: %s", self.nbytes >> 20, error)
        with self._lock:
            self._growing = False
            self._growth_error = error
            self._blocked_until = time.monotonic() + _RETRY_GROWTH_S if error else 0.0
            self._space.notify_all()
            self._work.notify()  # its sleep has an end now

    def _until_surplus(self) -> float | None:
        """Seconds until an idle segment may leave; None where there is nothing to give back."""
        if sum(segment.memory.nbytes for segment in self._segments) <= self._keep_bytes:
            return None
        return max(self._last_use + self._idle_s - time.monotonic(), 0.0) or self._idle_s

    def _take_surplus(self) -> list[Segment]:
        """Empty segments beyond ``keep_bytes`` of a pool that nobody used for ``idle_s``, taken out of it."""
        if time.monotonic() < self._last_use + self._idle_s:
            return []
        total = sum(segment.memory.nbytes for segment in self._segments)
        surplus = []
        for segment in self._segments[::-1]:
            if segment.extents.idle and total - segment.memory.nbytes >= self._keep_bytes:
                total -= segment.memory.nbytes
                self._segments.remove(segment)
                surplus.append(segment)
        return surplus

    def _discard(self, segments: list[Segment]) -> None:
        for segment in segments:
            self.on_trim(segment.number)
            self._budget.close_segment(segment)
            logger.info("pool gives %d MiB back, idle for %g s", segment.memory.nbytes >> 20, self._idle_s)

    # -- the whole -----------------------------------------------------------------------------------------------------

    @property
    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return sum(segment.memory.nbytes for segment in self._segments)

    @property
    def leased_bytes(self) -> int:
        with self._lock:
            return sum(region.nbytes for region in self._regions.values())

    def refuse(self) -> None:
        """Grant nothing more and let nobody wait: the engine is gone. What is out stays valid until ``close``."""
        with self._lock:
            self._refusing = True
            self._space.notify_all()

    def close(self) -> None:
        """Give all memory back. Nobody may copy into a region any more. The engine's own mapping lives on."""
        self.refuse()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._work.notify()
        self._grower.join()
        with self._lock:
            segments, self._segments = self._segments, []
            self._regions.clear()
            self._leased.clear()
        self._budget.leave(self)
        for segment in segments:
            self._budget.close_segment(segment)
        self._device.drain()
