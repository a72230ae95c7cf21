"""AF_UNIX SOCK_SEQPACKET connections, and their outboxes: framed by the kernel, descriptors travel with their message.

Note [Why SEQPACKET]
A datagram arrives whole or not at all: no partial frame to wait for, no length prefix to distrust, a send that does not
block either happened or did not, and a descriptor cannot be separated from the message it belongs to.

Note [A descriptor that finds no room]
Where this process may open no more, the kernel hands out a message without its descriptor, and that is gone. A look at the
message (MSG_PEEK) hands out a duplicate: where that finds no room, the message is still there, descriptor and all. So each
message is looked at, and taken once everything that belongs to it is here. Whoever receives decides what becomes of one that
cannot be had now: it tries again later, or takes it without (``skip``).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import logging
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable

from packer_service.errors import DescriptorLost, PackerError, PeerClosed, PeerHung, ProtocolError
from packer_service.wire import protocol
from packer_service.wire.protocol import Decoder, Message

logger = logging.getLogger(__name__)

_UCRED = struct.Struct("3i")
_FD = struct.Struct("i")
_TIMEVAL = struct.Struct("ll")
_recv = ctypes.PyDLL(None, use_errno=True).recv  # keeps the GIL: for calls that do not wait
_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_ANCILLARY_BYTES = socket.CMSG_LEN(protocol.MAX_FDS * _FD.size)

MAX_QUEUED = 1 << 14  # messages; a peer that left so many unread does not read

Done = Callable[[Exception | None], None]
"""What to do when a message is sent (None), or will not be. On any thread, with no lock held; it may not wait."""


def ignore(error: Exception | None) -> None:
    """The ``done`` of a message that nothing follows."""


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


class Channel:
    """One connection. Any thread may send (a lock keeps order); exactly one thread receives."""

    def __init__(self, sock: socket.socket, decoder: Decoder) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()
        self._receive_us = 0  # SO_RCVTIMEO as it is set, 0 for none; the receiving thread's
        self.decoder = decoder
        _channels.add(self)

    def send(self, message: Message, fd: int | None = None) -> None:
        """Send, waiting for room. PeerClosed where the peer is gone, or makes none for the time given to ``connect``."""
        data = protocol.encode(message)
        with self._send_lock:
            try:
                self._send(data, fd, 0)
            except BlockingIOError as error:
                self.shutdown()  # the thread that receives must hear of it too
                raise PeerHung("the peer hangs: it takes no more messages") from error

    def try_send(self, message: Message, fd: int | None = None) -> bool:
        """Send without ever waiting; False where there is no room now or another thread is sending."""
        data = protocol.encode(message)
        if not self._send_lock.acquire(blocking=False):
            return False
        try:
            self._send(data, fd, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        finally:
            self._send_lock.release()
        return True

    def _send(self, data: bytes, fd: int | None, flags: int) -> None:
        try:
            if fd is None:
                self._socket.send(data, flags)
            else:
                # not socket.send_fds, which ignores flags (and recv_fds too)
                self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))], flags)
        except ConnectionError as error:
            raise PeerClosed(f"the peer is gone: {error}") from error
        except OSError as error:
            if error.errno != errno.EBADF:  # closed on this side
                raise
            raise PeerClosed("this connection was closed") from error

    def receive(self, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, which are the caller's to close. None where none came in time.

        Raises PeerClosed at the end of the stream and ProtocolError for anything that is not an allowed message;
        DescriptorLost for a message whose descriptor finds no room in this process's table. That message is still the next:
        see Note [A descriptor that finds no room].
        """
        try:
            try:
                data, fds, flags = self._look(timeout_s)
            except ConnectionResetError:
                # The kernel says this once, of a peer that died before it had read all; what it sent is still there to read.
                data, fds, flags = self._look(timeout_s)
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerClosed(f"the connection broke: {error}") from error
        try:
            # The kernel says MSG_CTRUNC both where more descriptors came than we take and where our table is full. In the
            # first case it still delivers as many as we take, in the second it stops at the first that finds no place.
            lost = bool(flags & socket.MSG_CTRUNC) and len(fds) < protocol.MAX_FDS
            if not lost:
                self.skip()
            if flags & socket.MSG_TRUNC or (flags & socket.MSG_CTRUNC and not lost):
                raise ProtocolError(
                    f"a message exceeds {protocol.MAX_MESSAGE_BYTES} bytes or {protocol.MAX_FDS} descriptor"
                )
            if not data:
                raise PeerClosed("the peer closed the connection")
            message = self.decoder(data)
            if lost:
                raise DescriptorLost(message)
            return message, list(fds)
        except BaseException:
            close_fds(list(fds))
            raise

    def skip(self) -> None:
        """Take the next message, which was looked at: what of it is not here yet is lost."""
        # With no buffer, the kernel drops the message. Where the peer died since the look, the first call says that instead.
        while _recv(self._socket.fileno(), None, 0, socket.MSG_DONTWAIT) < 0 and ctypes.get_errno() == errno.ECONNRESET:
            pass

    def _look(self, timeout_s: float | None) -> tuple[bytes, list[int], int]:
        """The next message, its descriptors and flags. BlockingIOError where none came in time.

        The time is the kernel's to keep (SO_RCVTIMEO, rounded up to its ticks): one call that waits and receives lets go of
        the GIL once, poll and recvmsg twice; setsockopt keeps it.
        """
        how = socket.MSG_CMSG_CLOEXEC | socket.MSG_PEEK
        if timeout_s is not None and timeout_s <= 0:
            how |= socket.MSG_DONTWAIT
        else:
            wanted_us = 0 if timeout_s is None else max(int(timeout_s * 1e6), 1)
            if wanted_us != self._receive_us:
                _set_timeout(self._socket, socket.SO_RCVTIMEO, wanted_us)
                self._receive_us = wanted_us
        data, ancillary, flags, _ = self._socket.recvmsg(protocol.MAX_MESSAGE_BYTES, _ANCILLARY_BYTES, how)
        fds = [
            fd
            for level, kind, content in ancillary
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (fd,) in _FD.iter_unpack(content[: len(content) - len(content) % _FD.size])
        ]
        return data, fds, flags

    @property
    def peer_pid(self) -> int:
        """The pid of the process at the other end, as this pid namespace sees it (SO_PEERCRED)."""
        return peer_credentials(self._socket)[0]

    def finish(self) -> None:
        """Say that nothing more will be sent; the peer's last messages can still be received."""
        with contextlib.suppress(OSError):  # it is not connected any more
            self._socket.shutdown(socket.SHUT_WR)

    def shutdown(self) -> None:
        """``hang_up``. The descriptor stays until ``close``."""
        hang_up(self._socket)

    def close(self) -> None:
        self.shutdown()
        with self._send_lock:  # else the descriptor's number could be somebody else's before a send got to it
            self._socket.close()

    def _disown(self) -> None:
        """In a forked child: close its copy of the descriptor, and leave the connection, which is its parent's, alone."""
        self._send_lock = threading.Lock()  # a thread that is not here may have held it
        self._socket.close()


