"""An operator's end of a connection to a packer: for commands, the board's readers and tests. It prints nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from types import TracebackType

import msgspec

from packer_service import status
from packer_service.errors import PackerUnavailable, PeerClosed, ProtocolError
from packer_service.status import Status
from packer_service.wire import handshake
from packer_service.wire.channel import close_fds
from packer_service.wire.protocol import Drain, DrainIs, GetStatus, Message, PauseIs, Refused, SetPaused, StatusIs

_PATIENCE_S = 5.0  # beyond what a packer was given for an answer


class Operator:
    """Connected from ``__init__`` to ``close``. ``key``: the packer's key, or the operator's key of its status board.

    Every method raises PackerUnavailable where the packer does not answer in ``timeout_s``, and PackerError where it cannot be
    reached, refuses, or ends.
    """

    def __init__(self, socket: str, key: bytes, *, timeout_s: float = _PATIENCE_S) -> None:
        self.socket = socket
        self._timeout_s = timeout_s
        session = secrets.token_hex(8)
        self._channel, self.welcome = handshake.connect(socket, key, "operator", session, timeout_s=timeout_s)

    def __enter__(self) -> Operator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def status(self) -> Status:
        self._channel.send(GetStatus())
        answer = self._receive(self._timeout_s)
        assert isinstance(answer, StatusIs)
        try:
            return status.decode(answer.status)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ProtocolError(
                f"the packer at {self.socket} is of another release: run that one's packer-service"
            ) from error

    def set_paused(self, paused: bool, session: str = "", *, timeout_s: float = _PATIENCE_S) -> PauseIs:
        """Have workers export nothing more, or export again: those of engines whose session begins with ``session``."""
        self._channel.send(SetPaused(paused, session, timeout_s))
        answer = self._receive(timeout_s + _PATIENCE_S)
        assert isinstance(answer, PauseIs)
        return answer

    def drain(self, timeout_s: float) -> Iterator[DrainIs]:
        """Have the packer take no more, finish and exit; what is in flight, about twice a second, until it ends."""
        self._channel.send(Drain(timeout_s))
        ended = False
        while not ended:
            answer = self._receive(_PATIENCE_S)
            assert isinstance(answer, DrainIs)
            ended = answer.ended
            yield answer

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether the packer hung up within ``timeout_s``, as it does when it ends."""
        try:
            return self._channel.receive(timeout_s) is not None
        except PeerClosed:
            return True

    def _receive(self, timeout_s: float) -> Message:
        received = self._channel.receive(timeout_s)
        if received is None:
            raise PackerUnavailable(
                f"the packer at {self.socket} does not answer within {timeout_s:g} s: is it stopped?"
            )
        message, fds = received
        close_fds(fds)
        if isinstance(message, Refused):
            raise PackerUnavailable(f"the packer at {self.socket} refused: {message.reason}")
        return message
