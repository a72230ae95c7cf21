"""Calls to the device that are under way, so that a watchdog sees the one that does not return.

Whoever makes a call that could hang says so: ``with DeviceCall("the import of chunk %d", number): ...``. Entering and leaving
are one step each under the GIL, and so is the watchdog's look at all of them. There is no lock, because whoever is stuck could
hold it. Nothing here ends a call, or a process.
"""

from __future__ import annotations

from collections.abc import Callable

_under_way: set[DeviceCall] = set()  # of this process


class DeviceCall:
    """One call of one thread. ``due`` tells, on the watchdog's thread and without waiting, whether it should return by now."""

    __slots__ = ("_names", "_what", "due")

    def __init__(self, what: str, *names: object, due: Callable[[], bool] = lambda: True) -> None:
        self._what = what
        self._names = names
        self.due = due

    def __enter__(self) -> None:
        _under_way.add(self)

    def __exit__(self, *error: object) -> None:
        _under_way.discard(self)

    def __str__(self) -> str:
        return self._what % self._names


class Watch:
    """Counts looks at the calls under way, for one thread.

    It counts looks rather than time, in which this process may have been stopped.
    """

    def __init__(self) -> None:
        self._seen: dict[DeviceCall, int] = {}

    def stuck(self, looks: int) -> DeviceCall | None:
        """Look once: a call that has been due for the last ``looks`` intervals between looks."""
        self._seen = {call: self._seen.get(call, -1) + 1 for call in _under_way.copy() if call.due()}
        return next((call for call, times in self._seen.items() if times >= looks), None)
