"""One connection: the handshake on both sides, messages and descriptors, and every way a peer can fail to keep to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from packer_process import DEADLINE_S, full_table, wait_until

from packer_service.errors import (
    DescriptorLost,
    HandshakeError,
    PackerAbsent,
    PackerError,
    PackerUnavailable,
    PeerClosed,
    ProtocolError,
)
from packer_service.memory.memfd import SharedMemory, create_memfd
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import Ack, Challenge, Export, MapTimeline, Refused, Release, UnmapChunk, Welcome

KEY, SESSION = b"k" * 32, "session-1"
ME = frozenset({os.geteuid()})


def admit(hello, proof):
    return Welcome(proof, "host", "host", "host memory", os.getpid())


def seqpacket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@pytest.fixture
def listener(tmp_path):
    with seqpacket() as sock:
        sock.bind(str(tmp_path / "sock"))
        sock.listen()
        yield sock


@pytest.fixture
def in_background():
    with ThreadPoolExecutor(4) as executor:
        yield executor.submit


def accept_one(listener, *, uids=ME, admit=admit, timeout_s=DEADLINE_S):
    """The packer's side of one connection."""
    return handshake.accept(listener.accept()[0], KEY, uids, admit, timeout_s)


def connect(listener, role="worker", key=KEY, timeout_s=DEADLINE_S):
    return handshake.connect(listener.getsockname(), key, role, SESSION, timeout_s=timeout_s)


