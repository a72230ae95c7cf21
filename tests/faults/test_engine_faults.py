"""The real vllm-omni engine through PackerDiffusionExecutor while something is full, stopped, or killed."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import struct
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_checks import (
    GPUS,
    MIB,
    References,
    Residue,
    assert_same,
    exporter_state,
    in_packer_memory,
    leases,
    mapped_elsewhere,
    named_memory,
    outputs,
    packer_engine,
    packer_memory,
    packer_pid,
    run_directories,
    wait_gone,
    wait_settled,
)
from engine_harness import BATCH, RunningEngine, engine
from engine_load import IMAGE, images, pump_held, received, submit, wait_computed
from packer_process import stop, stopped, wait_until

pytestmark = pytest.mark.engine

TIGHT = {
    "arena_max_bytes": 8 * MIB,  # two images
    "overflow_max_bytes": 4 * MIB,  # and one beside
    "pool_bytes": 16 * MIB,  # five
    "pool_max_bytes": 16 * MIB,
    "wait_s": 3.0,
}


@pytest.fixture(scope="module")
def uni() -> Iterator[References]:
    with engine("uni", "RequestPipeline") as running:
        yield References(running)


@pytest.fixture(scope="module", params=["timeline", pytest.param("ipc", marks=pytest.mark.gpu)])
def tight(uni: References, request: pytest.FixtureRequest) -> Iterator[RunningEngine]:
    with packer_engine(packer={**TIGHT, "event": request.param}) as running:
        yield running


@pytest.fixture
def idle(tight: RunningEngine) -> RunningEngine:
    """``tight`` with nothing in flight and no output alive."""
    wait_settled(tight)
    wait_until(lambda: gc.collect() >= 0 and leases(tight).outstanding == 0, "the outputs of other tests die")
    return tight


# -- full --------------------------------------------------------------------------------------------------------------


def test_an_output_for_which_the_pool_has_no_room_arrives_all_the_same(idle, uni):
    kept = outputs(idle, *images(*range(5)))
    assert all(map(in_packer_memory, kept))
    (sixth,) = outputs(idle, *images(5))
    assert not in_packer_memory(sixth)
    assert_same([*kept, sixth], uni(*images(*range(6))))
    del kept[2]
    wait_until(lambda: gc.collect() >= 0 and leases(idle).outstanding == 4, "a lease goes back")
    (another,) = outputs(idle, *images(6))
    assert in_packer_memory(another)
    assert_same(another, uni(*images(6))[0])
    assert wait_settled(idle)["overflow_left"] == TIGHT["overflow_max_bytes"]


def test_a_forked_child_that_ends_its_copy_of_the_engine_ends_nothing_of_its_parents(idle, uni):
    kept, workers, packer = outputs(idle, *images(1)), list(idle.executor._processes), packer_pid(idle)
    child = os.fork()
    if not child:
        try:
            idle.executor._finalizer()  # what the garbage collector and the end of Python call
            idle.executor.shutdown()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert_same([*kept, *outputs(idle, *images(2))], uni(*images(1, 2)))
    assert (list(idle.executor._processes), packer_pid(idle)) == (workers, packer)


def test_neighbours_of_an_output_without_room_are_delivered(idle, uni):
    kept = outputs(idle, *images(*range(4)))  # one more fits
    requests = [*images(4, 5), {"seed": 6}]
    assert_same(outputs(idle, *requests), uni(*requests))
    assert_same(kept, uni(*images(*range(4))))


@pytest.mark.parametrize("behaviour", ["image", "bfloat16", "static", "noncontiguous", "views"])
def test_an_output_larger_than_the_arena_arrives(idle, uni, behaviour):
    request = {"seed": 8, "height": 1024, "width": 1024, "behaviour": behaviour}
    if behaviour == "bfloat16":
        request["num_frames"] = 2
    (output,) = outputs(idle, request)
    assert_same(output, uni(request)[0])
    tensors = output.values() if isinstance(output, dict) else [output]
    assert {in_packer_memory(tensor) for tensor in tensors} == {bool(GPUS)}, "a GPU can export memory where it lies"


def test_outputs_wait_beside_a_full_arena_until_the_packer_goes_on(idle, uni):
    with stopped(packer_pid(idle)):
        futures = submit(idle, *images(1, 2, 3))
        wait_computed(idle, 3)
        assert not any(future.done() for future in futures)
    received_now = received(futures)
    assert all(map(in_packer_memory, received_now))
    assert_same(received_now, uni(*images(1, 2, 3)))
    assert wait_settled(idle)["overflow_left"] == TIGHT["overflow_max_bytes"]


def test_outputs_that_find_no_room_beside_the_arena_do_not_wait_for_a_packer_that_hangs(idle, uni):
    with stopped(packer_pid(idle)):
        futures = submit(idle, *images(1, 2, 3, 4))
        beside = received(futures[2:])  # one waited wait_s for the arena, one had nowhere to wait
        assert not any(map(in_packer_memory, beside))
        assert not any(future.done() for future in futures[:2])
        assert exporter_state(idle)["pending"] == 2
    staged = received(futures[:2])
    assert all(map(in_packer_memory, staged))
    assert_same([*staged, *beside], uni(*images(1, 2, 3, 4)))
    assert wait_settled(idle)["overflow_left"] == TIGHT["overflow_max_bytes"]


# -- killed ------------------------------------------------------------------------------------------------------------


def deliveries(running: RunningEngine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts from now on how often each output is handed to its waiter."""
    counter: Counter[str] = Counter()
    finish = running.executor._finish_output

    def recording(output_id: str, *args: Any) -> None:
        counter[output_id] += 1
        finish(output_id, *args)

    monkeypatch.setattr(running.executor, "_finish_output", recording)
    return counter


