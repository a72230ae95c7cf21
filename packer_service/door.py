"""The packer's door: it lets peers in, as many as may be, and keeps listening at its path.

It knows connections and whether they have proven themselves, but not who they are or what they want. It touches nothing at the
path that is not its own or stale.

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
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from packer_service.errors import HandshakeError, NotNow, PackerError, SettingError, SocketTaken
from packer_service.run_directory import MAX_SOCKET_BYTES
from packer_service.wire.channel import hang_up, peer_credentials

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at the path
_PAUSE_S = 30.0  # between two tries to have it back, at most
_RETRY_S = 0.1
_LOCK_S = 5.0
_LOCK_POLL_S = 0.002
_BACKLOG = 64

# Connections that have not proven themselves yet. They take no place of a session: whoever may connect, but has no key,
# could hold them all.
MAX_UNPROVEN = 64
MAX_OPERATORS = 8  # nor do operators, who ask what goes on where every place is taken


class Door:
    """Lets peers in, as many as may be, and knows them until it is to ``forget`` them. ``on_taken`` is called when ``taken``
    changes.

    One thread calls ``accept`` again and again; it alone replaces the listener. ``_changed`` guards the rest, and is never
    held for anything that waits.
    """

    def __init__(
        self, path: Path, max_sessions: int, on_taken: Callable[[], None], given: socket.socket | None = None
    ) -> None:
        """``given``: a socket that already listens at ``path``, and is somebody else's to remove."""
        self.taken = False  # another packer listens at the path: nobody new comes here
        self._path = path
        self._max_sessions = max_sessions
        self._on_taken = on_taken
        self._changed = threading.Condition()
        self._unproven: dict[socket.socket, int] = {}  # to the peer's pid, oldest first
        self._proven: set[socket.socket] = set()
        self._operators: set[socket.socket] = set()
        self._connections = 0  # not forgotten yet, those that were hung up on included
        self._closed = False
        self._complaint = ""  # the last, so that each is said once
        self._pause_s = self._try_at = 0.0  # see _keep_listening
        self._listener: Listener | GivenListener = GivenListener(given) if given else Listener(self._path)

    def accept(self) -> socket.socket | None:
        """The next peer; None once the door is closed. Meanwhile it keeps listening at its path."""
        while not self._closed:
            try:
                peer, _ = self._listener.socket.accept()
            except TimeoutError:
                self._keep_listening()
            except OSError as error:
                if not self._closed:
                    # Out of descriptors, most likely, and for a while. The peer waits in the backlog until there is one again.
                    self._complain(f"cannot accept a connection: {error}; see LimitNOFILE or ulimit -n")
                    time.sleep(_RETRY_S)
                    self._evict()
            else:
                self._complaint = ""
                if self._enter(peer):
                    return peer
                peer.close()
        return None

    def _enter(self, peer: socket.socket) -> bool:
        """Make room for one more peer that has not proven itself; False where the door closes meanwhile."""
        pid, _ = peer_credentials(peer)
        bound = self._max_sessions + MAX_UNPROVEN + MAX_OPERATORS
        if len(self._unproven) >= MAX_UNPROVEN:  # only this thread adds to them
            self._evict()
        with self._changed:
            self._changed.wait_for(lambda: self._connections < bound or self._closed)  # the evicted one's thread ends
            if not self._closed:
                self._unproven[peer] = pid
                self._connections += 1
            return not self._closed

    def _evict(self) -> None:
        """Close the oldest unproven connection of the process that has most of them: a flood washes away its own.

        Where pids are not told apart (0: another pid namespace), it is the oldest of all.
        """
        with self._changed:
            if not self._unproven:
                return
            pid, held = Counter(self._unproven.values()).most_common(1)[0]
            oldest = next(peer for peer, owner in self._unproven.items() if owner == pid)
            del self._unproven[oldest]
            hang_up(oldest)
        logger.warning("too many connections without a proof, %d of them of pid %d: its oldest is closed", held, pid)

    def admit(self, peer: socket.socket, *, operator: bool = False) -> None:
        """``peer`` has proven itself, and has a place from now on: a session's, or an operator's. HandshakeError where there is
        none."""
        with self._changed:
            if operator and len(self._operators) >= MAX_OPERATORS:
                raise NotNow(f"{MAX_OPERATORS} operators are connected already")
            if not operator and len(self._proven) >= self._max_sessions:
                raise HandshakeError(f"max_sessions = {self._max_sessions} are open: raise it, or end a session")
            if self._unproven.pop(peer, None) is None:
                raise HandshakeError("this connection was closed: too many came that had not proven themselves")
            (self._operators if operator else self._proven).add(peer)

    def forget(self, peer: socket.socket) -> None:
        """Close the connection of ``peer``: its place is somebody else's."""
        peer.close()
        with self._changed:
            self._unproven.pop(peer, None)
            self._proven.discard(peer)
            self._operators.discard(peer)
            self._connections -= 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let nobody in any more and hang up on all; whether they were all forgotten in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for peer in (*self._unproven, *self._proven, *self._operators):
                hang_up(peer)
        self._listener.close()
        with self._changed:
            return self._changed.wait_for(lambda: not self._connections, timeout_s)

    # -- the path ------------------------------------------------------------------------------------------------------

    def _keep_listening(self) -> None:
        """Whoever cleans up a run directory may remove the socket; nobody could reach the packer again."""
        if self._listener.has_path:
            self._complaint, self._pause_s = "", 0.0
            self._set_taken(False)
            return
        if self._closed or time.monotonic() < self._try_at:
            return
        try:
            listener: Listener | GivenListener = Listener(self._path)
        except (PackerError, OSError) as error:  # OSError: no descriptor is to be had for it
            taken = isinstance(error, SocketTaken)
            what = "it serves the engines that it has, then it ends" if taken else "somebody removed its socket"
            self._complain(f"nobody new can reach this packer: {error}; {what}")
            self._set_taken(taken)
            self._pause_s = min(2 * self._pause_s or _LOOK_S, _PAUSE_S)  # each try is a connection to the other packer
            self._try_at = time.monotonic() + self._pause_s
        else:
            logger.error("the socket %s was removed; listening there again", self._path)
            with self._changed:
                if not self._closed:
                    listener, self._listener = self._listener, listener
            listener.close()  # the old one; the new one, where the door was closed meanwhile

    def _set_taken(self, taken: bool) -> None:
        if taken != self.taken:
            self.taken = taken
            self._on_taken()

    def _complain(self, text: str) -> None:
        if text != self._complaint:
            self._complaint = text
            logger.error("%s", text)


