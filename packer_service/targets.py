"""Which packers a command is meant for, and how each is reached: by its status board, or by its socket and the key."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from packer_service import board
from packer_service.config import Settings
from packer_service.errors import PackerAbsent, PackerUnavailable
from packer_service.operator import Operator


@dataclass(frozen=True)
class Target:
    """One packer, and the key that lets an operator in there."""

    label: str
    socket: str
    key: bytes

    def connect(self, timeout_s: float) -> Operator:
        return Operator(self.socket, self.key, timeout_s=timeout_s)


def absolute(socket: str) -> str:
    """As status boards name it."""
    return os.path.abspath(socket)


def of_socket(socket: str, key_file: str) -> Target:
    """The packer at ``socket``: with the key of ``key_file``, else with what its board shows. SettingError as ``read_key``."""
    path = absolute(socket)
    if key_file:
        return Target(path, path, Settings.load({"key_file": key_file}, {}, "").read_key())
    shown = next((found for found in board.find() if found.socket == path and found.alive is not False), None)
    if shown is not None:
        return Target(path, path, shown.operator_key)
    if not Path(path).exists():
        raise PackerAbsent(f"there is no socket {path}: is the packer running? (--socket names it)")
    raise PackerUnavailable(
        f"no status board here shows the packer at {path}, so its key is needed: name the file with --key-file"
        " (PACKER_KEY_FILE), or run this command as the packer's user on its host"
    )


def select(names: list[str], everyone: bool) -> list[Target]:
    """The packers that ``names`` name: each a device (cuda:0), the UUID of a GPU, a pid, or a socket.

    With no name: the only packer there is, or with ``everyone`` each of them. PackerUnavailable if there is none.
    """
    living = [shown for shown in board.find() if shown.alive is not False and shown.socket]
    if names:
        chosen = [each for name in names for each in _named(name, living)]
    elif not living:
        raise PackerAbsent(
            "no packer of this user is running on this host: name the socket of another with --socket, and its key with"
            " --key-file"
        )
    elif len(living) > 1 and not everyone:
        raise PackerUnavailable(
            f"there are {len(living)} packers: name one ({', '.join(_label(each) for each in living)}), or all with --all"
        )
    else:
        chosen = living
    return [Target(_label(each), each.socket, each.operator_key) for each in chosen]


def _named(name: str, living: list[board.Shown]) -> list[board.Shown]:
    found = [each for each in living if name in _names(each)]
    if not found:
        there = ", ".join(_label(each) for each in living) or "none"
        raise PackerAbsent(f"no packer here is {name!r}; there are: {there}")
    return found


def _names(shown: board.Shown) -> set[str]:
    names = {str(shown.pid), shown.socket}
    return names | {shown.status.device, shown.status.device_uuid} if shown.status else names


def _label(shown: board.Shown) -> str:
    return f"{shown.status.device} (pid {shown.pid})" if shown.status else f"pid {shown.pid}"
