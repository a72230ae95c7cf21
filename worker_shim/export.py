"""The exporter: stages a worker's outputs in the arena and hands them to the packer.

Note [Who does what in the worker]
Main thread, in ``stage``: find the device arrays, copy them into slots on the current stream, signal, tell the packer to
start. It never waits for the packer: a message that finds no room goes to the outbox.
Export thread, in ``submit``: what needs Python time or may wait: pickling, copying host arrays, a full arena.
Ack thread: takes slots back, hears of failures. Whatever the packer cannot do comes back through ``on_handed_back``.

Note [A slot until the ack]
From ``stage`` to the ack the slot holds the output, whatever becomes of the packer. An output that is handed back is
rebuilt from its slots (``rebuild``) and goes vllm-omni's own way.
"""

from __future__ import annotations

import collections
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from packer_service import protocol, transport
from packer_service.config import Settings
from packer_service.errors import PackerError, PackerUnavailable, PeerClosed
from packer_service.extents import align
from packer_service.memory import SharedMemory
from packer_service.protocol import Export, MapArena, Message, Piece, Probe, Probed, Skeleton, Withdraw
from worker_shim import skeleton
from worker_shim.arena import Arena, Slot
from worker_shim.export_device import Chunk, ExportDevice, Signal
from worker_shim.log import get_logger
from worker_shim.skeleton import ARRAY_ALIGNMENT, Place

logger = get_logger(__name__)

OWN_PIECE_BYTES = (
    1 << 20
)  # an array this large is a piece of its own, and so a lease of its own; smaller ones share one
PROBE_BYTES = 1 << 16


@dataclass
class Staged:
    """One output between ``_return_result`` and its ack."""

    output_id: str
    output: object  # until it is pickled
    tensors: list[torch.Tensor]  # the originals, or their clones where the arena was full
    places: list[Place]
    sizes: list[int]  # of the pieces, in bytes
    signal: Signal
    slots: list[Slot] | None = None
    overflow_bytes: int = 0
    submitted: bool = False
    failed: bool = False  # its error was sent; the ack only gives the slots back
    payload: bytes = b""
    host: SharedMemory | None = None
    host_bytes: int = 0
    staged_ids: list[int] = field(default_factory=list)  # id() of each original


