"""The directory that an engine makes for its packers' sockets: where it is made, who holds it, who removes it.

Note [What may be removed]
Temporary directories are full of what belongs to others, under any name. A directory is removed only where it carries our
mark, holds nothing but that and packers' sockets, and nobody uses it; name by name, so that whatever came meanwhile stays.
Whoever uses one holds a shared lock on its mark (flock), and only who gets the exclusive one may remove it. The kernel drops
a lock with its process, in whatever pid namespace that was, and systemd-tmpfiles leaves alone what is locked. A child that the
engine forks keeps the lock of a killed engine as long as it lives: then a later engine removes the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator

from packer_service.errors import PackerUnavailable

logger = logging.getLogger(__name__)

_PREFIX = "packer-"
_MARK = ".packer-service"
_TEXT = b"A run directory of packer-service, which removes it when nobody uses it and nothing else is in it.\n"
_SOCKET = re.compile(r"(host|cuda\d*)\.sock")
MAX_SOCKET_BYTES = 107  # of a socket's path: sun_path, less the byte that ends it
_LONGEST = "cuda999.sock"


def bases() -> dict[str, str]:
    """Where one may be made, by what a message calls it; the first that works is taken.

    XDG_RUNTIME_DIR comes last: it goes when its user logs out, and an engine may stay.
    """
    given = {name: os.environ.get(name, "") for name in ("TMPDIR", "XDG_RUNTIME_DIR")}
    named = {f"{name}={base}": base for name, base in given.items() if os.path.isabs(base)}
    first = {name: base for name, base in named.items() if base == given["TMPDIR"]}
    return {**first, "/tmp": "/tmp", "/var/tmp": "/var/tmp", **named}


class RunDirectory:
    """One directory, held from ``make`` to ``release``. ``remake`` it before it is used again: it may be gone."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._mark = -1  # the descriptor that has the lock

    @classmethod
    def make(cls, bases: dict[str, str]) -> RunDirectory:
        """A new one, in the first of ``bases`` that allows it. What engines that are gone left there is removed."""
        reasons = []
        for name, base in bases.items():
            remove_abandoned(base)
            try:
                return cls._make(base)
            except OSError as error:
                reasons.append(f"{name}: {error.strerror}")
        raise PackerUnavailable(
            f"there is no directory for the sockets of packers: {'; '.join(reasons)}."
            " Set TMPDIR to a directory with a short path that this user may write to"
        )

    @classmethod
    def _make(cls, base: str) -> RunDirectory:
        made = cls(os.path.join(base, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"))
        longest = len(os.fsencode(os.path.join(made.path, _LONGEST)))
        if longest > MAX_SOCKET_BYTES:
            reason = f"a socket there would have a path of {longest} bytes, more than {MAX_SOCKET_BYTES}"
            raise OSError(errno.ENAMETOOLONG, reason)
        os.mkdir(made.path, 0o700)
        try:
            made.remake()
        except OSError:
            made.close()
            with contextlib.suppress(OSError):  # it is new, so nothing in it is anybody else's
                os.unlink(os.path.join(made.path, _MARK))
            with contextlib.suppress(OSError):
                os.rmdir(made.path)
            raise
        return made

    def remake(self) -> None:
        """Have it there, marked and held, whatever became of it. OSError where that cannot be."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        with _opened(self.path) as directory:
            if os.fstat(directory).st_uid != os.geteuid():
                raise OSError(errno.EPERM, "the directory there is somebody else's")
            mark = os.open(_MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=directory)
            try:
                fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
                if not _is_ours(mark):  # the text comes last: with it, and without a lock, it may be removed
                    os.pwrite(mark, _TEXT, 0)
            except BaseException:
                os.close(mark)
                raise
        self.close()
        self._mark = mark

    def close(self) -> None:
        """Let go of it, and leave it where it is."""
        mark, self._mark = self._mark, -1
        if mark >= 0:
            with contextlib.suppress(OSError):  # explicitly: in a child that was forked, the descriptor is open too
                fcntl.flock(mark, fcntl.LOCK_UN)
            os.close(mark)

    def release(self) -> None:
        """Let go of it, and remove it unless somebody else holds it."""
        self.close()
        _remove_if_abandoned(self.path)


def hold(path: str) -> RunDirectory:
    """One that somebody else made, such as the engine of a packer. Where it cannot be held it only goes too early."""
    held = RunDirectory(path)
    try:
        with _opened(path) as directory:
            held._mark = _open_mark(directory)
        fcntl.flock(held._mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        logger.debug("the run directory %s is not held: %s", path, error)
    return held


def remove_abandoned(base: str) -> None:
    """Remove what nobody uses any more of what we made in ``base``. Never fails: it only tidies."""
    try:
        names = [name for name in os.listdir(base) if name.startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        _remove_if_abandoned(os.path.join(base, name))


def _remove_if_abandoned(path: str) -> None:
    """See Note [What may be removed]."""
    try:
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(_opened(path))
            mark = _open_mark(directory)
            stack.callback(os.close, mark)
            if not _is_ours(mark):
                return
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = os.listdir(directory)
            if all(name == _MARK or _is_socket(directory, name) for name in names):
                for name in sorted(names, key=_MARK.__eq__):  # the mark comes last: this may be interrupted
                    os.unlink(name, dir_fd=directory)
                os.rmdir(path)
    except OSError as error:  # it is gone, not ours, in use, or something came into it meanwhile
        logger.debug("%r stays: %s", path, error)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield directory
    finally:
        os.close(directory)


def _open_mark(directory: int) -> int:
    """Whatever goes by its name; without O_NONBLOCK, opening a fifo would wait for somebody else to."""
    return os.open(_MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)


def _is_ours(mark: int) -> bool:
    status = os.fstat(mark)
    ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return ours and os.pread(mark, len(_TEXT) + 1, 0) == _TEXT


def _is_socket(directory: int, name: str) -> bool:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    return _SOCKET.fullmatch(name) is not None and stat.S_ISSOCK(status.st_mode)
