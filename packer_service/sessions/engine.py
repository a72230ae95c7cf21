"""What a packer does for one engine: its pool, the segments it maps, the outputs it is sent, the leases it returns."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable

from packer_service.errors import DescriptorLost, PackerError, PeerClosed, ProtocolError
from packer_service.pool.pool import Pool
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, Done, Outbox, close_fds, ignore
from packer_service.wire.protocol import MapSegment, OutputComing, OutputReady, UnmapSegment

logger = logging.getLogger(__name__)


class EngineSession:
    """One engine. The reader (the thread in ``serve``) takes leases back; any thread sends, and none ever waits for it."""

    def __init__(self, name: str, channel: Channel, pool: Pool, describe: Callable[[str], str]) -> None:
        self.name = name
        self.pid = channel.peer_pid  # as this process sees it; 0 where that is another pid namespace
        self.pool = pool
        self._describe = describe  # how far an output of any of its workers is
        self._channel = channel
        self._outbox = Outbox(name, channel)
        self._lock = threading.Lock()  # guards _mapped, and has a segment go before what lies in it
        self._mapped: set[int] = set()  # segments that the engine was told to map
        pool.on_trim = self._unmap_segment
        pool.owner = name

    def serve(self) -> None:
        """Take leases back until the engine is gone."""
        try:
            self._map_segments()
            while True:
                try:
                    received = self._channel.receive()
                except DescriptorLost as error:  # no message of an engine needs one
                    self._channel.skip()
                    received = error.message, []
                assert received is not None
                message, fds = received
                close_fds(fds)
                match message:
                    case protocol.Ping():
                        self._outbox.send(protocol.Pong())
                    case protocol.Describe():
                        self._outbox.send(protocol.Described(message.output, self._describe(message.output)))
                    case protocol.SegmentLost():
                        with self._lock:
                            self._mapped.discard(message.segment)
                        self._map_segments()
                    case protocol.Release():
                        self._end_leases(message.leases)
        except PeerClosed:
            logger.info("engine %s is gone", self.name)
        except ProtocolError as error:
            logger.error("engine %s broke the protocol and is disconnected: %s", self.name, error)
            refuse(self._channel, str(error))
        except OSError as error:
            logger.error("engine %s cannot be served and is disconnected: %s", self.name, error)
            refuse(self._channel, f"the packer cannot serve you: {error}")

    def _end_leases(self, leases: tuple[int, ...]) -> None:
        for lease in leases:
            try:
                self.pool.end_lease(lease)
            except ProtocolError as error:
                logger.warning("engine %s: %s", self.name, error)

    def _map_segments(self) -> None:
        """Have the engine map every segment that it has not yet, before an output needs it."""
        with self._lock:
            for segment in self.pool.segments:
                if segment.number not in self._mapped:
                    message = MapSegment(segment.number, segment.memory.nbytes)
                    self._outbox.offer(message, segment.memory.fd, ignore)
                    self._mapped.add(segment.number)

    def _unmap_segment(self, number: int) -> None:
        with self._lock:
            if number in self._mapped:
                self._mapped.discard(number)
                self._outbox.send(UnmapSegment(number), done=functools.partial(self._unmap_sent, number))

    def _unmap_sent(self, number: int, error: Exception | None) -> None:
        if error is not None and not isinstance(error, PeerClosed):  # who is gone unmaps everything
            logger.error("engine %s cannot be told that segment %d left: %s", self.name, number, error)

    def publish(self, message: OutputComing | OutputReady, fd: int | None = None, done: Done = ignore) -> None:
        """``tell``, once the engine was told to map the segments that the output lies in."""
        try:
            if any(lease.segment not in self._mapped for lease in message.leases):
                self._map_segments()
        except (PackerError, OSError) as error:
            done(error)
        else:
            self.tell(message, fd, done)

    def tell(self, message: protocol.Message, fd: int | None = None, done: Done = ignore) -> None:
        """Send a message, as soon as the engine reads. ``done`` is called once, now or later."""
        self._outbox.send(message, fd, done)

    def disconnect(self) -> None:
        """Have ``serve`` end, from another thread."""
        self._channel.shutdown()

    def close(self) -> None:
        self._outbox.close()
        self.pool.close()


def refuse(channel: Channel, reason: str) -> None:
    with contextlib.suppress(PeerClosed, OSError):  # it hears of its end all the same
        channel.try_send(protocol.Refused(reason[:4000]))
