"""What a worker and its packer tell each other of outputs, on one connection after another. It touches no memory of theirs.

The main thread and the export thread tell the packer; the link's thread hears its answers. Acks of outputs that hold nothing
but slots wake nobody (packer_service.memory.ack_page): they are taken where room is short, by whoever has just sent an output
or looks for room, and by the link's thread at every message, after each half second without one, and when a packer that was
gone is back or given up.

Note [What a restart means to the worker]
Whatever was not acknowledged is still in its memory. So when a connection ends, its generation ends with it (see
packer_service.memory.timeline), and on the next one everything that is not acknowledged is exported again; the engine drops
what it already had. Outputs wait ``restart_wait_s`` for that. Then they fall back, and new ones at once, until a connection is
made after all.
"""

from __future__ import annotations

from collections.abc import Callable

from packer_service.config import Settings
from packer_service.memory.ack_page import AckPage
from packer_service.wire import protocol
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import MapAcks, MapTimeline, Message, Paused
from worker_shim.connection import Connection, read_until_end
from worker_shim.link import Link, Packet
from worker_shim.log import get_logger
from worker_shim.outputs.own_path import OwnPathReason
from worker_shim.worker.device import ExportDevice
from worker_shim.worker.imports import Imports
from worker_shim.worker.in_flight import Event, InFlight, State

logger = get_logger(__name__)

_LOOK_S = 0.5

OnFallback = Callable[[InFlight, str], None]
"""(output, why): it takes vllm-omni's own path, and holds its memory until it is released."""


