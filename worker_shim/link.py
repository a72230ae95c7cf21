"""The link: an engine's or a worker's connection to its packer, across that packer's restarts.

    WAITING ----> CONNECTED      a packer is there, and its client has told it what it must know
    CONNECTED --> WAITING        the connection ended; another is tried, and whoever has something for the packer waits
    WAITING ----> GIVEN_UP       none was made in restart_wait_s, it went away too often, or was drained: nobody waits
    GIVEN_UP ---> CONNECTED      one was made after all: it is tried every retry_s
    WAITING, GIVEN_UP --> CLOSED

Note [Who does what on a link]
The link's thread makes connections, has its client ``read`` each of them until it ends, and closes it then. A client may leave
the reading to another thread: ``read`` only has to last as long. Any thread posts, and none ever waits for the packer.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from packer_service.config import Settings
from packer_service.errors import PackerError, PackerUnavailable
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Message
from worker_shim.connection import Connection
from worker_shim.log import get_logger
from worker_shim.retries import Arrival, RestartBudget, Retries

logger = get_logger(__name__)

Packet = tuple[Message, int | None]
"""A message, and the descriptor that goes with it."""

_FIRST_PAUSES_S = (0.0, 0.02)


class Client(Protocol):
    """Who has something to say to a packer. All is called on the link's thread, but in ``Link.open``."""

    def begin(self) -> None:
        """The thread starts."""
        return

    def resume(self, connection: Connection) -> Iterable[Packet]:
        """A connection was made: everything its packer must be told before anything new. Raises where it cannot be used, with
        nothing changed: another is tried. Called under the link's lock."""
        ...

    def read(self, connection: Connection) -> str:
        """Last as long as the connection does; why it ended."""
        ...

    def suspend(self) -> None:
        """The connection ended; another is tried. Called under the link's lock."""
        ...

    def give_up(self, reason: str) -> None:
        """None was made in time: whatever waits should go another way."""
        return


class LinkState(enum.Enum):
    WAITING = "waiting"
    CONNECTED = "connected"
    GIVEN_UP = "given up"
    CLOSED = "closed"


TRANSITIONS: dict[LinkState, frozenset[LinkState]] = {
    LinkState.WAITING: frozenset({LinkState.CONNECTED, LinkState.GIVEN_UP, LinkState.CLOSED}),
    LinkState.CONNECTED: frozenset({LinkState.WAITING}),
    LinkState.GIVEN_UP: frozenset({LinkState.CONNECTED, LinkState.CLOSED}),
    LinkState.CLOSED: frozenset(),
}


