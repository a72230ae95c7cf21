"""Step mode and streaming: the real vllm-omni engine, whose final steps and chunks leave through the packer.

What `uni` gives for the same request in the same mode is in test_contract.py; here it is how it comes.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_checks import (
    DEADLINE_S,
    MIB,
    Residue,
    assert_same,
    exporter_state,
    in_one_wave,
    in_packer_memory,
    leases,
    nothing_kept,
    outputs,
    packer_engine,
    packer_pid,
    run,
    torch,
    wait_settled,
    warnings_logged,
)
from engine_harness import STEP, STREAM, RunningEngine, engine
from packer_process import stopped, wait_until

pytestmark = pytest.mark.engine

IMAGE = {"height": 512, "width": 512}  # 3 MiB of float32: a piece, and a lease, of its own
CHUNKS = 3
POOL = {"pool_bytes": 256 * MIB}  # not the GiB of the default: five packers are there at once


@pytest.fixture(scope="module")
def reference() -> Iterator[Callable[..., list[Any]]]:
    """The outputs of each request, a list a request: `uni` in step mode, its bytes the request's alone."""
    with engine("uni", "StepPipeline", **STREAM) as running:
        known: dict[str, Any] = {}

        def chunks(*requests: dict[str, Any]) -> list[Any]:
            for request in requests:
                if repr(request) not in known:
                    (result,) = run(running, {**request, "behaviour": request.get("behaviour", "image")})
                    known[repr(request)] = [torch.utils._pytree.tree_map(_own, one) for one in result.outputs]
            return [known[repr(request)] for request in requests]

        yield chunks


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@pytest.fixture(scope="module")
def residue(reference: Any) -> Residue:
    return Residue()


@pytest.fixture(scope="module")
def step(residue: Residue) -> Iterator[RunningEngine]:
    with packer_engine("StepPipeline", POOL, **STEP) as running:
        yield running