# Whoever holds a connection is alive to its peer: a packer would stay for a child of an engine that died.
_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _disown_all() -> None:
    for channel in list(_channels):
        channel._disown()


os.register_at_fork(after_in_child=_disown_all)


def hang_up(sock: socket.socket) -> None:
    """End the stream both ways: every thread blocked on it wakes up. The descriptor stays its thread's to close."""
    with contextlib.suppress(OSError):  # it is not connected any more
        sock.shutdown(socket.SHUT_RDWR)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) that the kernel recorded for the process at the other end (SO_PEERCRED)."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def _set_timeout(sock: socket.socket, option: int, timeout_us: int) -> None:
    """Bound every single receive (SO_RCVTIMEO) or send (SO_SNDTIMEO); 0 lifts the bound. The socket stays in blocking mode."""
    sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(timeout_us, 1_000_000)))


def bound_sends(sock: socket.socket, timeout_s: float) -> None:
    _set_timeout(sock, socket.SO_SNDTIMEO, int(timeout_s * 1e6))


class Outbox:
    """What is sent to one peer, in order, by any thread, none of which ever waits for that peer.

    A message goes at once, on the thread that has it, where there is room for it. Else it queues, and as long as something is
    queued a thread of its own sends it as the peer makes room. ``done`` is called after the message is in the kernel's hands,
    or cannot get there any more: what must follow a send, such as the ack after OUTPUT_READY, belongs there.

    It is the only sender of ``channel``, which it owns. ``bounded``: a peer that leaves MAX_QUEUED messages unread is
    disconnected. ``_lock`` guards the queue, and is held for no call that can wait.
    """

    def __init__(self, name: str, channel: Channel, bounded: bool = True) -> None:
        self._name = name
        self._channel = channel
        self._bounded = bounded
        self._lock = threading.Lock()
        self._empty = threading.Condition(self._lock)
        self._queue: collections.deque[tuple[Message, int | None, Done]] = collections.deque()

    def send(self, message: Message, fd: int | None = None, done: Done = ignore) -> None:
        """Send or queue ``message``. ``done`` is called once, now or later. ``fd`` stays the caller's, who may close it."""
        try:
            sent = self.offer(message, fd, done)
        except (PackerError, OSError) as error:
            done(error)
        else:
            if sent:
                done(None)

    def offer(self, message: Message, fd: int | None, done: Done) -> bool:
        """As ``send``, but True where it is sent already, and raises what keeps it from being sent or queued: then ``done``
        is not called."""
        with self._lock:
            if not self._queue and self._channel.try_send(message, fd):
                return True
            if self._bounded and len(self._queue) >= MAX_QUEUED:
                self._channel.shutdown()
                raise PeerHung(f"the peer hangs: it left {MAX_QUEUED} messages unread")
            protocol.encode(message)  # refused now, and not when others queue behind it
            self._queue.append((message, None if fd is None else os.dup(fd), done))
            first = len(self._queue) == 1
        if first:
            self._start_sending()
        return False

    def _start_sending(self) -> None:
        try:
            threading.Thread(target=self._send_queue, name=f"sender-{self._name}", daemon=True).start()
        except RuntimeError as error:
            why = f"no thread can wait for it ({error}); see the pids limit of this process's cgroup"
            logger.error("peer %s does not read and is disconnected: %s", self._name, why)
            self._channel.shutdown()
            self._send_queue()  # no send waits any more

    def _send_queue(self) -> None:
        """Until nothing is queued. What is being sent stays in the queue, so that nothing passes it."""
        left = True
        while left:
            message, fd, done = self._queue[0]
            error: Exception | None = None
            try:
                self._channel.send(message, fd)
            except PeerClosed as caught:
                error = caught
            except Exception as caught:  # were this thread to end, whoever waits for the queue would wait for ever
                logger.error("peer %s is disconnected: what it was to be sent cannot be sent: %r", self._name, caught)
                self._channel.shutdown()  # what queues behind it may build on it
                error = caught
            if fd is not None:
                close_fds([fd])
            try:
                done(error)
            except Exception:
                logger.exception("what follows a %s to peer %s failed", type(message).__name__, self._name)
            with self._lock:
                self._queue.popleft()
                left = bool(self._queue)
                if not left:
                    self._empty.notify_all()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing is queued; False where that took longer than ``timeout_s``."""
        with self._lock:
            return self._empty.wait_for(lambda: not self._queue, timeout_s)

    def close(self) -> None:
        """Close the connection. What is still queued is not sent, which its ``done`` is told."""
        self._channel.shutdown()
        self.flush(None)
        self._channel.close()
