"""The status board: what a packer shows of itself in named shared memory, for operators on the same host.

    /dev/shm/sm_packer-PID-TOKEN   128 KiB, mode 0600, one writer: the packer, once a second
    {"written_s", "pid_namespace", "started_s", "socket", "operator_key", "status": {...}, "crc"}

The memory is a SharedMemoryDict with its JSON serializer. This is the only named memory that the project has, and nothing on
an output's way touches it. A packer that is killed leaves its board behind. Whoever finds one whose packer is dead removes it:
a command, the engine that started the packer, or the next packer.

A reader opens the file and reads: the library's own class would make a board that is gone meanwhile, and write to it. One that
was read while it was written does not match its crc, and is read again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil

from packer_service import status
from packer_service.status import Status

logger = logging.getLogger(__name__)

NBYTES = 1 << 17
STALE_S = 5.0  # a packer whose board is older than this hangs, or is stopped
_EVERY_S = 1.0
_DIRECTORY = Path("/dev/shm")
_FILE = re.compile(r"sm_packer-(\d+)-[0-9a-f]{8}")  # the library puts sm_ before the name
_TRIES, _TRY_AGAIN_S = 5, 0.01
_SAME_S = 0.5  # start times that differ by less are of one process: the kernel counts them in hundredths of a second


class Board:
    """The board of this process. ``open`` makes it and starts the thread that keeps it; ``close`` ends both."""

    def __init__(self, memory: Any, path: Path, fixed: dict[str, Any], read_status: Callable[[], bytes]) -> None:
        self._memory = memory
        self._path = path
        self._fixed = fixed
        self._read_status = read_status
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="board", daemon=True)

    @classmethod
    def open(cls, socket: str, operator_key: bytes, read_status: Callable[[], bytes]) -> Board:
        """OSError where /dev/shm cannot be written to or has no room: a packer does without a board then."""
        remove_dead()
        name = f"packer-{os.getpid()}-{secrets.token_hex(4)}"
        path = _DIRECTORY / f"sm_{name}"
        # The library would make the memory itself, and the first touch of a page that /dev/shm has no room for is a SIGBUS.
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, NBYTES)
            with _no_resource_tracker():
                from shared_memory_dict import SharedMemoryDict
                from shared_memory_dict.serializers import JSONSerializer

                memory = SharedMemoryDict(name, NBYTES, serializer=JSONSerializer())
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        fixed = {
            "pid_namespace": _pid_namespace(),
            "started_s": _started_s(os.getpid()),
            "socket": os.path.abspath(socket),
            "operator_key": operator_key.hex(),
        }
        board = cls(memory, path, fixed, read_status)
        board._write()
        board._thread.start()
        return board

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_EVERY_S)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def _keep(self) -> None:
        while not self._closing.wait(_EVERY_S):
            try:
                self._write()
            except Exception:  # the board says how old it is
                logger.exception("the status board could not be written")

    def _write(self) -> None:
        entries = {**self._fixed, "written_s": _now_s(), "status": msgspec.json.decode(self._read_status())}
        self._memory.update({**entries, "crc": _crc(entries)})


@dataclass(frozen=True)
class Shown:
    """A board as it was found. ``alive`` is None where its packer is in another pid namespace, and nobody here can know.

    ``status`` is None where it could not be read: another release wrote it, or its writer died in the middle.
    """

    pid: int
    alive: bool | None
    age_s: float
    socket: str
    operator_key: bytes
    status: Status | None

    @property
    def silent(self) -> bool:
        """Whether its packer has not written for so long that it hangs, or is stopped."""
        return self.alive is not False and self.age_s > STALE_S


def find() -> list[Shown]:
    """Every board that this user may read, by the pid of its packer. Those of dead packers are removed once they are read."""
    shown = []
    for path, pid in _boards():
        board = _read(path, pid)
        if board is not None:
            shown.append(board)
            if board.alive is False:
                _remove(path)
    return sorted(shown, key=lambda board: board.pid)


def remove_dead() -> None:
    """Remove the boards of this user whose packers are dead."""
    find()


def _boards() -> Iterator[tuple[Path, int]]:
    try:
        names = os.listdir(_DIRECTORY)
    except OSError:
        return
    for file in names:
        if (found := _FILE.fullmatch(file)) is not None:
            yield _DIRECTORY / file, int(found[1])


def _read(path: Path, pid: int) -> Shown | None:
    """None for what is gone meanwhile, or is not this user's, or may have been put there by another."""
    entries: dict[str, Any] = {}
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or (os.geteuid() and found.st_uid != os.geteuid()):
                return None
            data = file.read(NBYTES)
        entries = _parse(data)
        if entries:
            break
        time.sleep(_TRY_AGAIN_S)
    alive = _alive(pid, entries)
    if not entries and alive:
        return None  # its packer is just making it
    try:
        decoded = status.decode(msgspec.json.encode(entries["status"]))
    except (KeyError, msgspec.ValidationError, msgspec.DecodeError):
        decoded = None
    key = bytes.fromhex(entries.get("operator_key", ""))
    age_s = max(_now_s() - entries["written_s"], 0.0) if entries else 0.0
    return Shown(pid, alive, age_s, entries.get("socket", ""), key, decoded)


def _parse(data: bytes) -> dict[str, Any]:
    """Empty where it was read while it was written."""
    try:
        entries = msgspec.json.decode(data.partition(b"\0")[0], type=dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    crc = entries.pop("crc", None)
    return entries if crc == _crc(entries) else {}


def _crc(entries: dict[str, Any]) -> int:
    return zlib.crc32(msgspec.json.encode(entries, order="sorted"))


def _alive(pid: int, entries: dict[str, Any]) -> bool | None:
    if entries and entries.get("pid_namespace") != _pid_namespace():
        return None
    if not entries:
        return psutil.pid_exists(pid)
    try:
        return abs(_started_s(pid) - entries["started_s"]) < _SAME_S
    except psutil.NoSuchProcess:
        return False


def _started_s(pid: int) -> float:
    """Seconds from the host's start to the process's: a clock that is set meanwhile changes both that psutil knows alike."""
    boot_s = psutil.boot_time()  # first: what psutil remembers of it, create_time may use
    process = psutil.Process(pid)
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.NoSuchProcess(pid)
    return process.create_time() - boot_s


def _now_s() -> float:
    """Seconds since the host's start: no clock that somebody sets makes a board look old."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # another found it too
        path.unlink()


@contextlib.contextmanager
def _no_resource_tracker() -> Iterator[None]:
    """Attach named memory without Python's resource tracker.

    It is a process of its own, and it removes what this one attached when this one ends, whoever else uses it. Python 3.13 has
    ``track=False`` for this, which the library does not pass on.
    """
    from shared_memory_dict import dict as library

    shared_memory: Any = sys.modules[library.SharedMemory.__module__]

    class Untracked:
        register = unregister = staticmethod(lambda name, kind: None)

    tracker = shared_memory.resource_tracker
    shared_memory.resource_tracker = Untracked
    try:
        yield
    finally:
        shared_memory.resource_tracker = tracker
