"""What a service says to systemd, and is given by it: notifications, the watchdog's beat, and a socket that already listens.

Both protocols are a datagram and three environment variables (sd_notify(3), sd_listen_fds(3)). The libraries for them are one
that needs a compiler and libsystemd, and some that nobody keeps; so it is done here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from packer_service.errors import SettingError

logger = logging.getLogger(__name__)

_FIRST_FD = 3  # SD_LISTEN_FDS_START
LEAST_WATCHDOG_S = 2  # a beat comes about once a second (Server._watch), and one of two may be late


class Notifier:
    """Tells systemd how this process is; where nobody wants to know, each call does nothing. No call waits, and none raises.

    ``asked``: whether what systemd wrote into the environment was meant for this process. A managed packer has its engine's.
    ``watched`` says whether systemd expects a beat (``WatchdogSec=``). SettingError where it expects one too often.
    """

    def __init__(self, *, asked: bool = True) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")  # popped: it is not for processes that this one starts
        watched_pid = os.environ.pop("WATCHDOG_PID", "")
        watchdog_us = os.environ.pop("WATCHDOG_USEC", "")
        self.wanted = asked and bool(address)
        self.watched = self.wanted and watchdog_us.isdecimal() and watched_pid in ("", str(os.getpid()))
        if self.watched and int(watchdog_us) < LEAST_WATCHDOG_S * 1e6:
            raise SettingError(
                f"systemd wants to hear of this packer within {int(watchdog_us) / 1e6:g} s, and it says once a second that it"
                f" is well: set WatchdogSec= to at least {LEAST_WATCHDOG_S}"
            )
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # of the abstract namespace
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) if self.wanted else None
        if self._socket is not None:
            self._socket.setblocking(False)

    def ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={status}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def beat(self) -> None:
        if self.watched:
            self._send("WATCHDOG=1")

    def stopping(self, reason: str) -> None:
        self._send("STOPPING=1", f"STATUS={reason}")

    def _send(self, *lines: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # systemd is just busy, or is being replaced: the next one may arrive
                self._socket.sendto("\n".join(lines).encode(), self._address)


def take_listener(path: str) -> socket.socket | None:
    """The socket that systemd made for this process and listens at ``path`` already; None where it made none.

    SettingError where it is of another kind than ``ListenSequentialPacket=`` makes, or at another path.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or not int(count):
        return None
    if int(count) != 1:
        raise SettingError(
            f"systemd passed {count} sockets; a packer has one: give each its own packer-service@.socket"
        )
    os.set_inheritable(_FIRST_FD, False)
    try:
        given = socket.socket(fileno=_FIRST_FD)
        listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise SettingError(f"what systemd passed is no socket: {error.strerror}") from error
    if (given.family, given.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET) or not listens:
        raise SettingError(
            "the socket that systemd passed is of another kind: ListenSequentialPacket= makes the right one"
        )
    address = os.fsdecode(given.getsockname())  # an abstract one comes as bytes
    if Path(address) != Path(path):
        raise SettingError(f"systemd listens at {address!r} and the setting socket is {path!r}: make them the same")
    return given
