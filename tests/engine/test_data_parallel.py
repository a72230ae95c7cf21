"""DP waves: two replicas of one rank each, whose replies carry placeholders; their outputs leave through the packer.

With two GPUs each rank has one, and a packer of its own; with none both are on the host, and so on one packer. vllm-omni
sends waves only where an offloaded component gathers its weights from all ranks: `waves` makes its engine believe so. What
the workers do is theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_checks import (
    GPUS,
    References,
    Residue,
    assert_same,
    in_one_wave,
    in_packer_memory,
    nothing_kept,
    outputs,
    packer_engine,
)
from engine_harness import RunningEngine, engine
from packer_process import stopped, wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(GPUS) == 1, reason="two ranks on one GPU: vllm-omni gives each its own"),
]

IMAGE = {"height": 512, "width": 512}


@pytest.fixture(scope="module")
def uni() -> Iterator[References]:
    with engine("uni", "RequestPipeline") as running:
        yield References(running)


@pytest.fixture(scope="module")
def waves(uni: References) -> Iterator[RunningEngine]:
    from vllm_omni.diffusion.data import DiffusionParallelConfig

    residue = Residue()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("executor.multiproc_executor", "diffusion_engine", "offloader.config"):
            patch.setattr(f"vllm_omni.diffusion.{module}.any_selected_component_uses_allgather", lambda config: True)
        with packer_engine(
            packer={"compatibility": "lenient"},  # what was patched is no function that this release knows
            num_gpus=2,
            parallel_config=DiffusionParallelConfig(data_parallel_size=2),
            max_num_seqs=2,
        ) as running:
            yield running
    residue.assert_none()


def test_each_replica_sends_through_the_packer_of_its_device(waves):
    queues = [keeper.queue for keeper in waves.executor._packers.keepers]
    assert len(queues) == (2 if GPUS else 1)
    before = [queue.outputs for queue in queues]
    in_one_wave(waves, {"seed": 1, **IMAGE}, {"seed": 2, **IMAGE})
    came = [queue.outputs - earlier for queue, earlier in zip(queues, before, strict=True)]
    assert sum(came) == 3, "the wave's two, and one ahead of it"
    assert all(came), "one packer carried both replicas' outputs"


def test_each_request_of_a_wave_gets_the_output_of_its_replica_through_the_packer(waves, uni):
    requests = [{"seed": 1, **IMAGE}, {"seed": 2, **IMAGE}]
    received = [result.output for result in in_one_wave(waves, *requests)]
    assert all(map(in_packer_memory, received))
    assert_same(received, uni(*requests))
    del received
    nothing_kept(waves)


def test_the_next_wave_runs_while_the_outputs_of_the_one_before_are_not_copied_yet(waves, uni):
    requests = [{"seed": seed, **IMAGE} for seed in range(4)]
    with contextlib.ExitStack() as stack:
        for pid in waves.executor.packer_pids:
            stack.enter_context(stopped(pid))
        futures = [waves.submit(waves.request(**request)) for request in requests]
        wait_until(lambda: len(waves.executor._output_futures) == 4, "all four are waited for")
    assert_same([future.result(60).output for future in futures], uni(*requests))
    del futures
    nothing_kept(waves)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_wave_of_which_one_rank_fails_leaves_nothing_of_the_other(waves, uni, failing):
    requests: list[dict[str, Any]] = [{"seed": 1, **IMAGE}, {"seed": 2, **IMAGE}]
    requests[failing]["behaviour"] = "error"
    for request in requests:
        request.setdefault("behaviour", "image")
    # vllm-omni allows no two extra_args in a wave, so the ranks must find out by themselves
    from vllm_omni.diffusion.executor import multiproc_executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiproc_executor, "json", SimpleNamespace(dumps=lambda *args, **kwargs: ""))
        results = in_one_wave(waves, *requests)
    assert all("asked to fail" in str(result.error) for result in results), "vllm-omni fails a whole wave"
    nothing_kept(waves)
    assert_same(outputs(waves, {"seed": 3, **IMAGE}), uni({"seed": 3, **IMAGE}))


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({}, {0}),
        ({"tensor_parallel_size": 2, "sequence_parallel_size": 2}, {0}),
        ({"data_parallel_size": 3}, {0, 1, 2}),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "cfg_parallel_size": 2}, {0, 4}),
        ({"data_parallel_size": 2, "sequence_parallel_size": 2, "pipeline_parallel_size": 2}, {0, 4}),
    ],
)
def test_only_ranks_that_reply_have_a_packer(config, ranks, monkeypatch):
    from worker_shim.outputs.replies import reply_ranks

    names = ("data", "tensor", "sequence", "pipeline", "cfg")
    sizes = {f"{name}_parallel_size": 1 for name in names} | config
    gathers = "vllm_omni.diffusion.offloader.config.any_selected_component_uses_allgather"
    for step, gathered, expected in ((False, True, ranks), (False, False, {0}), (True, True, {0})):
        monkeypatch.setattr(gathers, lambda config, gathered=gathered: gathered)
        assert reply_ranks(SimpleNamespace(step_execution=step, parallel_config=SimpleNamespace(**sizes))) == expected