class Exporter:
    """One worker's connection to its packer. Opening it probes the device with a real copy.

    ``_lock`` guards ``_pending`` and ``broken``. See Note [Who does what in the worker].
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
        on_handed_back: Callable[[Staged, str], None],
    ) -> None:
        self.broken = ""  # why no new output can be exported
        self.device = device
        self._wait_s = settings.wait_s
        self._mac_key = mac_key
        self._on_settled = on_settled
        self._on_handed_back = on_handed_back
        self._lock = threading.Lock()
        self._pending: dict[str, Staged] = {}
        self._outbox: collections.deque[tuple[Message, int | None]] = collections.deque()
        self._overflow_left = settings.overflow_max_bytes
        self._arena = Arena(device, settings.arena_max_bytes, settings.arena_step_bytes, self._announce)
        self._channel, _ = transport.connect(
            socket, key, "worker", session, device_uuid=device.uuid, timeout_s=settings.start_timeout_s
        )
        try:
            self._channel.send(protocol.MapTimeline(), device.timeline.fd)
            self._probe(settings.start_timeout_s)
        except BaseException:
            self._channel.close()
            self._arena.close()
            raise
        self._ack_thread = threading.Thread(target=self._take_acks, name="packer-acks", daemon=True)
        self._ack_thread.start()

    def _probe(self, timeout_s: float) -> None:
        """Send a known pattern the whole way once. PackerUnavailable says what the packer could not do."""
        slots = self._arena.allocate([PROBE_BYTES])
        if slots is None:
            raise PackerUnavailable("the arena cannot be allocated: see the setting arena_max_bytes")
        self._flush()
        pattern = torch.arange(PROBE_BYTES // 8, dtype=torch.int64).view(torch.uint8)
        slots[0].view.copy_(pattern)
        signal = self.device.signal()
        self._channel.send(Probe(signal.value, _piece(slots[0]), signal.event))
        answer = self._channel.receive(timeout_s)
        self.device.retire(signal)
        self._arena.release(slots)
        if answer is None:
            raise PackerUnavailable(f"the packer did not answer a probe within start_timeout_s = {timeout_s:g}")
        probed = answer[0]
        if not isinstance(probed, Probed) or probed.error:
            raise PackerUnavailable(f"the packer cannot read this worker's memory: {getattr(probed, 'error', probed)}")
        if probed.digest != hashlib.sha256(pattern.numpy().tobytes()).digest():
            raise PackerUnavailable("the packer reads other bytes than this worker wrote")

    # -- main thread ---------------------------------------------------------------------------------------------------

    def stage(self, output: object, output_id: str) -> Staged | None:
        """Copy the device arrays of ``output`` on the current stream and have the packer start. None: not this way now.

        After it returns, the output's own memory may be overwritten or freed in stream order.
        """
        if self.broken:
            return None
        tensors = skeleton.find_tensors(output, self.device.owns)
        places, sizes = plan([tensor.numel() * tensor.element_size() for tensor in tensors])
        if len(sizes) > protocol.MAX_PIECES:
            logger.warning(
                "output %s has %d large arrays; at most %d go to the packer", output_id, len(sizes), protocol.MAX_PIECES
            )
            return None
        slots = self._arena.allocate(sizes)
        overflow = 0
        originals = tensors
        with torch.no_grad():
            if slots is not None:
                _fill(slots, tensors, places)
            elif (overflow := self._take_overflow(sum(sizes))) > 0:
                tensors = [tensor.detach().clone() for tensor in tensors]
            else:
                logger.warning("output %s finds no room to wait in: see arena_max_bytes, overflow_max_bytes", output_id)
                return None
        staged = Staged(output_id, output, tensors, places, sizes, self.device.signal(), slots, overflow)
        staged.staged_ids = [id(tensor) for tensor in originals]
        with self._lock:
            self._pending[output_id] = staged
        if slots is not None:
            self._send_soon(self._export(staged))
        return staged

    def _take_overflow(self, nbytes: int) -> int:
        with self._lock:
            if nbytes > self._overflow_left:
                return 0
            self._overflow_left -= nbytes
            return nbytes

    def _announce(self, number: int, chunk: Chunk) -> None:
        self._send_soon(MapArena(number, chunk.tensor.numel(), chunk.handle), chunk.fd)

    def _send_soon(self, message: Message, fd: int | None = None) -> None:
        """Send now if that does not block, else leave it to the export thread. Order is kept."""
        try:
            if self._outbox or not self._channel.try_send(message, fd):
                self._outbox.append((message, fd))
        except PeerClosed:
            pass  # the ack thread sees it too, and hands everything back

    # -- export thread -------------------------------------------------------------------------------------------------

    def submit(self, staged: Staged) -> None:
        """Send the second half. Whatever goes wrong with the packer comes back through ``on_handed_back``.

        Raises only what pickling the output raises; the output is withdrawn then.
        """
        self._flush()
        try:
            self._pickle(staged)
        except Exception:
            staged.failed = True
            self._send_second(staged, Withdraw(staged.output_id))
            raise
        if staged.slots is None and not self._stage_late(staged):
            with self._lock:
                self._pending.pop(staged.output_id, None)
            self._hand_back(staged, f"no room in the arena for {self._wait_s:g} s (settings arena_max_bytes, wait_s)")
            return
        payload = staged.payload
        tail = len(payload) if len(payload) > protocol.MAX_PAYLOAD_BYTES else 0
        self._send_second(
            staged,
            Skeleton(
                staged.output_id,
                b"" if tail else payload,
                skeleton.mac(self._mac_key, staged.output_id, payload),
                staged.host_bytes,
                tail,
            ),
        )

    def _pickle(self, staged: Staged) -> None:
        """Make the payload and the memfd of host arrays. Lets go of the output."""
        staged_places = dict(zip(staged.staged_ids, staged.places, strict=True))
        value = staged.signal.value

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type == "cpu":
                return tensor
            with self.device.after(value):  # hidden where find_tensors does not look
                return tensor.detach().cpu()

        payload, host = skeleton.dump(staged.output, staged_places, to_host)
        tail = len(payload) if len(payload) > protocol.MAX_PAYLOAD_BYTES else 0
        if host.nbytes + tail:
            staged.host_bytes = host.nbytes + tail
            staged.host = SharedMemory.create("packer-host-arrays", staged.host_bytes)
            host.write_into(staged.host.buffer)
            staged.host.buffer[host.nbytes :] = payload if tail else b""
        staged.payload = payload
        staged.output = None
        if staged.slots is not None:
            staged.tensors = []

    def _stage_late(self, staged: Staged) -> bool:
        """Give a clone its slots as soon as some come back."""
        slots = self._arena.wait_allocate(staged.sizes, self._wait_s)
        if slots is None:
            return False
        with self.device.after(staged.signal.value), torch.no_grad():
            _fill(slots, staged.tensors, staged.places)
        staged.slots, staged.tensors = slots, []
        self._return_overflow(staged)
        self._send(self._export(staged))
        return True

    def _return_overflow(self, staged: Staged) -> None:
        with self._lock:
            self._overflow_left += staged.overflow_bytes
            staged.overflow_bytes = 0

    def _send_second(self, staged: Staged, message: Skeleton | Withdraw) -> None:
        with self._lock:
            broken = self.broken
            staged.submitted = True
            if broken:
                self._pending.pop(staged.output_id, None)
        if broken:
            self._hand_back(staged, broken)
        elif isinstance(message, Withdraw) and staged.slots is None:
            self._settle(staged)  # the packer never heard of it
        else:
            self._send(message, staged.host.fd if staged.host and isinstance(message, Skeleton) else None)

    def _send(self, message: Message, fd: int | None = None) -> None:
        try:
            self._channel.send(message, fd)
        except PeerClosed:
            pass  # the ack thread sees it too, and hands everything back

    def _flush(self) -> None:
        while self._outbox:
            message, fd = self._outbox[0]
            self._send(message, fd)
            self._outbox.popleft()

    def _export(self, staged: Staged) -> Export:
        assert staged.slots is not None
        return Export(
            staged.output_id, staged.signal.value, tuple(_piece(slot) for slot in staged.slots), staged.signal.event
        )

    # -- ack thread ----------------------------------------------------------------------------------------------------

    def _take_acks(self) -> None:
        self.device.bind_thread()
        reason = "the packer is gone"
        try:
            while True:
                received = self._channel.receive()
                assert received is not None
                message, fds = received
                transport.close_fds(fds)
                if isinstance(message, protocol.Ack):
                    self._settle(self._take(message.output))
                elif isinstance(message, protocol.Nack):
                    staged = self._take(message.output)
                    if staged is not None:
                        self._hand_back(staged, message.reason)
                elif isinstance(message, protocol.Refused):
                    reason = f"the packer refused this worker: {message.reason}"
        except PackerError as error:
            reason = f"{reason} ({error})"
        with self._lock:
            self.broken = reason
            orphans = [staged for staged in self._pending.values() if staged.submitted]
            for staged in orphans:
                del self._pending[staged.output_id]
        for staged in orphans:
            self._hand_back(staged, reason)

    def _take(self, output_id: str) -> Staged | None:
        with self._lock:
            return self._pending.pop(output_id, None)

    # -- either --------------------------------------------------------------------------------------------------------

    def _settle(self, staged: Staged | None) -> None:
        """The engine has it, or nobody will: everything it held is free again."""
        if staged is None:
            return
        with self._lock:
            self._pending.pop(staged.output_id, None)
        self.release(staged)
        self._on_settled(staged.output_id)

    def _hand_back(self, staged: Staged, reason: str) -> None:
        if staged.failed:
            self._settle(staged)
        else:
            self._on_handed_back(staged, reason)

    def rebuild(self, staged: Staged) -> Any:
        """The output itself, over its slots or clones. Its bytes are complete once the device is past its signal."""
        specs, pickled = skeleton.array_specs(staged.payload)

        def device_bytes(spec: skeleton.ArraySpec) -> torch.Tensor:
            if staged.slots is None:
                return skeleton.flat_bytes(staged.tensors[staged.places.index(Place(spec.piece, spec.offset))])
            return staged.slots[spec.piece].view[spec.offset : spec.offset + spec.nbytes]

        return skeleton.load(specs, pickled, device_bytes, staged.host.buffer if staged.host else b"")

    def release(self, staged: Staged) -> None:
        """Give back slots, clones, host memory and event. Idempotent."""
        if staged.slots:
            self._arena.release(staged.slots)
        staged.slots, staged.tensors, staged.output = None, [], None
        self._return_overflow(staged)
        if staged.host is not None:
            staged.host.close()
            staged.host = None
        if staged.signal.value:
            self.device.retire(staged.signal)
            staged.signal = Signal(0)

    def close(self) -> None:
        """Leave the packer, which closes its imports before it hangs up, and only then free the arena."""
        self._channel.finish()
        self._ack_thread.join(timeout=5.0)
        self._channel.close()
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


def _fill(slots: list[Slot], tensors: list[torch.Tensor], places: list[Place]) -> None:
    """Copy every tensor to its place, on the current stream. Any layout becomes dense; lazy conj and neg are resolved."""
    for tensor, place in zip(tensors, places, strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            target = slots[place.piece].view[place.offset : place.offset + nbytes]
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _piece(slot: Slot) -> Piece:
    return Piece(slot.arena, slot.offset, slot.nbytes)
