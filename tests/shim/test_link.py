"""A link walks its states as its table says, whatever its packer does and whenever its own side closes.

The packers are listening sockets of this process, with the real handshake; what they do is said by each test.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packer_process import DEADLINE_S, wait_until

from packer_service.config import Settings
from packer_service.errors import PackerError, PackerUnavailable, PeerClosed
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import MAX_QUEUED, Channel
from packer_service.wire.protocol import Described, Message, Release
from worker_shim.connection import Connection, read_until_end
from worker_shim.link import TRANSITIONS, Link, LinkState, Packet

KEY = b"k" * 32
QUICK = Settings(restart_wait_s=0.3, max_restarts=1000, retry_s=0.1, hang_s=5.0, start_timeout_s=DEADLINE_S)


class Packer:
    """Listens at ``path``; every connection that it takes is an element of ``channels``."""

    def __init__(self, path: Path) -> None:
        self.channels: list[Channel] = []
        self.closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen()
        self._path = path
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._socket.accept()
                with contextlib.suppress(PackerError):  # who connects has left
                    self.channels.append(handshake.accept(peer, KEY, Settings().uids(), self._admit, DEADLINE_S)[0])

    def _admit(self, hello: protocol.Hello, proof: bytes) -> protocol.Welcome:
        return protocol.Welcome(proof, "host", "host", "host memory", 1)

    def hang_up(self) -> None:
        for channel in self.channels:
            channel.close()

    def close(self) -> None:
        """As its process's death would: nobody listens, and every connection ends."""
        if not self.closed:
            self.closed = True
            self._path.unlink()
            self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._socket.close()
            self.hang_up()


class Client:
    """What the link told it, in order. Each connection begins with a Release of its number."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.taken: list[Message] = []
        self.connections: list[Connection] = []
        self.refuses = False

    def begin(self) -> None:
        self.told.append("begin")

    def resume(self, connection: Connection) -> list[Packet]:
        if self.refuses:
            raise OSError("no memory")
        self.told.append("resume")
        self.connections.append(connection)
        return [(Release((len(self.connections),)), None)]

    def read(self, connection: Connection) -> str:
        return read_until_end(connection, self.taken.append, lambda: None, 0.05)

    def suspend(self) -> None:
        self.told.append("suspend")

    def give_up(self, reason: str) -> None:
        self.told.append("give up")


class Watched(Link):
    """A link that remembers the states it had."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.states = [self.state]

    def _move(self, state: LinkState) -> None:
        super()._move(state)
        self.states.append(state)


@contextlib.contextmanager
def link(path: Path, client: Client, chosen: Settings = QUICK) -> Iterator[Watched]:
    def connect(timeout_s: float) -> Channel:
        channel, _ = handshake.connect(str(path), KEY, "engine", "session-1", timeout_s=timeout_s)
        return channel

    made = Watched(connect, client, chosen, name=f"the packer at {path}")
    try:
        yield made
    finally:
        made.close(DEADLINE_S)


