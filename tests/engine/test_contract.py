"""The contract of an executor, kept by ours and by vllm-omni's own: the same requests give the same results.

Each executor runs the same list of requests once in each mode, on the real engine; the tests compare what came of each
request, bit for bit, with what `uni` gave. With no GPU vllm-omni's `mp` runs in step mode only (see engine_harness).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from engine_checks import assert_same, torch
from engine_harness import BATCH, STEP, STREAM, engine

from worker_shim.synthetic.engine import nvidia_gpus

pytestmark = pytest.mark.engine

LARGE = {"height": 512, "width": 512}
PACKER = "worker_shim.PackerDiffusionExecutor"
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "request": ("RequestPipeline", {}),
    "batch": ("BatchPipeline", BATCH),
    "step": ("StepPipeline", STEP),
    "stream": ("StepPipeline", STREAM),
}
EXECUTORS = [
    (mode, backend)
    for mode in MODES
    for backend in (PACKER, "mp")
    if backend == PACKER or "step_execution" in MODES[mode][1] or nvidia_gpus()
]
# Not "dict" and not "static": vllm-omni's own path cannot pack the one's empty view, and `uni` overwrites the other.
BEHAVIOURS = ["image", "bfloat16", "small", "noncontiguous", "views", "wordy", "trajectory", "media", "everything"]
# An error raised in a batch's forward is everybody's: those have a size of their own, and so a batch of their own.
REQUESTS = [
    {"seed": seed, "behaviour": behaviour, "num_inference_steps": 3, **size}
    for size in ({}, LARGE)
    for seed, behaviour in enumerate(BEHAVIOURS)
] + [
    {"seed": 50 + seed, "behaviour": behaviour, "height": 80 + 16 * seed}
    for seed, behaviour in enumerate(["error", "output_error"])
]


@dataclass
class Outcome:
    """What the engine's caller had of one request: what it was yielded, in order, or the error it got."""

    yielded: list[dict[str, Any]]
    error: tuple[str, str] | None


def outcome(result: Any) -> Outcome:
    yielded = [
        {
            "finished": each.finished,
            "images": each.images,
            "multimodal": each.multimodal_output,
            "custom": each.custom_output,
            "latents": each.latents,
            **{name: getattr(each, f"trajectory_{name}") for name in ("latents", "timesteps", "log_probs", "decoded")},
            "stages": sorted(each.stage_durations),
        }
        for each in result.yielded
    ]
    error = None if result.error is None else (type(result.error).__name__, str(result.error))
    return Outcome(torch.utils._pytree.tree_map(_own, yielded), error)


def _own(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


class Outcomes:
    """The outcomes of REQUESTS by mode and executor; an engine lives as long as it takes to have them."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[Outcome]] = {}

    def __call__(self, mode: str, backend: str) -> list[Outcome]:
        if (mode, backend) not in self._known:
            pipeline, config = MODES[mode]
            with engine(backend, pipeline, **config) as running:
                made = [running.request(**request) for request in REQUESTS]
                results = running.run(made)
                self._known[mode, backend] = [outcome(results[request.request_id]) for request in made]
        return self._known[mode, backend]


class Pair(NamedTuple):
    """What one executor and `uni` made of REQUESTS in one mode."""

    mode: str
    outcomes: list[Outcome]
    of_uni: list[Outcome]

    @property
    def each(self) -> Iterator[tuple[dict[str, Any], Outcome, Outcome]]:
        return zip(REQUESTS, self.outcomes, self.of_uni, strict=True)


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return Outcomes()


@pytest.fixture(scope="module", params=EXECUTORS, ids="-".join)
def pair(request: pytest.FixtureRequest, outcomes: Outcomes) -> Pair:
    """One executor after the other, each with all its tests."""
    mode, backend = request.param
    return Pair(mode, outcomes(mode, backend), outcomes(mode, "uni"))


def test_every_request_has_as_many_results_as_with_uni_and_the_last_is_final(pair):
    for request, one, other in pair.each:
        flags = [each["finished"] for each in one.yielded]
        assert flags == [each["finished"] for each in other.yielded], request
        if one.error is None:
            assert flags == [False] * (len(flags) - 1) + [True], request
            assert len(flags) == (3 if pair.mode == "stream" else 1), request


def test_every_error_is_that_of_uni(pair):
    errors = [one.error for one in pair.outcomes]
    assert errors == [other.error for other in pair.of_uni]
    assert sum(error is not None for error in errors) == 2


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_every_result_is_that_of_uni_bit_for_bit(pair, name):
    compared = 0
    for request, one, other in pair.each:
        if request["behaviour"] == name:
            assert_same(one.yielded, other.yielded, f"{name} in {pair.mode} mode")
            compared += len(one.yielded)
    assert compared == 2 * (3 if pair.mode == "stream" else 1)
