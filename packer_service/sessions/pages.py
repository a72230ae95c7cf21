"""The two pages of memory that a worker shares with its packer: how far its device is and whether it lives, and its acks.

Each comes once in a connection, from the reader. Any thread asks; what a page does not say before it came is said here.
"""

from __future__ import annotations

from packer_service.devices.base import Device, Timeline
from packer_service.devices.calls import DeviceCall
from packer_service.errors import ProtocolError
from packer_service.memory.ack_page import AckPage
from packer_service.memory.timeline import TimelinePage


class WorkerPages:
    """The timeline and the ack page of one worker's connection. ``close()`` gives both back."""

    def __init__(self, name: str, device: Device) -> None:
        self.timeline: Timeline | None = None
        self.dead = False  # the worker is, as the reader found when the connection had ended
        self._name = name
        self._device = device
        self._acks: AckPage | None = None
        self._generation = 0

    def map_timeline(self, generation: int, fds: list[int]) -> None:
        if self.timeline is not None or not fds:
            raise ProtocolError("a worker sends its timeline once, with its memfd")
        with DeviceCall("the registration of the timeline of worker %s", self._name):
            self.timeline = self._device.open_timeline(TimelinePage.attach(fds.pop()))
        self._generation = generation

    def map_acks(self, fds: list[int]) -> None:
        if self._acks is not None or not fds:
            raise ProtocolError("a worker sends its ack page once, with its memfd")
        self._acks = AckPage.attach(fds.pop())

    @property
    def counter(self) -> int:
        return self.timeline.page.counter if self.timeline is not None else 0

    @property
    def completed(self) -> int:
        """See ``TimelinePage``."""
        return self.timeline.page.completed if self.timeline is not None else 0

    @property
    def void(self) -> bool:
        """Whether the worker has another connection: what came through this one may be overwritten, and is exported again."""
        return self.timeline is not None and self.timeline.page.generation != self._generation

    def owner_lives(self) -> bool:
        return self.timeline is None or self.timeline.page.owner_lives()

    def is_due(self, ready: int) -> bool:
        """Whether the wait for ``ready`` is met, and so those of all before it in the stream."""
        return self.timeline is not None and self.timeline.page.counter >= ready

    def force(self, value: int) -> None:
        """In the stead of a live worker's device, which broke."""
        if self.timeline is not None and self.timeline.page.counter < value:
            self.timeline.page.counter = value

    def put_ack(self, ready: int) -> bool:
        """False where it has to be a message."""
        return self._acks is not None and self._acks.put(ready)

    def close(self) -> None:
        if self.timeline is not None:
            self.timeline.close()
        if self._acks is not None:
            self._acks.close()