Inode = tuple[int, int]


class Listener:
    """A socket that listens at ``path``, which is its own until ``close``. See Note [Whose path it is].

    Raises SocketTaken where somebody else listens there, SettingError where nobody can.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        self.socket = _new_socket()
        self.socket.settimeout(_LOOK_S)  # of accept
        self._path = path
        self._inode: Inode | None = None
        try:
            with _locked(path.parent):
                stale = _find_stale(path)
                if stale is not None and stale == _inode(path):
                    logger.info("a stale socket is replaced: %s", path)
                    path.unlink(missing_ok=True)
                mask = os.umask(0o117)  # the group may connect; the directory and allowed_uids say who does
                try:
                    self.socket.bind(str(path))
                finally:
                    os.umask(mask)
                self.socket.listen(_BACKLOG)
                self._inode = _inode(path)
        except BaseException as error:
            self.socket.close()
            if isinstance(error, OSError):
                raise SettingError(f"socket {str(path)!r} cannot be made: {error.strerror}") from error
            raise

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


class GivenListener:
    """A socket that systemd listens on, also when this packer is gone: who connects then waits for the next.

    Nothing is done to its path, and it is not hung up on, which would end it for systemd too.
    """

    has_path = True

    def __init__(self, given: socket.socket) -> None:
        self.socket = given
        self.socket.settimeout(_LOOK_S)  # of accept, which so sees that the door is closed

    def close(self) -> None:
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


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Be the only packer that takes a path in ``directory``: whoever may read that can hold its lock, so the wait is short."""
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(os.close, _lock(directory))
        except OSError as error:  # the file system has no locks, or a stranger holds this one
            advice = (
                "do not start two packers at once there, or give the socket a directory of its own, such as /run/packer"
            )
            logger.warning(
                "the directory %s of the socket cannot be locked (%s): %s", directory, error.strerror, advice
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
