"""A worker's device on the host that stops getting on when a test tells it to, and one that also says why."""

from __future__ import annotations

from worker_shim.worker.device import Signal
from worker_shim.worker.device_host import HostExportDevice


class Stalling(HostExportDevice):
    """A device that stops getting on when told: what is staged from then on is never complete."""

    stalled = False

    def signal(self) -> Signal:
        if not self.stalled:
            return super().signal()
        self._value += 1
        return Signal(self._value)


class Failing(Stalling):
    """A device that says why no signal will come any more."""

    why = ""

    def reached(self, ready: int) -> bool:
        return ready <= self.timeline.counter

    def failure(self) -> str:
        return self.why
