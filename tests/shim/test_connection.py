"""A silent packer is asked and given up, and nothing that it sent before is lost. Over a socket pair, in one process."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from packer_service.errors import PeerClosed, PeerHung
from packer_service.wire import protocol
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import OutputReady, Ping, Pong
from worker_shim.connection import Connection

LAST = OutputReady("last", error="sent at the last moment")


@contextlib.contextmanager
def channels(kind: type[Channel] = Channel) -> Iterator[tuple[Any, Channel]]:
    """The engine's end and the packer's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        contextlib.closing(kind(ours, protocol.to_engine)) as engine,
        contextlib.closing(Channel(theirs, protocol.from_engine)) as packer,
    ):
        yield engine, packer


def test_a_silent_packer_is_asked_and_one_that_answers_is_kept():
    with channels() as (engine, packer):
        connection = Connection(engine, hang_s=0.2)
        for _ in range(5):
            assert connection.receive(0.06) is None
            assert packer.receive(0) == (Ping(), [])
            packer.send(Pong())
            assert connection.receive(0.0) is None
        assert packer.receive(0) is None


def test_one_that_does_not_answer_is_given_up_and_the_connectionends():
    with channels() as (engine, packer):
        connection = Connection(engine, hang_s=0.1)
        with pytest.raises(PeerHung, match="hang_s"):
            connection.receive(5.0)
        with pytest.raises(PeerClosed):
            packer.send(LAST)


class FullChannel(Channel):
    """The kernel has no memory for a message now."""

    def try_send(self, message: protocol.Message, fd: int | None = None) -> bool:
        raise OSError(errno.ENOBUFS, "No buffer space available")


def test_a_question_that_cannot_be_sent_counts_as_one_that_is_not_answered():
    with channels(FullChannel) as (engine, _):
        connection = Connection(engine, hang_s=0.1)
        with pytest.raises(PeerHung, match="hang_s"):
            connection.receive(5.0)


class LateChannel(Channel):
    """The packer at the other end comes to itself at the very moment it is given up."""

    packer: Channel

    def shutdown(self) -> None:
        with contextlib.suppress(PeerClosed):
            self.packer.send(LAST)
        super().shutdown()


def test_what_a_packer_sends_at_the_moment_it_is_given_up_arrives():
    with channels(LateChannel) as (engine, packer):
        engine.packer = packer
        connection = Connection(engine, hang_s=0.1)
        assert connection.receive(5.0) == (LAST, [])
        with pytest.raises(PeerHung):
            connection.receive(5.0)


class DyingChannel(Channel):
    """The packer at the other end sends something and dies just before it is asked whether it is there."""

    packer: Channel

    def try_send(self, message: protocol.Message, fd: int | None = None) -> bool:
        with contextlib.suppress(PeerClosed):
            self.packer.send(LAST)
        self.packer.close()
        return super().try_send(message, fd)


def test_what_a_packer_sent_before_it_died_arrives_although_the_question_found_nobody():
    with channels(DyingChannel) as (engine, packer):
        engine.packer = packer
        connection = Connection(engine, hang_s=1.0)
        assert connection.receive(5.0) == (LAST, [])
        with pytest.raises(PeerClosed):
            connection.receive(5.0)
