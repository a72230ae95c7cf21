"""PackerDiffusionEngine: post-processing beside the event loop, with the results, errors and metrics of vllm-omni's own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_checks import DEADLINE_S, Residue, assert_same, nothing_kept, packer_engine
from engine_harness import STEP, STREAM, RunningEngine, engine
from packer_process import wait_until

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

import worker_shim  # noqa: E402
from worker_shim import compat  # noqa: E402
from worker_shim.engine import own_engine  # noqa: E402

OURS = {"engine_backend": "worker_shim.PackerDiffusionEngine"}
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "request": ("RequestPipeline", {}),
    "stream": ("StepPipeline", STREAM),
}
CASES = ("image", "bfloat16", "small", "dict", "media", "trajectory", "error", "output_error", "wordy")
METRICS = ("diffusion_engine_exec_time_ms", "output_ready_wait_time_ms", "postprocess_time_ms", "preprocess_time_ms")


def halved(output: Any) -> Any:
    """A post-processing function: every tensor of it, halved, in the nesting that it came in."""
    if isinstance(output, torch.Tensor):
        return output.float() / 2
    if isinstance(output, dict):
        return {name: halved(value) for name, value in output.items()}
    return [halved(value) for value in output] if isinstance(output, (list, tuple)) else output


@contextlib.contextmanager
def postprocessing(running: RunningEngine, function: Callable[[Any], Any]) -> Iterator[None]:
    diffusion_engine = running.diffusion_engine
    before = diffusion_engine.post_process_func
    diffusion_engine.post_process_func = function
    try:
        yield
    finally:
        diffusion_engine.post_process_func = before


def requests(running: RunningEngine) -> list[Any]:
    return [running.request(seed=seed, behaviour=case, height=64, width=64) for seed, case in enumerate(CASES)]


def came(running: RunningEngine) -> list[tuple[str, Any]]:
    """What each case came to: its payloads, or the error in words."""
    results = running.run(requests(running)).values()
    return [("error", str(r.error)) if r.error else ("outputs", [each.images for each in r.yielded]) for r in results]


@pytest.fixture(scope="module", params=MODES)
def running(request) -> Iterator[RunningEngine]:
    pipeline, config = MODES[request.param]
    residue = Residue()
    with packer_engine(pipeline, **config, **OURS) as one:
        one.mode = request.param
        yield one
    gc.collect()
    residue.assert_none()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[tuple[str, Any]]]:
    """What vllm-omni's own engine gives, over its default executor."""
    found = {}
    for mode, (pipeline, config) in MODES.items():
        with engine("uni", pipeline, **config) as own, postprocessing(own, halved):
            found[mode] = came(own)
    return found


def test_results_and_errors_are_those_of_vllm_omnis_own_engine(running, expected):
    with postprocessing(running, halved):
        got = came(running)
    for case, ours, theirs in zip(CASES, got, expected[running.mode], strict=True):
        assert ours[0] == theirs[0], case
        if ours[0] == "outputs":
            assert len(ours[1]) == len(theirs[1]), case
            assert_same(ours[1], theirs[1], case)
        else:
            assert ours[1].splitlines()[-1] == theirs[1].splitlines()[-1], case


def test_the_function_runs_beside_the_loop_which_goes_on_meanwhile(running):
    """A function that takes half a second and lets go of the GIL, as most of torch does."""
    threads = set()

    def slow(output: Any) -> Any:
        threads.add(threading.current_thread().name)
        time.sleep(0.5)
        return output

    async def longest_stall() -> float:
        longest, last = 0.0, time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest

    running.run([running.request(seed=0)])  # what the first request of an engine costs is not what is measured
    done = threading.Event()
    with postprocessing(running, slow):
        watching = running._start(longest_stall())
        result = running.submit(running.request(seed=1)).result(DEADLINE_S)
    done.set()
    assert result.error is None
    assert all(name.startswith("packer-postprocess") for name in threads)
    assert watching.result(DEADLINE_S) < 0.25  # 10 ms on a machine with nothing else to do; the function's 500 never


