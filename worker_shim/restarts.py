"""How often a packer may go away before it is left alone for a while, and when a lost one is tried again."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Iterator

from packer_service.config import Settings

_LONGEST_PAUSE_S = 1.0


class RestartBudget:
    """Counts one packer's ends, for one thread: ``max_restarts`` of them within ``restart_window_s`` are mended at once."""

    def __init__(self, settings: Settings) -> None:
        self._max = settings.max_restarts
        self._window_s = settings.restart_window_s
        self._ends: collections.deque[float] = collections.deque(maxlen=self._max + 1)

    def spend(self) -> bool:
        """Count one end. False where it is one too many, and the count starts anew."""
        now = time.monotonic()
        self._ends.append(now)
        if len(self._ends) <= self._max or now - self._ends[0] > self._window_s:
            return True
        self._ends.clear()
        return False


class Retries:
    """One packer that was lost, for one thread: ``while retries.wait(why it is not there yet): try it``.

    After each of ``first_pauses_s``, then after doubling ones, until ``restart_wait_s`` is over or the budget is spent. Then
    ``give_up`` is called, once, and it is tried every ``retry_s``.
    """

    def __init__(
        self,
        budget: RestartBudget,
        settings: Settings,
        closing: threading.Event,
        first_pauses_s: tuple[float, ...],
        give_up: Callable[[str], None],
    ) -> None:
        self.left_s = settings.restart_wait_s
        """Of ``restart_wait_s``, when the last wait began; inf once it was given up, for then nobody waits."""
        self._budget = budget
        self._retry_s = settings.retry_s
        self._closing = closing
        self._pauses_s = _doubling(first_pauses_s)
        self._give_up = give_up
        self._limit = time.monotonic() + settings.restart_wait_s
        self._patient = budget.spend()

    def count_end(self) -> None:
        """A packer that was started for a try ended as well."""
        self._patient = self._patient and self._budget.spend()

    def wait(self, reason: str) -> bool:
        """Until the next try is due. False where this side closes instead."""
        if self._closing.is_set():
            return False
        if self.left_s < math.inf:
            self.left_s = self._limit - time.monotonic() if self._patient else 0.0
            if self.left_s <= 0:
                self.left_s = math.inf
                self._give_up(reason)
        pause_s = self._retry_s if self.left_s == math.inf else min(next(self._pauses_s), self.left_s)
        return not self._closing.wait(pause_s)


def _doubling(first: tuple[float, ...]) -> Iterator[float]:
    yield from first
    pause_s = first[-1]
    while True:
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield pause_s
