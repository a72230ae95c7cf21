"""What a packer counts: its outputs by what became of them, their bytes, and how long they took. It decides nothing.

An output is counted once it is settled, after its engine was told: counting delays no output. It takes a microsecond or two.

    exported          began                 copied             published
       |--- wait ------>|------ copy -------->|                    |
       |---------------------- hand-off -------------------------->|

The wait is for the worker's forward, and for room in the pool. All times are seconds of ``time.perf_counter``.
"""

from __future__ import annotations

import bisect
import collections
import math
import threading
import time
from collections.abc import Iterable
from enum import Enum

RECENT = 512  # outputs whose times percentiles are taken of
RATE_S = 5  # seconds that the bandwidth of now is taken over
BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # of histograms


class Cause(Enum):
    """Why an output did not come through the packer, or failed there."""

    NO_ROOM = "no_room"  # the pool had none within wait_s
    DEVICE = "device"  # a call to the packer's device failed
    DESCRIPTORS = "descriptors"  # this process may open no more
    WORKER_DEVICE = "worker_device"  # the worker's device will never complete it
    WORKER_DIED = "worker_died"
    SEND = "send"  # the engine could not be told
    OTHER = "other"


class Histogram:
    """Counts of durations up to each of ``BOUNDS_S``, and beyond: as many counts as bounds and one more. The owner locks."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def copy(self) -> Histogram:
        other = Histogram()
        other.counts, other.sum_s = list(self.counts), self.sum_s
        return other


class Stats:
    """One packer's counts. Any thread adds and reads; the lock is held for arithmetic alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.published = 0
        self.published_bytes = 0
        self.withdrawn = 0
        self.waits_for_room = 0
        self.declined: collections.Counter[Cause] = collections.Counter()  # the worker sends them another way
        self.failed: collections.Counter[Cause] = collections.Counter()  # their requests fail
        self.wait, self.copy, self.handoff = Histogram(), Histogram(), Histogram()
        self._recent: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=RECENT)
        self._seconds = [(0, 0)] * (
            RATE_S + 1
        )  # (which second, bytes published in it), by the second modulo their number

    def add_published(self, nbytes: int, exported: float, began: float, copied: float) -> None:
        """``began`` is 0 for an output that had nothing to copy."""
        now = time.perf_counter()
        wait_s, copy_s = (began - exported, copied - began) if began else (0.0, 0.0)
        handoff_s = now - exported
        second = int(now)
        place = second % len(self._seconds)
        with self._lock:
            self.published += 1
            self.published_bytes += nbytes
            self.handoff.add(handoff_s)
            if began:
                self.wait.add(wait_s)
                self.copy.add(copy_s)
            self._recent.append((wait_s, copy_s, handoff_s))
            before = self._seconds[place]
            self._seconds[place] = (second, before[1] + nbytes if before[0] == second else nbytes)

    def add_declined(self, cause: Cause) -> None:
        with self._lock:
            self.declined[cause] += 1

    def add_failed(self, cause: Cause) -> None:
        with self._lock:
            self.failed[cause] += 1

    def add_withdrawn(self) -> None:
        with self._lock:
            self.withdrawn += 1

    def add_wait_for_room(self) -> None:
        with self._lock:
            self.waits_for_room += 1

    def bytes_per_s(self) -> float:
        """Of the last ``RATE_S`` whole seconds."""
        now = int(time.perf_counter())
        with self._lock:
            return sum(nbytes for second, nbytes in self._seconds if now - RATE_S <= second < now) / RATE_S

    def percentiles_s(self) -> dict[str, tuple[float, float]]:
        """(p50, p99) of the last ``RECENT`` outputs, by ``wait``, ``copy`` and ``handoff``; none before the first output."""
        with self._lock:
            recent = list(self._recent)
        if not recent:
            return {}
        columns = zip(("wait", "copy", "handoff"), zip(*recent, strict=True), strict=True)
        return {name: (quantile(times, 0.5), quantile(times, 0.99)) for name, times in columns}

    def histograms(self) -> dict[str, Histogram]:
        with self._lock:
            return {"wait": self.wait.copy(), "copy": self.copy.copy(), "handoff": self.handoff.copy()}


def quantile(values: Iterable[float], q: float) -> float:
    """The smallest of ``values`` that at least the part ``q`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)]