@pytest.fixture(scope="module")
def serial(residue: Residue) -> Iterator[RunningEngine]:
    """One request at a time, as on a GPU that one request fills."""
    with packer_engine("StepPipeline", POOL, **{**STEP, "max_num_seqs": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def stream(residue: Residue) -> Iterator[RunningEngine]:
    with packer_engine("StepPipeline", POOL, **STREAM) as running:
        nothing_kept(running)  # of the warm-up, whose chunks but the last the engine discards
        yield running


@pytest.fixture(scope="module")
def selective(residue: Residue) -> Iterator[RunningEngine]:
    """Outputs smaller than 1 MiB stay in the reply."""
    with packer_engine("StepPipeline", {"min_bytes": MIB, **POOL}, **STEP) as running:
        yield running


def first(chunks: list[Any]) -> list[Any]:
    """Of streamed references those of the same requests in step mode, where there is one output, the first chunk's."""
    return [each[0] for each in chunks]


@contextlib.contextmanager
def replies(running: RunningEngine) -> Iterator[list[Any]]:
    """The parts of the worker's replies to steps from now on."""
    executor, parts = running.executor, []
    execute = executor.execute_step

    def recording(*args: Any) -> Any:
        reply = execute(*args)
        parts.extend(
            (part.request_id, part.finished, part.result, part.async_output_id) for part in reply.runner_outputs
        )
        return reply

    running.diffusion_engine.execute_fn = recording
    try:
        yield parts
    finally:
        running.diffusion_engine.execute_fn = execute
        parts.clear()


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_final_steps_leave_through_the_packer_and_steps_between_carry_nothing(step, reference):
    requests = [{"seed": seed, "num_inference_steps": 4, "height": 64 + 448 * (seed % 2)} for seed in range(6)]
    with replies(step) as parts:
        received = outputs(step, *requests)
        assert len(parts) == 6 * 4
        between = [part for part in parts if not part[1]]
        assert len(between) == 6 * 3
        assert all(result is None and output_id is None for _, _, result, output_id in between)
        final = [part for part in parts if part[1]]
        assert all(result.output is None and result.async_output_id == output_id for _, _, result, output_id in final)
    assert all(map(in_packer_memory, received))
    assert_same(received, first(reference(*requests)))
    del received
    nothing_kept(step)


def test_every_chunk_leaves_through_the_packer_in_order(stream, reference):
    requests = [{"seed": seed, "height": 64 + 448 * (seed % 2)} for seed in range(6)]
    results = run(stream, *requests)
    for result in results:
        assert [output.finished for output in result.yielded] == [False, False, True]
        assert all(map(in_packer_memory, result.outputs))
    assert_same([result.outputs for result in results], reference(*requests))
    del results, result
    nothing_kept(stream)


@pytest.mark.parametrize("mode", ["serial", "stream"])
def test_a_static_buffer_that_the_next_forward_overwrites_delivers_every_output_intact(mode, request, reference):
    """In `serial` the next request's, in `stream` the next chunk's. Requests of one step would share it in any executor."""
    running = request.getfixturevalue(mode)
    requests = [{"seed": seed, **IMAGE} for seed in range(4 if mode == "serial" else 1)]
    results = run(running, *({**one, "behaviour": "static"} for one in requests))
    expected = reference(*requests)
    assert_same([r.outputs for r in results], expected if mode == "stream" else [[each[0]] for each in expected])


# -- what overlaps -----------------------------------------------------------------------------------------------------


def test_the_next_requests_steps_run_while_the_output_of_the_one_before_is_not_copied_yet(serial, reference):
    """The packer stands still, so nothing is copied; with one request at a time both come to their last step."""
    requests = [{"seed": 1, **IMAGE}, {"seed": 2, **IMAGE}]
    with stopped(packer_pid(serial)):
        futures = [serial.submit(serial.request(**each)) for each in requests]
        wait_until(lambda: len(serial.executor._output_futures) == 2, "both outputs are waited for")
        assert not any(future.done() for future in futures)
    assert_same([future.result(DEADLINE_S).output for future in futures], first(reference(*requests)))


def test_the_next_chunks_steps_run_while_the_chunk_before_is_not_copied_yet(stream, reference):
    request = {"seed": 5, **IMAGE}
    with stopped(packer_pid(stream)), replies(stream) as parts:
        future = stream.submit(stream.request(**request))
        wait_until(lambda: sum(part[3] is not None for part in parts) == CHUNKS, "all chunks are computed")
        assert not future.done()
        assert len(stream.executor._completed_outputs) == 0
    assert_same(future.result(DEADLINE_S).outputs, reference(request)[0])


@pytest.mark.parametrize("mode", ["step", "stream"])
def test_an_output_that_contains_itself_arrives_as_through_vllm_omnis_own_step_mode(mode, request, reference):
    """vllm-omni's walk over it does not end, at the worker or at the engine; there it takes the output as it came."""
    asked = {"seed": 6, **IMAGE}
    (result,) = run(request.getfixturevalue(mode), {**asked, "behaviour": "cyclic"})
    assert result.error is None
    expected = reference(asked)[0]
    assert_same(result.outputs, expected if mode == "stream" else expected[:1])


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["step", "stream"])
@pytest.mark.parametrize(
    ("behaviour", "message"),
    [("error", "asked to fail: seed 2"), ("output_error", "asked to fail: seed 2"), ("unpicklable", "pickle")],
)
def test_an_error_reaches_exactly_its_request(mode, behaviour, message, request, reference):
    """Also of an output that cannot be pickled; vllm-omni's own step mode fails all requests of that step."""
    running = request.getfixturevalue(mode)
    good = [{"seed": seed, "num_inference_steps": 3} for seed in (1, 3)]
    one, bad, other = run(running, good[0], {"seed": 2, "behaviour": behaviour, "num_inference_steps": 3}, good[1])
    assert isinstance(bad.error, RuntimeError)
    assert message in str(bad.error)
    expected = reference(*good)
    assert_same([one.outputs, other.outputs], expected if mode == "stream" else [[each[0]] for each in expected])
    assert wait_settled(running)["broken"] == ""


def test_an_output_the_packer_has_no_room_for_comes_late_and_its_neighbours_through_the_packer(residue, reference):
    """The pool holds five images: of eight three fall back, and reach the engine by the pipe of late outputs."""
    tight = {"pool_bytes": 16 * MIB, "pool_max_bytes": 16 * MIB, "wait_s": 0.2}
    requests = [{"seed": seed, **IMAGE} for seed in range(8)]
    with packer_engine("StepPipeline", packer=tight, **STEP) as running:
        wait_until(lambda: gc.collect() >= 0 and leases(running).outstanding == 0, "the warm-up's output dies")
        received = outputs(running, *requests)
        assert sum(map(in_packer_memory, received)) == 5
        assert_same(received, first(reference(*requests)))
        del received
        nothing_kept(running)


def test_a_packer_killed_while_steps_go_on_costs_no_request(stream, reference):
    import os
    import signal

    requests = [{"seed": seed, **IMAGE} for seed in range(4)]
    pid = packer_pid(stream)
    with stopped(pid):
        futures = [stream.submit(stream.request(**each)) for each in requests]
        wait_until(lambda: len(stream.executor._output_futures) == 4, "the first chunks are waited for")
        os.kill(pid, signal.SIGKILL)
    received = [future.result(DEADLINE_S).outputs for future in futures]
    assert_same(received, reference(*requests))
    assert_same([result.outputs for result in run(stream, *requests)], reference(*requests))
    assert packer_pid(stream) != pid
    del futures, received
    nothing_kept(stream)


def test_with_no_packer_to_be_had_step_mode_is_vllm_omnis_own(residue, reference, tmp_path):
    settings = {"mode": "sidecar", "socket": str(tmp_path / "nobody.sock"), "key_file": str(tmp_path / "key")}
    settings["start_timeout_s"] = 0.2
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text("k" * 32)
    requests = [{"seed": seed, **IMAGE} for seed in range(2)]
    with warnings_logged() as warnings, packer_engine("StepPipeline", packer=settings, **STREAM) as running:
        assert len(warnings) == 1
        assert exporter_state(running) == {}
        assert_same([result.outputs for result in run(running, *requests)], reference(*requests))


def test_outputs_smaller_than_min_bytes_stay_in_the_reply(selective, reference):
    requests = [{"seed": 1}, {"seed": 2, **IMAGE}]  # 72 KiB, 3 MiB
    with replies(selective) as parts:
        before = selective.executor.packer_outputs
        received = outputs(selective, *requests)
        assert selective.executor.packer_outputs - before == 1
        assert sorted(part[3] is None for part in parts if part[1]) == [False, True]
    assert [in_packer_memory(output) for output in received] == [False, True]
    assert_same(received, first(reference(*requests)))


def test_a_reply_that_cannot_be_sent_takes_back_the_outputs_that_it_promised(selective, reference):
    """The small output stays in the reply and does not pickle; the large one beside it was staged."""
    good = {"seed": 1, **IMAGE}
    results = in_one_wave(selective, good, {"seed": 2, "behaviour": "small_unpicklable", **IMAGE})
    assert all("pickle" in str(result.error) for result in results), "vllm-omni fails a whole step"
    nothing_kept(selective)
    assert_same(outputs(selective, good), first(reference(good)))


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["step", "stream"])
def test_memory_is_given_back_when_asked_with_outputs_in_flight(mode, request, reference):
    running = request.getfixturevalue(mode)
    requests = [{"seed": seed, **IMAGE} for seed in range(4)]
    futures = [running.submit(running.request(**each)) for each in requests]
    running.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
    results = [future.result(DEADLINE_S) for future in futures]
    expected = reference(*requests)
    assert_same([r.outputs for r in results], expected if mode == "stream" else [[each[0]] for each in expected])
    running.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
    assert exporter_state(running)["arena_bytes"] == 0


def test_closing_in_the_middle_of_steps_ends_and_leaves_nothing(residue, step, serial, selective, stream):
    future = stream.submit(stream.request(seed=1, num_inference_steps=400, **IMAGE))
    wait_until(lambda: stream.executor._broadcast_mq is not None, "it runs")
    closers = [threading.Thread(target=stream.executor.shutdown) for _ in range(3)]
    for each in closers:
        each.start()
    for each in closers:
        each.join(DEADLINE_S)
        assert not each.is_alive()
    for running in (step, serial, selective, stream):
        running.close()
    assert future.done() or future.cancel()
    del future
    residue.assert_none()