@contextlib.contextmanager
def channel_pair(one=protocol.to_worker, other=protocol.from_worker):
    """Two connected channels past their handshake: the worker's and the packer's."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(Channel(left, one)) as first, contextlib.closing(Channel(right, other)) as second:
        yield first, second


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_each_receive_waits_as_long_as_it_is_told_whatever_the_last_one_was_told(in_background):
    with channel_pair() as (worker, packer):
        for timeout_s in (0.05, 0.0, -1.0, 1e-9, 0.05, 0.2):
            begin = time.monotonic()
            assert packer.receive(timeout_s) is None
            assert time.monotonic() - begin >= timeout_s
        received = in_background(packer.receive)
        with pytest.raises(TimeoutError):
            received.result(0.5)
        worker.send(MapTimeline())
        assert received.result(DEADLINE_S) == (MapTimeline(), [])


def test_a_receive_that_waits_ends_when_its_own_side_shuts_the_connection_down(in_background):
    with channel_pair() as (_, packer):
        for timeout_s in (None, DEADLINE_S):
            received = in_background(packer.receive, timeout_s)
            packer.shutdown()
            with pytest.raises(PeerClosed):
                received.result(DEADLINE_S)


# -- the handshake -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "allowed", "forbidden"),
    [("worker", MapTimeline(), Release((1,))), ("engine", Release((1,)), MapTimeline())],
)
def test_after_the_handshake_each_role_may_send_its_own_messages_only(
    listener, in_background, role, allowed, forbidden
):
    accepted = in_background(accept_one, listener)
    client, welcome = connect(listener, role)
    server, hello = accepted.result(DEADLINE_S)
    with contextlib.closing(client), contextlib.closing(server):
        assert (hello.role, hello.session, welcome.pid) == (role, SESSION, os.getpid())
        client.send(allowed)
        client.send(forbidden)
        assert server.receive(DEADLINE_S) == (allowed, [])
        with pytest.raises(ProtocolError):
            server.receive(DEADLINE_S)


def test_the_bounds_of_the_handshake_do_not_bind_the_connection(listener, in_background):
    accepted = in_background(accept_one, listener, timeout_s=0.1)
    client, _ = connect(listener, timeout_s=0.1)
    server, _ = accepted.result(DEADLINE_S)
    with contextlib.closing(client), contextlib.closing(server):
        received = in_background(server.receive)
        assert not select.select([server._socket], [], [], 0.3)[0]  # longer than either bound
        client.send(MapTimeline())
        assert received.result(DEADLINE_S) == (MapTimeline(), [])


def test_a_wrong_key_is_refused_and_both_sides_say_what_mends_it(listener, in_background):
    accepted = in_background(accept_one, listener)
    with pytest.raises(HandshakeError, match="key_file"):
        connect(listener, key=b"another" * 5)
    with pytest.raises(HandshakeError, match="key_file"):
        accepted.result(DEADLINE_S)


def test_whoever_listens_without_knowing_the_key_is_found_out(listener, in_background):
    def impostor():
        channel = Channel(listener.accept()[0], protocol.from_client)
        with contextlib.closing(channel):
            channel.send(Challenge(protocol.VERSION, bytes(32)))
            channel.receive(DEADLINE_S)
            channel.send(Welcome(bytes(32), "host", "host", "", 1))

    served = in_background(impostor)
    with pytest.raises(HandshakeError, match="does not know the key"):
        connect(listener)
    served.result(DEADLINE_S)


def test_a_uid_that_is_not_on_the_list_is_closed_without_a_word(listener, in_background):
    accepted = in_background(accept_one, listener, uids=frozenset({os.geteuid() + 1}))
    with pytest.raises(PeerClosed, match=rf"{listener.getsockname()} hung up .*allowed_uids lacks uid {os.geteuid()}"):
        connect(listener)
    with pytest.raises(HandshakeError, match=rf"uid {os.geteuid()} .*allowed_uids"):
        accepted.result(DEADLINE_S)


def test_a_peer_that_stays_silent_is_given_up(listener, in_background):
    accepted = in_background(accept_one, listener, timeout_s=0.1)
    with seqpacket() as silent:
        silent.connect(listener.getsockname())
        with pytest.raises(HandshakeError, match="silent"):
            accepted.result(DEADLINE_S)
        assert silent.recv(1000)  # the challenge
        assert silent.recv(1000) == b""  # and the end


def test_a_listener_that_stays_silent_is_given_up(listener):
    with pytest.raises(HandshakeError, match="silent"):
        connect(listener, timeout_s=0.1)


def test_a_client_of_another_version_is_told_both_versions(listener, in_background):
    accepted = in_background(accept_one, listener)
    with seqpacket() as other:
        other.connect(listener.getsockname())
        channel = Channel(other, protocol.from_server)
        channel.receive(DEADLINE_S)
        channel.send(protocol.Hello(99, "worker", SESSION, bytes(32), bytes(32)))
        refused = channel.receive(DEADLINE_S)[0]
    assert isinstance(refused, Refused)
    for told in (refused.reason, str(accepted.exception(DEADLINE_S))):
        assert f"protocol {protocol.VERSION}" in told
        assert "99" in told
        assert "same release" in told


def test_a_packer_of_another_version_is_named_to_the_client(listener, in_background):
    def other_version():
        peer = listener.accept()[0]
        with peer:
            peer.send(protocol.encode(Challenge(99, bytes(32))))
            peer.recv(1)

    in_background(other_version)
    with pytest.raises(HandshakeError, match=f"speaks protocol 99, this side {protocol.VERSION}"):
        connect(listener)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(70000), msgspec.msgpack.encode(["Release", [1]]), b"\xc1"],
    ids=["http", "oversized", "a message of later", "no msgpack"],
)
def test_a_peer_that_does_not_speak_the_protocol_is_refused(listener, in_background, data):
    accepted = in_background(accept_one, listener)
    with seqpacket() as peer:
        peer.connect(listener.getsockname())
        peer.send(data)
        with pytest.raises(PackerError):
            accepted.result(DEADLINE_S)


def test_whoever_admits_can_refuse_with_a_reason(listener, in_background):
    def nobody(hello, proof):
        raise HandshakeError("a full house")

    accepted = in_background(accept_one, listener, admit=nobody)
    with pytest.raises(HandshakeError, match="a full house"):
        connect(listener)
    with pytest.raises(HandshakeError, match="a full house"):
        accepted.result(DEADLINE_S)


def test_descriptors_sent_during_the_handshake_are_closed(listener, in_background):
    accepted = in_background(accept_one, listener)
    with seqpacket() as peer:
        peer.connect(listener.getsockname())
        peer.recv(1000)  # the challenge: the other end is open
        before = open_fds()
        socket.send_fds(peer, [b"not a hello"], [0])
        with pytest.raises(PackerError):
            accepted.result(DEADLINE_S)
        assert open_fds() == before - 1  # the other end closed too


@pytest.mark.parametrize("left_behind", [False, True], ids=["nothing there", "a stale socket"])
def test_where_nobody_listens_the_packer_is_unavailable(tmp_path, left_behind):
    path = tmp_path / "sock"
    if left_behind:
        with seqpacket() as gone:
            gone.bind(str(path))
    with pytest.raises(PackerAbsent, match=f"no packer listens at {path}"):
        handshake.connect(str(path), KEY, "worker", SESSION)


def test_where_something_else_listens_no_packer_will_come_by_itself(tmp_path):
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(path))
        stream.listen()
        with pytest.raises(PackerUnavailable, match=f"no packer listens at {path}") as raised:
            handshake.connect(str(path), KEY, "worker", SESSION)
    assert not isinstance(raised.value, PackerAbsent)


def test_a_socket_that_this_user_may_not_reach_is_told_from_one_where_nobody_listens(monkeypatch, listener):
    def refuse(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(PackerAbsent, match=rf"uid {os.geteuid()} may not reach {listener.getsockname()}"):
        connect(listener)


def test_a_failed_connection_leaves_no_descriptor_open(tmp_path, listener):
    before = open_fds()
    for attempt in (
        lambda: connect(listener, timeout_s=0.05),
        lambda: handshake.connect("/nowhere", KEY, "worker", "s"),
    ):
        with pytest.raises(PackerError):
            attempt()
    assert open_fds() == before


# -- messages ----------------------------------------------------------------------------------------------------------


def test_a_descriptor_travels_with_its_message_and_no_child_inherits_it():
    fd = create_memfd("test", 4096)
    with channel_pair() as (worker, packer):
        worker.send(MapTimeline(), fd)
        os.close(fd)
        message, fds = packer.receive(DEADLINE_S)
        assert message == MapTimeline()
        assert os.fstat(fds[0]).st_size == 4096
        assert fcntl.fcntl(fds[0], fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        close_fds(fds)


@pytest.mark.parametrize(
    "data", [b"\xc1", b"", bytes(protocol.MAX_MESSAGE_BYTES + 1)], ids=["bad", "empty", "oversized"]
)
def test_what_is_no_message_raises_and_its_descriptor_is_closed(data):
    with channel_pair() as (worker, packer):
        before = open_fds()
        socket.send_fds(worker._socket, [data], [0])
        with pytest.raises(PackerError):
            packer.receive(DEADLINE_S)
        assert open_fds() == before


def test_more_descriptors_than_a_message_may_carry_are_refused_and_closed():
    with channel_pair() as (worker, packer):
        before = open_fds()
        socket.send_fds(worker._socket, [protocol.encode(MapTimeline())], [0] * 3)
        with pytest.raises(ProtocolError, match="descriptor"):
            packer.receive(DEADLINE_S)
        assert open_fds() == before


def test_a_message_whose_descriptor_finds_no_room_stays_until_there_is_some():
    with channel_pair() as (worker, packer), contextlib.closing(SharedMemory.create("test", 4096)) as memory:
        worker.send(MapTimeline(), memory.fd)
        worker.send(UnmapChunk(7))
        with full_table(os.getpid()):
            for _ in range(2):
                with pytest.raises(DescriptorLost, match="ulimit -n") as lost:
                    packer.receive(DEADLINE_S)
                assert lost.value.message == MapTimeline()
        message, fds = packer.receive(DEADLINE_S)
        assert message == MapTimeline()
        assert os.fstat(fds[0]).st_size == 4096
        close_fds(fds)
        assert packer.receive(DEADLINE_S) == (UnmapChunk(7), [])


def test_a_message_whose_descriptor_finds_no_room_can_be_taken_without_it():
    with channel_pair() as (worker, packer), contextlib.closing(SharedMemory.create("test", 4096)) as memory:
        before = open_fds()
        worker.send(MapTimeline(), memory.fd)
        worker.send(UnmapChunk(7))
        with full_table(os.getpid()):
            with pytest.raises(DescriptorLost):
                packer.receive(DEADLINE_S)
            packer.skip()
            assert packer.receive(DEADLINE_S) == (UnmapChunk(7), [])
        assert open_fds() == before


def test_receive_returns_none_where_nothing_came_in_time():
    with channel_pair() as (_, packer):
        assert packer.receive(0) is None
        assert packer.receive(0.01) is None


def test_try_send_never_waits_and_what_it_sent_arrives_whole_and_in_order():
    with channel_pair() as (worker, packer):
        messages = [Export(str(number), number, (), bytes(64)) for number in range(100_000)]
        sent = next(number for number, message in enumerate(messages) if not worker.try_send(message))
        assert sent > 10
        assert [packer.receive(DEADLINE_S)[0] for _ in range(sent)] == messages[:sent]
        assert packer.receive(0) is None
        assert worker.try_send(messages[sent])


def test_try_send_never_waits_with_a_descriptor_either():
    with channel_pair() as (worker, packer), open("/dev/null") as file:
        while worker.try_send(Export("o" * 100, 1, ())):
            pass
        while worker.try_send(MapTimeline()):  # the last bytes of room
            pass
        assert worker.try_send(MapTimeline(), file.fileno()) is False
        assert isinstance(packer.receive(0)[0], Export)


def test_send_waits_for_room():
    with channel_pair() as (worker, packer):
        while worker.try_send(Export("o" * 100, 1, ())):
            pass
        thread = threading.Thread(target=worker.send, args=(MapTimeline(),))
        thread.start()
        wait_until(worker._send_lock.locked, "the sender waits")
        while packer.receive(DEADLINE_S)[0] != MapTimeline():
            pass
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_try_send_does_not_wait_for_a_thread_that_is_sending():
    with channel_pair() as (worker, _), worker._send_lock:
        assert worker.try_send(MapTimeline()) is False


def test_a_peer_that_closed_is_reported_on_both_ways_after_its_last_message():
    with channel_pair() as (worker, packer):
        worker.send(MapTimeline())
        worker.close()
        assert packer.receive(DEADLINE_S) == (MapTimeline(), [])
        for attempt in (lambda: packer.receive(DEADLINE_S), lambda: packer.send(Ack("output"))):
            with pytest.raises(PeerClosed):
                attempt()


def test_the_messages_of_a_peer_that_died_with_unread_mail_still_arrive():
    with channel_pair() as (worker, packer):
        worker.send(MapTimeline())
        packer.send(Ack("output"))
        worker.close()
        assert packer.receive(DEADLINE_S) == (MapTimeline(), [])
        with pytest.raises(PeerClosed):
            packer.receive(DEADLINE_S)


def test_a_peer_that_dies_while_its_message_is_taken_does_not_have_it_received_twice():
    class Unlucky(Channel):
        def skip(self) -> None:
            channel.close()  # with unread mail: the kernel says so to the next call on this side, whatever that wants
            super().skip()

    with channel_pair() as (channel, peer):
        reader = Unlucky(peer._socket, peer.decoder)
        peer.send(Ack("unread"))
        channel.send(UnmapChunk(1))
        channel.send(UnmapChunk(2))
        assert [reader.receive(DEADLINE_S), reader.receive(DEADLINE_S)] == [(UnmapChunk(1), []), (UnmapChunk(2), [])]
        with pytest.raises(PeerClosed):
            reader.receive(DEADLINE_S)


def test_who_finished_sending_can_still_receive():
    with channel_pair() as (worker, packer):
        worker.finish()
        with pytest.raises(PeerClosed):
            packer.receive(DEADLINE_S)
        packer.send(Ack("output"))
        assert worker.receive(DEADLINE_S) == (Ack("output"), [])


def test_shutdown_wakes_a_thread_that_receives(in_background):
    with channel_pair() as (_, packer):
        receiving = in_background(packer.receive)
        wait_until(receiving.running, "the thread receives")
        packer.shutdown()
        with pytest.raises(PeerClosed):
            receiving.result(DEADLINE_S)


def test_shutdown_wakes_a_thread_that_sends_to_a_peer_that_does_not_read(in_background):
    with channel_pair() as (worker, packer):
        try:
            while worker.try_send(Export("o" * 100, 1, ())):
                pass
            sending = in_background(worker.send, MapTimeline())
            wait_until(worker._send_lock.locked, "the sender waits")
            begin = time.monotonic()
            worker.shutdown()
            with pytest.raises(PeerClosed):
                sending.result(5)
            assert time.monotonic() - begin < 5
        finally:
            packer.close()


def test_a_channel_closed_on_this_side_reports_it_to_its_other_threads():
    with channel_pair() as (worker, _):
        worker.close()
        with pytest.raises(PeerClosed):
            worker.send(MapTimeline())
