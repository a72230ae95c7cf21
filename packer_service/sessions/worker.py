"""What a packer does for one worker, from the handshake to the end of the connection: takes its messages, and ends it.

What a message may ask for is checked here and in ``Imports``. The outputs move as Note [The life of an output in the packer]
in packer_service.sessions.output says; ``Copier`` copies them, and ``Delivery`` delivers them.

Note [When a worker is gone]
The end of its connection does not say whether it died (packer_service.memory.timeline does). If it is dead, its imports keep
the device memory alive, so whatever its device had completed is still copied and delivered. What had not been completed never
will be: those outputs fail, the counter is forced until the stream has passed them (the device may write it a little longer),
their copies are discarded and their regions released only then. If it only hung up, it exports everything again somewhere,
and its device goes on and will still write the counter: then nothing is forced, published or failed, and what was submitted
ends when the worker's own forward does, or when the worker dies after all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from packer_service.config import Settings
from packer_service.devices.base import Device
from packer_service.errors import DescriptorLost, DeviceError, PeerClosed, ProtocolError
from packer_service.memory.memfd import check_memfd
from packer_service.sessions.copier import Copier
from packer_service.sessions.delivery import INCOMPLETE, Delivery
from packer_service.sessions.engine import EngineSession, refuse
from packer_service.sessions.imports import Imports, WorkerPages
from packer_service.sessions.output import COPYING, UNCOPIED, UNDECIDED, UNSUBMITTED, Output, Outputs, State
from packer_service.stats import Cause, Stats
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, Outbox, close_fds
from packer_service.wire.protocol import Export, MapChunk, Ping, Pong, Probe, Skeleton, Withdraw

logger = logging.getLogger(__name__)

MAX_OUTPUTS = 4096  # of one worker in flight; its arena and overflow bound them long before
MAX_HOST_MEMFDS = 64  # of one worker's outputs in flight: each is a descriptor of this process, which has only so many
_PROBE = ""  # stands for a probe among the outputs; no output is called so
_POLL_S = 0.02  # how often it looks at a page, which tells nobody that it was written
_COPIES_S = 2.0  # for copies on their way when the packer is told to stop
_STOP_S = 0.5  # for its last copies and answers, once the packer is told to stop
_LAST_SEND_S = 5.0  # what a worker that hung up has to read its last answers, and its engine to read what they wait for


class WorkerSession:
    """One worker: what it shares, its outputs in flight, and the two threads that serve it.

    The reader (in ``serve``) takes messages; the finisher (``Copier``'s) waits for copies. Whichever finds an output copied
    and whole settles it.
    """

    def __init__(
        self,
        name: str,
        channel: Channel,
        engine: EngineSession,
        device: Device,
        settings: Settings,
        stopping: threading.Event,
        stats: Stats,
        on_device_failure: Callable[[str], None],
    ) -> None:
        self.name = name
        self.engine = engine
        self.paused = False  # as the worker said last; the reader writes it
        self.pauses_said = 0  # how often it said so
        self._channel = channel
        self._device = device
        self._stopping = stopping  # the packer is: wait for no forward
        self._forced = 0  # what the counter was forced to for a live worker's broken device
        self._outbox = Outbox(name, channel)
        self._outputs = Outputs()
        self._pages = WorkerPages(name, device)
        self._imports = Imports(name, device, self._outputs)
        shared = name, engine, self._outputs, self._imports, self._pages
        self._delivery = Delivery(*shared, self._outbox, stats, self.disconnect)
        self._copier = Copier(*shared, self._delivery, device, settings.wait_s, on_device_failure)

    def disconnect(self) -> None:
        """Have ``serve`` end, from another thread."""
        self._channel.shutdown()

    def tell(self, message: protocol.Message) -> None:
        """Send what is about no output. On any thread."""
        self._outbox.send(message)

    @property
    def in_flight(self) -> int:
        """Outputs that are here and have not ended."""
        return len(self._outputs)

    def describe(self, output_id: str) -> str:
        """How far an output is; empty where this session does not have it. On any thread."""
        with self._outputs.lock:
            output = self._outputs.get(output_id)
            return output.describe(self._pages.counter) if output is not None and output.state in UNDECIDED else ""

    # -- messages ------------------------------------------------------------------------------------------------------

    def serve(self) -> bool:
        """Take messages until the worker is gone, then see its finished outputs off and give everything back.

        False where the packer stops and copies are still under way: nothing they use was given back.
        """
        self._copier.start()
        reason = ""
        try:
            while True:
                self._take_message()
        except PeerClosed:
            logger.info("worker %s is gone", self.name)
        except ProtocolError as error:
            logger.error("worker %s broke the protocol and is disconnected: %s", self.name, error)
            refuse(self._channel, str(error))
            reason = f"the worker broke the protocol: {error}"
            self._channel.shutdown()  # so that it exports elsewhere what it has here
        except (DeviceError, OSError) as error:
            logger.error("worker %s cannot be served and is disconnected: %s", self.name, error)
            self._copier.check_device()  # the context may be what is broken, by another session's error
            reason = f"the packer cannot serve this worker: {error}"
            refuse(self._channel, reason)
            self._channel.shutdown()
        except BaseException:  # out of memory or descriptors, most likely
            self._channel.shutdown()
            raise
        finally:
            ended = self._end(reason or INCOMPLETE)
        return ended

    def _take_message(self) -> None:
        lost = None
        try:
            received = self._channel.receive(_POLL_S if self._hold_forced() else None)
        except DescriptorLost as error:
            self._channel.skip()
            received, lost = (error.message, []), error
        if received is None:
            return
        message, fds = received
        try:
            if lost is None or not self._do_without(message, lost):
                self._handle(message, fds)
        finally:
            close_fds(fds)

    def _handle(self, message: protocol.Message, fds: list[int]) -> None:
        """One message. Takes out of ``fds`` the descriptors it keeps."""
        match message:
            case Export():
                self._start(message)
            case Skeleton():
                self._take_skeleton(message, fds)
            case Withdraw():
                self._take_withdraw(message)
            case MapChunk():
                self._imports.open(message, fds)
            case protocol.UnmapChunk():
                self._delivery.unmap(message.chunk)
            case protocol.MapTimeline():
                self._pages.map_timeline(message.generation, fds)
            case protocol.MapAcks():
                self._pages.map_acks(fds)
            case Ping():
                self._outbox.send(Pong())
            case protocol.Paused(paused):
                self.paused = paused
                self.pauses_said += 1
            case Probe():
                self._start(Export(_PROBE, message.ready, (message.piece,), message.event), message)
            case _:
                raise ProtocolError(f"a {type(message).__name__} is not a worker's to send")

    def _do_without(self, message: protocol.Message, lost: DescriptorLost) -> bool:
        """Fail what needed the descriptor and serve on: that our table is full is no fault of this worker's.

        False where the message needs none. Without its two pages a worker cannot be served at all.
        """
        match message:
            case Skeleton():
                self._take_skeleton(message, [], str(lost))
            case MapChunk():
                self._imports.open(message, [], str(lost))
            case protocol.MapTimeline() | protocol.MapAcks():
                raise DeviceError(str(lost))
            case _:
                return False
        logger.error("worker %s: %s", self.name, lost)
        return True

    def _start(self, export: Export, probe: Probe | None = None) -> None:
        if export.pieces and self._pages.timeline is None:
            raise ProtocolError("an output came before the worker's timeline")
        with self._outputs.lock:
            if export.output in self._outputs:
                raise ProtocolError(f"output {export.output} is exported already")
            if len(self._outputs) >= MAX_OUTPUTS:
                raise ProtocolError(f"{MAX_OUTPUTS} outputs are in flight already")
            self._imports.check(export)
            first = not self._outputs.within(UNSUBMITTED)
            output = self._outputs[export.output] = Output(export, probe)
        if export.pieces:
            self._copier.take(output, first=first)

    def _awaiting_second(self, output_id: str) -> Output:
        """The lock is held."""
        output = self._outputs.get(output_id)
        if output is None or output.second is not None:
            raise ProtocolError(f"output {output_id} was not exported, or is settled already")
        return output

    def _take_skeleton(self, message: Skeleton, fds: list[int], refusal: str = "") -> None:
        """``refusal``: why the output has to be declined although the worker did nothing wrong."""
        if not refusal:
            if bool(message.body.host_nbytes) != bool(fds):
                raise ProtocolError("host arrays and their memfd come together")
            if fds:
                check_memfd(fds[0], message.body.host_nbytes)
        with self._outputs.lock:
            output = self._awaiting_second(message.output)
            if fds and sum(other.host_fd is not None for other in self._outputs.values()) >= MAX_HOST_MEMFDS:
                refusal = f"{MAX_HOST_MEMFDS} outputs with host arrays wait for their copies already"
            elif fds:
                output.host_fd = fds.pop()
            output.fail(refusal, Cause.DESCRIPTORS)
            goes_ahead = message.plain and output.state is State.COPYING
            state = output.state if goes_ahead else output.take_second(message)
        if goes_ahead:
            self._delivery.tell_coming(output, message)  # before anybody may settle it
            with self._outputs.lock:
                state = output.take_second(message)
        if state is State.DECIDING:
            self._delivery.settle(output)

    def _take_withdraw(self, message: Withdraw) -> None:
        """That an output will never be complete may also come after its skeleton, or too late: it was complete after all."""
        with self._outputs.lock:
            if message.incomplete:
                output = self._outputs.get(message.output)
                if output is None or output.state not in UNDECIDED:
                    return
                output.fail(message.error or "its worker's device broke", Cause.WORKER_DEVICE)
            else:
                output = self._awaiting_second(message.output)
            state = output.take_second(message)
            if message.incomplete:
                self._note_forced(output)
        self._hold_forced()
        if state is State.DECIDING:
            self._delivery.settle(output)

    # -- a live worker whose device broke ------------------------------------------------------------------------------

    def _note_forced(self, output: Output) -> None:
        """Have the wait of ``output`` released, which nothing will meet. The lock is held."""
        # Forcing also declares complete whatever came before, which must not be. A worker fails its outputs in order; only one
        # that is broken does not, and then nothing is forced.
        ready = output.export.ready
        before = [other for other in self._outputs.incomplete(self._pages.completed) if other.export.ready < ready]
        if all(other.failure or isinstance(other.second, Withdraw) for other in before):
            self._forced = max(self._forced, ready)

    def _hold_forced(self) -> bool:
        """Force the counter, also where the broken device wrote it after that; whether a copy still needs it."""
        if not self._forced or self._pages.timeline is None:
            return False
        self._pages.force(self._forced)
        with self._outputs.lock:
            needed = any(output.export.ready <= self._forced for output in self._outputs.within(UNCOPIED))
        self._forced = self._forced if needed else 0
        return needed

    # -- the end -------------------------------------------------------------------------------------------------------

    def _end(self, reason: str) -> bool:
        """See the finisher off, then give everything back. False where the packer stops and copies are still under way."""
        tell = self._see_off(reason)
        self._copier.stop_soon()
        left_s = _STOP_S
        while not self._copier.has_stopped(_POLL_S):
            self._release_waits()
            if self._stopping.is_set():
                left_s -= _POLL_S
                if left_s <= 0:
                    return False
        if not self._pages.dead:
            deadline = time.monotonic() + (_STOP_S if self._stopping.is_set() else _LAST_SEND_S)
            while self._delivery.under_way() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            self._outbox.flush(deadline - time.monotonic())
        self._channel.shutdown()
        self._delivery.close(tell=tell)
        self._copier.close()
        self._imports.close_all()
        self._pages.close()
        self._device.closer.drain()
        self._outbox.close()  # only now may the worker free its memory
        return True

    def _see_off(self, reason: str) -> bool:
        """Wait until it is known whether the worker died, or until nothing waits for its device.

        Returns whether the engine is to be told.
        ``reason``: why the outputs of a dead worker fail that are not complete.
        """
        outputs, pages = self._outputs, self._pages
        if pages.timeline is None:  # nothing tells whether it lives, and there is hardly anything to tell of it
            with outputs.lock:
                return bool(outputs.within(UNDECIDED))
        while True:
            pages.dead = not pages.owner_lives()
            void = pages.void
            with outputs.lock:
                incomplete = outputs.incomplete(pages.completed)
                if pages.dead:
                    for output in incomplete:
                        output.failure, output.cause = reason, Cause.WORKER_DIED
            if pages.dead:
                self._release_waits()
                return not void
            if void and not incomplete:
                return False
            if self._stopping.wait(_POLL_S):
                deadline = time.monotonic() + _COPIES_S
                while self._is_copying() and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                return False

    def _release_waits(self) -> None:
        """Release whatever waits for a dead worker's device, which may have undone the last time."""
        if self._pages.dead and self._pages.timeline is not None:
            with self._outputs.lock:
                value = max((output.export.ready for output in self._outputs.within(UNCOPIED)), default=0)
            self._pages.timeline.page.end_at(value)

    def _is_copying(self) -> bool:
        """Whether the device is at a copy, and not at a wait for the worker's forward.

        The stream is in order: whatever is behind the first may wait for that one's forward, though its own wait is met.
        """
        with self._outputs.lock:
            first = next(iter(self._outputs.within(COPYING)), None)
        return first is not None and self._pages.is_due(first.export.ready)