def assert_walked(walked: Watched, client: Client) -> None:
    """Every step was one of the table, and the client heard of each connection and of its end, in turn."""
    steps = list(zip(walked.states, walked.states[1:], strict=False))
    assert all(after in TRANSITIONS[before] for before, after in steps)
    assert walked.state is LinkState.CLOSED
    heard = [event for event in client.told if event in ("resume", "suspend")]
    assert heard == ["resume", "suspend"] * (len(heard) // 2)
    assert walked.states.count(LinkState.CONNECTED) == len(heard) // 2 == walked.connections
    assert walked.states.count(LinkState.GIVEN_UP) == client.told.count("give up")
    assert not walked.connected
    assert not walked._thread.is_alive()
    assert all(connection._channel._socket.fileno() < 0 for connection in client.connections), "a descriptor is left"


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "packer.sock"


def test_a_connection_begins_with_what_its_client_has_to_say_and_every_next_one_too(path):
    packer, client = Packer(path), Client()
    with contextlib.closing(packer), link(path, client) as walked:
        walked.open()
        walked.start()
        walked.post(Release((77,)))
        wait_until(lambda: packer.channels, "a connection")
        assert packer.channels[0].receive(DEADLINE_S) == (Release((1,)), [])
        assert packer.channels[0].receive(DEADLINE_S) == (Release((77,)), [])
        packer.hang_up()
        wait_until(lambda: len(packer.channels) == 2, "the next connection")
        assert packer.channels[1].receive(DEADLINE_S) == (Release((2,)), [])
    assert_walked(walked, client)


def test_a_first_connection_that_does_not_prove_itself_is_none(path):
    def refuse(connection: Connection, timeout_s: float) -> None:
        raise PackerUnavailable("it reads other bytes")

    packer, client = Packer(path), Client()
    with contextlib.closing(packer), link(path, client) as walked:
        with pytest.raises(PackerUnavailable, match="other bytes"):
            walked.open(prove=refuse)
        assert walked.state is LinkState.WAITING
        assert client.told == ["resume", "suspend"]
        walked.start()
        wait_until(lambda: walked.connected, "another is made without a proof")
    assert_walked(walked, client)


def test_what_is_posted_without_a_connection_is_left_to_the_next_beginning(path):
    client = Client()
    with link(path, client) as walked:
        walked.start()
        walked.post(Release((77,)))
        packer = Packer(path)
        with contextlib.closing(packer):
            wait_until(lambda: packer.channels, "a connection")
            assert packer.channels[0].receive(DEADLINE_S) == (Release((1,)), [])
            assert packer.channels[0].receive(0.1) is None
    assert_walked(walked, client)


def test_the_side_that_finishes_hears_what_its_packer_still_says(path):
    packer, client = Packer(path), Client()
    with contextlib.closing(packer), link(path, client) as walked:
        walked.open()
        walked.start()
        wait_until(lambda: packer.channels, "a connection")

        def answer_the_end() -> None:
            with contextlib.suppress(Exception):
                while packer.channels[0].receive(DEADLINE_S):
                    pass
            packer.channels[0].send(Described("output", "here"))
            packer.hang_up()

        answering = threading.Thread(target=answer_the_end)
        answering.start()
        walked.finish(DEADLINE_S)
        answering.join()
    assert client.taken == [Described("output", "here")]
    assert_walked(walked, client)


def test_all_that_waits_is_sent_before_the_end_is_said_however_much_it_is(path):
    number = MAX_QUEUED + 100
    packer, client = Packer(path), Client()
    with contextlib.closing(packer), link(path, client) as walked:
        walked.open()
        walked.start()
        wait_until(lambda: packer.channels, "a connection")
        for each in range(number):
            walked.post(Release((each,)))
        came: list[object] = []

        def read_to_the_end() -> None:
            with contextlib.suppress(PeerClosed):
                while received := packer.channels[0].receive(DEADLINE_S):
                    came.append(received[0])
            packer.hang_up()

        reading = threading.Thread(target=read_to_the_end)
        reading.start()
        walked.finish(DEADLINE_S)
        reading.join()
    assert came[1:] == [Release((each,)) for each in range(number)]
    assert_walked(walked, client)


def test_a_link_for_which_no_thread_can_be_had_is_closed_and_says_what_to_raise(path, monkeypatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    packer, client = Packer(path), Client()
    with contextlib.closing(packer), link(path, client) as walked:
        walked.open()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(PackerUnavailable, match="pids limit"):
                walked.start()
        assert_walked(walked, client)


EVENTS = st.lists(st.sampled_from(["hang up", "die", "come", "refuse", "allow", "wait", "post"]), max_size=8)


@given(events=EVENTS, opened=st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_happens_the_states_follow_the_table_and_closing_ends_it_from_each(path, events, opened):
    client, stack = Client(), contextlib.ExitStack()
    packers = [Packer(path)]
    with stack, link(path, client) as walked:
        stack.callback(lambda: [packer.close() for packer in packers])
        if opened:
            walked.open()
        walked.start()
        for event in events:
            match event:
                case "hang up":
                    packers[-1].hang_up()
                case "die":
                    packers[-1].close()
                case "come" if packers[-1].closed:
                    packers.append(Packer(path))
                case "refuse" | "allow":
                    client.refuses = event == "refuse"
                case "post":
                    walked.post(Release((1 << 20,)))
                case "wait" if packers[-1].closed or client.refuses:
                    wait_until(
                        lambda: walked.state is not LinkState.CONNECTED or not packers[-1].closed, "its end is seen"
                    )
                case "wait":
                    wait_until(lambda: walked.connected, "a connection")
    assert_walked(walked, client)
