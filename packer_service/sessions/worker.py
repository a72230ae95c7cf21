"""What a packer does for one worker, from the handshake to the end of the connection.

Note [The life of an output in the packer]
``Export`` comes first, from the worker's main thread: the pieces get regions of the engine's pool, the copies are submitted
behind the wait for the worker's marker, and the finisher thread sleeps until they are done. Meanwhile ``Skeleton`` (or
``Withdraw``) arrives. With the copies submitted, a plain skeleton goes to the engine (OUTPUT_COMING), which puts the output
together meanwhile; if it does not come after all, that is taken back (OUTPUT_GONE). Once the copies are done and the second
message is there, the output is settled: OUTPUT_READY goes to the engine, and only after that send is it acknowledged to the
worker (a word on its ack page, or a message), so that an output is always in the worker's arena or in the engine's hands. From
then on the regions are the engine's leases. What failed is nacked; the worker sends it another way. Nothing of this waits
until a peer reads (packer_service.wire.outbox).
An import that is this output's alone is closed in between: with the answer, its memory is the worker's to free.

Note [When a worker is gone]
The end of its connection does not say whether it died (packer_service.memory.timeline does). If it is dead, its imports keep
the device memory alive, so whatever its device had completed is still copied and delivered. What had not been completed never
will be: those transfers are marked, the counter is forced until the stream has passed them (the device may write a little
longer), their copies are discarded and their regions released only then. If it only hung up, it exports everything again
somewhere, and its device goes on and will still write the counter: then nothing is forced, published or failed, and what was
submitted ends when the worker's own forward does, or when the worker dies after all.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from packer_service.config import Settings
from packer_service.devices.base import Device, ImportedChunk, Marker, Stream, Timeline
from packer_service.devices.calls import DeviceCall
from packer_service.errors import DescriptorLost, DeviceBusy, DeviceError, PackerError, PeerClosed, ProtocolError
from packer_service.memory.ack_page import AckPage
from packer_service.memory.memfd import check_memfd
from packer_service.memory.timeline import TimelinePage
from packer_service.pool.pool import Region
from packer_service.sessions.engine import EngineSession, refuse
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.outbox import Outbox
from packer_service.wire.protocol import (
    Ack,
    ChunkUnmapped,
    Export,
    Lease,
    MapChunk,
    Nack,
    OutputComing,
    OutputGone,
    OutputReady,
    Piece,
    Ping,
    Pong,
    Probe,
    Probed,
    Skeleton,
    Withdraw,
)

logger = logging.getLogger(__name__)

PROBE_WAIT_S = 10.0  # whatever wait_s says: the pool of a packer's second engine is empty until it grows
_PROBE = ""  # stands for a probe among the outputs; no output is called so
_LIVENESS_POLL_S = 0.02
_LEAVE_S = 0.5
_COPIES_S = 2.0  # for copies on their way when the packer is told to stop
MAX_TRANSFERS = 4096  # outputs of one worker in flight; its arena and overflow bound them long before
MAX_HOST_MEMFDS = 64  # of one worker's outputs in flight: each is a descriptor of this process, which has only so many
MAX_CHUNKS = 1024  # chunks of one worker: each is a mapping
_LAST_SEND_S = 5.0  # what a worker that hung up has to read its last answers, and its engine to read what they wait for
_BUSY_POLL_S = 0.001
_INCOMPLETE = "the worker died before the output was complete on the device"


@dataclass
class Transfer:
    """One output on its way through. See Note [The life of an output in the packer]."""

    export: Export
    copied: bool
    second: Skeleton | Withdraw | Probe | None = None
    host_fd: int | None = None
    regions: list[Region] = field(default_factory=list)
    # The first lease of what the engine was told is coming; 0: it was not. Written without the lock: by the reader before it
    # sets ``second``, then by the finisher or whoever settles it.
    announced: int = 0
    marker: Marker | None = None  # None: not submitted
    abandoned: str = ""  # why its bytes will never be right

    @property
    def output(self) -> str:
        return self.export.output


Then = Callable[[Transfer, Exception | None], None]


class WorkerSession:
    """One worker: its arena chunks and its timeline imported here, one stream, its outputs in flight.

    Two threads: the reader (in ``serve``) takes messages and submits copies; the finisher waits for copies. Whichever finds an
    output copied and both its messages there settles it. One of the two submits at a time: the reader, unless a transfer has
    to wait for room or for the device; then that one and all behind it are the finisher's (``_unsubmitted`` counts them).
    ``_lock`` guards the tables and the transfers in them and is held for bookkeeping alone: for no call to the device or the
    pool, and for no send. The regions and the marker of a transfer are written by whoever submits it.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        engine: EngineSession,
        device: Device,
        settings: Settings,
        leave: threading.Event,
        on_device_failure: Callable[[str], None],
    ) -> None:
        self.name = name
        self.engine = engine
        self._channel = channel
        self._outbox = Outbox(name, channel)
        self._device = device
        self._on_device_failure = on_device_failure
        self._wait_s = settings.wait_s
        self._stream: Stream  # opened in ``serve``
        self._chunks: dict[int, ImportedChunk | str] = {}  # or why the import failed
        self._closing: set[int] = set()  # imports that are let go of, until the worker is told that they are closed
        self._timeline: Timeline | None = None
        self._ack_page: AckPage | None = None
        self._generation = 0
        self._leave = leave  # the packer stops: wait for no forward any more
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}
        self._delivering = 0  # transfers that are settled and of which the engine is not told yet
        self._unanswered: dict[str, str] = {}  # outputs whose nack found nobody, and why they failed
        self._forced = 0  # what the counter was forced to for a live worker's broken device; the reader's
        self._dead = False  # the worker is; written by the reader
        self._host_memfds = 0  # of the transfers
        self._unsubmitted = 0  # transfers in the queue whose copies the finisher has to submit first
        self._finishing: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_all, name=f"finisher-{name}", daemon=True)

    # -- the reader ----------------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """Take messages until the worker is gone, then see its finished outputs off and give everything back.

        False where the packer stops and copies are still under way: nothing they use was given back.
        """
        self._stream = self._device.open_stream()
        try:
            self._finisher.start()
        except RuntimeError as error:
            self._stream.close()
            raise PackerError(f"{error} for a worker: raise the pids limit of this process's cgroup") from error
        reason = ""
        try:
            while True:
                lost = None
                try:
                    received = self._channel.receive(_LIVENESS_POLL_S if self._hold_forced() else None)
                except DescriptorLost as error:
                    self._channel.skip()
                    received, lost = (error.message, []), error
                if received is None:
                    continue
                message, fds = received
                try:
                    if lost is None or not self._hand_back(message, lost):
                        self._handle(message, fds)
                finally:
                    close_fds(fds)
        except PeerClosed:
            logger.info("worker %s is gone", self.name)
        except ProtocolError as error:
            logger.error("worker %s broke the protocol and is disconnected: %s", self.name, error)
            refuse(self._channel, str(error))
            reason = f"the worker broke the protocol: {error}"
            self._channel.shutdown()  # so that it exports elsewhere what it has here
        except (DeviceError, OSError) as error:
            logger.error("worker %s cannot be served and is disconnected: %s", self.name, error)
            self._check_device()  # the context may be what is broken, by another session's error
            reason = f"the packer cannot serve this worker: {error}"
            refuse(self._channel, reason)
            self._channel.shutdown()
        except BaseException:  # out of memory or descriptors, most likely
            self._channel.shutdown()
            raise
        finally:
            ended = self._end(reason or _INCOMPLETE)
        return ended

    def _handle(self, message: protocol.Message, fds: list[int]) -> None:
        """One message. Takes out of ``fds`` the descriptors it keeps."""
        match message:
            case Export():
                self._start(message)
            case Withdraw(incomplete=True):
                self._fail(message)
            case Skeleton() | Withdraw():
                self._take_second(message, fds)
            case MapChunk():
                self._map_chunk(message, fds)
            case protocol.UnmapChunk():
                with self._lock:
                    again = message.chunk in self._closing  # it is answered when that is closed
                    if not again:
                        self._check_unused({message.chunk})
                        self._closing.add(message.chunk)
                if not again:
                    self._unmap_chunks([message.chunk], ChunkUnmapped(message.chunk))
            case protocol.MapTimeline():
                if self._timeline is not None or not fds:
                    raise ProtocolError("a worker sends its timeline once, with its memfd")
                with DeviceCall("the registration of the timeline of worker %s", self.name):
                    self._timeline = self._device.open_timeline(TimelinePage.attach(fds.pop()))
                self._generation = message.generation
            case protocol.MapAcks():
                if self._ack_page is not None or not fds:
                    raise ProtocolError("a worker sends its ack page once, with its memfd")
                self._ack_page = AckPage.attach(fds.pop())
            case Ping():
                self._outbox.send(Pong())
            case Probe():
                self._start(Export(_PROBE, message.ready, (message.piece,), message.event), message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not a worker's to send")

    def _hand_back(self, message: protocol.Message, lost: DescriptorLost) -> bool:
        """Hand back what needed the descriptor and serve on: that our table is full is no fault of this worker's.

        False where the message needs none. Without its two pages a worker cannot be served at all.
        """
        match message:
            case Skeleton():
                self._take_second(message, [], str(lost))
            case MapChunk():
                self._check_new(message)
                self._chunks[message.chunk] = str(lost)
            case protocol.MapTimeline() | protocol.MapAcks():
                raise DeviceError(str(lost))
            case _:
                return False
        logger.error("worker %s: %s", self.name, lost)
        return True

    def _check_new(self, message: MapChunk) -> None:
        with self._lock:
            mapped = self._chunks.keys() | self._closing
        if message.chunk in mapped:
            raise ProtocolError(f"chunk {message.chunk} is mapped already")
        if len(mapped) >= MAX_CHUNKS:
            raise ProtocolError(f"{MAX_CHUNKS} chunks are mapped already")

    def _map_chunk(self, message: MapChunk, fds: list[int]) -> None:
        self._check_new(message)
        try:
            with DeviceCall("the import of chunk %d of worker %s", message.chunk, self.name):
                self._chunks[message.chunk] = self._device.open_chunk(message.handle, fds, message.nbytes)
        except (DeviceError, OSError) as error:
            logger.error("worker %s: chunk %d cannot be imported: %s", self.name, message.chunk, error)
            self._chunks[message.chunk] = str(error)

    def _unmap_chunks(self, numbers: Iterable[int], answer: Ack | Nack | ChunkUnmapped) -> None:
        """Close these imports, which are in ``_closing``, and then send ``answer``."""
        found = [self._chunks.pop(number, "") for number in numbers]
        chunks = [chunk for chunk in found if not isinstance(chunk, str)]
        for chunk in chunks[:-1]:
            chunk.close()
        if chunks:  # closed in order: after the last one, all are
            chunks[-1].close(functools.partial(self._closed, numbers, answer))
        else:
            self._closed(numbers, answer)

    def _closed(self, numbers: Iterable[int], answer: Ack | Nack | ChunkUnmapped) -> None:
        """The numbers of these imports are free for the worker to use again."""
        with self._lock:
            self._closing.difference_update(numbers)
        self._answer(answer)

    def _check_unused(self, chunks: set[int]) -> None:
        """No chunk may be unmapped under a copy: that would take the whole packer down. Nor twice. ``_lock`` is held."""
        if closing := self._closing & chunks:
            raise ProtocolError(f"chunk {closing.pop()} is being closed already")
        for transfer in self._transfers.values():
            pieces = transfer.export.pieces if not transfer.copied else ()
            if used := {*transfer.export.close, *(piece.chunk for piece in pieces)} & chunks:
                raise ProtocolError(f"chunk {used.pop()} is in use by output {transfer.output}")

    def _start(self, export: Export, second: Probe | None = None) -> None:
        """Submit the copies now, if there is room now; otherwise leave them to the finisher, which may wait."""
        if export.pieces and self._timeline is None:
            raise ProtocolError("an output came before the worker's timeline")
        with self._lock:
            if export.output in self._transfers:
                raise ProtocolError(f"output {export.output} is exported already")
            if len(self._transfers) + self._delivering >= MAX_TRANSFERS:
                raise ProtocolError(f"{MAX_TRANSFERS} outputs are in flight already")
            for piece in export.pieces:
                self._check(piece)
            if export.close:
                self._check_unused(set(export.close))
            transfer = self._transfers[export.output] = Transfer(export, copied=not export.pieces, second=second)
            ours = not self._unsubmitted
        if transfer.copied:
            return
        if ours:
            self._try_submit(transfer, timeout_s=0.0)
        if transfer.marker is None:
            with self._lock:
                self._unsubmitted += 1
        self._finishing.put(transfer)

    def _take_second(self, message: Skeleton | Withdraw, fds: list[int], refusal: str = "") -> None:
        """The second and last message of an output: its skeleton, or that it goes another way.

        ``refusal``: why the output has to be handed back although the worker did nothing wrong.
        """
        if isinstance(message, Skeleton) and not refusal:
            if bool(message.body.host_nbytes) != bool(fds):
                raise ProtocolError("host arrays and their memfd come together")
            if fds:
                check_memfd(fds[0], message.body.host_nbytes)
        with self._lock:
            transfer = self._transfers.get(message.output)
            if transfer is None or transfer.second is not None:
                raise ProtocolError(f"output {message.output} was not exported, or is settled already")
            if fds and self._host_memfds >= MAX_HOST_MEMFDS:
                refusal = f"{MAX_HOST_MEMFDS} outputs with host arrays wait for their copies already"
            elif fds:
                transfer.host_fd = fds.pop()
                self._host_memfds += 1
            transfer.abandoned = transfer.abandoned or refusal
        self._announce(transfer, message)
        with self._lock:
            transfer.second = message  # whoever comes second, this or the end of the copy, settles
            copied = transfer.copied
        if copied:
            self._settle(transfer)

    def _announce(self, transfer: Transfer, second: Skeleton | Withdraw | Probe | None) -> None:
        """Have the engine put a plain output together while it is copied. Where it cannot be told, it hears of it later."""
        under_way = transfer.marker is not None and not transfer.copied and not transfer.abandoned
        if not under_way or transfer.announced or not isinstance(second, Skeleton) or not second.plain:
            return
        leases = _leases(transfer)
        transfer.announced = leases[0].lease
        message = OutputComing(transfer.output, leases, second.body)
        self.engine.publish(message, transfer.host_fd, functools.partial(self._announcement_sent, transfer))

    def _announcement_sent(self, transfer: Transfer, error: Exception | None) -> None:
        if error is not None:
            transfer.announced = 0  # the error is met again when the output is published

    def _fail(self, message: Withdraw) -> None:
        """The worker's device broke: release the wait that nothing will meet, and let the engine know."""
        with self._lock:
            transfer = self._transfers.get(message.output)
            if transfer is None or (transfer.copied and transfer.second is not None):
                return  # it was complete after all
            transfer.second = message
            transfer.abandoned = transfer.abandoned or message.error or "its worker's device broke"
            copied = transfer.copied
            # What came before must not pass for complete. The worker fails its outputs in order, so that is for a broken one.
            before = [t for t in self._incomplete() if t.export.ready < transfer.export.ready]
            if all(t.abandoned or isinstance(t.second, Withdraw) for t in before):
                self._forced = max(self._forced, transfer.export.ready)
        self._hold_forced()
        if copied:
            self._settle(transfer)

    def _hold_forced(self) -> bool:
        """Force the counter, also where the broken device wrote it after that; whether a copy still needs it."""
        if not self._forced or self._timeline is None:
            return False
        page = self._timeline.page
        if page.counter < self._forced:
            page.counter = self._forced
        with self._lock:
            needed = any(not t.copied and t.export.ready <= self._forced for t in self._transfers.values())
        self._forced = self._forced if needed else 0
        return needed

    def _check(self, piece: Piece) -> None:
        """A piece must lie inside its chunk, as the device itself measured it."""
        chunk = self._chunks.get(piece.chunk)
        if chunk is None or piece.chunk in self._closing:
            raise ProtocolError(f"chunk {piece.chunk} was never mapped, or is let go of")
        if any(piece.chunk in other.export.close for other in self._transfers.values()):
            raise ProtocolError(f"chunk {piece.chunk} is in use by an output that will close it")
        if not isinstance(chunk, str) and piece.offset + piece.nbytes > chunk.nbytes:
            raise ProtocolError(
                f"{piece.nbytes} bytes at {piece.offset} lie outside chunk {piece.chunk} of {chunk.nbytes}"
            )

    # -- copying -------------------------------------------------------------------------------------------------------

    def _try_submit(self, transfer: Transfer, timeout_s: float, *, last: bool = False) -> None:
        """Give the transfer regions and submit its copies; where it cannot now, ``marker`` stays None.

        ``last``: where there is no room, the transfer is abandoned.
        """
        try:
            for piece in transfer.export.pieces[len(transfer.regions) :]:
                transfer.regions.append(self.engine.pool.allocate(piece.nbytes, timeout_s))
        except PackerError as error:
            if last:
                self._check_device()  # a broken context keeps the pool from growing too
                transfer.abandoned = str(error)
                self.engine.pool.complain()
            return
        due = functools.partial(self._is_due, transfer)  # before that, the stream may hold as much as it can
        with DeviceCall("the submission of output %s of worker %s", transfer.output, self.name, due=due):
            try:
                transfer.marker = self._submit(transfer.export, transfer.regions)
            except DeviceBusy:  # the finisher tries again
                return
            except DeviceError as error:
                self._check_device()
                transfer.abandoned = str(error)
                transfer.marker = self._stream.record()  # what was submitted must be past before the regions go back

    def _submit(self, export: Export, regions: list[Region]) -> Marker:
        if export.event and not self._dead:  # the page says what a dead worker completed
            self._stream.wait_event(export.event)
        else:
            assert self._timeline is not None  # _start looked
            self._stream.wait_timeline(self._timeline, export.ready)
        for piece, region in zip(export.pieces, regions, strict=True):
            chunk = self._chunks[piece.chunk]
            if isinstance(chunk, str):
                raise DeviceError(chunk)
            self._stream.copy_to_host(region.address, chunk, piece.offset, piece.nbytes)
        return self._stream.record()

    def _check_device(self) -> None:
        """An error of one call fails one output; one that breaks the context ends the packer, which is started again."""
        with DeviceCall("a query of the device"):
            failure = self._device.failure()
        if failure:
            self._on_device_failure(f"the device cannot be used any more: {failure}")

    # -- the finisher --------------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        try:
            self._device.bind_thread()
        except DeviceError as error:
            self._on_device_failure(f"a thread cannot use the device: {error}")
        while (transfer := self._finishing.get()) is not None:
            try:
                self._finish_or_abandon(transfer)
            except Exception:
                logger.exception("worker %s cannot be answered and is disconnected", self.name)
                self.disconnect()  # it exports elsewhere what it was told nothing of

    def _finish_or_abandon(self, transfer: Transfer) -> None:
        try:
            self._finish(transfer)
        except Exception as error:
            logger.exception("output %s failed in the packer", transfer.output)
            self._check_device()
            with self._lock:
                transfer.abandoned = transfer.abandoned or f"{type(error).__name__}: {error}"
                transfer.copied = True
                complete = self._transfers.get(transfer.output) is transfer and transfer.second is not None
            if complete:
                self._settle(transfer)

    def _finish(self, transfer: Transfer) -> None:
        if transfer.marker is None:
            wait_s = max(self._wait_s, PROBE_WAIT_S) if isinstance(transfer.second, Probe) else self._wait_s
            try:
                while transfer.marker is None and not transfer.abandoned:
                    self._try_submit(transfer, wait_s, last=True)
                    if transfer.marker is None and not transfer.abandoned:  # the device is busy
                        time.sleep(_BUSY_POLL_S)
            finally:
                with self._lock:
                    self._unsubmitted -= 1
                    second = transfer.second
            self._announce(transfer, second)
        if transfer.marker is not None:
            due = functools.partial(self._is_due, transfer)
            with DeviceCall("the copy of output %s of worker %s", transfer.output, self.name, due=due):
                transfer.marker.synchronize()
        with self._lock:
            transfer.copied = True
            complete = transfer.second is not None
        if complete:
            self._settle(transfer)

    def _is_due(self, transfer: Transfer) -> bool:
        """Whether its wait is met, and so those of all before it in the stream."""
        return self._timeline is not None and self._timeline.page.counter >= transfer.export.ready

    def _settle(self, transfer: Transfer) -> None:
        """Copied, and both messages there: publish and acknowledge, or hand back."""
        with self._lock:
            self._transfers.pop(transfer.output, None)
            self._closing.update(transfer.export.close)
        page = self._timeline.page if self._timeline is not None else None
        if page is not None and transfer.export.pieces and page.completed < transfer.export.ready:
            transfer.abandoned = transfer.abandoned or _INCOMPLETE  # another connection's session forced the counter
        if page is not None and page.generation != self._generation:
            self._drop(
                transfer
            )  # see packer_service.memory.timeline: it may have been overwritten, and is exported again
        elif isinstance(transfer.second, Probe):
            self._answer_probe(transfer)
        elif isinstance(transfer.second, Withdraw):
            self._drop(transfer)
            if transfer.second.error:
                self._deliver(
                    transfer, OutputReady(transfer.output, error=transfer.second.error), None, self._withdrawn
                )
            else:
                self._withdrawn(transfer, None)
        elif transfer.abandoned:
            self._nack(transfer)
        else:
            self._publish(transfer)

    def _deliver(self, transfer: Transfer, message: OutputReady, fd: int | None, then: Then) -> None:
        """Send the engine its last message of this output; ``then`` is called when it is sent or cannot be."""
        with self._lock:
            self._delivering += 1
        self.engine.publish(message, fd, functools.partial(self._told, transfer, then))

    def _told(self, transfer: Transfer, then: Then, error: Exception | None) -> None:
        try:
            then(transfer, error)
        finally:
            with self._lock:
                self._delivering -= 1

    def _withdrawn(self, transfer: Transfer, error: Exception | None) -> None:
        self._log_untold(transfer.output, error)
        self._unmap_chunks(transfer.export.close, Ack(transfer.output))

    def _answer_probe(self, transfer: Transfer) -> None:
        """A probe does once, for nothing, what every output needs: wait for the marker, copy, read."""
        digest = b""
        if not transfer.abandoned:
            (region,) = transfer.regions
            # a view: the region may be as large as the pool, and a slice of the buffer would copy it
            with memoryview(region.segment.memory.buffer)[region.offset : region.offset + region.nbytes] as data:
                digest = hashlib.sha256(data).digest()
        self._drop(transfer)
        self._outbox.send(Probed(digest, transfer.abandoned[:4000]))

    def _publish(self, transfer: Transfer) -> None:
        skeleton = transfer.second
        assert isinstance(skeleton, Skeleton)
        if transfer.announced:
            message, fd = OutputReady(transfer.output, _leases(transfer)), None
        else:
            message, fd = OutputReady(transfer.output, _leases(transfer), skeleton.body), transfer.host_fd
        self.engine.pool.lease(transfer.regions)
        self._deliver(transfer, message, fd, self._published)

    def _published(self, transfer: Transfer, error: Exception | None) -> None:
        if error is None:
            transfer.regions, transfer.announced = [], 0  # the engine's now
            self._drop(transfer)
            assert isinstance(transfer.second, Skeleton)
            self._acknowledge(transfer.export, transfer.second)
            return
        transfer.regions = self.engine.pool.reclaim(transfer.regions)
        if isinstance(error, PeerClosed):
            self._drop(transfer)
        else:
            transfer.abandoned = f"OUTPUT_READY could not be sent: {error}"
            self._nack(transfer)

    def _acknowledge(self, export: Export, skeleton: Skeleton) -> None:
        """The engine has it. A note on the ack page where the worker holds only slots for it, which it misses when it runs out
        of room; a message where it holds more (host arrays, an allocation), or where that page is full or was never sent."""
        may_wait = not export.close and not skeleton.body.host_nbytes
        if may_wait and self._ack_page is not None and self._ack_page.put(export.ready):
            return
        self._unmap_chunks(export.close, Ack(export.output))

    def _nack(self, transfer: Transfer) -> None:
        """Tell the worker to send this output another way; where the worker is gone, tell the engine that it failed."""
        self._drop(transfer)
        logger.warning("output %s of worker %s is handed back: %s", transfer.output, self.name, transfer.abandoned)
        nack = Nack(transfer.output, transfer.abandoned[:4000])
        self._unanswered[nack.output] = nack.reason  # the engine's to know, if the worker dies before it does
        self._unmap_chunks(transfer.export.close, nack)

    def _answer(self, answer: Ack | Nack | ChunkUnmapped) -> None:
        """Send it. A nack that finds nobody, or only the socket of a dead worker, stays in ``_unanswered``."""
        self._outbox.send(answer, done=functools.partial(self._answered, answer))

    def _answered(self, answer: Ack | Nack | ChunkUnmapped, error: Exception | None) -> None:
        if error is None:
            if isinstance(answer, Nack) and (self._timeline is None or self._timeline.page.owner_lives()):
                self._unanswered.pop(answer.output, None)
        elif not isinstance(error, PeerClosed):
            logger.error("worker %s cannot be answered and is disconnected: %s", self.name, error)
            self.disconnect()  # it exports elsewhere what it was told nothing of

    def _drop(self, transfer: Transfer) -> None:
        """Give back what the transfer still holds."""
        if transfer.announced:
            self.engine.tell(OutputGone(transfer.announced), done=functools.partial(self._log_untold, transfer.output))
            transfer.announced = 0
        for region in transfer.regions:
            self.engine.pool.release(region.number)
        transfer.regions = []
        if transfer.host_fd is not None:
            close_fds([transfer.host_fd])
            transfer.host_fd = None
            with self._lock:
                self._host_memfds -= 1

    def _log_untold(self, output: str, error: Exception | None) -> None:
        """Of an output that failed, or does not come after all."""
        if isinstance(error, PeerClosed):
            logger.info("engine %s is gone before it could be told that output %s failed", self.engine.name, output)
        elif error is not None:
            logger.error("engine %s cannot be told that output %s failed: %s", self.engine.name, output, error)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> bool:
        """See the finisher off, then give everything back. False where the packer stops and copies are still under way."""
        tell = self._see_off(reason)
        self._finishing.put(None)
        patience_s = _LEAVE_S
        while self._finisher.is_alive():
            self._end_waits()
            self._finisher.join(_LIVENESS_POLL_S)
            if self._leave.is_set():
                patience_s -= _LIVENESS_POLL_S
                if patience_s <= 0:
                    return False
        if not self._dead:
            deadline = time.monotonic() + (_LEAVE_S if self._leave.is_set() else _LAST_SEND_S)
            while self._delivering and time.monotonic() < deadline:
                time.sleep(_LIVENESS_POLL_S)
            self._outbox.flush(deadline - time.monotonic())
        self._channel.shutdown()
        self._close(tell)
        return True

    def _end_waits(self) -> None:
        """Release whatever waits for a dead worker's device, which may have undone the last time."""
        if self._dead and self._timeline is not None:
            with self._lock:
                value = max((t.export.ready for t in self._transfers.values() if not t.copied), default=0)
            self._timeline.page.end_at(value)

    def _see_off(self, reason: str) -> bool:
        """Wait until it is known whether the worker died, or nothing it completes is waited for. Whether its engine is to know.

        See Note [When a worker is gone].
        """
        if self._timeline is None:  # nothing tells whether it lives, and there is hardly anything to tell of it
            return bool(self._transfers)
        page = self._timeline.page
        while True:
            self._dead = not page.owner_lives()
            void = page.generation != self._generation
            with self._lock:
                incomplete = self._incomplete()
                if self._dead:
                    for transfer in incomplete:
                        transfer.abandoned = reason
            if self._dead:
                self._end_waits()
                return not void
            if void and not incomplete:
                return False
            if self._leave.wait(_LIVENESS_POLL_S):
                deadline = time.monotonic() + _COPIES_S
                while self._due() is not None and time.monotonic() < deadline:
                    time.sleep(_LIVENESS_POLL_S)
                return False

    def _incomplete(self) -> list[Transfer]:
        """What the worker's device has not finished. ``_lock`` is held."""
        completed = self._timeline.page.completed if self._timeline is not None else 0
        return [t for t in self._transfers.values() if not t.copied and t.export.ready > completed]

    def _due(self) -> Transfer | None:
        """The copy that the device should be at, or None where the first that is not done waits for its forward.

        The stream is in order: whatever is behind the first may wait for that one's forward, though its own wait is met.
        """
        with self._lock:
            counter = self._timeline.page.counter if self._timeline is not None else 0
            first = next((t for t in self._transfers.values() if t.marker and not t.copied), None)
            return first if first is not None and first.export.ready <= counter else None

    def _close(self, tell: bool) -> None:
        """Give everything back; what a dead worker left half-sent fails."""
        for transfer in self._transfers.values():  # no second message ever came
            self._drop(transfer)
            self._unanswered[transfer.output] = "the worker died while it was sending this output"
        self._transfers.clear()
        if tell:
            for output, reason in self._unanswered.copy().items():
                done = functools.partial(self._log_untold, output)
                self.engine.tell(OutputReady(output, error=reason), done=done)
            self.engine.tell_worker_gone()
        self._stream.close()
        chunks, self._chunks = self._chunks, {}  # an ack that comes later finds none to close
        for chunk in chunks.values():
            if not isinstance(chunk, str):
                chunk.close()
        if self._timeline is not None:
            self._timeline.close()
        if self._ack_page is not None:
            self._ack_page.close()
        self._device.drain()
        self._outbox.close()  # only now may the worker free its memory

    def disconnect(self) -> None:
        """Have ``serve`` end, from another thread."""
        self._channel.shutdown()

    # -- other threads ask ---------------------------------------------------------------------------------------------

    def describe(self, output: str) -> str:
        """How far an output is; empty where this session does not have it."""
        with self._lock:
            transfer = self._transfers.get(output)
            if transfer is None:
                return ""
            counter = self._timeline.page.counter if self._timeline is not None else 0
            if transfer.copied:
                state = "copied" if not transfer.abandoned else f"failed ({transfer.abandoned})"
            elif len(transfer.regions) < len(transfer.export.pieces):
                state = "waiting for room in the pool"
            elif transfer.export.ready > counter:
                state = "waiting for the worker's forward"
            else:
                state = "copying"
            return state if transfer.second is not None else f"{state}, and its worker has not sent its skeleton"


def _leases(transfer: Transfer) -> tuple[Lease, ...]:
    """What its regions are to the engine."""
    return tuple(Lease(r.number, r.segment.number, r.offset, r.nbytes) for r in transfer.regions)
