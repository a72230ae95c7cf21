"""The real vllm-omni engine through PackerDiffusionExecutor, in request mode, single and batched, when nothing goes wrong.

What `uni` gives for the same request is the reference, bit for bit. The engines live as long as the module; the last test
closes them.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_checks import (
    MIB,
    References,
    Residue,
    assert_same,
    exporter_state,
    in_packer_memory,
    leases,
    outputs,
    packer_engine,
    packer_memory,
    packer_pid,
    run,
    run_directories,
    torch,
    trajectory,
    wait_settled,
    worker_pid,
)
from engine_harness import BATCH, RunningEngine, engine
from packer_process import wait_until

pytestmark = pytest.mark.engine

MODES = ["single", "batched"]
BEHAVIOURS = ["image", "bfloat16", "small", "noncontiguous", "static", "views", "dict", "wordy"]
LARGE = {"height": 512, "width": 512}  # 3 MiB of float32: a piece, and a lease, of its own


@pytest.fixture(scope="module")
def uni() -> Iterator[References]:
    with engine("uni", "RequestPipeline") as running:
        yield References(running)


@pytest.fixture(scope="module")
def residue(uni: References) -> Residue:
    """What was there before the first engine of ours."""
    return Residue()


@pytest.fixture(scope="module")
def single(residue: Residue) -> Iterator[RunningEngine]:
    with packer_engine() as running:
        yield running


@pytest.fixture(scope="module")
def batched(residue: Residue) -> Iterator[RunningEngine]:
    with packer_engine("BatchPipeline", **BATCH) as running:
        yield running


@pytest.fixture
def running(request: pytest.FixtureRequest) -> RunningEngine:
    return request.getfixturevalue(request.param)


def batch_sizes(running: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with the number of requests in each forward from now on."""
    sizes: list[int] = []
    call = running.executor.collective_rpc

    def recording(method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "execute_model":
            sizes.append(1)
        elif method == "execute_model_batch":
            sizes.append(len(kwargs["args"][0].scheduled_new_reqs))
        return call(method, *args, **kwargs)

    monkeypatch.setattr(running.executor, "collective_rpc", recording)
    return sizes


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", MODES, indirect=True)
def test_32_concurrent_requests_of_mixed_sizes_and_dtypes_are_bit_for_bit_those_of_uni(running, uni, monkeypatch):
    shapes = [
        (64, 96, 1),
        (512, 512, 1),
        (32, 32, 5),
        (256, 256, 9),
        (128, 32, 1),
        (8, 8, 1),
        (720, 480, 3),
        (64, 64, 2),
    ]
    dtypes = ["float32", "bfloat16", "float16", "uint8", "float8_e4m3fn", "bool", "int64"]
    requests = []
    for seed in range(32):
        height, width, num_frames = shapes[seed // 4]  # neighbours are alike, so that they can share a batch
        sizes = {"height": height, "width": width, "num_frames": num_frames}
        requests.append({"seed": seed, "dtype": dtypes[seed % len(dtypes)], **sizes})
    sizes = batch_sizes(running, monkeypatch)
    before = running.executor.packer_outputs
    received = outputs(running, *requests)
    assert_same(received, uni(*requests))
    assert all(map(in_packer_memory, received))
    assert sum(sizes) == 32
    assert running.executor.packer_outputs - before == len(sizes)  # a batch is one
    if running.diffusion_engine.od_config.max_num_seqs > 1:
        assert max(sizes) > 1, "nothing was batched"


@pytest.mark.parametrize("running", MODES, indirect=True)
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_whatever_an_output_is_made_of_it_arrives_as_with_uni(running, uni, behaviour):
    requests = [{"seed": seed, "behaviour": behaviour, "dtype": "float32"} for seed in (1, 2)]
    requests += [{**request, **LARGE} for request in requests]
    assert_same(outputs(running, *requests), uni(*requests))


@pytest.mark.parametrize("running", MODES, indirect=True)
def test_the_fields_beside_the_output_arrive_as_with_uni(running, uni):
    request = {"seed": 3, "behaviour": "trajectory", "num_inference_steps": 3, **LARGE}
    (result,) = run(running, request)
    received = [result.output, *trajectory(result)]
    assert all(map(torch.is_tensor, received))
    assert_same(received, uni.with_trajectory(request))


@pytest.mark.parametrize("running", MODES, indirect=True)
def test_a_static_buffer_overwritten_by_the_next_forward_delivers_eight_outputs_in_flight_intact(running, uni):
    requests = [{"seed": seed, "behaviour": "static", **LARGE} for seed in range(8)]
    assert_same(outputs(running, *requests), uni(*requests))


@pytest.mark.parametrize("running", MODES, indirect=True)
@pytest.mark.parametrize("behaviour", ["error", "output_error", "unpicklable"])
def test_an_error_reaches_exactly_its_request(running, uni, behaviour):
    """In a batch that shares one forward, an error raised there is everybody's: its neighbours are in other batches."""
    alone = {"num_frames": 2} if behaviour == "error" else {}
    bad = {"seed": 2, "behaviour": behaviour, **alone}
    good = [{"seed": seed} for seed in (1, 3, 4)]
    first, second, *rest = run(running, good[0], bad, *good[1:])
    message = "unpicklable|pickle" if behaviour == "unpicklable" else "the pipeline was asked to fail: seed 2"
    # Not raised: a pump of vllm-omni's keeps the last error, whose traceback would keep this frame, and all outputs in it.
    assert isinstance(second.error, RuntimeError)
    assert re.search(message, str(second.error))
    assert_same([first.output, *(result.output for result in rest)], uni(*good))
    assert wait_settled(running)["broken"] == ""
    assert_same(outputs(running, *good), uni(*good))


# -- OUTPUT_READY and who waits for it ---------------------------------------------------------------------------------


@contextmanager
def ready_held_until(running: RunningEngine, condition: Callable[[str], bool]) -> Iterator[list[str]]:
    """Each OUTPUT_READY of the packer is kept from the pump until ``condition(output_id)``. Yields the ids let go so far.

    The pump waits in the queue already: the first output still comes the old way.
    """
    (keeper,) = running.executor._packers.keepers
    queue = keeper.queue
    dequeue, passed, over = queue.dequeue, [], threading.Event()

    def gated(*args: Any, **kwargs: Any) -> Any:
        message = dequeue(*args, **kwargs)
        output_id = message.async_output_id
        if output_id is not None and not over.is_set():
            wait_until(lambda: over.is_set() or condition(output_id), "the gate of OUTPUT_READY opens")
            passed.append(output_id)
        return message

    queue.dequeue = gated
    try:
        yield passed
    finally:
        over.set()
        del queue.dequeue


def test_output_ready_may_come_after_its_waiter(single, uni):
    executor = single.executor
    requests = [{"seed": seed} for seed in range(4)]
    with ready_held_until(single, lambda output_id: output_id in executor._output_futures) as passed:
        assert_same(outputs(single, *requests), uni(*requests))
    assert len(passed) >= 3


def test_output_ready_may_come_before_its_waiter(single, uni, monkeypatch):
    executor = single.executor
    wait, cached = executor.wait_output_ready, []

    def late(output_id: str) -> Any:
        wait_until(lambda: output_id in executor._completed_outputs, "the output arrives before it is waited for")
        cached.append(output_id)
        return wait(output_id)

    monkeypatch.setattr(executor, "wait_output_ready", late)
    requests = [{"seed": seed} for seed in range(4)]
    assert_same(outputs(single, *requests), uni(*requests))
    assert len(cached) == 4


def test_output_ready_of_a_batch_may_come_after_its_split_map(batched, uni, monkeypatch):
    executor, requests = batched.executor, [{"seed": seed} for seed in range(4)]
    sizes = batch_sizes(batched, monkeypatch)

    def expected(output_id: str) -> bool:
        return output_id in executor._batch_split_map or output_id in executor._output_futures  # of a request alone

    with ready_held_until(batched, expected) as passed:
        for _ in range(2):
            assert_same(outputs(batched, *requests), uni(*requests))
    assert passed
    assert max(sizes) > 1


def test_output_ready_of_a_batch_may_come_before_its_split_map(batched, uni, monkeypatch):
    executor, requests = batched.executor, [{"seed": seed} for seed in range(4)]
    call, early = executor.collective_rpc, []

    def late(method: str, *args: Any, **kwargs: Any) -> Any:
        done = call(method, *args, **kwargs)
        if method == "execute_model_batch":
            wait_until(lambda: done.async_output_id in executor._completed_outputs, "the batch arrives unsplit")
            early.append(done.async_output_id)
        return done

    monkeypatch.setattr(executor, "collective_rpc", late)
    assert_same(outputs(batched, *requests), uni(*requests))
    assert early


def test_output_ready_of_a_batch_may_come_while_its_split_map_is_made(batched, uni, monkeypatch):
    """vllm-omni's pump finds no map, then unpacks; meanwhile `execute_batch` finds no output and registers the map."""
    from vllm_omni.diffusion.executor import multiproc_executor

    executor, requests = batched.executor, [{"seed": seed} for seed in range(4)]
    call, unpack = executor.collective_rpc, multiproc_executor.unpack_diffusion_output_shm
    unpacking, crossed = threading.Event(), []

    def slow(output: Any) -> Any:
        if hasattr(output, "runner_outputs"):
            unpacking.set()
            wait_until(lambda: executor._batch_split_map, "the map is registered while the pump unpacks")
            crossed.append(output)
        return unpack(output)

    def late(method: str, *args: Any, **kwargs: Any) -> Any:
        unpacking.clear()
        done = call(method, *args, **kwargs)
        if method == "execute_model_batch":
            assert unpacking.wait(20)
        return done

    monkeypatch.setattr(multiproc_executor, "unpack_diffusion_output_shm", slow)
    monkeypatch.setattr(executor, "collective_rpc", late)
    assert_same(outputs(batched, *requests), uni(*requests))
    assert crossed


# -- processes ---------------------------------------------------------------------------------------------------------


def test_worker_packer_and_engine_are_three_processes_and_the_packer_has_no_torch(single):
    worker, packer = psutil.Process(worker_pid(single)), psutil.Process(packer_pid(single))
    assert len({worker.pid, packer.pid, os.getpid()}) == 3
    assert {worker.ppid(), packer.ppid()} == {os.getpid()}
    mapped = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (worker.pid, packer.pid)}
    for library in ("libtorch", "libc10"):
        assert library in mapped[worker.pid]
        assert library not in mapped[packer.pid]
    assert packer_memory(packer.pid)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_goes_back_when_the_last_view_dies_also_on_an_idle_engine(single, uni):
    book = leases(single)
    wait_until(lambda: book.outstanding == 0, "earlier outputs die")
    request = {"seed": 11, **LARGE}
    (output,) = outputs(single, request)
    assert book.outstanding == 1
    view = output.detach()[0, 1].view(torch.int32).numpy()[:3]
    expected = uni(request)[0][0, 1].cpu().view(torch.int32).numpy()[:3]
    del output
    gc.collect()
    assert_same(outputs(single, {"seed": 12, **LARGE}), uni({"seed": 12, **LARGE}))  # would reuse a free region
    assert_same(view, expected)
    assert book.outstanding >= 1
    del view
    wait_until(lambda: gc.collect() >= 0 and book.outstanding == 0, "the lease goes back")


def test_each_large_array_of_an_output_has_a_lease_of_its_own(single):
    book = leases(single)
    wait_until(lambda: gc.collect() >= 0 and book.outstanding == 0, "earlier outputs die")
    (output,) = outputs(single, {"seed": 13, "behaviour": "views", **LARGE})
    assert book.outstanding == 2
    del output["upper"]
    wait_until(lambda: gc.collect() >= 0 and book.outstanding == 1, "one of two leases goes back")
    del output
    wait_until(lambda: gc.collect() >= 0 and book.outstanding == 0, "the other goes back")


@pytest.mark.parametrize("running", MODES, indirect=True)
def test_pickling_a_small_view_of_an_output_pickles_at_most_that_output(running):
    received = outputs(running, *({"seed": seed, **LARGE} for seed in range(4)))
    for output in received:
        assert output.untyped_storage().nbytes() == output.nbytes == 3 * MIB
        assert len(pickle.dumps(output[..., :1])) < output.nbytes + 4096


def test_an_output_may_be_written_to_by_its_owner_and_touches_nobody_else(single, uni):
    requests = [{"seed": seed} for seed in range(3)]
    first, second, third = outputs(single, *requests)
    second.fill_(7)
    assert_same([first, third], uni(requests[0], requests[2]))


# -- accounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("running", MODES, indirect=True)
def test_after_many_requests_nothing_is_pending_and_the_device_is_given_back_when_asked(running, uni):
    before = wait_settled(running)
    for seed in range(0, 96, 16):
        outputs(running, *({"seed": seed + n, "num_frames": 1 + n // 4} for n in range(16)))
    after = wait_settled(running)
    assert after["overflow_left"] == before["overflow_left"]
    assert after["arena_bytes"] == before["arena_bytes"] > 0
    executor = running.executor
    for kept in (
        executor._output_futures,
        executor._completed_outputs,
        executor._batch_split_map,
        executor._rpc_futures,
    ):
        assert not kept
    running.diffusion_engine.collective_rpc("synchronize_device", timeout=30, kwargs={"timeout": 30.0})
    assert exporter_state(running)["arena_bytes"] == 0
    assert_same(outputs(running, {"seed": 5, **LARGE}), uni({"seed": 5, **LARGE}))


def test_a_wait_for_the_device_ends_when_outputs_in_flight_are_delivered(single, uni, monkeypatch):
    requests = [{"seed": seed, **LARGE} for seed in range(8)]
    made = [single.request(**request) for request in requests]
    sizes, states = batch_sizes(single, monkeypatch), single.diffusion_engine.scheduler._request_states
    futures = [single.submit(one) for one in made]
    wait_until(lambda: sum(sizes) == 8 and not states, "no forward is to come")
    single.diffusion_engine.collective_rpc("synchronize_device", timeout=60, kwargs={"timeout": 60.0})
    assert exporter_state(single)["pending"] == 0
    assert_same([future.result(60).output for future in futures], uni(*requests))


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_leaves_the_outputs_and_nothing_else(single, batched, uni, residue):
    request = {"seed": 21, **LARGE}
    kept = outputs(single, request) + outputs(batched, request)
    assert len(run_directories(os.getpid())) == 2
    threads = [threading.Thread(target=single.executor.shutdown) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for running in (single, batched):
        running.close()
        running.close()
    # What another session hands over in named memory has, for a moment, nobody who maps it.
    wait_until(lambda: not residue.found()["named shared memory"], "there is no named memory")
    found = residue.found()
    found.pop("named shared memory")
    assert found.pop("memfds") == 2  # of the outputs that are kept
    assert not any(found.values()), found
    assert_same(kept, uni(request, request))
    del kept
    residue.assert_none()
