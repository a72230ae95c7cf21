"""How long a packer is waited for at the start, and when a lost one is tried again or left alone for a while."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from packer_service.config import Settings
from packer_service.errors import MAY_PASS, PackerAbsent, PackerUnavailable
from worker_shim.log import get_logger

logger = get_logger(__name__)

_Made = TypeVar("_Made")

_LONGEST_PAUSE_S = 1.0
_FIRST_PAUSES_S = (0.05,)


class Arrival:
    """The wait for packers that somebody else starts, maybe just now: ``start_timeout_s`` for all of an engine's together.

    Only for one that is not there yet, or hangs up and so is ending: one that answers is taken at its word. ``closing`` ends
    the wait. ``who`` waits.
    """

    def __init__(self, settings: Settings, closing: threading.Event, who: str = "engine") -> None:
        self._who = who
        self._settings = settings
        self._closing = closing
        self._begin = time.monotonic()
        self._limit = self._begin + settings.start_timeout_s

    def connect(self, connect: Callable[[float], _Made]) -> _Made:
        """What ``connect`` makes once somebody is there, given the seconds it may take. PackerAbsent where nobody came in time,
        PackerUnavailable where this side closes."""
        pauses_s = _doubling(_FIRST_PAUSES_S)
        said = False
        while True:
            left_s = self._limit - time.monotonic()
            try:
                return connect(max(left_s, self._settings.handshake_timeout_s))
            except MAY_PASS as error:
                left_s = self._limit - time.monotonic()
                if left_s <= 0:
                    waited_s = time.monotonic() - self._begin
                    raise PackerAbsent(
                        f"{error}. The {self._who} waited {waited_s:.3g} s for it (setting start_timeout_s)"
                    ) from error
                if not said:
                    logger.info("waiting up to %.3g s for a packer (setting start_timeout_s): %s", left_s, error)
                    said = True
            if self._closing.wait(min(next(pauses_s), left_s)):
                raise PackerUnavailable("the executor is shutting down")


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
    ``give_up`` is called, once, and it is tried every ``retry_s``. With ``patient`` false, ``give_up`` is called at once.
    """

    def __init__(
        self,
        budget: RestartBudget,
        settings: Settings,
        closing: threading.Event,
        first_pauses_s: tuple[float, ...],
        give_up: Callable[[str], None],
        *,
        patient: bool = True,
    ) -> None:
        self.left_s = settings.restart_wait_s
        """What was left of ``restart_wait_s`` when the last wait began; inf once the packer was given up, when nobody waits."""
        self._budget = budget
        self._retry_s = settings.retry_s
        self._closing = closing
        self._pauses_s = _doubling(first_pauses_s)
        self._give_up = give_up
        self._limit = time.monotonic() + settings.restart_wait_s
        self._patient = patient and budget.spend()

    @property
    def given_up(self) -> bool:
        return self.left_s == math.inf

    def count_end(self) -> None:
        """A packer that was started for a try ended as well."""
        self._patient = self._patient and self._budget.spend()

    def wait(self, reason: str) -> bool:
        """Until the next try is due. False where this side closes instead."""
        if self._closing.is_set():
            return False
        if not self.given_up:
            self.left_s = self._limit - time.monotonic() if self._patient else 0.0
            if self.left_s <= 0:
                self.left_s = math.inf
                self._give_up(reason)
        pause_s = self._retry_s if self.given_up else min(next(self._pauses_s), self.left_s)
        return not self._closing.wait(pause_s)


def _doubling(first: tuple[float, ...]) -> Iterator[float]:
    yield from first
    pause_s = first[-1]
    while True:
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield pause_s
