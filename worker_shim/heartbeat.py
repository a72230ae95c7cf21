"""Receiving from a packer that may hang: whoever was not heard for a while is asked, and who does not answer is given up."""

from __future__ import annotations

import time

from packer_service.errors import DescriptorLost, PeerClosed, PeerHung
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import Message, Ping, Pong

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
        self._hung = False

    def receive(self, timeout_s: float) -> tuple[Message, list[int]] | None:
        """As ``Channel.receive``; PeerHung where nothing came for ``hang_s``, not even an answer to a Ping.

        Before that the connection is shut down and everything is received that was sent until then: a packer that comes to
        itself just now has either sent its message here, or knows that it has not.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = max(min(deadline - time.monotonic(), self._beat_s), 0.0)
            try:
                received = self._channel.receive(wait_s)
            except DescriptorLost:
                self._hear()
                raise
            except PeerClosed as error:
                if not self._hung:
                    raise
                raise PeerHung(f"the packer hangs: it was silent for hang_s = {self._hang_s:g} s") from error
            if received is None:
                self._silence(wait_s)
                if time.monotonic() >= deadline:
                    return None
                continue
            self._hear()
            if not isinstance(received[0], Pong):
                return received
            close_fds(received[1])

    def _hear(self) -> None:
        self._silent_s, self._next_ping_s = 0.0, self._beat_s

    def _silence(self, seconds: float) -> None:
        self._silent_s += seconds
        if self._silent_s >= self._hang_s:
            self._hung = True
            self._channel.shutdown()
        elif self._silent_s >= self._next_ping_s:
            self._next_ping_s += self._beat_s
            try:
                self._channel.try_send(Ping())
            except (PeerClosed, OSError):
                pass  # what it sent before it died is still to be received; where no memory is to be had, it is asked again
