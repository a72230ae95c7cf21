"""Requests that are aborted and clients that leave, in every mode: nothing of their outputs stays, whatever comes first.

The races are forced: by holding the engine's thread between a worker's reply and what the engine makes of it (`wave`), and
by holding the pump in front of the packer's messages (`pump_held`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_checks import DEADLINE_S, Residue, assert_same, nothing_kept, outputs, packer_engine, run
from engine_harness import BATCH, STEP, STREAM, RunningEngine
from engine_load import pump_held
from packer_process import wait_until

pytestmark = pytest.mark.engine

IMAGE = {"height": 512, "width": 512}  # 3 MiB of float32: a piece, and a lease, of its own
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "request": ("RequestPipeline", {}),
    "batch": ("BatchPipeline", BATCH),
    "step": ("StepPipeline", STEP),
    "stream": ("StepPipeline", STREAM),
}


@pytest.fixture(scope="module", params=MODES)
def running(request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    pipeline, config = MODES[request.param]
    residue = Residue()
    with packer_engine(pipeline, **config) as engine:
        yield engine
    residue.assert_none()


@pytest.fixture
def clean(running: RunningEngine) -> Iterator[RunningEngine]:
    """``running`` with nothing kept, before and after. vllm-omni holds its last reply until the next request runs."""
    outputs(running, {"seed": 0})
    nothing_kept(running)
    yield running
    outputs(running, {"seed": 0})
    nothing_kept(running)


@dataclass
class Wave:
    """Requests that the worker is given together, and what the engine's thread met with meanwhile."""

    ids: list[str]
    futures: list[Future[Any]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    acted: threading.Event = field(default_factory=threading.Event)

    def results(self) -> list[Any]:
        return [future.result(DEADLINE_S) for future in self.futures]


@contextlib.contextmanager
def wave(running: RunningEngine, *requests: dict[str, Any], act: Callable[[Wave, list[Any]], None]) -> Iterator[Wave]:
    """``act`` runs on the engine's thread after the first reply that promises outputs of these requests, with its parts."""
    engine = running.diffusion_engine
    execute, gate, inside = engine.execute_fn, threading.Event(), threading.Event()
    made = [running.request(**request) for request in requests]
    the_wave = Wave([request.request_id for request in made])

    def held(scheduled: Any) -> Any:
        inside.set()
        assert gate.wait(DEADLINE_S)
        reply = execute(scheduled)
        promised = [part for part in reply.runner_outputs if part.async_output_id and part.request_id in the_wave.ids]
        if promised and not the_wave.acted.is_set():
            try:
                act(the_wave, promised)
            except BaseException as failure:
                the_wave.failures.append(failure)
            the_wave.acted.set()
        return reply

    engine.execute_fn = held
    try:
        running.submit(running.request(seed=0, height=16, width=16))  # its output may be held too: nobody waits for it
        assert inside.wait(DEADLINE_S)
        the_wave.futures = [running.submit(request) for request in made]
        states = engine.scheduler._request_states
        wait_until(lambda: len(states) == 1 + len(made), "all requests are scheduled")
        gate.set()
        assert the_wave.acted.wait(DEADLINE_S)
        yield the_wave
        assert not the_wave.failures, the_wave.failures
    finally:
        gate.set()
        engine.execute_fn = execute


def leave(running: RunningEngine, future: Future[Any], request_id: str) -> None:
    """The client goes away, and the engine knows."""
    future.cancel()
    wait_until(lambda: request_id not in running.diffusion_engine._out_streams, "the client is gone")


def arrived(running: RunningEngine, part: Any) -> None:
    wait_until(lambda: part.async_output_id in running.executor._completed_outputs, "its output is there")


def assert_aborted(result: Any) -> None:
    from vllm_omni.diffusion.data import DiffusionRequestAbortedError

    assert isinstance(result.error, DiffusionRequestAbortedError), result


# -- aborted -----------------------------------------------------------------------------------------------------------


def test_an_abort_after_output_ready_leaves_nothing_and_spares_the_neighbour(clean):
    (expected,) = run(clean, {"seed": 2, **IMAGE})

    def act(the_wave: Wave, parts: list[Any]) -> None:
        part = next(part for part in parts if part.request_id == the_wave.ids[0])
        arrived(clean, part)
        clean.diffusion_engine.abort(part.request_id)

    with wave(clean, {"seed": 1, **IMAGE}, {"seed": 2, **IMAGE}, act=act) as the_wave:
        aborted, other = the_wave.results()
    assert_aborted(aborted)
    assert_same(other.outputs, expected.outputs)


def test_an_abort_before_output_ready_leaves_nothing_and_spares_the_neighbour(clean):
    (expected,) = run(clean, {"seed": 2, **IMAGE})
    with contextlib.ExitStack() as stack:
        stack.enter_context(pump_held(clean))
        marks = clean.executor._output_futures
        output_ids = []

        def act(the_wave: Wave, parts: list[Any]) -> None:
            output_ids.extend(part.async_output_id for part in parts if part.request_id == the_wave.ids[0])
            clean.diffusion_engine.abort(the_wave.ids[0])

        with wave(clean, {"seed": 1, **IMAGE}, {"seed": 2, **IMAGE}, act=act) as the_wave:
            assert_aborted(the_wave.futures[0].result(DEADLINE_S))
            assert not the_wave.futures[1].done()
            assert output_ids[0] in marks, "it is marked to be dropped when it comes"
            stack.close()
            assert_same(the_wave.futures[1].result(DEADLINE_S).outputs, expected.outputs)


# -- gone --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ready", ["before", "after"])
def test_a_client_that_leaves_before_it_waits_leaves_nothing(clean, ready):
    with contextlib.ExitStack() as stack:
        if ready == "after":
            stack.enter_context(pump_held(clean))

        def act(the_wave: Wave, parts: list[Any]) -> None:
            if ready == "before":
                arrived(clean, parts[0])
            leave(clean, the_wave.futures[0], the_wave.ids[0])

        with wave(clean, {"seed": 1, **IMAGE}, act=act) as the_wave:
            states = clean.diffusion_engine.scheduler._request_states
            wait_until(lambda: not states, "the engine is done with it")
        assert the_wave.futures[0].cancelled()
        # Its placeholder, and so its output, lives in a local of the engine's loop: until the next request.
        stack.close()


def test_a_client_that_leaves_while_it_waits_leaves_nothing(clean):
    with pump_held(clean):
        future = clean.submit(clean.request(seed=1, **IMAGE))
        wait_until(lambda: clean.executor._output_futures, "the output is waited for")
        (waiter,) = clean.executor._output_futures.values()
        future.cancel()
        wait_until(waiter.cancelled, "the client is gone")
        states = clean.diffusion_engine.scheduler._request_states
        wait_until(lambda: not states, "the engine is done with it")


def test_300_requests_of_which_a_third_is_aborted_and_a_third_left_keep_nothing(clean):
    """No gates here: whatever races there are besides."""
    for start in range(0, 306, 102):
        made = [clean.request(seed=start + n, height=16, width=16, num_inference_steps=1) for n in range(102)]
        futures = [clean.submit(request) for request in made]
        for number, (request, future) in enumerate(zip(made, futures, strict=True)):
            if number % 3 == 1:
                clean.diffusion_engine.abort(request.request_id)
            elif number % 3 == 2:
                future.cancel()
        for future in futures[::3]:
            assert future.result(DEADLINE_S).error is None
        wait_until(lambda: not clean.diffusion_engine.scheduler._request_states, "the engine is done with all of them")


# -- late --------------------------------------------------------------------------------------------------------------


def test_an_output_that_is_late_ends_its_request_after_vllm_omnis_timeout_and_is_dropped_when_it_comes(
    clean, monkeypatch
):
    monkeypatch.setenv("VLLM_OMNI_ASYNC_OUTPUT_TIMEOUT", "0.2")
    with pump_held(clean):
        (result,) = run(clean, {"seed": 1, **IMAGE})
        assert isinstance(result.error, TimeoutError)
        states = clean.diffusion_engine.scheduler._request_states
        wait_until(lambda: not states, "the engine is done with it")


def test_an_error_that_comes_before_its_waiter_fails_the_request_at_once(clean):
    """vllm-omni 4981: it became a timeout. An error of a batch's member comes inside its batch."""

    def act(the_wave: Wave, parts: list[Any]) -> None:
        arrived(clean, parts[0])

    with wave(clean, {"seed": 1, "behaviour": "unpicklable", **IMAGE}, act=act) as the_wave:
        (result,) = the_wave.results()
    assert isinstance(result.error, RuntimeError)
    assert "pickle" in str(result.error)


def test_what_is_pending_says_how_far_the_packer_is_with_it(clean):
    expected = "unclaimed=0 packer=['not here: never exported, or published; 1 workers are connected']"
    wait_until(lambda: clean.executor.describe_pending_state("an-id").endswith(expected), expected)


# -- a pump that ends --------------------------------------------------------------------------------------------------


def test_a_pump_that_ends_fails_the_executor_and_every_request_at_once(running, monkeypatch, caplog):
    """The last test of each engine, which does not survive it: ``running`` sees that nothing is left."""
    # Pytest keeps what is logged, and a record of the traceback would keep the output.
    caplog.set_level(logging.CRITICAL, logger="vllm.worker_shim.engine.pump")
    failed = threading.Event()
    running.executor.register_failure_callback(failed.set)

    def broken(*args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(running.executor, "_finish_output", broken)
    results = run(running, *({"seed": seed, **IMAGE} for seed in range(3)))
    assert all(result.error is not None for result in results)
    assert failed.wait(DEADLINE_S)
    assert running.executor.is_dead
