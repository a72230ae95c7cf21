"""The exporter: stages a worker's outputs in the arena and hands them to the packer.

Note [Who does what in the worker]
Main thread, in ``stage``: find the device arrays, tell the packer to start, copy them into slots on the current stream,
signal. Then, in ``submit_now``, pickle what is left of a plain output (``survey.survey``) and send it: waking the export
thread, and losing the GIL to it a few times, would cost this thread more. The main thread never waits for the packer: a
message that finds no room goes to the outbox.
Export thread, in ``submit``: what needs Python time or may wait: pickling any other output, host arrays, a full arena. Any
other output it pickles only when the device has passed the forward: that may run somebody's code, which may read what the
forward writes.
Ack thread: hears of what was delivered or failed. Whatever the packer cannot do comes back through ``on_fallback``.
The acks of outputs that hold nothing but slots wake nobody (packer_service.memory.ack_page): they are taken where room is
short, by whoever has just sent an output or looks for room, and by the ack thread at every message, after each half second
without one, and when a packer that was gone is back or given up.

Note [Held until the ack]
Each piece of an output is flat device memory: a slot of the arena; a clone beside a full arena, until slots come back; or, of
an output larger than the arena may grow, its own memory where it lies ("direct"). It is held until the ack, whatever becomes
of the packer: the output is exported from it again to the next packer, or is handed back, rebuilt from it and sent
vllm-omni's own way (see Note [What a restart means to the worker]). Only a direct piece can be overwritten by a later forward
of a pipeline that reuses its buffers.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from packer_service.config import Settings
from packer_service.errors import MAY_PASS, DeviceError, PackerUnavailable, PeerClosed, PeerHung
from packer_service.memory.ack_page import AckPage
from packer_service.memory.extents import align
from packer_service.memory.memfd import SharedMemory
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import (
    Body,
    Export,
    MapAcks,
    MapChunk,
    MapTimeline,
    Message,
    Piece,
    Probe,
    Probed,
    Refused,
    Skeleton,
    UnmapChunk,
    Withdraw,
)
from worker_shim.connection import Connection, read_until_end
from worker_shim.link import Link, Packet
from worker_shim.log import get_logger
from worker_shim.outputs import skeleton, survey
from worker_shim.outputs.arrays import (
    ARRAY_ALIGNMENT,
    ArraySpec,
    HostArrays,
    Place,
    flat_bytes,
    tensor_from_bytes,
)
from worker_shim.retries import Arrival
from worker_shim.worker.arena import Arena, Slot
from worker_shim.worker.device import Chunk, ExportDevice, Signal, copy_into, record_lazy_use

logger = get_logger(__name__)

OWN_PIECE_BYTES = (
    1 << 20
)  # an array this large is a piece of its own, and so a lease of its own; smaller ones share one
PROBE_BYTES = 1 << 16
_FINISH_S = 5.0
_LOOK_S = 0.5
_NO_SIGNAL = Signal(0)

Copy = tuple[torch.Tensor, torch.Tensor, int]
"""(tensor, flat memory, offset in it): see ``export_device.copy_into``."""

Salvage = Callable[[object, Callable[[object], object]], bool]
"""(output, dump) -> whether to try again; see ``Exporter.submit``."""


def _no_salvage(output: object, dump: Callable[[object], object]) -> bool:
    return False


@dataclass
class Staged:
    """One output between ``_return_result`` and its ack. See Note [Held until the ack]."""

    output_id: str
    output: object  # until it is pickled
    placed: list[tuple[torch.Tensor, Place]]  # its device arrays, which live until then
    plain: bool = False  # see survey.Survey
    yielding: frozenset[type] = frozenset()
    slots: list[Slot] = field(default_factory=list)  # one a piece, where they are in the arena
    beside: list[torch.Tensor] = field(default_factory=list)  # where they are not: flat uint8, one a piece
    overflow_bytes: int = 0  # of the pieces that are clones
    pieces: tuple[Piece, ...] = ()  # as the packer reads them; empty while they are clones
    imports: tuple[int, ...] = ()  # numbers of the direct pieces' allocations
    signal: Signal = _NO_SIGNAL
    export: Export | None = None  # the two messages, once they may be sent
    second: Skeleton | Withdraw | None = None
    failed: bool = False  # the worker sent its error; the ack only gives back what it holds
    counted: bool = True  # ``on_settled`` is told of its end
    payload: bytes = b""
    host: SharedMemory | None = None

    def view(self, piece: int) -> torch.Tensor:
        """The bytes of a piece, flat uint8."""
        return self.slots[piece].view if self.slots else self.beside[piece]

    def messages(self) -> Iterator[Packet]:
        """What the packer must hear of it, in order."""
        if self.export is not None:
            yield self.export, None
            if self.second is not None:
                yield self.second, self.second_fd()

    def second_fd(self) -> int | None:
        """The memfd that goes with the second message."""
        return self.host.fd if self.host is not None and isinstance(self.second, Skeleton) else None


class Exporter:
    """One worker's connection to its packer. The first probes the device with a real copy.

    Making one waits ``start_timeout_s`` for a packer that is away. With none then it raises where ``fallback`` is ``fail``;
    else outputs are handed back until one comes. It always raises where a packer answers that it cannot serve this worker.

    The link's lock guards ``_pending``, ``_ack_page``, ``_delivered``, ``_mapped``, ``_overflow_left`` and ``broken``.
    See Note [Who does what in the worker].
    """

    def __init__(
        self,
        settings: Settings,
        device: ExportDevice,
        *,
        socket: str,
        key: bytes,
        session: str,
        mac_key: bytes,
        on_settled: Callable[[str], None],
        on_fallback: Callable[[Staged, str], None],
    ) -> None:
        self.broken = ""  # why no output can be exported: what is staged is handed back
        self.device = device
        self._wait_s = settings.wait_s
        self._mac_key = mac_key
        self._on_settled = on_settled
        self._on_fallback = on_fallback
        self._pending: dict[str, Staged] = {}
        self._delivered: list[Staged] = []  # by the ack page, and not settled yet
        self._mapped: dict[int, Packet] = {}  # what the packer imports, by number
        self._overflow_left = settings.overflow_max_bytes
        self._next_import = 1 << 32  # numbers of direct pieces' allocations, beside the arena's chunks
        self._unmapped = threading.Condition()
        self._closed_imports: set[int] = set()
        self._leaving: dict[int, Chunk] = {}  # main thread only: out of the arena, and not yet free
        self._arena = Arena(device, settings.arena_max_bytes, settings.arena_step_bytes, self._announce, self.take_acks)

        def connect(timeout_s: float) -> Channel:
            return handshake.connect(
                socket, key, "worker", session, device_uuid=device.uuid, timeout_s=timeout_s, hang_s=settings.hang_s
            )[0]

        self._ack_page = AckPage.create()  # this connection's
        self._link = Link(connect, self, settings, name=f"the packer at {socket}")
        try:
            self._link.open(Arrival(settings, threading.Event(), "worker"), self._probe)
        except (*MAY_PASS, OSError) as error:
            if settings.fallback == "fail":
                self._let_go()
                raise
            self.broken = str(error)
            logger.warning(
                "outputs take vllm-omni's own path until a packer is there: %s. It is tried again (setting retry_s)",
                error,
            )
        except BaseException:
            self._let_go()
            raise
        self._link.start()

    def _let_go(self) -> None:
        self._ack_page.close()
        self._arena.close()

    def _probe(self, connection: Connection, timeout_s: float) -> None:
        """Send a known pattern the whole way once. PackerUnavailable says what the packer could not do."""
        slots = self._arena.allocate([PROBE_BYTES])
        if slots is None:
            raise PackerUnavailable("the arena cannot be allocated: see the setting arena_max_bytes")
        pattern = np.arange(PROBE_BYTES // 8, dtype=np.int64).view(np.uint8)
        slots[0].view.copy_(torch.from_numpy(pattern))
        signal = self.device.signal()
        try:
            connection.post(Probe(signal.ready, _piece(slots[0]), signal.event))
            answer = connection.receive(timeout_s)
        finally:
            self.device.retire(signal)
            self._arena.release(slots)
        if answer is None:
            raise PeerHung(f"the packer did not answer a probe within {timeout_s:.3g} s (setting start_timeout_s)")
        probed = answer[0]
        if isinstance(probed, Refused):
            raise PeerClosed(f"the packer hung up on this worker: {probed.reason}")
        if not isinstance(probed, Probed) or probed.error:
            raise PackerUnavailable(f"the packer cannot read this worker's memory: {getattr(probed, 'error', probed)}")
        if probed.digest != hashlib.sha256(pattern.tobytes()).digest():
            raise PackerUnavailable("the packer reads other bytes than this worker wrote")

    # -- main thread ---------------------------------------------------------------------------------------------------

    def stage(self, output: object, output_id: str) -> Staged | None:
        """Take the device arrays of ``output`` on the current stream and have the packer start. None: not this way now.

        After it returns, the output's own memory may be overwritten or freed in stream order. So it stages where no packer is
        there to start, too: ``submit`` hands such an output back, and the own way it is read from where it was staged.
        """
        tensors, plain, yielding = survey.survey(output, self.device.owns)
        places, sizes = plan([tensor.nbytes for tensor in tensors])
        if len(sizes) > protocol.MAX_PIECES:
            logger.warning("output %s has %d large arrays, more than %d", output_id, len(sizes), protocol.MAX_PIECES)
            return None
        staged = Staged(output_id, output, list(zip(tensors, places, strict=True)), plain, yielding)
        try:
            copies = self._place(staged, sizes)
        except torch.OutOfMemoryError as error:
            logger.warning("output %s finds no device memory to wait in: %s", output_id, error)
            self.release(staged)
            return None
        if copies is None:
            return None
        announced = self.device.next_signal() if staged.pieces else None
        with self._link.lock:
            self._pending[output_id] = staged
            if announced is not None:
                staged.signal = announced
                self._start(staged)  # the packer gets ready while the copies below are submitted
        try:
            for tensor, memory, offset in copies:
                copy_into(self.device, tensor, memory, offset)
            staged.signal = self.device.signal()
        except Exception:
            self._abandon(staged, announced)
            raise
        if announced is None and (staged.pieces or not sizes):
            self._start(staged)
        return staged

    def submit_now(self, staged: Staged) -> bool:
        """``submit``, where that neither takes long nor waits; False where it is still to be called. Raises nothing."""
        if not staged.plain or staged.overflow_bytes or self.broken:
            return False
        try:
            body = self._pickle(staged, _no_salvage)
        except Exception:
            return False  # submit meets it again, and says so
        self._send_skeleton(staged, body)
        return True

    def _start(self, staged: Staged) -> None:
        with self._link.lock:
            staged.export = _export(staged)
            self._link.post(staged.export)

    def _abandon(self, staged: Staged, announced: Signal | None) -> None:
        """Staging failed. What was announced is withdrawn, and holds its slots until the packer has let go of them.

        Where the device cannot even signal any more, ``look`` ends the packer's wait. The CPU must not signal in its stead:
        that would declare complete what was staged before.
        """
        staged.counted = False
        if announced is None:
            self._forget(staged)
            self.release(staged)
            return
        try:
            self.device.signal()
        except Exception:
            logger.exception("the device cannot mark the end of output %s", staged.output_id)
        with self._link.lock:
            staged.failed, staged.second = True, Withdraw(staged.output_id)
            self._link.post(staged.second)

    def _place(self, staged: Staged, sizes: list[int]) -> list[Copy] | None:
        """Find memory for pieces of these ``sizes``, one of the three ways of Note [Held until the ack].

        Returns what has yet to be copied where; None where no way is open.
        """
        if sum(map(align, sizes)) > self._arena.max_bytes:
            return self._place_directly(staged, sizes)
        slots = self._arena.allocate(sizes)
        if slots is not None:
            staged.slots = slots
            staged.pieces = tuple(map(_piece, slots))
            return [
                (tensor, slots[piece].memory, slots[piece].offset + offset) for tensor, (piece, offset) in staged.placed
            ]
        if self._take_overflow(sum(sizes)):
            staged.overflow_bytes = sum(sizes)
            device = staged.placed[0][0].device
            staged.beside = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
            return [(tensor, staged.beside[piece], offset) for tensor, (piece, offset) in staged.placed]
        logger.warning(
            "output %s finds no room to wait in: see arena_max_bytes and overflow_max_bytes", staged.output_id
        )
        return None

    def _place_directly(self, staged: Staged, sizes: list[int]) -> list[Copy] | None:
        """Export each piece where it lies; small arrays, which share a piece, and other layouts are copied by torch first."""
        copies: list[Copy] = []
        try:
            for piece, size in enumerate(sizes):
                owners = [(tensor, place) for tensor, place in staged.placed if place.piece == piece]
                if size >= OWN_PIECE_BYTES and len(owners) == 1:
                    view = flat_bytes(owners[0][0])
                    record_lazy_use(self.device, owners[0][0])  # where it had to be made dense
                else:
                    view = torch.empty(size, dtype=torch.uint8, device=owners[0][0].device)
                    copies += [(tensor, view, place.offset) for tensor, place in owners]
                staged.beside.append(view)
            allocations = [self.device.find_allocation(view) for view in staged.beside]
        except DeviceError as error:
            logger.warning("output %s exceeds arena_max_bytes and cannot leave directly: %s", staged.output_id, error)
            return None
        staged.imports = tuple(range(self._next_import, self._next_import + len(sizes)))
        self._next_import += len(sizes)
        for number, allocation in zip(staged.imports, allocations, strict=True):
            self._map(MapChunk(number, allocation.nbytes, allocation.handle))
        staged.pieces = tuple(
            Piece(number, allocation.offset, size)
            for number, allocation, size in zip(staged.imports, allocations, sizes, strict=True)
        )
        return copies

    def _take_overflow(self, nbytes: int) -> bool:
        with self._link.lock:
            if nbytes > self._overflow_left:
                return False
            self._overflow_left -= nbytes
            return True

    def reserve_arena(self) -> None:
        """Have all of the arena now, before somebody else is given the memory."""
        self._arena.reserve()

    def give_back_arena(self, timeout_s: float) -> None:
        """Free the chunks that hold nothing, so that the device has the memory: the packer closes its imports first."""
        self.take_acks()
        self._leaving |= self._arena.take_idle()
        chunks = self._leaving
        with self._link.lock:
            connection = self._link.connections
            for number in chunks:
                self._mapped.pop(number, None)
                self._link.post(UnmapChunk(number))

        # A connection that ended takes its imports with it; one to a packer that hangs, as soon as that comes to itself or
        # is killed, and the driver keeps the memory until then.
        def let_go() -> bool:
            ended = self._link.connections != connection or not self._link.connected
            return ended or self._closed_imports >= chunks.keys()

        with self._unmapped:
            free = self._unmapped.wait_for(let_go, timeout_s)
            self._closed_imports -= chunks.keys()
        if not free:
            logger.error("the packer did not close its imports within %g s; %d chunks stay", timeout_s, len(chunks))
            return  # the next time
        while chunks:  # what a device that breaks did not free is not freed twice
            self.device.free(chunks.popitem()[1])

    def _announce(self, number: int, chunk: Chunk) -> None:
        self._map(MapChunk(number, chunk.tensor.numel(), chunk.handle), chunk.fd)

    def _map(self, message: MapChunk, fd: int | None = None) -> None:
        with self._link.lock:
            self._mapped[message.chunk] = message, fd
            self._link.post(message, fd)

    # -- export thread -------------------------------------------------------------------------------------------------

    def submit(self, staged: Staged, salvage: Salvage = _no_salvage) -> None:
        """Send the second half. Whatever goes wrong with the packer comes back through ``on_fallback``.

        Raises only what pickling the output raises; the output is withdrawn then. Before that ``salvage`` may take out of
        the output what cannot be pickled, and return True to have it tried once more.
        """
        try:
            body = self._pickle(staged, salvage)
            if staged.overflow_bytes and (why_not := self._stage_late(staged)):
                self._forget(staged)
                self._hand_back(staged, why_not)
                return
        except BaseException:  # somebody's pickling may end in SystemExit
            self.withdraw(staged)
            raise
        self._send_skeleton(staged, body)

    def withdraw(self, staged: Staged) -> None:
        """Forget an output that the engine was not promised, or was told of: what it holds comes back with the ack."""
        staged.failed = True
        self._send_second(staged, Withdraw(staged.output_id))

    def _stage_late(self, staged: Staged) -> str:
        """Give clones their slots as soon as some come back. Why that was in vain; empty where it was not."""
        if self.broken:
            return self.broken
        slots = self._arena.wait_allocate([clone.numel() for clone in staged.beside], self._wait_s)
        if slots is None:
            return f"no room in the arena for {self._wait_s:g} s (settings arena_max_bytes, wait_s)"
        with self.device.after(staged.signal.ready), torch.no_grad():
            for slot, clone in zip(slots, staged.beside, strict=True):
                slot.view.copy_(clone)
        staged.slots, staged.beside = slots, []
        staged.pieces = tuple(map(_piece, slots))
        self._return_overflow(staged)
        self._start(staged)
        return ""

    def _return_overflow(self, staged: Staged) -> None:
        with self._link.lock:
            self._overflow_left += staged.overflow_bytes
            staged.overflow_bytes = 0

    # -- the link's client: its thread hears of acks -----------------------------------------------------------------

    def begin(self) -> None:
        self.device.bind_thread()

    def take(self, message: Message) -> None:
        self.take_acks()
        if isinstance(message, protocol.Ack):
            staged = self._forget_id(message.output)
            if staged is not None:
                self._settle(staged)
        elif isinstance(message, protocol.Nack):
            staged = self._forget_id(message.output)
            if staged is not None:
                self._hand_back(staged, message.reason)
        elif isinstance(message, protocol.ChunkUnmapped):
            with self._unmapped:
                self._closed_imports.add(message.chunk)
                self._unmapped.notify_all()

    def look(self) -> None:
        """Take what acks there are, and say of every output that the device will never complete that it failed: nobody waits
        for a timeout."""
        self.take_acks()
        with self._link.lock:
            waiting = [s for s in self._pending.values() if s.export is not None and not _is_incomplete(s)]
        waiting = [staged for staged in waiting if not self.device.reached(staged.signal.ready)]
        if not waiting or not (failure := self.device.failure()):
            return
        for staged in waiting:
            error = f"the worker's device failed before output {staged.output_id} was complete: {failure}"
            logger.error(error)
            with self._link.lock:
                staged.second = Withdraw(staged.output_id, error, incomplete=True)
                self._link.post(staged.second)

    def suspend(self) -> None:
        self.device.timeline.generation += 1
        with self._unmapped:
            self._unmapped.notify_all()

    def read(self, connection: Connection) -> str:
        return read_until_end(connection, self.take, self.look, _LOOK_S)

    def resume(self, connection: Connection) -> list[Packet]:
        page = AckPage.create()  # first: it may raise
        self.broken = ""
        self._collect_acks()
        self._ack_page.close()
        self._ack_page = page
        packets: list[Packet] = [*self._pages(), *self._mapped.values()]
        for staged in self._pending.values():
            packets += staged.messages()
        return packets

    def give_up(self, reason: str) -> None:
        with self._link.lock:
            self.broken = reason
            self._collect_acks()
            orphans = [staged for staged in self._pending.values() if staged.second is not None]
            for staged in orphans:
                self._forget(staged)
        for staged in orphans:
            self._hand_back(staged, reason)  # what is not submitted yet is handed back when it is: see _send_second
        self.take_acks()  # this thread looks for them only while there is a connection

    def _pages(self) -> list[Packet]:
        """What a connection begins with."""
        timeline = self.device.timeline
        return [(MapTimeline(timeline.generation), timeline.fd), (MapAcks(), self._ack_page.fd)]

    def _collect_acks(self) -> None:
        """Move what the ack page says was delivered from ``_pending`` to ``_delivered``. The link's lock is held, and
        ``take_acks`` settles them without it: settling takes the arena's lock, which comes first."""
        if ready := set(self._ack_page.take()):
            delivered = [s for s in self._pending.values() if s.export is not None and s.export.ready in ready]
            for staged in delivered:
                self._forget(staged)
            self._delivered += delivered

    def _forget_id(self, output_id: str) -> Staged | None:
        with self._link.lock:
            return self._pending.pop(output_id, None)

    # -- either --------------------------------------------------------------------------------------------------------

    def take_acks(self) -> None:
        """Settle every output whose ack is on the page. Any thread, but not under the link's lock."""
        with self._link.lock:
            self._collect_acks()
            delivered, self._delivered = self._delivered, []
        if delivered:
            self._settle(*delivered)

    @property
    def acknowledged(self) -> int:
        """How many outputs were acknowledged on the page and are not settled yet. For benchmarks."""
        with self._link.lock:
            return len(self._delivered) + self._ack_page.waiting

    def _pickle(self, staged: Staged, salvage: Salvage) -> Body:
        """What the engine rebuilds the output from. Host arrays, and a payload too large for a message, go to a memfd,
        ``staged.host``. Lets go of the output. Raises what pickling raises, and OSError where there is no memfd."""

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            # of this device it was hidden where survey does not look
            return tensor if tensor.device.type == "cpu" else tensor.detach().cpu()

        def dump(output: object) -> tuple[bytes, HostArrays]:
            return skeleton.dump(output, staged.placed, to_host, staged.yielding)

        with contextlib.nullcontext() if staged.plain else self.device.after(staged.signal.ready):
            try:
                payload, host = dump(staged.output)
            except Exception:
                if not salvage(staged.output, dump):
                    raise
                payload, host = dump(staged.output)
            in_host = payload if len(payload) > protocol.MAX_PAYLOAD_BYTES else b""
            nbytes = host.nbytes + len(in_host)
            if nbytes:
                staged.host = SharedMemory.create("packer-host-arrays", nbytes)
                host.write_into(staged.host.buffer)
                staged.host.buffer[host.nbytes :] = in_host
        mac = skeleton.mac(self._mac_key, staged.output_id, payload)
        staged.payload, staged.output, staged.placed = payload, None, []
        return Body(b"" if in_host else payload, mac, nbytes, len(in_host))

    def _send_skeleton(self, staged: Staged, body: Body) -> None:
        self._send_second(staged, Skeleton(staged.output_id, body, staged.plain))
        if not self._arena.has_room(sum(piece.nbytes for piece in staged.pieces)):
            self.take_acks()  # here rather than in ``stage``: the engine has COMPUTE_DONE already

    def _send_second(self, staged: Staged, message: Skeleton | Withdraw) -> None:
        with self._link.lock:
            settled = staged.output_id not in self._pending  # it failed on the device meanwhile
            broken, known = self.broken, staged.export is not None
            if broken or not known:
                self._forget(staged)
            elif staged.second is None and not settled:
                staged.second = message
                self._link.post(message, staged.second_fd())
        if settled:
            self.release(staged)  # what pickling it added
        elif broken:
            self._hand_back(staged, broken)
        elif not known:
            self._settle(staged)  # withdrawn before the packer ever heard of it

    def _forget(self, staged: Staged) -> None:
        self._forget_id(staged.output_id)

    def _settle(self, *outputs: Staged) -> None:
        """The engine has them, or nobody will: everything they held is free again. They are out of ``_pending`` already."""
        self.release(*outputs)
        for staged in outputs:
            if staged.counted:
                self._on_settled(staged.output_id)

    def _hand_back(self, staged: Staged, reason: str) -> None:
        if staged.failed:
            self._settle(staged)
        else:
            self._on_fallback(staged, reason)

    def rebuild(self, staged: Staged) -> Any:
        """The output itself, over its pieces. Its bytes are complete once the device is past its signal."""
        specs, pickled = skeleton.array_specs(staged.payload)

        def device_tensor(spec: ArraySpec) -> torch.Tensor:
            view = staged.view(spec.piece)[spec.offset : spec.offset + spec.nbytes]
            # vllm-omni goes by the size of a storage: of a small view of a large one it makes named memory, which has no
            # form for an empty tensor and takes a scalar for a vector
            return tensor_from_bytes(view if spec.nbytes >= OWN_PIECE_BYTES else view.clone(), spec)

        return skeleton.load(specs, pickled, device_tensor, staged.host.buffer if staged.host else b"")

    def release(self, *outputs: Staged) -> None:
        """Give back slots, clones, host memory and events. Idempotent, on any thread."""
        slots: list[Slot] = []
        hosts: list[SharedMemory] = []
        signals: list[Signal] = []
        with self._link.lock:
            for staged in outputs:
                slots += staged.slots
                if staged.host is not None:
                    hosts.append(staged.host)
                if staged.signal.ready:
                    signals.append(staged.signal)
                staged.slots, staged.host, staged.signal = [], None, _NO_SIGNAL
                staged.beside, staged.output, staged.placed = [], None, []
                for number in staged.imports:
                    self._mapped.pop(number, None)
                self._return_overflow(staged)
        self._arena.release(slots)
        for host in hosts:
            host.close()
        for signal in signals:
            self.device.retire(signal)

    def close(self) -> None:
        """Leave the packer, which closes its imports before it hangs up, and only then free the arena."""
        self.device.timeline.let_go()
        self._link.finish(_FINISH_S)
        self._ack_page.close()
        for chunk in self._leaving.values():
            self.device.free(chunk)
        self._arena.close()
        self.device.close()


def plan(sizes: list[int]) -> tuple[list[Place], list[int]]:
    """Where arrays of these sizes (bytes) go: large ones each into a piece of their own, small ones together into one."""
    places: list[Place] = []
    pieces: list[int] = []
    shared = -1
    for nbytes in sizes:
        if nbytes >= OWN_PIECE_BYTES:
            places.append(Place(len(pieces), 0))
            pieces.append(nbytes)
            continue
        if shared < 0:
            shared = len(pieces)
            pieces.append(0)
        offset = align(pieces[shared], ARRAY_ALIGNMENT)
        places.append(Place(shared, offset))
        pieces[shared] = offset + max(nbytes, 1)
    return places, pieces


def _is_incomplete(staged: Staged) -> bool:
    return isinstance(staged.second, Withdraw) and staged.second.incomplete


def _piece(slot: Slot) -> Piece:
    return Piece(slot.chunk, slot.offset, slot.nbytes)


def _export(staged: Staged) -> Export:
    return Export(staged.output_id, staged.signal.ready, staged.pieces, staged.signal.event, staged.imports)
