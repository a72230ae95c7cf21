"""What a packer does for an operator: it says how it is, passes a pause on to workers, and drains. No output comes this way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from packer_service.errors import PackerError, PeerClosed
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import Drain, DrainIs, GetStatus, PauseIs, Pong, SetPaused, StatusIs

logger = logging.getLogger(__name__)

_SILENCE_S = 60.0  # an operator that asks nothing for so long gives up its place


class Operated(Protocol):
    """What may be asked of a packer. Each is called on the operator's own thread."""

    def encoded_status(self) -> bytes: ...

    def set_paused(self, paused: bool, session: str, timeout_s: float) -> PauseIs: ...

    def drain(self, timeout_s: float) -> Iterator[DrainIs]:
        """What is left, now and again; the packer ends once it is exhausted."""


class OperatorSession:
    """One operator, served on the thread that calls ``serve``."""

    def __init__(self, channel: Channel, operated: Operated) -> None:
        self._channel = channel
        self._operated = operated

    def serve(self) -> None:
        """Answer until the operator is gone."""
        try:
            while (received := self._channel.receive(_SILENCE_S)) is not None:
                message, fds = received
                close_fds(fds)
                self._answer(message)
        except PeerClosed:
            pass
        except (PackerError, OSError) as error:
            logger.warning("an operator is disconnected: %s", error)
        finally:
            self._channel.close()

    def _answer(self, message: protocol.Message) -> None:
        match message:
            case protocol.Ping():
                self._channel.send(Pong())
            case GetStatus():
                self._channel.send(StatusIs(self._operated.encoded_status()))
            case SetPaused(paused, session, timeout_s):
                self._channel.send(self._operated.set_paused(paused, session, timeout_s))
            case Drain(timeout_s):
                gone: PeerClosed | None = None
                for report in self._operated.drain(timeout_s):  # all of it, also when nobody hears of it any more
                    try:
                        self._channel.send(report)
                    except PeerClosed as error:
                        gone = error
                if gone is not None:
                    raise gone
