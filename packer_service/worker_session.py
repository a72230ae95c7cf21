"""What a packer does for one worker, from the handshake to the end of the connection.

Note [The life of an output in the packer]
``Export`` comes first, from the worker's main thread: the pieces get regions of the engine's pool, the copies are submitted
behind the wait for the worker's marker, and the finisher thread sleeps until they are done. Meanwhile ``Skeleton`` (or
``Withdraw``) arrives. With the copies submitted, a plain skeleton goes to the engine (OUTPUT_COMING), which puts the output
together meanwhile; if it does not come after all, that is taken back (OUTPUT_GONE). Once the copies are done and the second
message is there, the output is settled: OUTPUT_READY goes to the engine, and only after that send is it acknowledged to the
worker (a word on its ack page, or a message), so that an output is always in the worker's arena or in the engine's hands. From
then on the regions are the engine's leases. What failed is nacked; the worker sends it another way.
An import that is this output's alone is closed in between: with the answer, its memory is the worker's to free.

Note [When a worker is gone]
The end of its connection does not say whether it died (packer_service.timeline does). If it is dead, its imports keep the
device memory alive, so whatever its device had completed is still copied and delivered. What had not been completed never
will be: those transfers are marked, the counter is forced so that the stream moves on, their copies are discarded and their
regions released only after the stream has passed them. If it only hung up, it exports everything again somewhere, and its
device goes on and will still write the counter: then nothing is forced, published or failed, and what was submitted ends
when the worker's own forward does, or when the worker dies after all.
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

from packer_service import protocol
from packer_service.ack_page import AckPage
from packer_service.config import Settings
from packer_service.devices.base import Arena, Device, Marker, Stream, Timeline
from packer_service.engine_session import EngineSession, refuse
from packer_service.errors import DescriptorLost, DeviceBusy, DeviceError, PackerError, PeerClosed, ProtocolError
from packer_service.memory import check_memfd
from packer_service.pool import Region
from packer_service.protocol import (
    Ack,
    Export,
    Fail,
    Lease,
    MapArena,
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
    Unmapped,
    Withdraw,
)
from packer_service.timeline import TimelinePage
from packer_service.transport import Channel, close_fds

logger = logging.getLogger(__name__)

PROBE_WAIT_S = 10.0  # whatever wait_s says: the pool of a packer's second engine is empty until it grows
_PROBE = ""  # stands for a probe among the outputs; no output is called so
_LIVENESS_POLL_S = 0.02
_LEAVE_S = 0.5
_COPIES_S = 2.0  # for copies on their way when the packer is told to stop
MAX_TRANSFERS = 4096  # outputs of one worker in flight; its arena and overflow bound them long before
MAX_HOST_MEMFDS = 64  # of one worker's outputs in flight: each is a descriptor of this process, which has only so many
MAX_ARENAS = 1024  # chunks of one worker: each is a mapping
_LAST_SEND_S = 5.0  # what a worker that hung up has to read its last answers
_BUSY_POLL_S = 0.001


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


class WorkerSession:
    """One worker: its arena chunks and its timeline imported here, one stream, its outputs in flight.

    Two threads: the reader (in ``serve``) takes messages and submits copies; the finisher waits for copies, publishes and
    acknowledges. ``_lock`` guards ``_transfers``, every Transfer in it, and ``_closing``.
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
        self.outputs = 0  # published; written under _lock
        self.nacks = 0
        self._channel = channel
        self._device = device
        self._on_device_failure = on_device_failure
        self._wait_s = settings.wait_s
        self._stream: Stream = device.open_stream()
        self._arenas: dict[int, Arena | str] = {}  # or why the import failed
        self._closing: set[int] = set()  # imports that are let go of, until the worker is told that they are closed
        self._timeline: Timeline | None = None
        self._ack_page: AckPage | None = None
        self._generation = 0
        self._leave = leave  # the packer stops: wait for no forward any more
        self._lock = threading.Lock()
        self._transfers: dict[str, Transfer] = {}
        self._unanswered: dict[str, str] = {}  # outputs whose nack found nobody, and why they failed
        self._synchronizing: Transfer | None = None  # whose copies the finisher waits for; written by it alone
        self._watched: Transfer | None = None  # watchdog only: the copy it last saw under way,
        self._looks = 0  # and how many times in a row
        self._host_memfds = 0  # of these transfers; written under _lock
        self._unsubmitted = 0  # transfers in the queue whose copies the finisher has to submit first
        self._finishing: queue.SimpleQueue[Transfer | Callable[[], object] | None] = queue.SimpleQueue()
        self._finisher = threading.Thread(target=self._finish_all, name=f"finisher-{name}", daemon=True)

    # -- the reader ----------------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """Take messages until the worker is gone, then see its finished outputs off and give everything back.

        False where the packer stops and copies are still under way: nothing they use was given back.
        """
        self._device.bind_thread()
        self._finisher.start()
        reason = ""
        try:
            while True:
                lost = None
                try:
                    received = self._channel.receive()
                except DescriptorLost as error:
                    self._channel.skip()
                    received, lost = (error.message, []), error
                assert received is not None
                message, fds = received
                try:
                    if lost is None or not self._hand_back(message, lost):
                        self._handle(message, fds)
                except PeerClosed:  # an answer found nobody; what the worker sent before it died is still to be read
                    pass
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
            ended = self._end(reason or "the worker died before the output was complete on the device")
        return ended

    def _handle(self, message: protocol.Message, fds: list[int]) -> None:
        """One message. Takes out of ``fds`` the descriptors it keeps."""
        match message:
            case Export():
                self._start(message)
            case Skeleton() | Withdraw():
                self._take_second(message, fds)
            case MapArena():
                self._map_arena(message, fds)
            case protocol.UnmapArena():
                with self._lock:
                    again = message.arena in self._closing  # it is answered when that is closed
                    if not again:
                        self._check_unused({message.arena})
                        self._closing.add(message.arena)
                if not again:
                    self._unmap_arenas([message.arena], Unmapped(message.arena))
            case protocol.MapTimeline():
                if self._timeline is not None or not fds:
                    raise ProtocolError("a worker sends its timeline once, with its memfd")
                self._timeline = self._device.open_timeline(TimelinePage.attach(fds.pop()))
                self._generation = message.generation
            case protocol.MapAcks():
                if self._ack_page is not None or not fds:
                    raise ProtocolError("a worker sends its ack page once, with its memfd")
                self._ack_page = AckPage.attach(fds.pop())
            case Fail():
                self._fail(message)
            case Ping():
                self._channel.send(Pong())
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
            case MapArena():
                self._check_new(message)
                self._arenas[message.arena] = str(lost)
            case protocol.MapTimeline() | protocol.MapAcks():
                raise DeviceError(str(lost))
            case _:
                return False
        logger.error("worker %s: %s", self.name, lost)
        return True

    def _check_new(self, message: MapArena) -> None:
        with self._lock:
            mapped = self._arenas.keys() | self._closing
        if message.arena in mapped:
            raise ProtocolError(f"arena chunk {message.arena} is mapped already")
        if len(mapped) >= MAX_ARENAS:
            raise ProtocolError(f"{MAX_ARENAS} arena chunks are mapped already")

    def _map_arena(self, message: MapArena, fds: list[int]) -> None:
        self._check_new(message)
        try:
            self._arenas[message.arena] = self._device.open_arena(message.handle, fds, message.nbytes)
        except (DeviceError, OSError) as error:
            logger.error("worker %s: arena chunk %d cannot be imported: %s", self.name, message.arena, error)
            self._arenas[message.arena] = str(error)

    def _unmap_arenas(self, numbers: Iterable[int], answer: Ack | Nack | Unmapped) -> None:
        """Close these imports, which are in ``_closing``; then the finisher sends ``answer``, for sending may wait."""
        found = [self._arenas.pop(number, "") for number in numbers]
        arenas = [arena for arena in found if not isinstance(arena, str)]
        for arena in arenas[:-1]:
            arena.close()
        if arenas:  # closed in order: after the last one, all are
            arenas[-1].close(functools.partial(self._finishing.put, functools.partial(self._closed, numbers, answer)))
        else:
            self._closed(numbers, answer)

    def _closed(self, numbers: Iterable[int], answer: Ack | Nack | Unmapped) -> None:
        """The numbers of these imports are free for the worker to use again."""
        with self._lock:
            self._closing.difference_update(numbers)
        self._answer(answer)

    def _check_unused(self, arenas: set[int]) -> None:
        """No chunk may be unmapped under a copy: that would take the whole packer down. Nor twice. ``_lock`` is held."""
        if closing := self._closing & arenas:
            raise ProtocolError(f"arena chunk {closing.pop()} is being closed already")
        for transfer in self._transfers.values():
            pieces = transfer.export.pieces if not transfer.copied else ()
            if used := {*transfer.export.close, *(piece.arena for piece in pieces)} & arenas:
                raise ProtocolError(f"arena chunk {used.pop()} is in use by output {transfer.output}")

    def _start(self, export: Export, second: Probe | None = None) -> None:
        """Submit the copies now, if there is room now; otherwise leave them to the finisher, which may wait."""
        if export.pieces and not export.event and self._timeline is None:
            raise ProtocolError("an output came before the worker's timeline")
        with self._lock:
            if export.output in self._transfers:
                raise ProtocolError(f"output {export.output} is exported already")
            if len(self._transfers) >= MAX_TRANSFERS:
                raise ProtocolError(f"{MAX_TRANSFERS} outputs are in flight already")
            for piece in export.pieces:
                self._check(piece)
            if export.close:
                self._check_unused(set(export.close))
            transfer = self._transfers[export.output] = Transfer(export, copied=not export.pieces, second=second)
            if transfer.copied:
                return
            if not self._unsubmitted:
                self._try_submit(transfer, timeout_s=0.0)
            if transfer.marker is None:
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
        self._announce(transfer, message, wait=False)
        with self._lock:
            transfer.second = message  # whoever comes second, this or the end of the copy, settles
            copied = transfer.copied
        if copied:
            self._complete(transfer)

    def _announce(self, transfer: Transfer, second: Skeleton | Withdraw | Probe | None, *, wait: bool) -> None:
        """Have the engine put a plain output together while it is copied. Where it cannot be told now, it hears of it later."""
        under_way = transfer.marker is not None and not transfer.copied and not transfer.abandoned
        if not under_way or transfer.announced or not isinstance(second, Skeleton) or not second.plain:
            return
        leases = _leases(transfer)
        message = OutputComing(transfer.output, leases, second.body)
        try:
            if self.engine.publish(message, transfer.host_fd, wait=wait):
                transfer.announced = leases[0].lease
        except (PackerError, OSError):  # it is met again when the output is published
            pass

    def _complete(self, transfer: Transfer) -> None:
        """Settle on the reader's thread unless the engine does not read: that must not keep the worker from its Pong."""
        if not self._settle(transfer, wait=False):
            self._finishing.put(transfer)

    def _fail(self, message: Fail) -> None:
        """The worker's device broke: release the wait that nothing will meet, and let the engine know."""
        with self._lock:
            transfer = self._transfers.get(message.output)
            if transfer is None or (transfer.copied and transfer.second is not None):
                return  # it was complete after all
            transfer.second = Withdraw(message.output, message.error)
            copied = transfer.copied
            # What came before must not pass for complete. The worker fails its outputs in order, so that is for a broken one.
            before = [t for t in self._incomplete() if t.export.ready < transfer.export.ready]
            if all(isinstance(t.second, Withdraw) or t.abandoned for t in before):
                self._force(transfer.export.ready)
        if copied:
            self._complete(transfer)

    def _force(self, value: int) -> None:
        if self._timeline is not None and self._timeline.page.counter < value:
            self._timeline.page.counter = value

    def _check(self, piece: Piece) -> None:
        """A piece must lie inside its chunk, as the device itself measured it."""
        arena = self._arenas.get(piece.arena)
        if arena is None or piece.arena in self._closing:
            raise ProtocolError(f"arena chunk {piece.arena} was never mapped, or is let go of")
        if any(piece.arena in other.export.close for other in self._transfers.values()):
            raise ProtocolError(f"arena chunk {piece.arena} is in use by an output that will close it")
        if not isinstance(arena, str) and piece.offset + piece.nbytes > arena.nbytes:
            raise ProtocolError(
                f"{piece.nbytes} bytes at {piece.offset} lie outside arena chunk {piece.arena} of {arena.nbytes}"
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
        try:
            transfer.marker = self._submit(transfer.export, transfer.regions)
        except DeviceBusy:  # the finisher tries again
            return
        except DeviceError as error:
            self._check_device()
            transfer.abandoned = str(error)
            transfer.marker = self._stream.record()  # what was submitted must be past before the regions go back

    def _submit(self, export: Export, regions: list[Region]) -> Marker:
        if export.event:
            self._stream.wait_event(export.event)
        else:
            assert self._timeline is not None  # _start looked
            self._stream.wait_timeline(self._timeline, export.ready)
        for piece, region in zip(export.pieces, regions, strict=True):
            arena = self._arenas[piece.arena]
            if isinstance(arena, str):
                raise DeviceError(arena)
            self._stream.copy_to_host(region.address, arena, piece.offset, piece.nbytes)
        return self._stream.record()

    def _check_device(self) -> None:
        """An error of one call fails one output; one that breaks the context ends the packer, which is started again."""
        if failure := self._device.failure():
            self._on_device_failure(f"the device cannot be used any more: {failure}")

    # -- the finisher --------------------------------------------------------------------------------------------------

    def _finish_all(self) -> None:
        self._device.bind_thread()
        while (job := self._finishing.get()) is not None:
            try:
                if isinstance(job, Transfer):
                    self._finish_or_abandon(job)
                else:
                    job()
            except PeerClosed:
                pass  # the reader sees it too, and ends the session
            except Exception:
                logger.exception("worker %s cannot be answered and is disconnected", self.name)
                self.disconnect()  # it exports elsewhere what it was told nothing of

    def _finish_or_abandon(self, transfer: Transfer) -> None:
        try:
            self._finish(transfer)
        except PeerClosed:
            raise
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
        if transfer.copied:  # the reader completed it
            self._settle(transfer)
            return
        if transfer.marker is None:
            wait_s = max(self._wait_s, PROBE_WAIT_S) if isinstance(transfer.second, Probe) else self._wait_s
            while transfer.marker is None and not transfer.abandoned:
                self._try_submit(transfer, wait_s, last=True)
                if transfer.marker is None and not transfer.abandoned:  # the device is busy
                    time.sleep(_BUSY_POLL_S)
            with self._lock:
                self._unsubmitted -= 1
                second = transfer.second
            self._announce(transfer, second, wait=True)
        if transfer.marker is not None:
            self._synchronizing = transfer
            transfer.marker.synchronize()
            self._synchronizing = None
        with self._lock:
            transfer.copied = True
            complete = transfer.second is not None
        if complete:
            self._settle(transfer)

    def _settle(self, transfer: Transfer, *, wait: bool = True) -> bool:
        """Copied, and both messages there: publish and acknowledge, or hand back. False where that has to wait and may not."""
        with self._lock:
            self._transfers.pop(transfer.output, None)
            self._closing.update(transfer.export.close)
        if self._timeline is not None and self._timeline.page.generation != self._generation:
            self._drop(transfer)  # see packer_service.timeline: it may have been overwritten, and is exported again
        elif isinstance(transfer.second, Probe):
            self._answer_probe(transfer)
        elif isinstance(transfer.second, Withdraw):
            self._drop(transfer)
            error = transfer.second.error
            if error and not self._tell_engine(OutputReady(transfer.output, error=error), wait=wait):
                return False
            self._unmap_arenas(transfer.export.close, Ack(transfer.output))
        elif transfer.abandoned:
            self._nack(transfer)
        else:
            return self._publish(transfer, wait=wait)
        return True

    def _answer_probe(self, transfer: Transfer) -> None:
        """A probe does once, for nothing, what every output needs: wait for the marker, copy, read."""
        digest = b""
        if not transfer.abandoned:
            (region,) = transfer.regions
            # a view: the region may be as large as the pool, and a slice of the buffer would copy it
            with memoryview(region.segment.memory.buffer)[region.offset : region.offset + region.nbytes] as data:
                digest = hashlib.sha256(data).digest()
        self._drop(transfer)
        self._channel.send(Probed(digest, transfer.abandoned[:4000]))

    def _publish(self, transfer: Transfer, *, wait: bool) -> bool:
        skeleton = transfer.second
        assert isinstance(skeleton, Skeleton)
        if transfer.announced:
            message, fd = OutputReady(transfer.output, _leases(transfer)), None
        else:
            message, fd = OutputReady(transfer.output, _leases(transfer), skeleton.body), transfer.host_fd
        self.engine.pool.lease(transfer.regions)
        try:
            if not self.engine.publish(message, fd, wait=wait):
                transfer.regions = self.engine.pool.reclaim(transfer.regions)
                return False
        except (PackerError, OSError) as error:
            transfer.regions = self.engine.pool.reclaim(transfer.regions)
            if isinstance(error, PeerClosed):
                self._drop(transfer)
                raise
            transfer.abandoned = f"OUTPUT_READY could not be sent: {error}"
            self._nack(transfer)
            return True
        transfer.regions, transfer.announced = [], 0  # the engine's now
        self._drop(transfer)
        self.outputs += 1
        self._acknowledge(transfer.export, skeleton)
        return True

    def _acknowledge(self, export: Export, skeleton: Skeleton) -> None:
        """The engine has it. A note on the ack page where the worker holds only slots for it, which it misses when it runs out
        of room; a message where it holds more (host arrays, an allocation), or where that page is full or was never sent."""
        may_wait = not export.close and not skeleton.body.host_nbytes
        if may_wait and self._ack_page is not None and self._ack_page.put(export.ready):
            return
        self._unmap_arenas(export.close, Ack(export.output))

    def _nack(self, transfer: Transfer) -> None:
        """Tell the worker to send this output another way; where the worker is gone, tell the engine that it failed."""
        self._drop(transfer)
        self.nacks += 1
        logger.warning("output %s of worker %s is handed back: %s", transfer.output, self.name, transfer.abandoned)
        nack = Nack(transfer.output, transfer.abandoned[:4000])
        self._unanswered[nack.output] = nack.reason  # the engine's to know, if the worker dies before it does
        self._unmap_arenas(transfer.export.close, nack)

    def _answer(self, answer: Ack | Nack | Unmapped) -> None:
        """Send it. A nack that finds nobody stays in ``_unanswered``; for anything else that is PeerClosed."""
        try:
            self._channel.send(answer)
        except PeerClosed:
            if not isinstance(answer, Nack):
                raise
        else:
            if isinstance(answer, Nack):
                self._unanswered.pop(answer.output, None)

    def _drop(self, transfer: Transfer) -> None:
        """Give back what the transfer still holds."""
        if transfer.announced:
            gone = OutputGone(transfer.announced)
            transfer.announced = 0
            # The reader must not wait. The finisher must: it may have no later.
            if not self._tell_engine(gone, wait=threading.current_thread() is self._finisher):
                self._finishing.put(functools.partial(self._tell_engine, gone))
        for region in transfer.regions:
            self.engine.pool.release(region.number)
        transfer.regions = []
        if transfer.host_fd is not None:
            close_fds([transfer.host_fd])
            transfer.host_fd = None
            with self._lock:
                self._host_memfds -= 1

    def _tell_engine(self, message: OutputReady | OutputGone, *, wait: bool = True) -> bool:
        """Of an output that failed, or does not come after all. False where that has to wait and may not."""
        try:
            return self.engine.tell(message, wait=wait)
        except PeerClosed:
            logger.info("engine %s is gone before it could be told %s", self.engine.name, message)
        except OSError as error:
            logger.error("engine %s cannot be told %s: %s", self.engine.name, message, error)
        return True

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> bool:
        """See the finisher off, then give everything back. False where the packer stops and copies are still under way."""
        dead = self._see_off(reason)
        self._finishing.put(None)
        self._finisher.join(_LEAVE_S if self._leave.is_set() else _LAST_SEND_S)
        self._channel.shutdown()  # a worker that lives and does not read may hold the finisher in a send
        self._finisher.join(_LEAVE_S if self._leave.is_set() else None)
        if self._finisher.is_alive():
            return False
        self._close(dead)
        return True

    def _see_off(self, reason: str) -> bool:
        """Wait until it is known whether the worker died and until the finisher has nothing left to wait for. Whether it died.

        See Note [When a worker is gone].
        """
        if self._timeline is None:  # nothing tells whether it lives, and there is hardly anything to tell of it
            return bool(self._transfers)
        page = self._timeline.page
        while True:
            dead = not page.owner_lives()
            void = page.generation != self._generation
            with self._lock:
                incomplete = self._incomplete()
                if dead:
                    for transfer in incomplete:
                        transfer.abandoned = reason
            if dead:
                for transfer in incomplete:
                    self._force(transfer.export.ready)
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
        counter = self._timeline.page.counter if self._timeline is not None else 0
        return [t for t in self._transfers.values() if not t.copied and t.export.ready > counter]

    def _due(self) -> Transfer | None:
        """The copy that the device should be at, or None where the first that is not done waits for its forward.

        The stream is in order: whatever is behind the first may wait for that one's forward, though its own wait is met.
        """
        with self._lock:
            counter = self._timeline.page.counter if self._timeline is not None else 0
            first = next((t for t in self._transfers.values() if t.marker and not t.copied), None)
            return first if first is not None and first.export.ready <= counter else None

    def _close(self, dead: bool) -> None:
        """Give everything back; what a dead worker left half-sent fails."""
        for transfer in self._transfers.values():  # no second message ever came
            self._drop(transfer)
            self._unanswered[transfer.output] = "the worker died while it was sending this output"
        self._transfers.clear()
        if dead:
            for output, reason in self._unanswered.items():
                self._tell_engine(OutputReady(output, error=reason))
            self.engine.tell_worker_gone()
        self._stream.close()
        for arena in self._arenas.values():
            if not isinstance(arena, str):
                arena.close()
        if self._timeline is not None:
            self._timeline.close()
        if self._ack_page is not None:
            self._ack_page.close()
        self._device.drain()
        self._channel.close()  # only now may the worker free its memory

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

    # -- the watchdog --------------------------------------------------------------------------------------------------

    def stuck(self, looks: int) -> str:
        """Called at intervals by one thread: which copy has been due for the last ``looks`` of them; empty while all move.

        It counts looks rather than time, in which this process may have been stopped. Nor is a copy stuck that may long be
        done, where the finisher sends to an engine that does not read.
        """
        due = self._due()
        if due is not self._synchronizing:
            due = None
        self._looks = self._looks + 1 if due is not None and due is self._watched else 0
        self._watched = due
        return f"the copy of output {due.output} of worker {self.name}" if due and self._looks >= looks else ""


def _leases(transfer: Transfer) -> tuple[Lease, ...]:
    """What its regions are to the engine."""
    return tuple(Lease(r.number, r.segment.number, r.offset, r.nbytes) for r in transfer.regions)
