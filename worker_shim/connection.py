"""One channel to a packer as its client uses it: a heartbeat over what is received, an outbox for what is sent."""

from __future__ import annotations

import time
from collections.abc import Callable

from packer_service.errors import DescriptorLost, PackerError, PeerClosed, PeerHung
from packer_service.wire.channel import Channel, Outbox, close_fds
from packer_service.wire.protocol import Message, Ping, Pong, Refused
from worker_shim.log import get_logger

logger = get_logger(__name__)

_BEATS = 4


class Connection:
    """One channel: its outbox sends, on any thread, and one thread at a time receives.

    A packer that was not heard of for a while is asked, and one that does not answer is given up. Silence is the time spent
    waiting in vain rather than time that passed, in which this process may have been stopped.
    """

    def __init__(self, channel: Channel, hang_s: float, name: str = "packer") -> None:
        self.packer_pid = channel.peer_pid
        self._channel = channel
        # Its client holds what is to be sent anyway, and a packer that reads nothing is given up after hang_s.
        self._outbox = Outbox(name, channel, bounded=False)
        self._hang_s = hang_s
        self._beat_s = hang_s / _BEATS
        self._silent_s = 0.0
        self._next_ping_s = self._beat_s
        self._hung = False

    def post(self, message: Message, fd: int | None = None) -> None:
        """Send, now or as soon as the packer reads. What cannot be sent ends the connection; ProtocolError is the caller's."""
        try:
            self._outbox.offer(message, fd, self._sent)
        except (PeerClosed, OSError) as error:
            self._sent(error)

    def _sent(self, error: Exception | None) -> None:
        if error is not None:
            self.shutdown()

    def receive(self, timeout_s: float) -> tuple[Message, list[int]] | None:
        """As ``Channel.receive``; PeerHung where nothing came for ``hang_s``, not even an answer to a Ping.

        Before it raises, it shuts the connection down and receives everything that was sent until then. So a packer that wakes
        just now has either sent a message, which is received, or finds that it cannot send it.
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
                self._wait_in_vain(wait_s)
                if time.monotonic() >= deadline:
                    return None
                continue
            self._hear()
            if not isinstance(received[0], Pong):
                return received
            close_fds(received[1])

    def skip(self) -> None:
        """As ``Channel.skip``."""
        self._channel.skip()

    def _hear(self) -> None:
        self._silent_s, self._next_ping_s = 0.0, self._beat_s

    def _wait_in_vain(self, seconds: float) -> None:
        self._silent_s += seconds
        if self._silent_s >= self._hang_s:
            self._hung = True
            self.shutdown()
        elif self._silent_s >= self._next_ping_s:
            self._next_ping_s += self._beat_s
            # Where it cannot be sent: what the packer sent before it died is still to be received, and where no memory is to
            # be had, it is asked again.
            self._outbox.send(Ping())

    def finish(self, timeout_s: float) -> None:
        """Have sent what waits, for up to ``timeout_s``, and say that nothing more comes. The packer can still be heard."""
        self._outbox.flush(timeout_s)
        self._channel.finish()

    def shutdown(self) -> None:
        """End the connection both ways; what had come before can still be received."""
        self._channel.shutdown()

    def close(self) -> None:
        self._outbox.close()


def read_until_end(
    connection: Connection, take: Callable[[Message], None], look: Callable[[], None], look_s: float
) -> str:
    """Have ``take`` called with every message, and ``look`` after each ``look_s`` without one. Why the connection ended."""
    refused = ""
    try:
        while True:
            received = connection.receive(look_s)
            if received is None:
                look()
                continue
            message, fds = received
            close_fds(fds)
            if isinstance(message, Refused):
                refused = f"the packer refused this worker: {message.reason}"
            else:
                take(message)
    except (PackerError, OSError) as error:
        return refused or str(error)
    except Exception as error:  # a defect of ours; outputs must not wait for its sake
        logger.exception("an answer of the packer could not be taken")
        return f"{type(error).__name__}: {error}"