@pytest.mark.parametrize(
    ("pipeline", "config"),
    [
        ("RequestPipeline", {}),
        ("BatchPipeline", BATCH),
        pytest.param("RequestPipeline", {"packer": {"event": "ipc"}}, marks=pytest.mark.gpu),
    ],
    ids=["one by one", "batches", "events"],
)
def test_a_packer_killed_under_load_costs_no_request_and_leaves_nothing(pipeline, config, uni, monkeypatch):
    """Of 32 requests 8 are delivered, 4 are on their way to the engine, 4 wait in the packer and 16 are yet to come."""
    residue = Residue()
    requests = images(*range(32))
    with packer_engine(pipeline, **config) as running:
        counter = deliveries(running, monkeypatch)
        packer = packer_pid(running)
        delivered = outputs(running, *requests[:8])
        dropped = outputs(running, *images(100))
        with pump_held(running):
            on_the_way = submit(running, *requests[8:12])
            wait_computed(running, 4)
            wait_settled(running)
            stop(packer)
            # The packer dies with a message of the engine's unread: the kernel then reports a reset before what it sent.
            del dropped
            connection = running.executor._packers.keepers[0].queue._receiver._connection._channel._socket
            wait_until(lambda: gc.collect() >= 0 and unread_by_peer(connection) > 0, "a lease is on its way back")
            in_the_packer = submit(running, *requests[12:16])
            wait_computed(running, 8)
            os.kill(packer, signal.SIGKILL)
            wait_gone([packer])
        to_come = submit(running, *requests[16:])
        received_since = received([*on_the_way, *in_the_packer, *to_come])
        assert_same([*delivered, *received_since], uni(*requests))
        assert all(map(in_packer_memory, received_since))
        batches = {output_id.partition("/")[0] for output_id in counter if "/" in output_id}
        assert len(counter.keys() - batches) == 33
        assert set(counter.values()) == {1}
        assert packer_pid(running) != packer
        assert wait_settled(running)["broken"] == ""
        again = [*images(200), {"seed": 201, "behaviour": "views", **IMAGE}]
        assert_same(outputs(running, *again), uni(*again))
    assert_same(delivered, uni(*requests[:8]))
    del delivered, received_since, on_the_way, in_the_packer, to_come
    residue.assert_none()


def unread_by_peer(connection: Any) -> int:
    """Bytes in the connection that its other end has not taken."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


def test_a_killed_engine_takes_its_worker_and_its_packer_with_it(tmp_path):
    import multiprocessing

    assert multiprocessing.get_start_method() == "spawn"
    named = named_memory()
    code = (
        "import multiprocessing as m; m.set_start_method('spawn', force=True);"
        " import killed_engine; killed_engine.serve_until_killed()"
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        packer = 0
        for line in process.stdout:
            if line.startswith('{"packer"'):
                packer = json.loads(line)["packer"]
                break
        assert packer, (tmp_path / "log").read_text()
        family = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert packer in family
        assert run_directories(process.pid)
        assert packer_memory(packer)
        named_maps = [line for line in Path(f"/proc/{packer}/maps").read_text().splitlines() if "/dev/shm/" in line]
        assert GPUS or all("/dev/shm/sm_packer-" in line for line in named_maps)  # the driver may have some
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    wait_gone(family)
    wait_until(lambda: not run_directories(process.pid), "the run directory goes")
    wait_until(lambda: not (left := named_memory() - named) or left <= mapped_elsewhere(left), "named memory goes")
