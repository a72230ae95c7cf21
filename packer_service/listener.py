"""The path that others connect to, and the socket that listens there: how a packer gets it, keeps it and gives it up.

It accepts nobody itself, and touches nothing at the path that is not its own or stale.

Note [Whose path it is]
A path belongs to the packer that listens at it: the kernel knows, and ends that with the process. To see that nobody
listens, to remove what is left there and to listen there are three steps, which one packer of a directory takes at a time,
under a lock on the directory itself. It goes with the process too, and leaves no file behind. So nobody takes the path of a
packer that listens. Somebody may still remove the socket, and another packer start there: then the path has another inode. Ours
cannot be given to another file while our socket is open. Only with its own inode does a packer remove the path, and without it
it listens again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from packer_service.errors import SettingError, SocketTaken
from packer_service.run_directory import MAX_SOCKET_BYTES

logger = logging.getLogger(__name__)

_LOCK_S = 5.0
_LOCK_POLL_S = 0.002
_BACKLOG = 64

Inode = tuple[int, int]


class Listener:
    """A socket that listens at ``path``, which is its own until ``close``. See Note [Whose path it is].

    Raises SocketTaken where somebody else listens there, SettingError where nobody can.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        self.socket = _new_socket()
        self._path = path
        self._inode: Inode | None = None
        try:
            with _locked(path.parent):
                _remove_stale(path)
                self._bind()
                self._inode = _inode(path)
        except BaseException as error:
            self.socket.close()
            if isinstance(error, OSError):
                raise SettingError(f"socket {str(path)!r} cannot be made: {error.strerror}") from error
            raise

    def _bind(self) -> None:
        mask = os.umask(0o117)  # the group may connect; the directory and allowed_uids say who does
        try:
            self.socket.bind(str(self._path))
        finally:
            os.umask(mask)
        self.socket.listen(_BACKLOG)

    @property
    def has_path(self) -> bool:
        """Whether who connects to the path comes here."""
        return self._inode is not None and _inode(self._path) == self._inode

    def close(self) -> None:
        """Remove the path, where it is this socket's, and wake who accepts."""
        if self.has_path:
            with contextlib.suppress(OSError):  # somebody else removed it, or will: nobody listens there from here on
                self._path.unlink()
        hang_up(self.socket)
        self.socket.close()


def check_path(path: Path) -> None:
    """Have a directory for ``path`` that is ours alone (or a group's), and nobody who listens there; else SettingError.

    Nothing that is there is touched.
    """
    directory = path.parent
    if path == Path():
        raise SettingError("socket is not set: it names the path at which engine and workers reach this packer")
    if "," in str(path):
        raise SettingError(f"socket is {str(path)!r}; a packer listens at one path: start one packer for each GPU")
    if len(os.fsencode(path)) > MAX_SOCKET_BYTES:
        raise SettingError(f"socket is {str(path)!r}; allowed is a path of at most {MAX_SOCKET_BYTES} bytes")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise SettingError(f"the directory of socket {str(path)!r} cannot be made: {error.strerror}") from error
    if status.st_mode & stat.S_IWOTH or status.st_uid not in (os.geteuid(), 0):
        raise SettingError(
            f"the directory {str(directory)!r} of the socket must be ours and not writable by everybody:"
            " give the socket a directory of its own, such as /run/packer"
        )
    _find_stale(path)


def _find_stale(path: Path) -> Inode | None:
    """A socket at ``path`` that nobody listens at; None where nothing is there. SettingError for whatever else is."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError(f"socket is {str(path)!r}, which cannot be looked at: {error.strerror}") from error
    if not stat.S_ISSOCK(status.st_mode):
        raise SettingError(f"socket is {str(path)!r}, which is there and is no socket")
    with _new_socket() as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return status.st_dev, status.st_ino
        except FileNotFoundError:  # somebody removed it just now
            return None
        except BlockingIOError:  # its queue is full, as that of a packer that was stopped may be
            pass
        except OSError as error:
            raise SettingError(f"socket is {str(path)!r}, which somebody else uses: {error}") from error
    raise SocketTaken(f"another packer listens at {str(path)!r}: give each its own socket")


def _remove_stale(path: Path) -> None:
    stale = _find_stale(path)
    if stale is not None and stale == _inode(path):
        logger.info("a stale socket is replaced: %s", path)
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Be the only packer that takes a path in ``directory``: whoever may read that can hold its lock, so the wait is short."""
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, _lock(directory))
        except OSError as error:  # the file system has no locks, or a stranger holds this one
            logger.warning(
                "the directory %s of the socket cannot be locked (%s): do not start two packers at once there, or give the"
                " socket a directory of its own, such as /run/packer",
                directory,
                error.strerror,
            )
        yield


def _lock(directory: Path) -> int:
    """A descriptor that holds the lock of what is at ``directory`` now. OSError where there is no lock to be had."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with contextlib.ExitStack() as stack:
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOCK_POLL_S)
                continue
            if os.path.samestat(os.fstat(fd), directory.stat()):  # else it was removed and made again meanwhile
                stack.pop_all()
                return fd


def _inode(path: Path) -> Inode | None:
    """Which file is at ``path``; None where none can be seen."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def hang_up(sock: socket.socket) -> None:
    """End the stream: every thread blocked on it wakes up. The descriptor stays its thread's to close."""
    with contextlib.suppress(OSError):  # it is closed already
        sock.shutdown(socket.SHUT_RDWR)
