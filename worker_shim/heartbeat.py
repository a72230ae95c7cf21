"""Receiving from a packer that may hang: whoever was not heard for a while is asked, and who does not answer is given up."""

from __future__ import annotations

import time

from packer_service.errors import PeerHung
from packer_service.protocol import Message, Ping, Pong
from packer_service.transport import Channel, close_fds

_BEATS = 4


class Heartbeat:
    """The receiving end of ``channel``, for one thread.

    Silence is the time spent waiting in vain rather than time that passed, in which this process may have been stopped.
    """

    def __init__(self, channel: Channel, hang_s: float) -> None:
        self._channel = channel
        self._hang_s = hang_s
        self._beat_s = hang_s / _BEATS
        self._silent_s = 0.0
        self._next_ping_s = self._beat_s

    def receive(self, timeout_s: float) -> tuple[Message, list[int]] | None:
        """As ``Channel.receive``; PeerHung where nothing came for ``hang_s``, not even an answer to a Ping."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(min(deadline - time.monotonic(), self._beat_s), 0.0)
            received = self._channel.receive(wait_s)
            if received is None:
                self._silence(wait_s)
                if time.monotonic() >= deadline:
                    return None
                continue
            self._silent_s, self._next_ping_s = 0.0, self._beat_s
            if not isinstance(received[0], Pong):
                return received
            close_fds(received[1])

    def _silence(self, seconds: float) -> None:
        self._silent_s += seconds
        if self._silent_s >= self._hang_s:
            raise PeerHung(f"the packer hangs: it was silent for hang_s = {self._hang_s:g} s")
        if self._silent_s >= self._next_ping_s:
            self._next_ping_s += self._beat_s
            self._channel.try_send(Ping())
