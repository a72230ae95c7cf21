"""A vllm-omni custom pipeline with no weights: some matrix products, then an output that its request's seed determines."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput

from worker_shim.synthetic.content import content


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
