"""The pool: pinned host memory of one engine session, in segments that grow ahead of need, carved into regions.

    segment 0  (memfd, sealed, populated, registered with the device, mapped by the engine)
    +-----------+---------------+--------------------+
    | region 7  | region 9      | free               |      region = the packer's while it copies,
    +-----------+---------------+--------------------+               the engine's (a lease) from OUTPUT_READY to Release
    segment 1  ...

A region is named by a number that is never used twice, so that a lease returned twice touches nobody else. The pool says which
bytes are whose. It never copies. What adds and removes memory is in packer_service.pool.growth.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from packer_service.devices.base import Device
from packer_service.errors import PoolExhausted, ProtocolError
from packer_service.pool.budget import Budget
from packer_service.pool.growth import Segment, Segments

logger = logging.getLogger(__name__)

_OTHERS_POLL_S = 0.02
_COMPLAINT_S = 10.0


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


@dataclass(frozen=True)
class Usage:
    """How much of a pool is taken. ``lease_ages_s``: seconds since each leased region was granted, the oldest first."""

    pool_bytes: int
    used_bytes: int
    leased_bytes: int
    lease_ages_s: list[float]


class Pool(Segments):
    """Allocates regions and takes them back. Closes when its engine is gone.

    One lock guards the regions, the leases and the segments. It is held for bookkeeping alone: not for a call to the kernel or
    the device, a file, a log line or the start of a thread. To make a pool starts a thread.
    """

    def __init__(self, device: Device, budget: Budget, *, keep_bytes: int, step_bytes: int, idle_s: float) -> None:
        super().__init__(device, budget, keep_bytes=keep_bytes, step_bytes=step_bytes, idle_s=idle_s)
        self._regions: dict[int, Region] = {}
        self._leased: set[int] = set()  # those of them that the engine may give back
        self._next_region = 1
        self._declined = 0  # outputs for which there was no room
        self._complained_at = -_COMPLAINT_S
        self._refusing = False  # grants nothing more
        self._closed = False
        budget.add(self)

    def allocate(self, nbytes: int, timeout_s: float = 0.0) -> Region:
        """A region of ``nbytes``, waiting up to ``timeout_s`` for growth or for leases to return. PoolExhausted otherwise.

        Leases are not waited for once that was in vain, until one returns: outputs that come behind would each wait as long.
        """
        begin = time.monotonic()
        with self._lock:
            self._note_request(nbytes, begin)
            waited = False
            while True:
                if self._refusing:
                    raise PoolExhausted("the pool is closed: its engine is gone")
                region = self._try_allocate(nbytes)
                if region is not None:
                    self._look_ahead()
                    return region
                could_grow = self._ask_for(nbytes)
                remaining = begin + timeout_s - time.monotonic()
                others = not could_grow and self._others_hold(nbytes)
                hopeful = could_grow or others or (self._regions and not self._in_vain)
                if remaining <= 0 or not hopeful:
                    self._in_vain = self._in_vain or waited
                    why = self._error or f"at its limit {self._budget.describe()}"
                    raise PoolExhausted(
                        f"no room for {nbytes} bytes: {self._holds()} and the pool is {why}."
                        " Raise pool_max_bytes, or let the engine drop finished outputs sooner"
                    )
                if not waited:
                    self.on_wait()
                waited = True
                self._space.wait(min(remaining, _OTHERS_POLL_S) if others else remaining)

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
        """Make them the engine's. Call it before the engine hears of them: it may give them back the moment it does."""
        with self._lock:
            self._leased.update(region.number for region in regions)

    def reclaim(self, regions: list[Region]) -> list[Region]:
        """Undo ``lease``, because the engine could not be told. Returns those of ``regions`` that are the packer's again.

        Not always all: an engine that breaks the protocol may have guessed a number and given it back.
        """
        with self._lock:
            ours = [region for region in regions if region.number in self._leased]
            self._leased.difference_update(region.number for region in ours)
            return ours

    def end_lease(self, number: int) -> None:
        """The engine gives a lease back. ProtocolError where it has no lease of that number: it may have a region's."""
        with self._lock:
            if number not in self._leased:
                raise ProtocolError(f"lease {number} is not out: it was returned twice or never granted")
            self._leased.remove(number)
            self._release(number)

    def _holds(self) -> str:
        used = sum(region.nbytes for region in self._regions.values())
        who = f"engine {self.owner}" if self.owner else "a pool without an engine"
        held = (
            f"{who} holds {used} of {self._total_bytes} bytes in {len(self._regions)} regions"
            f" ({len(self._leased)} of them leases)"
        )
        if not self._regions:
            return held
        oldest = next(iter(self._regions.values()))  # granted in this order
        return f"{held}, the oldest for {time.monotonic() - oldest.granted_at:.1f} s"

    def usage(self) -> Usage:
        with self._lock:
            regions, leased, total = list(self._regions.values()), set(self._leased), self._total_bytes
        now = time.monotonic()
        leases = [region for region in regions if region.number in leased]
        return Usage(
            total,
            sum(region.nbytes for region in regions),
            sum(region.nbytes for region in leases),
            [now - region.granted_at for region in leases],
        )

    def describe(self) -> str:
        """Who holds how much of this pool, and since when."""
        with self._lock:
            return self._holds()

    def complain(self) -> None:
        """An output found no room and is declined: count it, and say who holds what, now and then."""
        now = time.monotonic()
        with self._lock:
            self._declined += 1
            if self._refusing or now < self._complained_at + _COMPLAINT_S:
                return
            self._complained_at = now
            count = self._declined
        holders = self._budget.describe_pools()
        logger.warning("the pool is exhausted, %d outputs were declined so far: %s", count, holders)

    @property
    def segments(self) -> list[Segment]:
        with self._lock:
            return list(self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        with self._lock:
            return self._total_bytes

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
        self._stop()
        with self._lock:
            self._regions.clear()
            self._leased.clear()
        self._budget.remove(self)
        self._device.closer.drain()
