"""What vllm-omni has of outputs: which workers reply with them, in what messages, its rules for media."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_omni.diffusion.data import AsyncDiffusionOutput, DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

from worker_shim.outputs.own_path import OwnPathReason


@dataclass
class OwnPathOutput(AsyncDiffusionOutput):
    """vllm-omni's OUTPUT_READY, and why the output comes this way: the value of an ``OwnPathReason``."""

    reason: str = OwnPathReason.OTHER.value


def reply_ranks(od_config: OmniDiffusionConfig) -> frozenset[int]:
    """The workers that reply with outputs: the first of each DP replica where vllm-omni runs DP waves, else the first.

    Waves are what its ``execute_request`` sends to all replicas where an offloaded component gathers its weights from
    them; the other ranks (TP, SP, CFG, PP; DP without such offload) compute and send nothing.
    """
    from vllm_omni.diffusion.offloader.config import any_selected_component_uses_allgather

    if od_config.step_execution:
        return frozenset({0})
    parallel = od_config.parallel_config
    replicas = parallel.data_parallel_size
    if replicas <= 1 or not any_selected_component_uses_allgather(od_config):
        return frozenset({0})
    replica_size = (
        parallel.tensor_parallel_size
        * parallel.sequence_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.cfg_parallel_size
    )
    return frozenset(replica * replica_size for replica in range(replicas))


def in_reply(reply: Any) -> Iterator[DiffusionOutput]:
    """The outputs in a synchronous reply of a worker: those of a step, or of one rank's part in a DP wave."""
    if isinstance(reply, BatchRunnerOutput):
        for part in reply.runner_outputs:
            if part.result is not None:
                yield part.result
    elif isinstance(reply, RunnerOutput):
        if reply.result is not None:
            yield reply.result
    elif isinstance(reply, dict) and "dp_rank" in reply and isinstance(reply.get("output"), DiffusionOutput):
        yield reply["output"]


def replace_in_reply(reply: Any, replace: Callable[[DiffusionOutput], DiffusionOutput]) -> None:
    """Put ``replace(output)`` where each output of the reply is; a part that then holds a placeholder carries its id too.

    With the id beside it vllm-omni itself drops the output of a request that was aborted meanwhile.
    """
    if isinstance(reply, dict):
        for output in in_reply(reply):
            reply["output"] = replace(output)
        return
    parts = reply.runner_outputs if isinstance(reply, BatchRunnerOutput) else [reply]
    for part in parts:
        if isinstance(part, RunnerOutput) and part.result is not None:
            part.result = replace(part.result)
            part.async_output_id = part.result.async_output_id


def check_media(output: DiffusionOutput) -> None:
    """What vllm-omni checks of typed media when it packs or unpacks an output: it does neither with one of ours.

    TypeError or ValueError says what is wrong.
    """
    from vllm_omni.diffusion.media import DiffusionMediaOutput

    if output.output is not None:
        raise ValueError("DiffusionOutput cannot contain both media and legacy output")
    media = output.media
    if not isinstance(media, DiffusionMediaOutput):
        raise TypeError(f"DiffusionOutput.media must be DiffusionMediaOutput, got {type(media).__name__}")
    media.validate()
    if not media.prepared_for_transport:
        raise ValueError("Diffusion media must be prepared before it leaves the worker")