def test_metrics_keep_their_meaning(running):
    def slow(output: Any) -> Any:
        time.sleep(0.2)
        return output

    with postprocessing(running, slow):
        (result,) = running.run([running.request(seed=0)]).values()
    assert result.error is None
    for request_output in result.yielded:
        metrics = {name: request_output.metrics[name] for name in METRICS}
        assert metrics["postprocess_time_ms"] >= 200
        assert 0 <= metrics["output_ready_wait_time_ms"] < 10_000
        assert metrics["diffusion_engine_exec_time_ms"] > 0
    assert result.yielded[0].metrics["diffusion_engine_exec_time_ms"] < 200 * len(result.yielded) + 10_000


def test_what_the_function_raises_fails_its_request_alone(running):
    def picky(output: Any) -> Any:
        if float(torch.as_tensor(output).flatten()[0]) < 0:
            raise ValueError("this output is not for showing")
        return output

    def failing(output: Any) -> Any:
        raise ValueError("this output is not for showing")

    with postprocessing(running, failing):
        (result,) = running.run([running.request(seed=0)]).values()
    assert isinstance(result.error, ValueError)
    assert "not for showing" in str(result.error)
    assert hasattr(result.error, "diffusion_metrics")
    (result,) = running.run([running.request(seed=0)]).values()
    assert result.error is None


def test_a_client_that_leaves_while_its_output_is_post_processed_leaves_nothing(running):
    entered, go_on = threading.Event(), threading.Event()

    def held(output: Any) -> Any:
        entered.set()
        assert go_on.wait(DEADLINE_S)
        return output

    with postprocessing(running, held):
        future = running.submit(running.request(seed=0, height=512, width=512))
        assert entered.wait(DEADLINE_S)
        future.cancel()
        go_on.set()
        wait_until(lambda: not running.diffusion_engine._postprocess_pool._work_queue.qsize(), "the pool is idle")
    running.run([running.request(seed=1)])
    nothing_kept(running)


def test_an_output_goes_back_to_the_pool_as_soon_as_post_processing_has_left_it(running):
    """Though its request goes on, as a stream does, and its client holds what was made of it."""
    if running.mode != "stream":
        pytest.skip("a request of one output ends with it")
    seen: list[weakref.ref] = []
    alive: list[int] = []

    def summed(output: Any) -> Any:
        gc.collect()
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(output))
        return output.float().mean(dim=-1)

    with postprocessing(running, summed):
        (result,) = running.run([running.request(seed=0, height=512, width=512)]).values()
    assert result.error is None
    assert alive == [0, 0, 0]


@pytest.mark.parametrize("backend", ["uni", "mp"])
def test_it_takes_vllm_omnis_own_executors_as_well(backend):
    pipeline, config = "StepPipeline", STEP  # without a GPU `mp` runs nothing else
    with engine("uni", pipeline, **config) as own, postprocessing(own, halved):
        theirs = came(own)
    with engine(backend, pipeline, **config, **OURS) as running, postprocessing(running, halved):
        ours = came(running)
    assert [kind for kind, _ in ours] == [kind for kind, _ in theirs]
    for case, (kind, one), (_, other) in zip(CASES, ours, theirs, strict=True):
        if kind == "outputs":
            assert_same(one, other, case)


def test_its_threads_end_with_the_engine():
    before = set(threading.enumerate())
    with packer_engine(**OURS) as running:
        running.run([running.request(seed=0)])
        (ours,) = (each for each in set(threading.enumerate()) - before if each.name.startswith("packer-postprocess"))
    ours.join(DEADLINE_S)
    assert not ours.is_alive()


@pytest.mark.parametrize("found", [compat.Found("0.31", ["a name is gone"], []), compat.Found("0.30.1", [], ["one"])])
def test_of_a_vllm_omni_we_do_not_know_it_is_the_own_engine_and_says_so_once(found, caplog):
    from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

    with caplog.at_level(logging.WARNING):
        assert own_engine.engine_class(found) is DiffusionEngine
    assert len([record for record in caplog.records if "post-processes on its event loop" in record.message]) == 1


def test_the_installed_vllm_omni_is_the_one_we_know():
    assert worker_shim.PackerDiffusionEngine.__name__ == "PackerDiffusionEngine"
