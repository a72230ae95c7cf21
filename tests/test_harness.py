"""The harness and the pipelines on vllm-omni's own executors: what every comparison in the other tests rests on."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
from engine_harness import BATCH, STEP, STREAM, RunningEngine, engine

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine

CHUNKS = 3  # of pipelines.StepPipeline, which is not imported here: it imports vllm_omni
SIZES = [(64, 96, 1), (128, 32, 1), (32, 32, 5)]
DTYPES = ["float32", "bfloat16", "uint8", "float8_e4m3fn"]


def requests(running: RunningEngine, seeds: range = range(12), dtypes: list[str] = DTYPES) -> list:
    return [
        running.request(
            seed=seed,
            height=SIZES[seed % 3][0],
            width=SIZES[seed % 3][1],
            num_frames=SIZES[seed % 3][2],
            dtype=dtypes[seed % len(dtypes)],
        )
        for seed in seeds
    ]


def outputs(running: RunningEngine, dtypes: list[str] = DTYPES) -> list[torch.Tensor]:
    return [result.output for result in running.run(requests(running, dtypes=dtypes)).values()]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.cpu(), other.cpu()
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_uni_gives_each_request_the_content_of_its_own_seed_every_time():
    with engine("uni", "RequestPipeline") as running:
        first, second = outputs(running), outputs(running)
        one, another = running.run([running.request(seed=100), running.request(seed=101)]).values()
    for seed, (output, again) in enumerate(zip(first, second, strict=True)):
        height, width, num_frames = SIZES[seed % 3]
        assert output.shape == (1, 3, num_frames, height, width)
        assert output.dtype == getattr(torch, DTYPES[seed % 4])
        assert same_bytes(output, again)
    assert not same_bytes(one.output, another.output)
    assert "output_ready_wait_time_ms" in one.yielded[-1].metrics


def test_uni_batches_requests_and_gives_each_what_it_gets_alone():
    with engine("uni", "RequestPipeline") as running:
        alone = outputs(running)
    with engine("uni", "BatchPipeline", **BATCH) as running:
        together = outputs(running)
        alike = running.run(running.request(seed=seed) for seed in range(4))
    assert all(same_bytes(output, expected) for output, expected in zip(together, alone, strict=True))
    storages = {result.output.untyped_storage().data_ptr() for result in alike.values()}
    assert len(storages) == 1, "four requests alike, sent at once, should come back as views of one fused storage"


@pytest.mark.parametrize(
    ("pipeline", "config"),
    [pytest.param("RequestPipeline", {}, marks=pytest.mark.gpu), pytest.param("StepPipeline", STEP)],
)
def test_mp_runs_the_same_pipeline_in_a_process_of_its_own(pipeline, config):
    dtypes = DTYPES[:3]  # small ones are pickled, and torch 2.11 reads no pickled float8
    with engine("uni", pipeline, **config) as running:
        expected = outputs(running, dtypes)
    with engine("mp", pipeline, **config) as running:
        pids = [process.pid for process in running.executor._processes]
        received = outputs(running, dtypes)
    assert pids
    assert os.getpid() not in pids
    assert all(same_bytes(output, reference) for output, reference in zip(received, expected, strict=True))


def test_step_mode_ends_with_the_output_and_streaming_yields_its_chunks_in_order():
    with engine("uni", "StepPipeline", **STEP) as running:
        final = outputs(running)
    with engine("uni", "StepPipeline", **STREAM) as running:
        streamed = running.run(requests(running)).values()
    for output, result in zip(final, streamed, strict=True):
        assert len(result.outputs) == CHUNKS
        assert same_bytes(output, result.outputs[0])
        assert not same_bytes(output, result.outputs[1])


@pytest.mark.parametrize(("pipeline", "config"), [("RequestPipeline", {}), ("BatchPipeline", BATCH)])
def test_each_behaviour_reaches_the_caller(pipeline, config):
    with engine("uni", pipeline, **config) as running:

        def run(behaviour, seed=7, **sizes):
            return running.run([running.request(seed=seed, behaviour=behaviour, **sizes)]).popitem()[1]

        image = run("image").output
        assert same_bytes(run("bfloat16").output, image.bfloat16())
        assert run("small").output.numel() == 12
        assert same_bytes(run("noncontiguous").output, image.transpose(-1, -2))
        assert same_bytes(torch.cat(list(run("views").output.values()), dim=-2), image)
        first, second = run("static").output, run("static", seed=8).output
        assert first.data_ptr() == second.data_ptr(), "the second forward should have overwritten the first's output"
        trajectory = run("trajectory", num_inference_steps=3).yielded[0]
        assert trajectory.trajectory_latents.shape == (3, *image.shape)
        assert trajectory.trajectory_timesteps.shape == trajectory.trajectory_log_probs.shape == (3,)
        nested = run("dict").output
        assert same_bytes(nested["list"][1]["deeper"], image + 1)
        assert same_bytes(torch.from_numpy(nested["array"]), image.cpu() + 3)
        assert (nested["pair"][1], nested["seed"], nested["nothing"]) == ("and text", 7, None)
        assert callable(run("unpicklable").output["callable"])


@pytest.mark.parametrize("behaviour", ["error", "output_error"])
def test_an_error_reaches_its_request_and_no_other(behaviour):
    with engine("uni", "RequestPipeline") as running:
        results = running.run(
            running.request(seed=seed, request_id=str(seed), behaviour=behaviour if seed == 2 else "image")
            for seed in range(4)
        )
    with pytest.raises(RuntimeError, match="the pipeline was asked to fail: seed 2"):
        _ = results.pop("2").output
    assert all(result.output is not None for result in results.values())


def test_the_harness_keeps_no_output_alive():
    with engine("uni", "RequestPipeline") as running:
        results = running.run([running.request(seed=1)])
        alive = weakref.ref(results.popitem()[1].output)
        running.run([running.request(seed=2)])  # the engine's busy loop holds its last output until the next
        gc.collect()
        assert alive() is None
