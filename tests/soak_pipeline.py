"""The pipeline of tests/soak.py: outputs cut out of one array of random bits, so that a comparison tells whether all is right.

This module imports vllm_omni.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from pipelines import Pipeline
from vllm_omni.diffusion.data import DiffusionOutput

MIB = 1 << 20
MOST_BYTES = 128 * MIB
STEP_BYTES = 256  # sizes are multiples of it
KINDS = ("float32", "bfloat16", "several", "numpy", "host tensor")
_STARTS = 1024  # an output starts at one of so many places of the array


@functools.cache
def bits() -> torch.Tensor:
    """The same in the engine's process and the worker's."""
    size = (MOST_BYTES + _STARTS * STEP_BYTES) // 4
    return torch.randint(-(1 << 31), 1 << 31, (size,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))


def _cut(seed: int, nbytes: int) -> torch.Tensor:
    start = seed % _STARTS * STEP_BYTES // 4
    return bits()[start : start + nbytes // 4]


def parts(kind: str, seed: int, nbytes: int) -> list[torch.Tensor]:
    """The arrays of an output, as int32, in the order of ``arrays``."""
    if kind != "several":
        return [_cut(seed, nbytes)]
    part = max(nbytes // 4 // STEP_BYTES * STEP_BYTES, STEP_BYTES)
    return [_cut(seed + number, part) for number in range(4)]


def make(kind: str, seed: int, nbytes: int, device: torch.device) -> Any:
    """The output of a request, in memory of its own."""
    cuts = parts(kind, seed, nbytes)
    if kind == "numpy":
        return {"output": {"array": cuts[0].clone().numpy()}}
    if kind == "host tensor":
        return {"output": {"host": cuts[0].clone()}}
    made = [cut.to(device, copy=True).view(torch.float32).view(-1, STEP_BYTES // 4) for cut in cuts]
    if kind == "several":
        image, latents, other, array = made
        return {"output": {"image": image, "latents": [latents, (other, "and text")], "array": array.cpu().numpy()}}
    return made[0].view(getattr(torch, kind))


def arrays(kind: str, output: Any) -> list[Any]:
    """The arrays in an output as the engine hands it out. Whatever is not as ``make`` made it raises."""
    if kind == "several":
        (latents, (other, text)) = output["latents"]
        assert text == "and text"
        return [output["image"], latents, other, output["array"]]
    if kind in ("numpy", "host tensor"):
        return list(output.values())
    assert output.dtype is getattr(torch, kind)
    return [output]


def is_right(kind: str, seed: int, nbytes: int, output: Any) -> bool:
    """Every bit."""
    found, expected = arrays(kind, output), parts(kind, seed, nbytes)
    return all(
        torch.equal(torch.as_tensor(array).reshape(-1).view(torch.int32), part)
        for array, part in zip(found, expected, strict=True)
    )


class SoakPipeline(Pipeline):
    """Several requests a forward: extra_args "kind" and "nbytes", and the seed, say what each output holds."""

    supports_request_batch = True

    @torch.no_grad()
    def forward(self, batch: Any) -> list[DiffusionOutput]:
        outputs = []
        for params in batch.sampling_params_list:
            # vllm-omni's warm-up asks for nothing
            asked = {"kind": KINDS[0], "nbytes": STEP_BYTES, **(params.extra_args or {})}
            made = make(asked["kind"], params.seed or 0, asked["nbytes"], self.weight.device)
            outputs.append(DiffusionOutput(output=made))
        return outputs
