"""What is sent to one peer, in order, by any thread, none of which ever waits for that peer.

A message goes at once, on the thread that has it, where there is room for it. Else it queues, and as long as something is
queued a thread of its own sends it as the peer makes room. ``done`` is called after the message is in the kernel's hands, or
cannot get there any more: what must follow a send, such as the ack after OUTPUT_READY, belongs there.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
from collections.abc import Callable

from packer_service.errors import PackerError, PeerClosed, PeerHung
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import Message

logger = logging.getLogger(__name__)

MAX_QUEUED = 1 << 14  # messages; a peer that left so many unread does not read

Done = Callable[[Exception | None], None]
"""What to do when a message is sent (None), or will not be. On any thread, with no lock held; it may not wait."""


def ignore(error: Exception | None) -> None:
    """The ``done`` of a message that nothing follows."""


class Outbox:
    """The only sender of ``channel``, which it owns. ``_lock`` guards the queue, and is held for no call that can wait.

    ``bounded``: a peer that leaves MAX_QUEUED messages unread is disconnected.
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
            logger.error(
                "peer %s does not read and is disconnected: no thread can wait for it (%s); see the pids limit of this"
                " process's cgroup",
                self._name,
                error,
            )
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