class Exchange:
    """The link's client, and every change of an output's state that its packer hears of or answers.

    The link's lock guards ``pending``, ``broken``, ``ack_page``, ``_done`` and the states. ``settle`` and ``on_fallback`` are
    called without it, so that they may take locks of their own. See worker_shim.worker.in_flight for the states.
    """

    def __init__(
        self,
        settings: Settings,
        device: ExportDevice,
        connect: Callable[[float], Channel],
        name: str,
        settle: Callable[..., None],
        on_fallback: OnFallback,
    ) -> None:
        self.broken = ""  # why no output can be exported: what is staged falls back
        self._leaving = ""  # what a packer said that ends soon
        self._paused = False  # by an operator
        self.pending: dict[str, InFlight] = {}  # what a packer must be told of, in the order of its export
        self.ack_page = AckPage.create()  # this connection's
        self.link = Link(connect, self, settings, name=name)
        self.imports = Imports(self.link)
        self._device = device
        self._settle = settle
        self._on_fallback = on_fallback
        self._done: list[InFlight] = []  # by the ack page, and to be settled

    @property
    def diverted(self) -> str:
        """Why no new output should be exported although a packer is there; empty where one should."""
        return "an operator paused it (packer-service resume)" if self._paused else self._leaving

    @property
    def own_path(self) -> OwnPathReason | None:
        """Why outputs take vllm-omni's own path at present; None where they need not."""
        if self.broken:
            return OwnPathReason.GONE
        if self._paused:
            return OwnPathReason.PAUSED
        return OwnPathReason.DRAINING if self._leaving else None

    # -- main thread and export thread ---------------------------------------------------------------------------------

    def export(self, output: InFlight) -> None:
        """Have the packer copy it once its signal is reached."""
        with self.link.lock:
            output.on(Event.EXPORT)
            self.pending[output.output_id] = output
            self.link.post(output.export)

    def submit(self, output: InFlight) -> None:
        """Send the rest of it, which is pickled. Without a packer it falls back."""
        with self.link.lock:
            broken = ""
            if not output.allows(Event.SUBMIT):  # its device broke while it was pickled, and it may have ended since
                ended = output.state in (State.DONE, State.SETTLED)
            elif self.broken:
                broken, ended = self.broken, False
                output.own_path = OwnPathReason.GONE
                self._end(output, Event.FALL_BACK)
            else:
                ended = False
                output.on(Event.SUBMIT)
                self.link.post(*output.last_packet)
        if broken:
            self._on_fallback(output, broken)
        elif ended:
            self._settle(output)  # what pickling it added is still held

    def fall_back(self, output: InFlight, reason: str) -> None:
        """No packer was told of it, and none will be."""
        with self.link.lock:
            output.on(Event.FALL_BACK)
        output.own_path = self.own_path or OwnPathReason.NO_DEVICE_ROOM
        self._on_fallback(output, reason)

    def withdraw(self, output: InFlight) -> None:
        """Take an output back that the engine was not promised, or that it was told has failed.

        It keeps its memory until the packer has let go of that.
        """
        with self.link.lock:
            if output.allows(Event.WITHDRAW):
                output.on(Event.WITHDRAW)
                if output.state is State.WITHDRAWN and self.broken:
                    self._end(output, Event.FALL_BACK)
                elif output.state is State.WITHDRAWN:
                    self.link.post(*output.last_packet)
            ended = output.state in (State.DONE, State.SETTLED)
        if ended:
            self._settle(output)

    def take_acks(self) -> None:
        """Settle every output whose ack is on the page. Any thread, but not under the link's lock."""
        with self.link.lock:
            self._take_page()
            done, self._done = self._done, []
        if done:
            self._settle(*done)

    @property
    def acknowledged(self) -> int:
        """How many outputs were acknowledged on the page and are not settled yet. For benchmarks."""
        with self.link.lock:
            return len(self._done) + self.ack_page.waiting

    # -- the link's thread ---------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._device.bind_thread()

    def read(self, connection: Connection) -> str:
        return read_until_end(connection, self.take, self.look, _LOOK_S)

    def resume(self, connection: Connection) -> list[Packet]:
        page = AckPage.create()  # first: it may raise
        self.broken = self._leaving = ""
        self._take_page()
        self.ack_page.close()
        self.ack_page = page
        timeline = self._device.timeline
        packets: list[Packet] = [(MapTimeline(timeline.generation), timeline.fd), (MapAcks(), page.fd)]
        if self._paused:
            packets.append((Paused(True), None))
        packets += self.imports.packets()
        for output in self.pending.values():
            packets += output.packets()
        return packets

    def suspend(self) -> None:
        self._device.timeline.generation += 1
        self.imports.end_connection()

    def give_up(self, reason: str) -> None:
        """Nobody waits for a packer any more. Outputs that are not submitted yet fall back when they are: see ``submit``."""
        with self.link.lock:
            self.broken = reason
            self._take_page()
            orphans = [output for output in self.pending.values() if output.state is not State.EXPORTED]
            for output in orphans:
                self._end(output, Event.FALL_BACK)
        for output in orphans:
            output.own_path = OwnPathReason.GONE
            self._part_with(output, reason)
        self.take_acks()  # this thread looks for them only while there is a connection

    def take(self, message: Message) -> None:
        self.take_acks()
        match message:
            case protocol.Ack(output_id):
                self._take_answer(output_id, Event.ACK, "")
            case protocol.Nack(output_id, reason):
                self._take_answer(output_id, Event.FALL_BACK, reason)
            case protocol.ChunkUnmapped(number):
                self.imports.closed(number)
            case protocol.Leaving(reason):
                self._leaving = reason
                self.link.expect_end()
            case protocol.Pause(paused):
                self._paused = paused
                logger.info("outputs %s: an operator asked", "take vllm-omni's own path" if paused else "go through it")
                self.link.post(Paused(paused))

    def _take_answer(self, output_id: str, event: Event, reason: str) -> None:
        """One that comes late, or twice, finds nothing that waits for it."""
        with self.link.lock:
            output = self.pending.get(output_id)
            if output is None or not output.allows(Event.ACK):
                return
            self._end(output, event)
        output.own_path = OwnPathReason.DECLINED  # where it falls back
        self._part_with(output, reason)

    def look(self) -> None:
        """Take what acks there are, and say of every output that the device will never complete that it failed: nobody waits
        for a timeout."""
        self.take_acks()
        with self.link.lock:
            waiting = [output for output in self.pending.values() if output.allows(Event.LOSE)]
        waiting = [output for output in waiting if not self._device.reached(output.signal.ready)]
        if not waiting or not (failure := self._device.failure()):
            return
        for output in waiting:
            error = f"the worker's device failed before output {output.output_id} was complete: {failure}"
            with self.link.lock:
                lost = output.allows(Event.LOSE)  # and not settled meanwhile
                if lost:
                    output.error = error
                    output.on(Event.LOSE)
                    self.link.post(*output.last_packet)
            if lost:
                logger.error(error)

    # -- either --------------------------------------------------------------------------------------------------------

    def _take_page(self) -> None:
        """Find what the ack page says was delivered; ``take_acks`` settles it. The lock is held."""
        if ready := set(self.ack_page.take()):
            # Not one that was withdrawn: where a signal failed, the next output has the same ``ready``.
            acked = (State.SUBMITTED, State.LOST)
            done = [o for o in self.pending.values() if o.signal.ready in ready and o.state in acked]
            for output in done:
                self._end(output, Event.ACK)
            self._done += done

    def _end(self, output: InFlight, event: Event) -> None:
        """No packer has to be told of it any more. The lock is held."""
        output.on(event)
        del self.pending[output.output_id]

    def _part_with(self, output: InFlight, reason: str) -> None:
        if output.state is State.FALLING_BACK:
            self._on_fallback(output, reason)
        else:
            self._settle(output)
