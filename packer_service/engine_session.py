"""What a packer does for one engine: its pool, the segments it was told of, the outputs it is sent, the leases it returns."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from packer_service import protocol
from packer_service.errors import DescriptorLost, PeerClosed, ProtocolError
from packer_service.pool import Pool
from packer_service.protocol import (
    Describe,
    Described,
    OutputComing,
    OutputReady,
    Ping,
    Pong,
    Segment,
    SegmentGone,
    WorkerGone,
)
from packer_service.transport import Channel, close_fds

logger = logging.getLogger(__name__)

_SEND_S = 0.05  # what another's send to the same engine takes at most, unless that does not read


class EngineSession:
    """One engine: its pool, the segments it was told of, the outputs it is sent.

    The reader (the thread in ``serve``) takes leases back; any worker session's threads publish, under one lock.
    """

    def __init__(self, name: str, channel: Channel, pool: Pool, describe: Callable[[str], str]) -> None:
        self.name = name
        self.pool = pool
        self._describe = describe  # how far an output of any of its workers is
        self.bad_releases = 0  # written by the reader only
        self._channel = channel
        self._lock = threading.Lock()  # guards the announcements and the order of what is sent
        self._announced: set[int] = set()
        pool.on_trim = self._forget_segment
        pool.owner = name

    def serve(self) -> None:
        """Take leases back until the engine is gone."""
        try:
            self.announce_segments()
            while True:
                try:
                    received = self._channel.receive()
                except DescriptorLost as error:  # no message of an engine needs one
                    self._channel.skip()
                    received = error.message, []
                assert received is not None
                message, fds = received
                close_fds(fds)
                if isinstance(message, Ping):
                    self._send(Pong())
                    continue
                if isinstance(message, Describe):
                    self._send(Described(message.output, self._describe(message.output)))
                    continue
                if isinstance(message, protocol.SegmentLost):
                    with self._lock:
                        self._announced.discard(message.segment)
                    self.announce_segments()
                    continue
                assert isinstance(message, protocol.Release)
                for lease in message.leases:
                    try:
                        self.pool.end_lease(lease)
                    except ProtocolError as error:
                        self.bad_releases += 1
                        logger.warning("engine %s: %s", self.name, error)
        except PeerClosed:
            logger.info("engine %s is gone", self.name)
        except ProtocolError as error:
            logger.error("engine %s broke the protocol and is disconnected: %s", self.name, error)
            refuse(self._channel, str(error))
        except OSError as error:
            logger.error("engine %s cannot be served and is disconnected: %s", self.name, error)
            refuse(self._channel, f"the packer cannot serve you: {error}")

    def announce_segments(self) -> None:
        """Tell the engine of every segment it does not know yet, so that it maps them before an output needs them."""
        with self._lock:
            for segment in self.pool.segments:
                if segment.number not in self._announced:
                    self._channel.send(Segment(segment.number, segment.memory.nbytes), segment.memory.fd)
                    self._announced.add(segment.number)

    def _forget_segment(self, number: int) -> None:
        with self._lock:
            if number in self._announced:
                self._announced.discard(number)
                try:
                    self._channel.send(SegmentGone(number))
                except PeerClosed:
                    pass  # it unmaps everything as it goes
                except OSError as error:  # it keeps an empty mapping; the number is never used again
                    logger.error("engine %s cannot be told that segment %d left: %s", self.name, number, error)

    def publish(self, message: OutputComing | OutputReady, fd: int | None = None, *, wait: bool = True) -> bool:
        """``tell``, once the engine knows the segments that the output lies in."""
        if any(lease.segment not in self._announced for lease in message.leases):
            if not wait:
                return False
            self.announce_segments()
        return self.tell(message, fd, wait=wait)

    def tell(self, message: protocol.Message, fd: int | None = None, *, wait: bool = True) -> bool:
        """Send a message. PeerClosed where the engine is gone; False where it would have to wait and may not."""
        if wait:
            self._send(message, fd)
            return True
        if not self._lock.acquire(timeout=_SEND_S):
            return False
        try:
            return self._channel.try_send(message, fd)
        finally:
            self._lock.release()

    def tell_worker_gone(self) -> None:
        """See ``WorkerGone``."""
        try:
            self._send(WorkerGone())
        except PeerClosed:
            pass  # then it asks no more

    def _send(self, message: protocol.Message, fd: int | None = None) -> None:
        with self._lock:
            self._channel.send(message, fd)

    def disconnect(self) -> None:
        """Have ``serve`` end, from another thread."""
        self._channel.shutdown()

    def close(self) -> None:
        self._channel.close()
        self.pool.close()


def refuse(channel: Channel, reason: str) -> None:
    try:
        channel.try_send(protocol.Refused(reason[:4000]))
    except PeerClosed:
        pass
