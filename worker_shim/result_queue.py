"""The packer's result_mq as vllm-omni's result pump reads it.

The pump asks one thing of a queue: ``dequeue(timeout)``, a message or TimeoutError. It runs on a thread of its own, which is
thereby the reader of the engine's connection: one wake-up from the packer's send to the request's future.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind
from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm

from packer_service.transport import Channel
from worker_shim.receiver import Delivered, Receiver

_QUIET_S = 0.05


class PackerResultQueue(Receiver):
    """One packer's queue. Only the pump thread may call ``dequeue``."""

    def __init__(self, channel: Channel, mac_key: bytes, delivered: Delivered) -> None:
        super().__init__(channel, mac_key, delivered)
        self._quiet = True

    def dequeue(self, timeout: float | None = None) -> AsyncDiffusionOutput:
        """The next OUTPUT_READY. TimeoutError where none came in ``timeout`` seconds.

        After ~50 ms of quiet it returns one empty message: the pump's locals would otherwise hold the last output, and its
        lease, until the next one comes.
        """
        timeout = 3600.0 if timeout is None else timeout
        received = self.receive(timeout if self._quiet else min(_QUIET_S, timeout))
        if received is not None:
            self._quiet = False
            return AsyncDiffusionOutput(
                kind=AsyncOutputKind.OUTPUT_READY,
                async_output_id=received.output_id,
                output=received.output,
                error=received.error or None,
            )
        if not self._quiet:
            self._quiet = True
            return AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY)
        if self.broken:
            time.sleep(timeout)  # nothing will come: do not spin
        raise TimeoutError


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
            unpack_diffusion_output_shm(message.output)  # for nothing: that is what removes its named SHM segments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result_mq, name)
