"""How often a packer may go away before it is left alone for a while."""

from __future__ import annotations

import collections
import time

from packer_service.config import Settings


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