class Link:
    """See Note [Who does what on a link].

    ``connect`` makes a channel within the seconds that it is given; ``restart`` starts a packer that is ours to start before
    that. ``name`` says in messages which packer it is. ``lock`` guards the state, and whatever of the client's depends on the
    connection. Nobody waits for a peer or a device while holding it; a client's ``resume`` may make memory and a thread.
    """

    def __init__(
        self,
        connect: Callable[[float], Channel],
        client: Client,
        settings: Settings,
        *,
        name: str,
        restart: Callable[[], None] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.state = LinkState.WAITING
        self.connections = 0  # made so far
        self._connect = connect
        self._client = client
        self._settings = settings
        self._name = name
        self._restart = restart
        self._connection: Connection | None = None
        self._budget = RestartBudget(settings)
        self.ends_soon = False  # the packer of the present connection, or of the last, said so
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packer-link", daemon=True)

    def _move(self, state: LinkState) -> None:
        assert state in TRANSITIONS[self.state], f"a link that is {self.state.value} does not become {state.value}"
        self.state = state

    # -- any thread ----------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def post(self, message: Message, fd: int | None = None) -> None:
        """Have a message sent. With no connection it is forgotten: ``Client.resume`` will know."""
        with self.lock:
            if self._connection is not None:
                self._connection.post(message, fd)

    def expect_end(self) -> None:
        """The packer said that it ends soon: when the connection ends, nobody waits for another."""
        self.ends_soon = True

    def open(
        self, arrival: Arrival | None = None, prove: Callable[[Connection, float], None] = lambda *_: None
    ) -> None:
        """Make the first connection, waiting for a packer as ``arrival`` has it, and have ``prove`` try it. Raises what stood
        in the way."""

        def join(timeout_s: float) -> None:
            connection, _ = self._use(self._connect(timeout_s))
            try:
                prove(connection, timeout_s)
            except BaseException:
                self._drop(connection)
                raise

        if arrival is None:
            join(self._settings.start_timeout_s)
        else:
            arrival.connect(join)

    def start(self) -> None:
        """Have the connection read, and others made when it ends, or where there is none. PackerUnavailable where no thread can
        be had for it; the link is closed then."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.stop()
            if self._connection is not None:
                self._drop(self._connection)
            self._move(LinkState.CLOSED)
            raise PackerUnavailable(
                f"{error} for {self._name}: raise the pids limit of this process's cgroup"
            ) from error

    def stop(self) -> None:
        """Make no connection any more. The one in use stays: see ``finish`` and ``close``."""
        self._closing.set()

    def finish(self, timeout_s: float) -> None:
        """Leave for good: say that nothing more comes, and wait until the packer has hung up, having given back everything."""
        self.stop()
        connection = self._connection
        if connection is not None:
            connection.finish(timeout_s)
        self._join(timeout_s)
        self.close(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Hang up. Where the thread does not end in time, it does with whatever holds it up."""
        self.stop()
        with self.lock:
            if self._connection is not None:
                self._connection.shutdown()
        self._join(timeout_s)

    def _join(self, timeout_s: float) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    # -- the link's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._client.begin()
        except Exception:  # were this thread to end, outputs would wait for ever
            logger.exception("the thread of the link to %s cannot use the device", self._name)
        connection = self._connection or self._reconnect("no packer was there")
        while connection is not None:
            reason = self._client.read(connection)
            self._drop(connection)
            patient = not self.ends_soon
            if not self._closing.is_set() and patient:
                logger.warning("%s is gone: %s; outputs wait for it to come back", self._name, reason)
            connection = self._reconnect(reason, patient=patient)
        with self.lock:
            self._move(LinkState.CLOSED)

    def _use(self, channel: Channel) -> tuple[Connection, int]:
        """Send on this connection from now on; also how many messages come first. Raises what the client does."""
        connection = Connection(channel, self._settings.hang_s, self._name)
        try:
            with self.lock:
                if self._closing.is_set():
                    raise PackerUnavailable("this side is closing")
                packets = list(self._client.resume(connection))
                self._move(LinkState.CONNECTED)
                self.connections += 1
                self._connection = connection
                self.ends_soon = False
                for message, fd in packets:
                    connection.post(message, fd)
        except BaseException:
            connection.close()
            raise
        return connection, len(packets)

    def _drop(self, connection: Connection) -> None:
        """Nothing more is sent on this connection."""
        with self.lock:
            connection.shutdown()
            self._connection = None
            self._move(LinkState.WAITING)
            self._client.suspend()
        connection.close()

    def _reconnect(self, reason: str, *, patient: bool = True) -> Connection | None:
        """The next connection, however long it takes; None where this side is closing. Unless ``patient``, nobody waits."""
        budget, settings, closing = self._budget, self._settings, self._closing
        retries = Retries(budget, settings, closing, _FIRST_PAUSES_S, self._give_up, patient=patient)
        while retries.wait(reason):
            before = reason
            timeout_s = self._settings.handshake_timeout_s
            try:
                if self._restart is not None:
                    self._restart()
                else:
                    timeout_s = min(timeout_s, max(retries.left_s, 0.1))
                connection, waiting = self._use(self._connect(timeout_s))
            except (PackerError, OSError, MemoryError) as error:
                reason = str(error) or type(error).__name__
            except Exception as error:  # a defect of ours; were this thread to end, outputs would wait for ever
                reason = f"{type(error).__name__}: {error}"
                logger.exception("%s cannot be used", self._name)
            else:
                logger.info(
                    "%s is there: packer %d (%d messages come first)", self._name, connection.packer_pid, waiting
                )
                return connection
            if retries.given_up and reason != before:
                logger.error("%s still does not come back: %s", self._name, reason)
            if self._restart is not None:
                retries.count_end()
        return None

    def _give_up(self, reason: str) -> None:
        reason = f"{self._name} does not come back: {reason}"
        logger.error(
            "outputs take vllm-omni's own path: %s. It is tried again every retry_s = %g s"
            " (settings restart_wait_s, max_restarts, restart_window_s)",
            reason,
            self._settings.retry_s,
        )
        with self.lock:
            self._move(LinkState.GIVEN_UP)
        try:
            self._client.give_up(reason)
        except Exception:  # this thread goes on to look for the packer
            logger.exception("not everything that waited could take another way")
