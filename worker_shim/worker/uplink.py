"""The worker's connection to its packer, across that packer's restarts.

Note [What a restart means to the worker]
Whatever was not acknowledged is still in its slots. So when a connection ends, nothing more is sent on it and its generation
ends with it (see packer_service.memory.timeline); on the next one everything unacknowledged is exported again, and the engine
drops what it already had. Outputs wait ``restart_wait_s`` for that. Then they are handed back, and new ones at once, until a
connection is made after all. A packer that goes away more often than ``max_restarts`` allows is not waited for.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from packer_service.config import Settings
from packer_service.errors import PackerError, PeerClosed
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import Message
from worker_shim.heartbeat import Heartbeat
from worker_shim.log import get_logger
from worker_shim.restarts import RestartBudget, Retries

logger = get_logger(__name__)

Packet = tuple[Message, int | None]
_LOOK_S = 0.5
_ROOM_POLL_S = 0.005
_FIRST_PAUSES_S = (0.02,)


class Client(Protocol):
    """Who has something to send. ``resume`` and ``suspend`` are called under the uplink's lock, the others without it."""

    def begin(self) -> None:
        """The ack thread starts; all that follows is called there."""
        ...

    def resume(self) -> Iterable[Packet]:
        """A connection was made: everything its packer must be told before anything new. Raises where it cannot be used, with
        nothing changed: another is tried."""
        ...

    def suspend(self) -> None:
        """The connection ended; another is tried."""
        ...

    def give_up(self, reason: str) -> None:
        """None was made in time: whatever waits should go another way."""
        ...

    def take(self, message: Message) -> None:
        """The packer says this."""
        ...

    def look(self) -> None:
        """Called now and then while the packer says nothing."""
        ...


