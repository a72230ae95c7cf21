"""vllm-omni's own path for an output: packed into named SHM on this thread, and sent through the worker's own queue.

Whatever is packed and cannot be sent is taken out of SHM again, because nobody else removes it.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind, DiffusionOutput
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm, unpack_diffusion_output_shm
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput

from worker_shim.log import get_logger
from worker_shim.outputs.replies import OwnPathOutput
from worker_shim.worker.jobs import OwnPath
from worker_shim.worker.shm_room import NoRoom

logger = get_logger(__name__)


class OwnPathSender:
    """The export thread's. ``send_message`` puts an OUTPUT_READY on its way to the engine, and may raise."""

    def __init__(self, device: torch.device, send_message: Callable[[AsyncDiffusionOutput], None]) -> None:
        self._device = device
        self._send_message = send_message

    @functools.cached_property
    def _side_stream(self) -> Any:
        return None if self._device.type == "cpu" else torch.Stream(self._device)

    def send(self, job: OwnPath) -> None:
        """Pack and send it. Raises where that fails; nothing of it is left then."""
        stream = self._side_stream
        if stream is not None and job.event is not None:
            stream.wait_event(job.event)
        try:
            output = pack_diffusion_output_shm(job.output, d2h_stream=stream)
        except RecursionError:
            output = job.output  # it contains itself, and vllm-omni's own step mode sends such an output as it is
        if stream is not None:
            stream.synchronize()
        message = _ready(job.output_id, output=output, reason=job.reason.value)
        try:
            self._send_message(message)
        except Exception as error:
            if isinstance(error, NoRoom) or not fail_unpicklable(output, pickle.dumps):
                unpack_diffusion_output_shm(output)  # nobody else removes its named SHM
                raise
            self._send_message(message)

    def send_error(self, output_id: str, error: BaseException) -> None:
        """Tell the engine that an output failed. Where even that fails, the export thread goes on for the other outputs."""
        try:
            self._send_message(_ready(output_id, error=not_handed_over(error)))
        except Exception:
            logger.exception("the engine cannot be told that output %s failed", output_id)


def _ready(output_id: str, **what: Any) -> AsyncDiffusionOutput:
    return OwnPathOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, **what)


def fail_unpicklable(output: object, dump: Callable[[object], object]) -> bool:
    """Of a batch that does not pickle, make those results errors that do not. False where ``output`` is no batch."""
    if not isinstance(output, BatchRunnerOutput):
        return False
    for part in output.runner_outputs:
        try:
            dump(part)
        except Exception as error:
            logger.exception("the output of request %s cannot be pickled", part.request_id)
            unpack_diffusion_output_shm(part)  # nobody else removes its named SHM, where it has some
            part.result = DiffusionOutput(error=not_handed_over(error))
    return True


def not_handed_over(error: BaseException) -> str:
    return f"the output could not be handed over: {type(error).__name__}: {error}"
