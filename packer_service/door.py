"""The packer's door: it lets peers in, as many as may be, and keeps listening at its path.

It knows connections and whether they have proven themselves, but not who they are or what they want.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from packer_service.errors import HandshakeError, PackerError, SocketTaken
from packer_service.listener import Listener, hang_up
from packer_service.wire.channel import peer_credentials

logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two looks at the path
_PAUSE_S = 30.0  # between two tries to have it back, at most
_RETRY_S = 0.1

# Connections that have not proven themselves yet. They take no place of a session: whoever may connect, but has no key,
# could hold them all.
MAX_UNPROVEN = 64


class Door:
    """Lets peers in, as many as may be, and knows them until it is to ``forget`` them. ``on_taken`` is called when ``taken``
    changes.

    One thread calls ``accept`` again and again; it alone replaces the listener. ``_changed`` guards the rest, and is never
    held for anything that waits.
    """

    def __init__(self, path: Path, max_sessions: int, on_taken: Callable[[], None]) -> None:
        self.taken = False  # another packer listens at the path: nobody new comes here
        self._path = path
        self._max_sessions = max_sessions
        self._on_taken = on_taken
        self._changed = threading.Condition()
        self._unproven: dict[socket.socket, int] = {}  # to the peer's pid, oldest first
        self._proven: set[socket.socket] = set()
        self._connections = 0  # not forgotten yet, those that were hung up on included
        self._closed = False
        self._complaint = ""  # the last, so that each is said once
        self._pause_s = self._try_at = 0.0  # see _keep_listening
        self._listener = self._listen()

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
        bound = self._max_sessions + MAX_UNPROVEN
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

    def admit(self, peer: socket.socket) -> None:
        """``peer`` has proven itself, and has a place of a session from now on. HandshakeError where there is none."""
        with self._changed:
            if len(self._proven) >= self._max_sessions:
                raise HandshakeError(f"max_sessions = {self._max_sessions} are open: raise it, or end a session")
            if self._unproven.pop(peer, None) is None:
                raise HandshakeError("this connection was closed: too many came that had not proven themselves")
            self._proven.add(peer)

    def forget(self, peer: socket.socket) -> None:
        """Close the connection of ``peer``: its place is somebody else's."""
        peer.close()
        with self._changed:
            self._unproven.pop(peer, None)
            self._proven.discard(peer)
            self._connections -= 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let nobody in any more and hang up on all; whether they were all forgotten in time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for peer in (*self._unproven, *self._proven):
                hang_up(peer)
            listener = self._listener
        listener.close()
        with self._changed:
            return self._changed.wait_for(lambda: not self._connections, timeout_s)

    # -- the path ------------------------------------------------------------------------------------------------------

    def _listen(self) -> Listener:
        listener = Listener(self._path)
        listener.socket.settimeout(_LOOK_S)  # of accept
        return listener

    def _keep_listening(self) -> None:
        """Whoever cleans up a run directory may remove the socket; nobody could reach the packer again."""
        if self._listener.has_path:
            self._complaint, self._pause_s = "", 0.0
            self._set_taken(False)
            return
        if self._closed or time.monotonic() < self._try_at:
            return
        try:
            listener = self._listen()
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
