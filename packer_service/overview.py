"""What `status` and `top` show: one entry for each packer, from its board, or from its answer over a socket."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from packer_service import board, targets
from packer_service.errors import PackerError
from packer_service.status import Status, Times

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH = 200  # where the output goes to no terminal
_ANSWER_S = 3.0


@dataclass(frozen=True)
class Overview:
    """One packer. ``state`` is its own word, or "dead", "silent" (its board grows old) or "unreachable"."""

    state: str
    pid: int | None
    socket: str
    status: Status | None
    error: str = ""
    age_s: float = 0.0  # of what ``status`` says

    @property
    def well(self) -> bool:
        return self.state in ("ready", "draining", "stopping")


def look(sockets: list[str], key_file: str) -> list[Overview]:
    """Those that have a board here, and those at ``sockets``: a packer with both is shown once."""
    shown = [_of_board(each) for each in board.find()]
    have = {each.socket for each in shown if each.state != "dead"}
    return shown + [_of_socket(socket, key_file) for socket in sockets if targets.absolute(socket) not in have]


def _of_board(shown: board.Shown) -> Overview:
    if shown.alive is False:
        state = "dead"
    elif shown.silent:
        state = "silent"
    else:
        state = shown.status.state if shown.status else "unknown"
    error = "" if shown.status else "its board is of another release: run that one's packer-service"
    return Overview(state, shown.pid, shown.socket, shown.status, error, shown.age_s)


def _of_socket(socket: str, key_file: str) -> Overview:
    try:
        target = targets.of_socket(socket, key_file)
        with target.connect(_ANSWER_S) as operator:
            status = operator.status()
    except (PackerError, OSError) as error:
        return Overview("unreachable", None, socket, None, str(error))
    return Overview(status.state, status.pid, socket, status)


def as_json(found: list[Overview]) -> str:
    """``{"packers": [{"state", "pid", "socket", "age_s", "error", "status"}]}``; status as ``packer_service.status.Status``."""
    packers = [
        {
            "state": each.state,
            "pid": each.pid,
            "socket": each.socket,
            "age_s": round(each.age_s, 3),
            "error": each.error or None,
            "status": each.status,
        }
        for each in found
    ]
    return msgspec.json.format(msgspec.json.encode({"packers": packers}), indent=2).decode()


_COLUMNS = (
    *("device", "pid", "state", "mode", "version", "engines", "workers", "in flight", "outputs", "GB", "GB/s"),
    *("hand-off p50/p99 ms", "pool GiB used/size", "own way", "failed", "restarts"),
)
_TEXT_COLUMNS = ("device", "state", "mode", "version")


def table(found: list[Overview]) -> RenderableType:
    """For ``rich``: a row a packer; below it what was last wrong with which."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        rows.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right")
    notes = []
    for each in found:
        rows.add_row(*_row(each), style=None if each.well else "red")
        name = each.status.device if each.status else each.socket
        if each.error:
            notes.append(f"{name}: {each.error}")
        if each.state == "silent":
            notes.append(f"{name}: pid {each.pid} has written nothing for {each.age_s:.0f} s: it hangs, or is stopped")
        if each.state == "dead":
            notes.append(f"{name}: pid {each.pid} died; its board is removed")
        if each.status and (last := each.status.last_error):
            notes.append(f"{name}: last error, {_since(last.at)} ago: {last.text}")
    if not found:
        return Text("no packer of this user is running on this host")
    return Group(rows, *([Text("")] if notes else []), *(Text(note) for note in notes))


def _row(each: Overview) -> list[str]:
    status = each.status
    if status is None:
        return ["?", str(each.pid or "?"), each.state]
    gib = 1 << 30
    own_way = sum(status.declined.values()) + status.withdrawn
    values: list[Any] = [
        status.device,
        status.pid,
        each.state,
        status.mode,
        status.version,
        len(status.engines),
        status.workers
        if not (paused := sum(e.paused_workers for e in status.engines))
        else f"{status.workers} ({paused} paused)",
        status.in_flight,
        status.published,
        f"{status.published_bytes / 1e9:.2f}",
        f"{status.bytes_per_s / 1e9:.2f}",
        _milliseconds(status.handoff),
        f"{status.pool_used_bytes / gib:.2f}/{status.pool_bytes / gib:.2f}",
        own_way,
        sum(status.failed.values()),
        "-" if status.restarts is None else status.restarts,
    ]
    return [str(value) for value in values]


def _milliseconds(times: Times | None) -> str:
    return f"{times.p50_ms:.2f}/{times.p99_ms:.2f}" if times else "-"


def _since(at: float) -> str:
    seconds = max(time.time() - at, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