class Uplink:
    """``post`` on any thread, which never waits; ``flush`` on those that may. The ack thread receives, and connects anew.

    ``lock`` guards the connection, the outbox and whatever of the client's depends on them. Nobody waits while holding it.
    """

    def __init__(self, connect: Callable[[float], Channel], settings: Settings, client: Client) -> None:
        self.lock = threading.RLock()
        self.connections = 0  # made so far
        self._channel: Channel | None = None
        self._connect = connect
        self._settings = settings
        self._client = client
        self._budget = RestartBudget(settings)
        self._outbox: collections.deque[Packet] = collections.deque()
        self._flushing = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packer-acks", daemon=True)

    def start(self) -> None:
        """Have the ack thread receive on the connection in use; with none, make one."""
        self._thread.start()

    def use(self, channel: Channel) -> int:
        """Send on this connection from now on; how many messages come first. OSError where the client cannot use it."""
        with self.lock:
            packets = self._client.resume()
            self.connections += 1
            self._channel = channel
            self._outbox.extend(packets)
            return len(self._outbox)

    def leave(self, channel: Channel) -> None:
        """Nothing more is sent on this connection."""
        with self.lock:
            channel.shutdown()
            self._channel = None
            self._outbox.clear()
            self._client.suspend()
        with self._flushing:  # nobody may still be sending when the descriptor's number becomes free
            channel.close()

    @property
    def connected(self) -> bool:
        return self._channel is not None

    @property
    def has_backlog(self) -> bool:
        """Whether something that was posted waits for room."""
        return bool(self._outbox)

    def post(self, message: Message, fd: int | None = None) -> None:
        """Send now if that does not block, else leave it to the next ``flush`` or the ack thread. Order is kept.

        With no connection it is forgotten: ``Client.resume`` will know.
        """
        with self.lock:
            if self._channel is None:
                return
            try:
                if self._outbox or not self._channel.try_send(message, fd):
                    self._outbox.append((message, fd))
            except (PeerClosed, OSError):
                self._channel.shutdown()  # the ack thread sees it, and connects anew

    def _send_what_finds_room(self) -> bool:
        """As ``flush``, but without waiting; whether something is left. For the ack thread: a packer that finds no room
        for its acks reads nothing more, so whoever waits for it to read must not be the one that takes the acks."""
        if not self._flushing.acquire(blocking=False):
            return False  # another thread is at it
        try:
            with self.lock:
                while self._outbox and self._channel is not None:
                    channel = self._channel
                    if not channel.try_send(*self._outbox[0]):
                        return True
                    self._outbox.popleft()
        except (PeerClosed, OSError):
            channel.shutdown()  # seen by the next receive
        finally:
            self._flushing.release()
        return False

    def flush(self) -> None:
        """Send what found no room. A packet leaves the outbox only when it is sent: what comes later queues behind it."""
        with self._flushing:
            while True:
                with self.lock:
                    if not self._outbox or self._channel is None:
                        return
                    channel, (message, fd) = self._channel, self._outbox[0]
                try:
                    channel.send(message, fd)
                except (PeerClosed, OSError):
                    channel.shutdown()
                    return
                with self.lock:
                    if self._channel is channel:
                        self._outbox.popleft()

    def finish(self, timeout_s: float) -> None:
        """Leave for good: say that nothing more comes, and wait until the packer has hung up, having given back everything."""
        self._closing.set()
        with self.lock:
            if self._channel is not None:
                self._channel.finish()
        self._thread.join(timeout_s)
        with self.lock:
            if self._channel is not None:
                self._channel.shutdown()
        self._thread.join(timeout_s)

    # -- the ack thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._client.begin()
        except Exception:  # were this thread to end, outputs would wait for ever
            logger.exception("the thread that takes acks cannot use the device")
        channel = self._channel or self._reconnect("no packer was there")
        while channel is not None:
            reason = f"the packer is gone ({self._receive(channel)})"
            self.leave(channel)
            if not self._closing.is_set():
                logger.warning("%s; outputs wait for it to come back", reason)
            channel = self._reconnect(reason)

    def _receive(self, channel: Channel) -> str:
        """Until the connection ends; why it did."""
        heartbeat = Heartbeat(channel, self._settings.hang_s)
        refused = ""
        try:
            while True:
                left = self._send_what_finds_room()
                received = heartbeat.receive(_ROOM_POLL_S if left else _LOOK_S)
                if received is None:
                    if not left:
                        self._client.look()
                    continue
                message, fds = received
                close_fds(fds)
                if isinstance(message, protocol.Refused):
                    refused = f"the packer refused this worker: {message.reason}"
                else:
                    self._client.take(message)
        except (PackerError, OSError) as error:
            return refused or str(error)
        except Exception as error:  # a defect of ours; outputs must not wait for its sake
            logger.exception("an answer of the packer could not be taken")
            return f"{type(error).__name__}: {error}"

    def _reconnect(self, reason: str) -> Channel | None:
        """The next connection, however long it takes; None where this side is closing."""
        retries = Retries(self._budget, self._settings, self._closing, _FIRST_PAUSES_S, self._give_up)
        while retries.wait(reason):
            try:
                channel = self._connect(min(self._settings.handshake_timeout_s, max(retries.left_s, 0.1)))
            except (PackerError, OSError) as error:
                reason = f"the packer is gone and does not come back ({error})"
                continue
            try:
                waiting = self.use(channel)
            except Exception as error:  # were this thread to end, outputs would wait for ever
                channel.close()
                if not isinstance(error, (OSError, MemoryError)):
                    logger.exception("a connection to the packer cannot be used")
                reason = f"the packer is back, but this worker cannot use the connection ({error})"
                continue
            logger.info("outputs go through the packer (%d messages are sent to begin with)", waiting)
            return channel
        return None

    def _give_up(self, reason: str) -> None:
        logger.error(
            "outputs take vllm-omni's own path: %s; it is tried again every retry_s = %g s"
            " (settings restart_wait_s, max_restarts)",
            reason,
            self._settings.retry_s,
        )
        try:
            self._client.give_up(reason)
        except Exception:  # this thread goes on to look for the packer
            logger.exception("not everything that waited could be handed back")
