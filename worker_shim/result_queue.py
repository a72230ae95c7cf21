"""The packer's result_mq as vllm-omni's result pump reads it.

The pump asks one thing of a queue: ``dequeue(timeout)``, a message or TimeoutError. It runs on a thread of its own, which is
thereby the reader of the engine's connection: one wake-up from the packer's send to the request's future.
"""

from __future__ import annotations

import collections
import hmac
import threading
import time
from typing import Any

import torch
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind

from packer_service import protocol
from packer_service.errors import PackerError, PeerClosed
from packer_service.protocol import OutputReady
from packer_service.transport import Channel, close_fds
from worker_shim import skeleton
from worker_shim.lease import LeaseBook, map_host_arrays
from worker_shim.log import get_logger
from worker_shim.skeleton import ArraySpec

logger = get_logger(__name__)

_QUIET_S = 0.05
_REMEMBERED = 1 << 16


class Delivered:
    """The ids already delivered, by whichever queue: an output that comes a second time is dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: collections.OrderedDict[str, None] = collections.OrderedDict()

    def first(self, output_id: str) -> bool:
        """True the first time it is asked about ``output_id``."""
        with self._lock:
            if output_id in self._ids:
                return False
            self._ids[output_id] = None
            if len(self._ids) > _REMEMBERED:
                self._ids.popitem(last=False)
            return True


class PackerResultQueue:
    """One packer's queue. Only the pump thread may call ``dequeue``."""

    def __init__(self, channel: Channel, mac_key: bytes, delivered: Delivered) -> None:
        self.leases = LeaseBook(channel)
        self.broken = ""
        self._channel = channel
        self._mac_key = mac_key
        self._delivered = delivered
        self._quiet = True

    def dequeue(self, timeout: float | None = None) -> AsyncDiffusionOutput:
        """The next OUTPUT_READY. TimeoutError where none came in ``timeout`` seconds.

        After ~50 ms of quiet it returns one empty message: the pump's locals would otherwise hold the last output, and its
        lease, until the next one comes.
        """
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        while True:
            remaining = max(deadline - time.monotonic(), 0.0)
            if self.broken:
                time.sleep(remaining)  # nothing will come: do not spin
                raise TimeoutError
            wait = remaining if self._quiet else min(_QUIET_S, remaining)
            try:
                received = self._channel.receive(wait)
            except PackerError as error:
                self._break(error)
                continue
            if received is None:
                if self._quiet:
                    raise TimeoutError
                self._quiet = True
                return AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY)
            message, fds = received
            try:
                output = self._take(message, fds)
            finally:
                close_fds(fds)
            if output is not None:
                self._quiet = False
                return output

    def _break(self, error: PackerError) -> None:
        self.broken = str(error)
        if not isinstance(error, PeerClosed):
            logger.error("the packer broke the protocol and is disconnected: %s", error)
            self._channel.shutdown()
        logger.warning("the packer's result queue ended: %s", error)

    def _take(self, message: protocol.Message, fds: list[int]) -> AsyncDiffusionOutput | None:
        if isinstance(message, protocol.Segment):
            self.leases.add_segment(message, fds)
            return None
        if isinstance(message, protocol.Refused):
            logger.error("the packer refused this engine: %s", message.reason)
            return None
        assert isinstance(message, OutputReady)
        if not self._delivered.first(message.output):
            logger.info("output %s came a second time and is dropped", message.output)
            for lease in message.leases:
                self.leases.give_back(lease)
            return None
        ready = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=message.output)
        if message.error:
            ready.error = message.error
            return ready
        try:
            ready.output = self._build(message, fds)
        except Exception as error:  # whatever an unpickled class raises belongs to this output alone
            logger.exception("output %s cannot be put together", message.output)
            ready.error = f"output {message.output} cannot be put together: {type(error).__name__}: {error}"
        return ready

    def _build(self, message: OutputReady, fds: list[int]) -> Any:
        """The output over its leases; a lease that no array uses goes back at once, also when this raises."""
        unused = {number: lease for number, lease in enumerate(message.leases)}
        try:
            host: Any = map_host_arrays(fds, message.host_nbytes) if message.host_nbytes else b""
            payload: bytes | memoryview = message.payload
            if message.payload_in_host:
                payload = memoryview(host)[len(host) - message.payload_in_host :]
            if not hmac.compare_digest(skeleton.mac(self._mac_key, message.output, payload), message.mac):
                raise PackerError("its MAC is not our worker's")
            specs, pickled = skeleton.array_specs(payload)
            by_piece: dict[int, list[ArraySpec]] = {}
            for spec in specs:
                if spec.piece >= 0 and spec.nbytes:
                    by_piece.setdefault(spec.piece, []).append(spec)
            arrays: dict[tuple[int, int], torch.Tensor] = {}
            for number, group in by_piece.items():
                uses = [(spec.offset, spec.nbytes) for spec in group]
                for use, array in zip(uses, self.leases.grant(unused.pop(number), uses), strict=True):
                    arrays[number, use[0]] = torch.from_numpy(array)
            return skeleton.load(specs, pickled, lambda spec: arrays.get((spec.piece, spec.offset), _EMPTY), host)
        finally:
            for lease in unused.values():
                self.leases.give_back(lease)

    def close(self) -> None:
        """End the session: the packer frees what no tensor here still looks at. Tensors that are out stay valid."""
        self._channel.shutdown()
        self.leases.close()
        self._channel.close()


_EMPTY = torch.empty(0, dtype=torch.uint8)


class OnceQueue:
    """A worker's own result queue, less the outputs that the packer delivered first."""

    def __init__(self, result_mq: Any, delivered: Delivered) -> None:
        self._result_mq = result_mq
        self._delivered = delivered

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            message = self._result_mq.dequeue(*args, **kwargs)
            if (
                not isinstance(message, AsyncDiffusionOutput)
                or message.kind is not AsyncOutputKind.OUTPUT_READY
                or message.async_output_id is None
                or self._delivered.first(message.async_output_id)
            ):
                return message
            _discard(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result_mq, name)


def _discard(message: AsyncDiffusionOutput) -> None:
    """Unpack a duplicate for nothing: that is what removes its named SHM segments."""
    from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm

    unpack_diffusion_output_shm(message.output)
