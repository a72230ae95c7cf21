"""The exporter: stages a worker's outputs in memory that a packer can read, and hands them to the packer.

Note [Who does what in the worker]
Main thread, in ``stage``: it finds the device arrays, tells the packer to start, copies them into slots on the current stream,
and signals. Then, in ``submit_now``, it pickles what is left of a plain output (``survey.survey``) and sends it: to wake the
export thread, and to lose the GIL to it a few times, would cost the main thread more. The main thread never waits for the
packer: what finds no room in the connection is queued.
Export thread, in ``submit``: it does what needs Python time or may wait: it pickles any other output, copies host arrays, and
waits for a full arena. It pickles only when the device has passed the forward: pickling may run somebody's code, which may read
what the forward writes.
The link's thread hears of what was delivered or failed (worker_shim.worker.exchange).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from packer_service.config import Settings
from packer_service.errors import MAY_PASS, PackerError
from packer_service.memory.memfd import SharedMemory
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Body, Skeleton
from worker_shim.connection import Connection
from worker_shim.log import get_logger
from worker_shim.outputs import skeleton, survey
from worker_shim.outputs.arrays import ArraySpec, HostArrays, tensor_from_bytes
from worker_shim.retries import Arrival
from worker_shim.worker.device import ExportDevice, copy_into
from worker_shim.worker.exchange import Exchange, OnFallback
from worker_shim.worker.in_flight import Event, InFlight, State
from worker_shim.worker.placement import OWN_PIECE_BYTES, Placement, plan
from worker_shim.worker.probe import probe

logger = get_logger(__name__)

_FINISH_S = 5.0

Salvage = Callable[[object, Callable[[object], object]], bool]
"""(output, dump) -> whether to try again; see ``Exporter.submit``."""


def _no_salvage(content: object, dump: Callable[[object], object]) -> bool:
    return False


class Exporter:
    """One worker's outputs, and its connection to its packer. The first connection probes the device with a real copy.

    Making one waits ``start_timeout_s`` for a packer that is away. With none then it raises where ``fallback`` is ``fail``;
    else outputs fall back until one comes. It always raises where a packer answers that it cannot serve this worker.
    ``on_settled`` is called once for each output that the packer is done with. One that falls back goes to ``on_fallback``
    instead, whose callee rebuilds it, sends it, and then releases it. See Note [Who does what in the worker].
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
        on_fallback: OnFallback,
    ) -> None:
        self.device = device
        self._mac_key = mac_key
        self._on_settled = on_settled

        def connect(timeout_s: float) -> Channel:
            return handshake.connect(
                socket, key, "worker", session, device_uuid=device.uuid, timeout_s=timeout_s, hang_s=settings.hang_s
            )[0]

        name = f"the packer at {socket}"
        self.exchange = Exchange(settings, device, connect, name, self._settle, on_fallback)
        self._link = self.exchange.link
        self.placement = Placement(device, settings, self._link.lock, self.exchange.imports, self.take_acks)

        def prove(connection: Connection, timeout_s: float) -> None:
            probe(device, self.placement.arena, connection, timeout_s)

        try:
            self._link.open(Arrival(settings, threading.Event(), "worker"), prove)
        except (*MAY_PASS, OSError) as error:
            if settings.fallback == "fail":
                self._free_memory()
                raise
            self.exchange.broken = str(error)
            logger.warning(
                "outputs take vllm-omni's own path until a packer is there: %s. It is tried again (setting retry_s)",
                error,
            )
        except BaseException:
            self._free_memory()
            raise
        try:
            self._link.start()
        except PackerError:
            self._free_memory()
            raise

    @property
    def broken(self) -> str:
        """Why no output is exported at present; empty where one is."""
        return self.exchange.broken or self.exchange.diverted

    # -- main thread ---------------------------------------------------------------------------------------------------

    def stage(self, content: object, output_id: str) -> InFlight | None:
        """Take the device arrays of an output on the current stream, and have the packer start. None where nothing has room.

        After it returns, the output's own memory may be overwritten or freed in stream order. So it stages where no packer is
        there to start, too: ``submit`` has such an output fall back, and it is read from where it was staged.
        """
        tensors, plain, yielding = survey.survey(content, self.device.owns)
        places, sizes = plan([tensor.nbytes for tensor in tensors])
        if len(sizes) > protocol.MAX_PIECES:
            logger.warning("output %s has %d large arrays, more than %d", output_id, len(sizes), protocol.MAX_PIECES)
            return None
        aside = bool(self.exchange.diverted)  # the packer is there and must not hear of it
        if aside and not sizes:
            return None
        output = InFlight(output_id, content, list(zip(tensors, places, strict=True)), plain, yielding)
        try:
            copies = self.placement.place(output, sizes, aside=aside)
        except torch.OutOfMemoryError as error:
            logger.warning("output %s finds no device memory to wait in: %s", output_id, error)
            copies = None
        if copies is None:
            self.placement.give_back(output)
            return None
        next_signal = self.device.next_signal() if output.pieces else None
        if next_signal is not None:
            output.signal = next_signal
            self.exchange.export(output)  # the packer gets ready while the copies below are submitted
        try:
            for tensor, memory, offset in copies:
                copy_into(self.device, tensor, memory, offset)
            output.signal = self.device.signal()
        except Exception:
            self._abandon(output)
            raise
        if output.state is State.NEW:
            self.exchange.export(output)
        return output

    def _abandon(self, output: InFlight) -> None:
        """Staging failed. What was exported is withdrawn, and holds its slots until the packer has let go of them.

        Where the device cannot even signal any more, ``Exchange.look`` ends the packer's wait. The CPU must not signal in the
        device's stead: that would declare complete what was staged before.
        """
        output.counted = False
        if output.state is State.EXPORTED:
            try:
                self.device.signal()
            except Exception:
                logger.exception("the device cannot mark the end of output %s", output.output_id)
        self.exchange.withdraw(output)

    def submit_now(self, output: InFlight) -> bool:
        """``submit``, where that neither takes long nor waits; False where it is still to be called. Raises nothing."""
        if not output.plain or output.state is State.BESIDE or self.broken:
            return False
        try:
            self._pickle(output, _no_salvage)
            self._submit(output)
        except Exception:
            return False  # submit meets it again, and says so
        return True

    def reserve_arena(self) -> None:
        """Have all of the arena now, before somebody else is given the memory."""
        self.placement.arena.reserve()

    def give_back_arena(self, timeout_s: float) -> None:
        """Free the chunks that hold nothing, so that the device has the memory: the packer closes its imports first."""
        self.take_acks()
        self.placement.give_back_arena(timeout_s)

    # -- export thread -------------------------------------------------------------------------------------------------

    def submit(self, output: InFlight, salvage: Salvage = _no_salvage) -> None:
        """Send the second half. Whatever goes wrong with the packer comes back through ``on_fallback``.

        Raises only what pickling the output raises; the output is withdrawn then. Before that ``salvage`` may take out of
        the output what cannot be pickled, and return True to have it tried once more.
        """
        if output.state not in (State.EXPORTED, State.BESIDE):
            return  # it was submitted, or its device broke: nobody waits for the rest of it
        try:
            self._pickle(output, salvage)
            if output.state is State.BESIDE:
                if why_not := self.broken or self.placement.place_late(output):
                    self.exchange.fall_back(output, why_not)
                    return
                self.exchange.export(output)
        except BaseException:  # somebody's pickling may end in SystemExit
            self.withdraw(output)
            raise
        self._submit(output)

    def withdraw(self, output: InFlight) -> None:
        """Forget an output that the engine was not promised, or was told of: what it holds comes back with the ack."""
        self.exchange.withdraw(output)

    def rebuild(self, output: InFlight) -> Any:
        """The output itself, over its pieces. Its bytes are complete once the device is past its signal."""
        assert output.skeleton is not None, "an output that falls back is pickled"
        body = output.skeleton.body
        host = output.host.buffer if output.host else b""
        payload = bytes(host[len(host) - body.payload_in_host :]) if body.payload_in_host else body.payload
        specs, pickled = skeleton.array_specs(payload)

        def device_tensor(spec: ArraySpec) -> torch.Tensor:
            view = output.view(spec.piece)[spec.offset : spec.offset + spec.nbytes]
            # vllm-omni goes by the size of a storage: of a small view of a large one it makes named memory, which has no
            # form for an empty tensor and takes a scalar for a vector.
            return tensor_from_bytes(view if spec.nbytes >= OWN_PIECE_BYTES else view.clone(), spec)

        return skeleton.load(specs, pickled, device_tensor, host)

    def release(self, output: InFlight) -> None:
        """An output that fell back is sent, or failed: give back what it holds. Idempotent, on any thread."""
        self._finish(output)

    # -- any thread ----------------------------------------------------------------------------------------------------

    def take_acks(self) -> None:
        """Settle every output whose ack is there."""
        self.exchange.take_acks()

    def _pickle(self, output: InFlight, salvage: Salvage) -> None:
        """Make what the engine rebuilds the output from, its ``skeleton``, and let go of the output.

        Host arrays, and a payload too large for a message, go to a memfd, ``output.host``. Raises what pickling raises, and
        OSError where there is no memfd.
        """

        def to_host(tensor: torch.Tensor) -> torch.Tensor:
            # One of this device was hidden where survey does not look.
            return tensor if tensor.device.type == "cpu" else tensor.detach().cpu()

        def dump(content: object) -> tuple[bytes, HostArrays]:
            return skeleton.dump(content, output.arrays, to_host, output.yielding)

        with contextlib.nullcontext() if output.plain else self.device.after(output.signal.ready):
            try:
                payload, host = dump(output.content)
            except Exception:
                if not salvage(output.content, dump):
                    raise
                payload, host = dump(output.content)
            in_host = payload if len(payload) > protocol.MAX_PAYLOAD_BYTES else b""
            nbytes = host.nbytes + len(in_host)
            if nbytes:
                output.host = SharedMemory.create("packer-host-arrays", nbytes)
                host.write_into(output.host.buffer)
                output.host.buffer[host.nbytes :] = in_host
        mac = skeleton.mac(self._mac_key, output.output_id, payload)
        body = Body(b"" if in_host else payload, mac, nbytes, len(in_host))
        output.skeleton = Skeleton(output.output_id, body, output.plain)
        output.content, output.arrays = None, []

    def _submit(self, output: InFlight) -> None:
        self.exchange.submit(output)
        if not self.placement.arena.has_room(sum(piece.nbytes for piece in output.pieces)):
            self.take_acks()  # here rather than in ``stage``: the engine has COMPUTE_DONE already

    def _settle(self, *outputs: InFlight) -> None:
        """The engine has them, or nobody will: everything they held is free again."""
        for output in self._finish(*outputs):
            if output.counted:
                self._on_settled(output.output_id)

    def _finish(self, *outputs: InFlight) -> list[InFlight]:
        """Give back what these hold; which of them were not settled before."""
        with self._link.lock:
            finished = [output for output in outputs if output.state is not State.SETTLED]
            for output in finished:
                output.on(Event.SETTLE)
        self.placement.give_back(*outputs)
        return finished

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the packer, which closes its imports before it hangs up, and only then free the arena."""
        self.device.timeline.let_go()
        self._link.finish(_FINISH_S)
        self._free_memory()
        self.device.close()

    def _free_memory(self) -> None:
        self.exchange.ack_page.close()
        self.placement.close()
