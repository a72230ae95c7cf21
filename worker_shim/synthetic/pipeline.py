"""A vllm-omni custom pipeline with no weights, and the clock of its hand-offs.

Some matrix products make an output that its request's seed determines. It is timed from ``_return_result`` in the worker to its
arrival at the engine. Both processes read CLOCK_MONOTONIC, which is one clock for the whole machine. The stamps travel in the
output's own ``stage_durations``, so the same code times any executor of vllm-omni, ours or its own.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker import diffusion_worker

ENTERED = "return_result_entered_s"
PREVIOUS_COST = "previous_return_result_s"
UNCLAIMED = "unclaimed"


def content(shape: tuple[int, ...], dtype: str, seed: int, device: torch.device) -> torch.Tensor:
    """The output of a request with this seed; the same values in every process with the same device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if getattr(torch, dtype).is_floating_point:
        return torch.rand(shape, generator=generator, device=device).to(getattr(torch, dtype))
    return torch.randint(0, 128, shape, generator=generator, device=device).to(getattr(torch, dtype))


class SyntheticPipeline(nn.Module):
    """One request a forward: (1, 3, num_frames, height, width), of the dtype in ``extra_args["dtype"]`` (float32).

    With ``extra_args["synchronize"]`` it waits for the device before it returns, so that whatever is timed from then on
    counts no forward.
    """

    weights_sources = ()
    supports_request_batch = False

    def __init__(self, *, od_config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64), requires_grad=False)

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    @torch.no_grad()
    def forward(self, batch: Any) -> DiffusionOutput:
        params = batch.sampling_params
        extra = params.extra_args or {}
        hidden: torch.Tensor = self.weight
        for _ in range(params.num_inference_steps or 0):
            hidden = torch.tanh(hidden @ self.weight)
        shape = (1, 3, params.num_frames or 1, params.height, params.width)
        output = content(shape, extra.get("dtype", "float32"), params.seed or 0, hidden.device)
        if extra.get("synchronize") and output.is_cuda:
            torch.cuda.synchronize()
        return DiffusionOutput(output=output)


class TimedPipeline(SyntheticPipeline):
    """SyntheticPipeline, whose worker stamps each output on entry into ``_return_result``, and with the last call's time."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        _stamp(diffusion_worker.WorkerProc)  # the one this worker process runs


def _stamp(worker_proc: Any) -> None:
    original = worker_proc._return_result
    cost = 0.0

    def timed(self: Any, output: Any, rpc_id: str | None = None) -> None:
        nonlocal cost
        durations = getattr(output, "stage_durations", None)
        if durations is None:
            original(self, output, rpc_id)
            return
        entered = time.perf_counter()
        durations[ENTERED], durations[PREVIOUS_COST] = entered, cost
        begin = time.perf_counter()
        original(self, output, rpc_id)
        cost = time.perf_counter() - begin

    worker_proc._return_result = timed


class Arrival(NamedTuple):
    """One output in the engine's hands; all in seconds, ``at`` of CLOCK_MONOTONIC."""

    at: float
    handoff_s: float
    previous_cost_s: float  # of ``_return_result``, for the output before


class Arrivals:
    """Reads the stamps at the moment the executor has an output in hand. One lock; ``take`` on any thread.

    An output stamped UNCLAIMED, which nobody waits for, ends here.
    """

    def __init__(self, executor: Any) -> None:
        self._lock = threading.Lock()
        self._arrivals: list[Arrival] = []
        finish = executor._finish_output

        def arrived(async_output_id: str, result: Any, exc: BaseException | None) -> None:
            at = time.perf_counter()
            stamps = getattr(result, "stage_durations", None) or {}
            if UNCLAIMED in stamps:
                return
            if ENTERED in stamps:
                with self._lock:
                    self._arrivals.append(Arrival(at, at - stamps[ENTERED], stamps[PREVIOUS_COST]))
            finish(async_output_id, result, exc)

        executor._finish_output = arrived

    def take(self) -> list[Arrival]:
        """Those since the last call."""
        with self._lock:
            taken, self._arrivals = self._arrivals, []
        return taken
