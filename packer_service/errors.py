"""Every error this project raises on purpose. A message says what was wanted, what was found and what mends it.

Errors carry words and, where a caller needs it, one value. They do nothing.
"""

from __future__ import annotations

from typing import Any


class PackerError(Exception):
    """Base class: catch it to catch everything the packer and its clients raise on purpose."""


class SettingError(PackerError, ValueError):
    """A setting has a value that is not allowed; the message names the setting, the value and what is allowed."""


class SocketTaken(SettingError):
    """Another packer listens at the socket."""


class ProtocolError(PackerError):
    """A peer sent bytes that are not a message, or a message that is not allowed where it came."""


class DescriptorLost(ProtocolError):
    """A good ``message`` is there, and its descriptor finds no room, for this process may open no more: not the peer's fault.

    A ProtocolError for whoever cannot do without the descriptor; the packer catches it first and fails one output.
    """

    def __init__(self, message: Any) -> None:
        super().__init__(
            f"the descriptor of a message ({type(message).__name__}) finds no room, this process has too many open files:"
            " raise its limit (systemd LimitNOFILE, ulimit -n)"
        )
        self.message = message


class HandshakeError(PackerError):
    """A connection was refused: wrong key, another protocol version, a uid not on the list, a full house."""


class NotNow(HandshakeError):
    """A packer does not take this connection now: its engine is not there yet, or it does not answer. It may pass by itself."""


class PeerClosed(PackerError):
    """The peer closed its end of the connection, or died."""


class PeerHung(PeerClosed):
    """The peer is there and does not answer; its connection is given up."""


class DeviceError(PackerError):
    """The device or its driver refused a call; the message carries the driver's name for it."""


class DeviceBusy(DeviceError):
    """A stream may not wait for an unfinished forward at present. Whoever submits tries again until it may, or need not."""


class PoolExhausted(PackerError):
    """No host memory for an output within the time a setting allows."""


class PackerUnavailable(PackerError):
    """No packer can be had: it did not start, cannot be reached, or a probe of its device failed."""


class PackerAbsent(PackerUnavailable):
    """Nobody listens at the socket, or this user may not reach it. So it is while a packer starts; it may pass by itself."""


MAY_PASS = (PackerAbsent, PeerClosed, NotNow)
"""What a packer that is just starting or ending may cause: whoever waits for a packer tries again."""
