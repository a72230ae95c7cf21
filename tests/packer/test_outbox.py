"""What is sent to a peer that does not read: it queues in order, nobody waits, and what follows a send happens after it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest
from packer_process import DEADLINE_S

from packer_service.errors import PeerClosed, PeerHung, ProtocolError
from packer_service.memory.memfd import create_memfd
from packer_service.wire import channel, protocol
from packer_service.wire.channel import Channel, Outbox, close_fds
from packer_service.wire.protocol import MapSegment, Nack

COUNT = 1000  # more than fits a connection


class Sender:
    """An outbox, what its ``done`` were told, and the other end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.outbox = Outbox("test", Channel(ours, protocol.from_worker))
        self.peer = Channel(theirs, protocol.to_worker)
        self.done: list[tuple[str, Exception | None]] = []

    def send(self, number: int) -> None:
        self.outbox.send(Nack(str(number), "x" * 500), done=lambda error: self.done.append((str(number), error)))

    def send_all(self) -> None:
        for number in range(COUNT):
            self.send(number)


@pytest.fixture
def sender():
    sender = Sender()
    yield sender
    sender.peer.close()
    sender.outbox.close()


def test_all_arrives_in_order_and_what_follows_a_send_follows_it(sender):
    sender.send_all()
    assert 0 < len(sender.done) < COUNT
    for number in range(COUNT):
        message, _ = sender.peer.receive(DEADLINE_S)
        assert message.output == str(number)
    assert sender.outbox.flush(DEADLINE_S)
    assert sender.done == [(str(number), None) for number in range(COUNT)]


def test_what_cannot_be_sent_for_want_of_memory_ends_the_connection_and_leaves_nobody_waiting(sender, monkeypatch):
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(sender.outbox._channel, "send", refuse)
    sender.send_all()
    assert sender.outbox.flush(DEADLINE_S)
    assert len(sender.done) == COUNT
    assert any(isinstance(error, MemoryError) for _, error in sender.done)


def test_where_there_is_room_no_thread_is_needed(sender):
    before = threading.active_count()
    for number in range(100):
        sender.send(number)
        sender.peer.receive(DEADLINE_S)
        assert threading.active_count() == before


def test_messages_of_several_threads_keep_the_order_of_each(sender):
    threads = [
        threading.Thread(target=lambda base=base: [sender.send(base + n) for n in range(300)]) for base in (0, 1000)
    ]
    for thread in threads:
        thread.start()
    got = [int(sender.peer.receive(DEADLINE_S)[0].output) for _ in range(600)]
    for thread in threads:
        thread.join()
    assert [n for n in got if n < 1000] == list(range(300))
    assert [n - 1000 for n in got if n >= 1000] == list(range(300))


def test_a_peer_that_leaves_is_told_to_whoever_waits_to_be_sent(sender):
    sender.send_all()
    sender.peer.close()
    assert sender.outbox.flush(DEADLINE_S)
    assert len(sender.done) == COUNT
    assert isinstance(sender.done[-1][1], PeerClosed)
    sender.send(COUNT)
    assert isinstance(sender.done[-1][1], PeerClosed)


def test_a_queued_descriptor_may_be_closed_by_whoever_sent_it():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    box = Outbox("test", Channel(ours, protocol.from_engine))
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(Channel(theirs, protocol.to_engine)) as peer, contextlib.closing(box):
        while box.offer(protocol.Pong(), None, channel.ignore):
            pass
        fd = create_memfd("segment", 4096)
        inode = os.fstat(fd).st_ino
        box.send(MapSegment(3, 4096), fd)
        os.close(fd)
        while not isinstance((received := peer.receive(DEADLINE_S))[0], MapSegment):
            pass
        assert os.fstat(received[1][0]).st_ino == inode
        close_fds(received[1])
        assert box.flush(DEADLINE_S)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_message_that_is_too_large_is_refused_alone_although_others_queue(sender, monkeypatch):
    sender.send_all()
    monkeypatch.setattr(protocol, "MAX_MESSAGE_BYTES", 100)
    sender.send(COUNT)
    assert isinstance(sender.done[-1][1], ProtocolError)
    monkeypatch.undo()
    assert [sender.peer.receive(DEADLINE_S)[0].output for _ in range(COUNT)] == [str(n) for n in range(COUNT)]


def test_a_peer_that_never_reads_is_given_up_at_a_bound(sender, monkeypatch):
    monkeypatch.setattr(channel, "MAX_QUEUED", 100)
    sender.send_all()
    assert any(isinstance(error, PeerHung) for _, error in sender.done)
    assert sender.outbox.flush(DEADLINE_S)
    assert len(sender.done) == COUNT


def test_where_no_thread_can_be_had_a_peer_that_does_not_read_is_disconnected(sender, monkeypatch, caplog):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    sender.send_all()
    assert len(sender.done) == COUNT
    assert isinstance(sender.done[-1][1], PeerClosed)
    assert "pids limit" in caplog.text
