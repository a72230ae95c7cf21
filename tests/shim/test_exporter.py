"""The worker's Exporter and the engine's Receiver against a live packer on the host device, with no engine between.

The test is both main thread and export thread of the worker, and the engine's pump: it decides what happens when.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import logging
import os
import pickle
import secrets
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from packer_process import DEADLINE_S, MIB, Worker, full_table, running_packer, wait_until

from packer_service.errors import DeviceError, HandshakeError, PackerUnavailable
from packer_service.memory.ack_page import AckPage
from packer_service.wire import protocol
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Ack, Release

torch = pytest.importorskip("torch")
multiprocess = pytest.importorskip("multiprocess")

from any_output import OUTPUTS, content, nested, no_garbage_collection, tensors  # noqa: E402
from bit_for_bit import assert_same, assert_same_tensor  # noqa: E402
from sides import FLOATS, MAC_KEY, EngineSide, WorkerSide, working  # noqa: E402
from stalling_device import Failing, Stalling  # noqa: E402

from worker_shim.connection import Connection  # noqa: E402
from worker_shim.engine import receiver  # noqa: E402
from worker_shim.engine.receiver import Delivered  # noqa: E402
from worker_shim.outputs import skeleton  # noqa: E402
from worker_shim.outputs.arrays import ArraySpec  # noqa: E402
from worker_shim.worker.device import Signal  # noqa: E402
from worker_shim.worker.device_host import HostExportDevice  # noqa: E402
from worker_shim.worker.exchange import Exchange  # noqa: E402
from worker_shim.worker.in_flight import State  # noqa: E402


@pytest.fixture(scope="module")
def packer(tmp_path_factory):
    with running_packer(tmp_path_factory.mktemp("packer") / "run", pool_max_bytes="64MiB") as packer:
        yield packer
        assert packer.process.poll() is None
        assert "Traceback" not in packer.log, packer.log


@pytest.fixture
def engine(packer):
    with contextlib.closing(EngineSide(packer)) as engine:
        yield engine


@pytest.fixture
def worker(packer, engine):
    side = WorkerSide(packer, engine.session)
    with contextlib.closing(side.exporter):
        yield side


@pytest.fixture
def small(tmp_path):
    """A packer whose pool is 2 MiB and stays so: it has room only while no lease is out."""
    with running_packer(tmp_path / "run", pool_max_bytes="2MiB") as packer:
        yield packer


# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*experimental")
@settings(database=None, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(output=OUTPUTS)
def test_any_output_arrives_as_it_was(worker, engine, output):
    output_id = secrets.token_hex(8)
    worker.send(output, output_id)
    assert_same(engine.output(output_id), output)


@pytest.mark.filterwarnings("ignore:.*experimental")
@settings(database=None, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(tensor=tensors())
def test_a_tensor_of_any_dtype_and_layout_arrives_with_its_values(worker, engine, tensor):
    output_id = secrets.token_hex(8)
    worker.send(tensor, output_id)
    assert_same_tensor(engine.output(output_id), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.ones(FLOATS)),
        torch.ones(FLOATS, requires_grad=True) * 2,
        (torch.ones(FLOATS, requires_grad=True) * 2).view(2, -1).T,
        torch._efficientzerotensor((5, FLOATS)),
    ],
    ids=["parameter", "with a gradient", "with a gradient, transposed", "lazy zeros"],
)
def test_a_tensor_that_is_more_than_its_bytes_arrives_as_plain_values(worker, engine, tensor):
    expected = tensor.detach() + 0
    output_id = f"output-{id(tensor)}"
    worker.send(tensor, output_id)
    got = engine.output(output_id)
    assert_same_tensor(got, expected)
    assert not got.requires_grad


def test_afterwards_nothing_is_in_flight_and_nothing_is_leased(worker, engine):
    for number in range(30):
        output = {"image": content(torch.float32, (number % 3, 100_000)), "text": "x" * 5000, "array": np.arange(3000)}
        worker.send(output, f"output-{number}")
        assert_same(engine.output(f"output-{number}"), output)
    del output
    worker.wait_settled(*(f"output-{number}" for number in range(30)))
    assert worker.arena_idle()
    assert not worker.exporter.exchange.pending
    engine.wait_no_lease()


def test_an_output_overwritten_right_after_staging_arrives_as_it_was(worker, engine):
    """The static buffer of a pipeline, which the next forward overwrites."""
    buffer = torch.zeros(FLOATS)
    for number in range(4):
        buffer.fill_(number)
        staged = worker.exporter.stage([buffer], str(number))
        buffer.fill_(-1)
        worker.exporter.submit(staged)
    for number in range(4):
        (got,) = engine.output(str(number))
        assert torch.equal(got, torch.full((FLOATS,), float(number)))


def test_outputs_staged_in_one_order_may_be_submitted_in_another(worker, engine):
    staged = {name: worker.exporter.stage([content(torch.float32, (50, 50), ord(name))], name) for name in "abc"}
    for name in "cab":
        worker.exporter.submit(staged[name])
    got = {received.output_id: received.output for received in (engine.next() for _ in "abc")}
    for name in "abc":
        assert_same_tensor(got[name][0], content(torch.float32, (50, 50), ord(name)))


def test_many_threads_of_many_workers_do_not_mix_their_outputs(packer, engine):
    workers = [WorkerSide(packer, engine.session) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for side in workers:
            stack.callback(side.exporter.close)

        def work(index: int) -> None:
            for number in range(20):
                workers[index].send([content(torch.uint8, (1000 * index + number,), number)], f"{index}/{number}")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            received = engine.next()
            index, number = map(int, received.output_id.split("/"))
            assert_same_tensor(received.output[0], content(torch.uint8, (1000 * index + number,), number))
        for thread in threads:
            thread.join()


def test_the_worker_lets_go_of_an_output_when_it_is_pickled_and_of_the_rest_with_the_ack(worker, engine):
    """Device memory of the pipeline's: it must not wait for the garbage collector."""
    output, references = nested()
    with no_garbage_collection():
        staged = worker.exporter.stage(output, "output")
        del output
        assert all(reference() is not None for reference in references)
        worker.exporter.submit(staged)
        # the host array is in the memfd, and the pickle is made
        assert [reference() for reference in references] == [None] * 3
        held = weakref.ref(staged)
        del staged
        received = engine.output("output")
        worker.wait_settled("output")
        wait_until(lambda: held() is None, "the ack thread is done with it")
        arrived = weakref.ref(received["media"].frames[0])
        del received
        assert arrived() is None
        wait_until(lambda: engine.leases.outstanding == 0, "the leases return")


def test_the_worker_lets_go_of_an_output_that_cannot_be_pickled(worker, engine):
    output, references = nested()
    output["callback"] = lambda: None
    with no_garbage_collection():
        staged = worker.exporter.stage(output, "bad")
        del output
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            worker.exporter.submit(staged)
        worker.wait_settled("bad")
        assert [reference() for reference in references] == [None] * 3


# -- zero copy and leases ----------------------------------------------------------------------------------------------


def pickled(tensor: torch.Tensor) -> int:
    file = io.BytesIO()
    pickle.dump(tensor, file)
    return file.tell()


def test_each_array_has_a_storage_of_exactly_its_own_bytes_so_that_a_view_pickles_no_more(worker, engine):
    worker.send([content(torch.float32, shape) for shape in ((100,), (2, FLOATS), (300, 7))], "output")
    small, large, other = engine.output("output")
    for tensor in (small, large, other):
        nbytes = tensor.numel() * 4
        assert tensor.untyped_storage().nbytes() == nbytes
        for view in (tensor.reshape(-1)[:1], tensor.detach(), tensor.view(torch.uint8)[..., :4]):
            assert pickled(view) < nbytes + 1000


def test_the_tensor_is_the_mapped_pool_itself(worker, engine):
    worker.send(content(torch.uint8, (FLOATS,)), "output")
    tensor = engine.output("output")
    address = tensor.data_ptr()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "packer-segment" in line]
    ranges = [[int(part, 16) for part in line.split()[0].split("-")] for line in maps]
    assert any(start <= address < end for start, end in ranges)


@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor[5:6],
        lambda tensor: tensor.view(torch.uint8),
        lambda tensor: tensor.detach().reshape(-1),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.numpy()[3:4],
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: tensor.untyped_storage(),
    ],
    ids=["slice", "view as bytes", "detached", "numpy", "numpy slice", "memoryview", "storage"],
)
def test_a_lease_stays_while_anything_looks_at_the_tensor_and_returns_when_the_last_dies(worker, engine, keep):
    worker.send(content(torch.float32, (1000,)), "output")
    tensor = engine.output("output")
    kept = keep(tensor)
    del tensor
    gc.collect()
    worker.send(content(torch.float32, (1000,)), "next")  # another round trip: a return would have arrived
    following = engine.output("next")
    assert engine.leases.outstanding == 2
    del following, kept
    engine.wait_no_lease()


def test_the_small_arrays_of_an_output_share_a_lease_which_returns_with_the_last(worker, engine):
    worker.send({name: content(torch.float32, (10,)) for name in "abc"}, "output")
    output = engine.output("output")
    for name in "abc":
        assert engine.leases.outstanding == 1
        del output[name]
    engine.wait_no_lease()


def test_a_lease_nobody_ever_used_returns_at_once(worker, engine):
    worker.send([torch.empty(0, 3)], "output")
    (tensor,) = engine.output("output")
    assert tensor.shape == (0, 3)
    engine.wait_no_lease()


def test_leases_return_to_the_packer_so_that_its_pool_serves_for_ever(small):
    with contextlib.closing(EngineSide(small)) as engine:
        side = WorkerSide(small, engine.session)
        with contextlib.closing(side.exporter):
            for number in range(6):  # each fills the pool
                side.send(torch.full((2 * FLOATS,), float(number)), str(number))
                tensor = engine.output(str(number))
                assert tensor[0] == tensor[-1] == number
                del tensor


def test_a_tensor_stays_valid_after_everything_is_closed_and_the_packer_is_dead(tmp_path):
    expected = content(torch.int64, (FLOATS,))
    with running_packer(tmp_path / "run") as packer:
        engine = EngineSide(packer)
        side = WorkerSide(packer, engine.session)
        side.send({"device": expected, "host": expected.numpy()}, "output")
        output = engine.output("output")
        side.exporter.close()
        engine.close()
        packer.process.kill()
        packer.wait()
    del engine, side
    gc.collect()
    assert_same_tensor(output["device"], expected)
    assert output["host"].tobytes() == expected.numpy().tobytes()
    output["device"][0] = 7  # and writable


def test_closing_the_engine_side_unmaps_the_pool_once_the_last_tensor_is_gone(tmp_path):
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "packer-" in line]

    before = len(mapped())
    fds = len(os.listdir("/proc/self/fd"))
    with running_packer(tmp_path / "run") as packer:
        engine = EngineSide(packer)
        side = WorkerSide(packer, engine.session)
        side.send([content(torch.float32, (FLOATS,)), np.arange(5000)], "output")
        output = engine.output("output")
        side.exporter.close()
        engine.close()
    assert len(mapped()) > before
    del output, engine, side
    gc.collect()
    assert len(mapped()) == before
    assert len(os.listdir("/proc/self/fd")) == fds


# -- host arrays and payloads ------------------------------------------------------------------------------------------


def test_large_numpy_arrays_travel_in_one_memfd_that_is_gone_with_the_last_of_them(worker, engine):
    arrays = {"a": np.arange(2 * MIB), "b": np.random.default_rng(0).random((300, 500)), "c": np.zeros(1)}
    worker.send(arrays, "output")
    got = engine.output("output")
    assert_same(got, arrays)
    worker.wait_settled("output")

    def mapped() -> bool:
        return "packer-host-arrays" in Path("/proc/self/maps").read_text()

    assert mapped()
    del got["a"]
    assert mapped()
    del got
    gc.collect()
    assert not mapped()


def test_outputs_that_are_kept_keep_no_descriptor(worker, engine):
    def kept(number: int) -> object:
        worker.send({"a": np.arange(MIB)}, f"output-{number}")
        return engine.output(f"output-{number}")

    got = [kept(0)]
    before = len(os.listdir("/proc/self/fd"))
    got += [kept(number) for number in range(1, 6)]
    worker.wait_settled(*(f"output-{number}" for number in range(6)))
    assert len(os.listdir("/proc/self/fd")) <= before  # the worker's own memfd is in this process too, until the ack
    assert all(int(one["a"][-1]) == MIB - 1 for one in got)


def test_with_a_full_descriptor_table_outputs_arrive_all_the_same(worker, engine):
    worker.send([torch.ones(FLOATS)], "first")
    engine.output("first")  # and with it the segments, whose descriptors the engine keeps
    outs = [{"a": np.arange(10_000) + number, "b": torch.ones(10)} for number in range(16)]
    for number, output in enumerate(outs):
        worker.send(output, f"output-{number}")
    worker.wait_settled(*(f"output-{number}" for number in range(16)))
    with full_table(os.getpid()):
        for number, output in enumerate(outs):
            assert_same(engine.output(f"output-{number}"), output)


@contextlib.contextmanager
def no_room_at_all(engine: EngineSide) -> Iterator[None]:
    """The table is full, and somebody took the descriptor that the engine's end keeps for this."""
    engine._spare.give()
    with full_table(os.getpid()):
        yield


def test_outputs_that_find_no_room_in_the_engines_table_wait_for_it_and_none_is_lost(worker, engine, monkeypatch):
    lines = []
    monkeypatch.setattr(receiver.logger, "error", lambda *line: lines.append(line))
    outs = [{"a": np.arange(10_000) + number} for number in range(3)]
    for number, output in enumerate(outs):
        worker.send(output, f"output-{number}")
    worker.wait_settled(*(f"output-{number}" for number in range(3)))
    with ThreadPoolExecutor(1) as background:
        with no_room_at_all(engine):
            first = background.submit(engine.output, "output-0")
            wait_until(lambda: lines, "it says that it waits")
            assert not first.done()
        assert_same(first.result(DEADLINE_S), outs[0])
        assert len(lines) == 1
    for number in (1, 2):
        assert_same(engine.output(f"output-{number}"), outs[number])


def test_an_output_that_finds_no_room_for_long_fails_with_the_limit_to_raise_and_the_next_arrive(
    worker, engine, monkeypatch
):
    monkeypatch.setattr(receiver, "_ROOM_S", 0.1)
    worker.send([torch.ones(FLOATS)], "before")
    assert_same(engine.output("before"), [torch.ones(FLOATS)])
    outs = {"lost": {"a": np.arange(10_000)}, "lost too": {"a": np.arange(10_000)}, "no descriptor": ["text"]}
    for output_id, output in outs.items():
        worker.send(output, output_id)
        worker.wait_settled(output_id)
    with no_room_at_all(engine):
        for output_id in ("lost", "lost too"):
            received = engine.next()
            assert received.output_id == output_id
            assert "ulimit -n" in received.error
        assert_same(engine.output("no descriptor"), ["text"])
    worker.send({"a": np.arange(10_000)}, "arrives")
    assert_same(engine.output("arrives"), {"a": np.arange(10_000)})
    del received
    engine.wait_no_lease()
    assert not engine.broken


def test_a_segment_that_finds_no_room_for_long_costs_what_lies_in_it_until_there_is_room(packer, monkeypatch):
    monkeypatch.setattr(receiver, "_ROOM_S", 0.1)
    with contextlib.closing(EngineSide(packer)) as engine, working(engine, packer) as worker:
        worker.send([torch.ones(FLOATS)], "lost")
        worker.wait_settled("lost")
        worker.send({"text": "no segment"}, "small")
        worker.wait_settled("small")
        with no_room_at_all(engine):
            received = engine.next()
            assert received.output_id == "lost"
            assert "ulimit -n" in received.error
            assert_same(engine.output("small"), {"text": "no segment"})
        worker.send([torch.ones(FLOATS)], "arrives")
        assert_same(engine.output("arrives"), [torch.ones(FLOATS)])
        engine.wait_no_lease()


def test_a_payload_too_large_for_a_message_travels_in_memory(worker, engine):
    output = {
        "prompt": "ü" * protocol.MAX_MESSAGE_BYTES,
        "image": content(torch.float32, (5000,)),
        "n": np.arange(3000),
    }
    worker.send(output, "output")
    assert_same(engine.output("output"), output)
    worker.wait_settled("output")


@pytest.mark.parametrize("extra", range(-3, 4))
def test_a_payload_about_as_large_as_a_message_may_carry_arrives(worker, engine, extra):
    overhead = len(skeleton.dump(b"x" * 30_000, [], lambda tensor: tensor)[0]) - 30_000
    output = b"x" * (protocol.MAX_PAYLOAD_BYTES - overhead + extra)
    worker.send(output, f"output{extra}")
    assert engine.output(f"output{extra}") == output


def test_hundreds_of_arrays_in_one_output_arrive(worker, engine):
    output = [content(torch.float32, (number,), number) for number in range(700)]
    worker.send(output, "output")
    assert_same(engine.output("output"), output)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_beside_a_full_arena_an_output_waits_as_a_clone_and_is_staged_when_slots_return(small):
    """Two outputs fill the arena; the packer, stopped, gives nothing back; the third must wait beside it."""
    with contextlib.closing(EngineSide(small)) as engine:
        side = WorkerSide(small, engine.session, arena_max_bytes="4MiB", wait_s=DEADLINE_S)
        with contextlib.closing(side.exporter):
            small.signal(signal.SIGSTOP)
            outputs = [torch.full((FLOATS * 3 // 2,), float(number)) for number in range(3)]
            staged = [side.exporter.stage([output], str(number)) for number, output in enumerate(outputs)]
            assert [bool(one.overflow_bytes) for one in staged] == [False, False, True]
            for output in outputs:
                output.fill_(-1)  # the originals may be overwritten either way
            for one in staged[:2]:
                side.exporter.submit(one)
            late = threading.Thread(target=side.exporter.submit, args=(staged[2],))
            late.start()
            small.signal(signal.SIGCONT)
            for number in range(3):
                (got,) = engine.output(str(number))
                assert torch.equal(got, torch.full((FLOATS * 3 // 2,), float(number)))
                del got
            late.join(DEADLINE_S)
            side.wait_settled("0", "1", "2")
            assert side.arena_idle()
            assert side.exporter.placement.overflow_left == 4 * MIB


def test_beside_a_full_overflow_the_output_is_left_to_the_worker_and_later_ones_are_taken_again(small):
    with contextlib.closing(EngineSide(small)) as engine:
        side = WorkerSide(small, engine.session, arena_max_bytes="2MiB", overflow_max_bytes="2MiB")
        with contextlib.closing(side.exporter):
            small.signal(signal.SIGSTOP)
            first, second = (side.exporter.stage([torch.ones(FLOATS * 3 // 2)], name) for name in ("first", "second"))
            assert first.slots
            assert second.overflow_bytes
            assert side.exporter.stage([torch.ones(FLOATS)], "third") is None
            small.signal(signal.SIGCONT)
            side.exporter.submit(first)
            engine.output("first")
            side.exporter.submit(second)
            engine.output("second")
            side.wait_settled("first", "second")
            side.send([torch.ones(FLOATS)], "fourth")
            engine.output("fourth")


def test_a_clone_that_waited_in_vain_for_a_slot_falls_back_whole(small):
    expected = content(torch.float32, (FLOATS,), 1)
    with contextlib.closing(EngineSide(small)) as engine:
        side = WorkerSide(small, engine.session, arena_max_bytes="2MiB", wait_s=0.05)
        with contextlib.closing(side.exporter):
            side.exporter.stage([torch.ones(FLOATS * 3 // 2)], "holds the arena")
            late = side.exporter.stage({"image": expected, "small": expected[:3].conj(), "n": np.arange(999)}, "late")
            side.exporter.submit(late)
            assert "arena_max_bytes" in side.wait_fallen_back(1)["late"]
            assert_same(
                side.exporter.rebuild(late), {"image": expected, "small": expected[:3].clone(), "n": np.arange(999)}
            )
            side.exporter.release(late)
            assert side.exporter.placement.overflow_left == 4 * MIB


def deafen(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Exporters that are made from here on hear nothing by themselves."""
    for method in methods:
        monkeypatch.setattr(Exchange, method, lambda *args: None)


def test_slots_of_delivered_outputs_are_used_again_before_the_arena_grows(packer, engine, monkeypatch):
    """Their acks wake nobody: whoever runs out of room looks for them. Here nobody else does, for as long as it takes."""
    deafen(monkeypatch, "look", "take")
    side = WorkerSide(packer, engine.session)
    with contextlib.closing(side.exporter):
        for number in range(12):
            output = content(torch.float32, (FLOATS * 3 // 4,), number)
            side.send([output], str(number))
            assert_same(engine.output(str(number)), [output])
            del output
        assert side.exporter.placement.arena.nbytes == 2 * MIB
        assert side.settled, "no slot was used twice"


def test_a_clone_gets_the_slots_of_delivered_outputs_although_nobody_was_told(packer, engine, monkeypatch):
    deafen(monkeypatch, "look", "take")
    side = WorkerSide(packer, engine.session)
    with contextlib.closing(side.exporter):
        staged = [side.exporter.stage([torch.ones(FLOATS * 3 // 4)], str(number)) for number in range(11)]
        assert staged[-1].overflow_bytes
        for one in staged:
            side.exporter.submit(one)
            engine.output(one.output_id)
        side.wait_settled(staged[-1].output_id)
        assert side.arena_idle()


def test_acks_are_heard_of_without_anybody_asking(worker, engine):
    worker.send([torch.ones(5)], "output")
    engine.output("output")
    wait_until(lambda: worker.settled == ["output"], "the ack thread looks")


def test_an_output_larger_than_the_arena_may_become_is_left_to_the_worker_and_harms_no_other(worker, engine):
    assert worker.exporter.stage([torch.ones(9 * FLOATS)], "huge") is None
    worker.send([torch.ones(FLOATS)], "next")
    engine.output("next")


def test_an_output_the_pool_has_no_room_for_falls_back_and_can_be_rebuilt(tmp_path):
    expected = {
        "image": content(torch.bfloat16, (1000, 300)),
        "more": content(torch.int64, (FLOATS,)),
        "n": np.arange(999),
    }
    with running_packer(tmp_path / "run", pool_max_bytes="2MiB", wait_s=0.05) as packer:
        with contextlib.closing(EngineSide(packer)) as engine:
            side = WorkerSide(packer, engine.session)
            with contextlib.closing(side.exporter):
                side.send([torch.ones(2 * FLOATS)], "fills the pool")
                kept = engine.output("fills the pool")
                side.send(expected, "output")
                assert "pool_max_bytes" in side.wait_fallen_back(1)["output"]
                staged = side.fallen_back[0][0]
                assert_same(side.exporter.rebuild(staged), expected)
                side.exporter.release(staged)
                side.exporter.release(staged)  # idempotent
                assert side.arena_idle()
                del kept
                engine.wait_no_lease()
                side.send([torch.ones(2 * FLOATS)], "again")
                engine.output("again")


def test_the_arena_is_given_back_and_grows_again(worker, engine):
    worker.send([torch.ones(FLOATS)], "before")
    engine.output("before")
    worker.wait_settled("before")

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("packer-arena")

    assert mapped()
    worker.exporter.give_back_arena(DEADLINE_S)
    assert mapped() == 0
    worker.send([torch.ones(FLOATS)], "after")
    assert torch.equal(engine.output("after")[0], torch.ones(FLOATS))


def test_a_chunk_with_an_output_in_it_is_not_given_back(worker, engine):
    staged = worker.exporter.stage([torch.ones(FLOATS)], "held")
    worker.exporter.give_back_arena(DEADLINE_S)
    worker.exporter.submit(staged)
    assert torch.equal(engine.output("held")[0], torch.ones(FLOATS))


# -- the main thread -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Typed:
    """As vllm-omni's media."""

    video: Any


@dataclass(frozen=True)
class Extended(Typed):
    """It inherits slots, and how those pickle, and has a dict beside them."""

    fps: int = 24


@dataclass
class GetsState:
    """Its own code says what is pickled of it."""

    value: Any

    def __getstate__(self) -> dict[str, Any]:
        return {"value": Odd(self.value)}


@dataclass(slots=True)
class Validated:
    """Pickle fills its slots by setting attributes."""

    value: Any

    def __setattr__(self, name: str, value: Any) -> None:
        assert value is None or value.min() > 0
        object.__setattr__(self, name, value)


class Slotted:
    __slots__ = ("hidden",)


@dataclass
class Hiding(Slotted):
    """A slot that is no field is pickled too."""

    value: Any

    def __post_init__(self) -> None:
        self.hidden = Odd(self.value)


@dataclass
class File(io.BytesIO):
    """Its state is a builtin's to get and to set."""

    value: Any


class Lazy(dict[str, Any]):
    """Its values have no length."""

    def values(self) -> Any:
        return iter([self[key] for key in self])


class Odd:
    """Not plain: its own code runs when it is put together."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Odd, (self.value,)


PLAIN = {
    "a tensor": lambda: torch.ones(FLOATS),
    "nested, with text": lambda: {"image": [torch.ones(5), (torch.ones(7), "text", 1.5)], "text": "x" * 40_000},
    "typed media": lambda: Typed(torch.ones(FLOATS)),
    "extended media": lambda: Extended(torch.ones(FLOATS)),
    "nothing": lambda: None,
}
NOT_PLAIN = {
    "a numpy array": lambda: [torch.ones(5), np.arange(5)],
    "somebody's class": lambda: Odd(torch.ones(5)),
    "many values": lambda: [torch.ones(5), list(range(1000))],
    "what cannot be pickled": lambda: [torch.ones(5), lambda: None],
    "an odd key": lambda: {np.int64(1): torch.ones(5)},
    "a dict of its own": lambda: Lazy(a=torch.ones(5)),
    "its own __getstate__": lambda: GetsState(torch.ones(5)),
    "slots that pickle sets": lambda: Validated(torch.ones(5)),
    "a hidden slot": lambda: Hiding(torch.ones(5)),
    "a builtin's __setstate__": lambda: File(torch.ones(5)),
    "much text": lambda: [torch.ones(5), {"video": bytes(MIB)}],
}


@pytest.mark.parametrize("make", PLAIN.values(), ids=PLAIN)
def test_a_plain_output_leaves_on_the_main_thread(worker, engine, make):
    staged = worker.exporter.stage(make(), "output")
    assert worker.exporter.submit_now(staged)
    assert staged.content is None
    assert_same(engine.output("output"), make())


def test_a_tensor_in_a_slot_is_staged_also_beside_a_dict(worker, engine):
    """Else the main thread would wait for its forward and copy it itself."""
    staged = worker.exporter.stage(Extended(torch.ones(FLOATS)), "output")
    assert [piece.nbytes for piece in staged.pieces] == [MIB]
    worker.exporter.withdraw(staged)
    worker.wait_settled("output")


@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_any_other_output_is_left_to_the_export_thread(worker, make):
    staged = worker.exporter.stage(make(), "output")
    assert not worker.exporter.submit_now(staged)
    worker.exporter.withdraw(staged)
    worker.wait_settled("output")


def test_a_plain_output_that_cannot_be_pickled_after_all_fails_on_the_export_thread(worker, monkeypatch):
    staged = worker.exporter.stage([torch.ones(5)], "output")

    def refuse(*args: Any) -> Any:
        raise OSError("no descriptor is left")

    with monkeypatch.context() as patched:
        patched.setattr(skeleton, "dump", refuse)
        assert not worker.exporter.submit_now(staged)
        with pytest.raises(OSError, match="no descriptor"):
            worker.exporter.submit(staged)
    worker.wait_settled("output")


def test_what_found_no_room_on_the_main_thread_is_sent_once_without_it(worker, engine, monkeypatch):
    staged = worker.exporter.stage([torch.ones(FLOATS)], "output")
    with monkeypatch.context() as patched:
        patched.setattr(Channel, "try_send", lambda *args: False)
        assert worker.exporter.submit_now(staged)
    engine.output("output")
    worker.wait_settled("output")
    assert engine.receive(0.1) is None


def test_the_engine_puts_a_plain_output_together_while_its_forward_runs(tmp_path):
    device = Stalling()
    with contextlib.ExitStack() as stack:
        # Of its own, and with room: one that has to grow first, or is given back what earlier tests had, may put off the
        # copy, and with it what is coming.
        packer = stack.enter_context(running_packer(tmp_path / "run", pool_bytes="16MiB", pool_max_bytes="64MiB"))
        engine = stack.enter_context(contextlib.closing(EngineSide(packer)))
        side = stack.enter_context(working(engine, packer, device=device))
        device.stalled = True
        side.send([torch.ones(FLOATS), Odd(1)], "not plain")
        side.send({"image": torch.ones(FLOATS)}, "plain")
        wait_until(lambda: engine.receive(0.01) is None and engine._coming, "it is coming")
        (coming,) = engine._coming.values()
        assert coming.received.output_id == "plain"
        del coming
        device.timeline.counter = device._value
        got = {received.output_id: received.output for received in (engine.next(), engine.next())}
        assert torch.equal(got["plain"]["image"], torch.ones(FLOATS))
        assert not engine._coming
        side.wait_settled("plain", "not plain")
        del got
        engine.wait_no_lease()


def test_what_was_coming_and_failed_leaves_no_lease_and_no_room_behind(packer, engine):
    device = Failing()
    side = WorkerSide(packer, engine.session, device=device)
    with contextlib.closing(side.exporter):
        side.send([torch.ones(FLOATS)], "first")
        engine.output("first")  # the pool has grown
        device.stalled = True
        side.send([torch.ones(FLOATS)], "lost")
        wait_until(lambda: engine.receive(0.01) is None and engine._coming, "it is coming")
        device.why = "device-side assert"
        assert "device-side assert" in engine.next().error
        engine.wait_no_lease()
        device.why, device.stalled = "", False
        side.send([torch.ones(FLOATS)], "next")
        engine.output("next")  # by then the packer would have complained of a lease that was not out
    assert "is not out" not in packer.log


# -- a forward that is not done yet ------------------------------------------------------------------------------------


class Queueing(HostExportDevice):
    """A device that does what it is given, forwards, copies and signals, when somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.queueing = False
        self.used: list[int] = []  # addresses of the memory whose use on the current stream it was told of
        self._work: list[Callable[[], Any]] = []

    def submit(self, work: Callable[[], Any]) -> None:
        self._work.append(work)
        if not self.queueing:
            self.run()

    def run(self) -> None:
        while self._work:
            self._work.pop(0)()

    def copy_bytes(self, target: int, source: int, nbytes: int, owner: torch.Tensor) -> None:
        copy = super().copy_bytes
        self.submit(lambda: copy(target, source, nbytes, owner))
        self.record_use(owner)

    def record_use(self, tensor: torch.Tensor) -> None:
        assert not tensor.is_conj()
        assert not tensor.is_neg()
        self.used.append(tensor.data_ptr())

    def signal(self) -> Signal:
        self._value = value = self._value + 1
        self.submit(lambda: setattr(self.timeline, "counter", value))
        return Signal(value)

    def reached(self, value: int) -> bool:
        return self.timeline.counter >= value

    @contextlib.contextmanager
    def after(self, value: int) -> Iterator[None]:
        self.run()
        assert self.reached(value)
        yield


@pytest.fixture
def queueing(packer, engine):
    """A worker on such a device, which queues from now on."""
    with working(engine, packer, device=Queueing()) as side:
        side.exporter.device.queueing = True
        yield side
        side.exporter.device.run()


class Frames(torch.Tensor):
    """It pickles itself."""


class Reading:
    """What is pickled of it is a copy of its tensor, as that is then."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self.tensor.clone()}


OVER_A_TENSOR = {
    "a subclass": lambda tensor: tensor.as_subclass(Frames),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 1.0, 0, torch.qint32),
    "sparse": lambda tensor: torch.sparse_coo_tensor(torch.arange(5)[None], tensor, (5,), check_invariants=False),
    "its own __getstate__": Reading,
    "a numpy array": lambda tensor: tensor.numpy(),
}


@pytest.mark.filterwarnings("ignore:.*quantiz", "ignore:TypedStorage", "ignore:.*deprecated")
@pytest.mark.parametrize("make", OVER_A_TENSOR.values(), ids=OVER_A_TENSOR)
def test_what_is_not_plain_is_pickled_when_the_forward_that_fills_it_is_done(queueing, engine, make):
    image = torch.zeros(5)
    output = {"image": image, "odd": make(image)}

    def forward() -> None:
        image.fill_(7.0)
        if getattr(output["odd"], "is_quantized", False):  # it has memory of its own
            output["odd"].copy_(image)

    queueing.exporter.device.submit(forward)
    queueing.send(output, "output")
    queueing.exporter.device.run()
    got = engine.output("output")
    odd = getattr(got["odd"], "tensor", got["odd"])
    if isinstance(odd, torch.Tensor):
        odd = (odd.dequantize() if odd.is_quantized else odd.to_dense() if odd.is_sparse else odd).numpy()
    assert odd.tolist() == got["image"].tolist() == [7.0] * 5


def test_a_plain_output_waits_for_no_forward_on_the_main_thread(queueing, engine):
    device = queueing.exporter.device
    image = torch.zeros(5)
    device.submit(lambda: image.fill_(7.0))
    staged = queueing.exporter.stage([image], "output")
    assert queueing.exporter.submit_now(staged)
    assert not device.reached(staged.signal.ready)
    device.run()
    assert engine.output("output")[0].tolist() == [7.0] * 5


class Renewing(list[Any]):
    """Each look at it gives other tensors, which nobody else holds."""

    def __iter__(self) -> Iterator[Any]:
        return (frame.clone() + 1 for frame in super().__iter__())


class RenewingTuple(tuple[Any, ...]):
    def __iter__(self) -> Iterator[Any]:
        return (frame.clone() + 1 for frame in super().__iter__())


class RenewingDict(dict[int, Any]):
    def items(self) -> Any:
        return [(key, frame.clone() + 1) for key, frame in super().items()]

    def values(self) -> Any:
        return [frame for _, frame in self.items()]


@pytest.mark.parametrize(
    ("renewing", "kind"),
    [
        (lambda frames: Renewing(frames), list),
        (lambda frames: RenewingTuple(frames), tuple),
        (lambda frames: RenewingDict(enumerate(frames)), dict),
    ],
    ids=["list", "tuple", "dict"],
)
def test_a_container_that_makes_its_tensors_when_asked_is_asked_once_as_by_vllm_omni(worker, engine, renewing, kind):
    ipc = pytest.importorskip("vllm_omni.diffusion.ipc")
    make = lambda: {"frames": renewing([torch.full((1000,), float(number)) for number in range(64)])}  # noqa: E731
    worker.send(make(), "output")
    got = engine.output("output")
    assert type(got["frames"]) is kind
    assert_same(got, ipc._pack_value_if_large(make()))
    assert_same(ipc._unpack_if_shm_handle(got), got)


def test_a_staged_tensor_that_the_output_forgets_lives_until_that_is_pickled(worker, engine):
    """Else one made while the rest is pickled could get its id, and with that its place and its bytes."""

    class Forgetful:
        def __reduce__(self) -> tuple[Any, ...]:
            image = weakref.ref(images.pop())
            return bool, (image() is not None,)

    images = [torch.ones(1000)]
    worker.send([Forgetful(), images], "output")
    assert engine.output("output") == [True, []]


def test_all_memory_that_staging_reads_is_recorded_as_used_by_its_stream(queueing, engine):
    """Else memory of another stream's could be written again before it was read."""
    dense, base = torch.ones(5), torch.ones(6, dtype=torch.complex64)
    output = [dense, torch.ones(4, 4).T, base.conj(), base.conj().imag, torch._efficientzerotensor((5,))]
    queueing.send(output, "output")
    used = queueing.exporter.device.used
    queueing.exporter.device.run()
    engine.output("output")
    assert set(used) == {dense.data_ptr(), output[1].data_ptr(), base.data_ptr(), output[3].data_ptr()}


# -- what a pipeline left switched on ----------------------------------------------------------------------------------


class EveryFunction(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class EveryOperator(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SWITCHED_ON = {
    "a default device": lambda: torch.device("meta"),  # what torch.set_default_device enters
    "a default dtype": lambda: default_dtype(torch.float64),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic algorithms": deterministic,
    "a function mode": EveryFunction,
    "a dispatch mode": EveryOperator,
}


@pytest.mark.parametrize("switch", SWITCHED_ON.values(), ids=SWITCHED_ON)
def test_whatever_a_pipeline_switched_on_in_torch_outputs_arrive(small, switch):
    """In the arena and beside it, with host arrays, empty and of odd layout; the export thread has none of it on."""

    def make(number: int) -> dict[str, Any]:
        return {
            "image": torch.full((FLOATS * 3 // 2,), float(number), device="cpu", dtype=torch.float32),
            "views": [content(torch.bfloat16, (9, 5), number).T, content(torch.complex64, (7,), number).conj()],
            "empty": torch.empty(0, 3, device="cpu", dtype=torch.float32),
            "array": np.full(3000, number),
        }

    with contextlib.closing(EngineSide(small)) as engine, contextlib.ExitStack() as stack:
        with switch():
            side = stack.enter_context(working(engine, small, arena_max_bytes="2MiB", wait_s=DEADLINE_S))
            staged = [side.exporter.stage(make(number), str(number)) for number in range(2)]
            assert [bool(one.overflow_bytes) for one in staged] == [False, True]
        for number, one in enumerate(staged):
            with ThreadPoolExecutor(1) as export_thread:
                export_thread.submit(side.exporter.submit, one).result(DEADLINE_S)
            with switch():
                got = engine.output(str(number))
            assert_same(got, make(number))
            del got
        side.send({"plain": torch.ones(5, device="cpu")}, "plain")
        engine.output("plain")


def test_what_is_rebuilt_under_a_default_device_lies_where_it_was_staged(worker):
    staged = worker.exporter.stage([torch.ones(5), torch.empty(0, 3)], "output")
    with torch.device("meta"):
        assert worker.exporter.submit_now(staged)
        rebuilt = worker.exporter.rebuild(staged)
    assert_same(rebuilt, [torch.ones(5), torch.empty(0, 3)])


# -- failures ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_pickled_raises_and_everything_it_held_is_free_again(worker, engine):
    staged = worker.exporter.stage({"image": torch.ones(FLOATS), "callback": lambda: None}, "bad")
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        worker.exporter.submit(staged)
    worker.wait_settled("bad")
    assert worker.arena_idle()
    assert worker.fallen_back == []
    worker.send([torch.ones(3)], "next")
    engine.output("next")  # and nothing came of the bad one
    engine.wait_no_lease()


def test_an_output_whose_pickling_ends_in_a_system_exit_is_withdrawn_like_any_other_that_fails(worker):
    class Exits:
        def __reduce__(self) -> Any:
            sys.exit("no licence")

    staged = worker.exporter.stage([torch.ones(FLOATS), Exits()], "bad")
    with pytest.raises(SystemExit):
        worker.exporter.submit(staged)
    worker.wait_settled("bad")
    assert worker.arena_idle()


def test_what_cannot_be_pickled_may_be_salvaged(worker, engine):
    output = {"image": torch.ones(FLOATS), "callback": lambda: None}
    staged = worker.exporter.stage(output, "mended")
    worker.exporter.submit(staged, lambda output, dump: output.pop("callback") is not None)
    assert list(engine.output("mended")) == ["image"]


class Watching:
    """Pickles as whether a tensor is still there."""

    def __init__(self, tensor: Any) -> None:
        self.watched = weakref.ref(tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (self.watched() is not None,)


def test_a_staged_tensor_that_is_salvaged_away_lives_until_the_rest_is_pickled(worker, engine):
    """Else one made while the rest is pickled could get its id, and with that its place and its bytes."""
    output = {"bad": (lambda: None, torch.ones(3))}  # a tuple: no pickler keeps it
    output["watching"] = Watching(output["bad"][1])
    staged = worker.exporter.stage(output, "mended")
    worker.exporter.submit(staged, lambda output, dump: output.pop("bad") is not None)
    assert engine.output("mended") == {"watching": True}
    assert output["watching"].watched() is None


@pytest.fixture
def no_records(caplog):
    """A log record with a traceback keeps the arrays in its frames alive; pytest keeps records, a log file does not."""
    caplog.set_level(logging.CRITICAL, "vllm.worker_shim.engine.assembly")


class Explosive:
    """Pickles, and fails where it is unpickled."""

    def __init__(self, *call: Any) -> None:
        self._call = call or (int, "no number")

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


@pytest.mark.parametrize("call", [(), (sys.exit, "no number")])
@pytest.mark.usefixtures("no_records")
def test_what_cannot_be_unpickled_fails_alone_and_its_leases_return(worker, engine, call):
    worker.send([torch.ones(FLOATS), Explosive(*call)], "bad")
    worker.send([torch.ones(FLOATS)], "good")
    bad = engine.next()
    assert (bad.output_id, bad.output) == ("bad", None)
    assert "no number" in bad.error
    engine.output("good")
    worker.wait_settled("bad", "good")
    engine.wait_no_lease()


@pytest.mark.parametrize("forged", ["another key", "another output's skeleton", "damaged"])
def test_a_skeleton_with_a_wrong_mac_is_not_unpickled_and_fails_alone(packer, engine, worker, forged, tmp_path):
    """Only the packer could forge one: here, a worker by hand, which does not know the engine's mac_key."""
    trap = tmp_path / "unpickled"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(trap),)

    payload, _ = skeleton.dump(Trap(), [], lambda tensor: tensor)
    mac = {
        "another key": skeleton.mac(b"guess" * 7, "forged", payload),
        "another output's skeleton": skeleton.mac(MAC_KEY, "other", payload),
        "damaged": skeleton.mac(MAC_KEY, "forged", payload[:-1]),
    }[forged]
    with contextlib.closing(Worker(packer, engine.session)) as forger:
        forger.export("forged", forger.write(b"x" * 1000))
        forger.channel.send(protocol.Skeleton("forged", protocol.Body(payload, mac)))
        received = engine.next()
        assert received.output is None
        assert "MAC" in received.error
        assert forger.answer() == Ack("forged")
    assert not trap.exists()
    engine.wait_no_lease()
    worker.send([torch.ones(3)], "genuine")
    engine.output("genuine")


@pytest.mark.usefixtures("no_records")
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ArraySpec("torch", "float32", (1000,), 4000, 0, 96), "does not lie inside lease"),
        (ArraySpec("torch", "float32", (1,), 4, 0, -4), ""),
        (ArraySpec("torch", "float32", (1,), 4, 7, 0), ""),
        (ArraySpec("torch", "float32", (99,), 4, 0, 0), ""),
        (ArraySpec("torch", "no_dtype", (1,), 4, 0, 0), ""),
        (ArraySpec("numpy", "f4", (1,), 4, -1, 1 << 40), ""),
    ],
    ids=["beyond its lease", "before its lease", "another piece", "more than its bytes", "no dtype", "no host memory"],
)
def test_a_skeleton_that_points_outside_its_memory_fails_alone_and_its_lease_returns(
    packer, engine, worker, spec, reason
):
    payload = skeleton._encode(skeleton._Payload((spec,), pickle.dumps(None)))
    with contextlib.closing(Worker(packer, engine.session)) as other:
        other.export("bad", other.write(b"x" * 4000))
        other.channel.send(protocol.Skeleton("bad", protocol.Body(payload, skeleton.mac(MAC_KEY, "bad", payload))))
        received = engine.next()
        assert received.error
        assert reason in received.error
    engine.wait_no_lease()
    worker.send([torch.ones(3)], "good")
    engine.output("good")


def test_an_output_that_comes_a_second_time_is_dropped_with_its_lease(packer, engine):
    with contextlib.closing(Worker(packer, engine.session)) as other:
        payload, _ = skeleton.dump("once", [], lambda tensor: tensor)
        for output in ("twice", "twice", "last"):
            other.export(output, other.write(b"x" * 4000))
            other.channel.send(
                protocol.Skeleton(output, protocol.Body(payload, skeleton.mac(MAC_KEY, output, payload)))
            )
            assert other.answer() == Ack(output)
    assert [engine.next().output_id, engine.next().output_id] == ["twice", "last"]
    engine.wait_no_lease()


def test_while_the_engine_waits_it_can_ask_how_far_an_output_is(packer, engine):
    device = Stalling()
    side = WorkerSide(packer, engine.session, device=device)

    def state() -> str:
        answer = engine.questions.ask("stalled")
        with ThreadPoolExecutor(1) as background:
            asked = background.submit(answer, time.monotonic() + DEADLINE_S)
            wait_until(lambda: engine.receive(0.01) is None and asked.done(), "an answer")
        return asked.result()

    with contextlib.closing(side.exporter):
        device.stalled = True
        side.send([torch.ones(FLOATS)], "stalled")
        # The question may overtake the output: they are two connections.
        wait_until(lambda: state() == "waiting for the worker's forward", "the output waits")
        device.timeline.counter = device._value
        assert torch.equal(engine.output("stalled")[0], torch.ones(FLOATS))


def test_a_packer_that_does_not_answer_is_waited_for_once_until_it_speaks_again(tmp_path):
    with running_packer(tmp_path / "run") as packer, contextlib.closing(EngineSide(packer)) as engine:
        packer.signal(signal.SIGSTOP)
        assert engine.questions.ask("output")(time.monotonic() + 0.01) == "unknown: the packer did not answer"
        for _ in range(10_000):  # far more than a connection holds, were each asked
            assert engine.questions.ask("output")(time.monotonic() + DEADLINE_S) == "unknown: the packer did not answer"
        packer.signal(signal.SIGCONT)
        wait_until(lambda: engine.receive(0.01) is None and not engine.questions.overdue, "the late answer")
        answer = engine.questions.ask("output")
        with ThreadPoolExecutor(1) as background:
            state = background.submit(answer, time.monotonic() + DEADLINE_S)
            wait_until(lambda: engine.receive(0.01) is None and state.done(), "an answer")
        assert state.result().startswith("not here: never exported")


def test_leases_that_cannot_be_returned_end_the_connection_and_go_back_with_it(worker, engine, monkeypatch):
    worker.send([torch.ones(FLOATS)], "output")
    output = engine.output("output")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    monkeypatch.setattr(engine._connection._channel, "try_send", refuse)
    del output
    gc.collect()
    wait_until(lambda: engine.receive(0.01) is None and engine.broken, "the connection is given up")


def test_an_engine_that_cannot_take_a_message_gives_the_connection_up_and_the_thread_goes_on(
    worker, engine, monkeypatch
):
    """As when the kernel has no mapping for memory that comes back: the keeper's thread reads, too, and must not end."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(engine, "_take", refuse)
    worker.send([torch.ones(FLOATS)], "output")
    assert engine.receive(DEADLINE_S) is None
    assert "Cannot allocate memory" in engine.broken


class Unbound(HostExportDevice):
    def bind_thread(self) -> None:
        raise DeviceError("no thread can be bound")


def test_acks_are_taken_although_their_thread_cannot_use_the_device(packer, engine):
    with working(engine, packer, device=Unbound()) as worker:
        worker.send([torch.ones(FLOATS)], "output")
        engine.output("output")
        wait_until(lambda: "output" in worker.settled, "the ack")


class Breaking(Stalling):
    """A device that cannot signal any more when told."""

    broken = False

    def signal(self) -> Signal:
        if self.broken:
            raise RuntimeError("the device is broken")
        return super().signal()


def test_an_output_that_cannot_be_staged_does_not_pass_earlier_ones_for_complete(packer, engine):
    device = Breaking()
    side = WorkerSide(packer, engine.session, device=device)
    with contextlib.closing(side.exporter):
        probed = device._value
        device.stalled = True
        side.send([torch.ones(FLOATS)], "earlier")
        device.broken = True
        with pytest.raises(RuntimeError, match="broken"):
            side.exporter.stage([torch.ones(5)], "never")
        assert device.timeline.counter == probed
        device.broken = device.stalled = False
        assert engine.receive(0.1) is None
        device.timeline.counter = device._value
        assert torch.equal(engine.output("earlier")[0], torch.ones(FLOATS))
        side.send([torch.ones(7)], "later")
        assert torch.equal(engine.output("later")[0], torch.ones(7))
        side.wait_settled("earlier", "later")
        wait_until(lambda: not side.exporter.exchange.pending and side.arena_idle(), "the slots come back")
        assert side.settled == ["earlier", "later"], "nobody counted the one that failed"


def test_an_ack_on_the_page_is_not_of_a_withdrawn_output_whose_signal_failed_and_so_came_again(packer, engine):
    device = Breaking()
    side = WorkerSide(packer, engine.session, device=device)
    with contextlib.closing(side.exporter):
        packer.signal(signal.SIGSTOP)
        device.broken = True
        with pytest.raises(RuntimeError, match="broken"):
            side.exporter.stage([torch.ones(5)], "withdrawn")
        device.broken = False
        later = side.send([torch.ones(7)], "later")
        exchange = side.exporter.exchange
        assert exchange.pending["withdrawn"].signal.ready == later.signal.ready
        page = AckPage.attach(os.dup(exchange.ack_page.fd))
        assert page.put(later.signal.ready)
        page.close()
        side.exporter.take_acks()
        assert side.settled == ["later"]
        assert list(exchange.pending) == ["withdrawn"], "its slots are free while the packer may read them"
        packer.signal(signal.SIGCONT)
        wait_until(lambda: not exchange.pending, "the packer's own answer")
        assert side.settled == ["later"]
        engine.output("later")


def test_an_output_that_is_lost_and_then_withdrawn_is_nobodys_to_send(tmp_path):
    device = Failing()
    with running_packer(tmp_path / "run") as packer, contextlib.closing(EngineSide(packer)) as engine:
        side = WorkerSide(packer, engine.session, device=device)
        with contextlib.closing(side.exporter):
            packer.signal(signal.SIGSTOP)
            device.stalled, device.why = True, "device-side assert"
            staged = side.exporter.stage([torch.ones(5)], "output")
            wait_until(lambda: staged.state is State.LOST, "its device is looked at")
            side.exporter.withdraw(staged)
            assert staged.state is State.DROPPED
            packer.process.kill()
            packer.wait()
            side.exporter.exchange.give_up("by hand")
            assert staged.state is State.SETTLED
            assert side.fallen_back == []


def test_memory_the_packer_did_not_let_go_in_time_is_freed_the_next_time(worker):
    device = worker.exporter.device
    assert device._chunks
    worker.exporter.give_back_arena(0.0)
    worker.exporter.give_back_arena(DEADLINE_S)
    assert not device._chunks


def test_an_output_released_by_two_threads_at_once_gives_its_slots_back_once(worker, engine):
    staged = [worker.exporter.stage([torch.ones(10)], f"output-{number}") for number in range(200)]
    worker.exporter.exchange.broken = "by hand"
    for one in staged:
        worker.exporter.submit(one)
    assert len(worker.fallen_back) == 200
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            for one in staged:
                for done in [pool.submit(worker.exporter.release, one) for _ in range(2)]:
                    done.result()
    finally:
        sys.setswitchinterval(interval)
    assert worker.arena_idle()
    assert not worker.exporter.exchange.pending


def test_after_the_packer_is_killed_everything_pending_falls_back_and_is_rebuilt_equal(tmp_path):
    expected = {
        "first": {"image": content(torch.float32, (FLOATS,)), "small": content(torch.bool, (5,)), "n": np.arange(9999)},
        "second": [content(torch.complex64, (64, 64)).conj(), "text" * 20_000],
        "no arrays": {"a": 1},
    }
    with running_packer(tmp_path / "run") as packer:
        engine = EngineSide(packer)
        side = WorkerSide(packer, engine.session, restart_wait_s=0.0)
        packer.signal(signal.SIGSTOP)
        for name, output in expected.items():
            side.send(output, name)
        half = side.exporter.stage([torch.ones(FLOATS)], "half sent")
        packer.process.kill()
        packer.wait()
        side.exporter.submit(half)
        reasons = side.wait_fallen_back(4)
        assert all("does not come back" in reason for reason in reasons.values())
        rebuilt = {staged.output_id: side.exporter.rebuild(staged) for staged, _ in side.fallen_back}
        assert_same(rebuilt.pop("half sent"), [torch.ones(FLOATS)])
        for name, output in expected.items():
            assert_same(rebuilt[name], [output[0].resolve_conj(), output[1]] if name == "second" else output)
        for staged, _ in side.fallen_back:
            side.exporter.release(staged)
        assert side.arena_idle()
        buffer = torch.ones(4 * FLOATS)
        side.send([buffer], "later")
        buffer.fill_(2)  # as the next forward of a pipeline that uses it again
        side.send([torch.ones(3 * FLOATS)], "beside the arena")
        assert len(side.wait_fallen_back(6)) == 6
        rebuilt = {staged.output_id: side.exporter.rebuild(staged) for staged, _ in side.fallen_back[4:]}
        assert_same(rebuilt, {"later": [torch.ones(4 * FLOATS)], "beside the arena": [torch.ones(3 * FLOATS)]})
        for staged, _ in side.fallen_back[4:]:
            side.exporter.release(staged)
        assert engine.receive(0) is None
        assert engine.broken
        side.exporter.close()
        engine.close()


def test_what_a_packer_had_acknowledged_is_settled_when_it_is_given_up(tmp_path, monkeypatch):
    deafen(monkeypatch, "look")  # until it is given up, nobody looks
    with running_packer(tmp_path / "run") as packer, contextlib.closing(EngineSide(packer)) as engine:
        side = WorkerSide(packer, engine.session, restart_wait_s=0.0)
        with contextlib.closing(side.exporter):
            side.send([torch.ones(5)], "output")
            engine.output("output")
            wait_until(lambda: side.exporter.exchange.acknowledged, "its ack is on the page")
            packer.signal(signal.SIGKILL)
            wait_until(lambda: side.settled == ["output"], "nobody looks for room, and the packer never comes back")
            assert side.exporter.placement.arena.idle
            assert side.fallen_back == []


def test_a_worker_the_packer_refuses_gets_back_what_it_sent(packer, engine):
    side = WorkerSide(packer, engine.session, max_restarts=0)
    with contextlib.closing(side.exporter):
        staged = side.exporter.stage([torch.ones(FLOATS)], "pending")
        side.exporter.exchange.link.post(Release((1,)))  # not a worker's to send
        wait_until(lambda: side.exporter.broken, "the exporter hears of it")
        assert "no message allowed here" in side.exporter.broken
        side.exporter.submit(staged)
        side.wait_fallen_back(1)
        assert_same(side.exporter.rebuild(staged), [torch.ones(FLOATS)])
        side.exporter.release(staged)


def test_opening_an_exporter_proves_that_the_packer_reads_what_the_worker_wrote(packer, engine):
    class Elsewhere(HostExportDevice):
        """Hands out the memory of one chunk and exports that of another."""

        def allocate(self, nbytes: int) -> Any:
            return super().allocate(nbytes)._replace(fd=super().allocate(nbytes).fd)

    with pytest.raises(PackerUnavailable, match="other bytes than this worker wrote"):
        WorkerSide(packer, engine.session, device=Elsewhere())
    with pytest.raises(PackerUnavailable, match="cannot read this worker's memory"):
        WorkerSide(packer, engine.session, device=TooSmall())


class TooSmall(HostExportDevice):
    """Says that a chunk is exported by an event, which the host device does not have."""

    def signal(self) -> Signal:
        return super().signal()._replace(event=bytes(64))


def test_an_exporter_on_the_wrong_gpu_is_refused(packer, engine):
    class Other(HostExportDevice):
        uuid = "GPU-1234"

    with pytest.raises(HandshakeError, match="GPU-1234"):
        WorkerSide(packer, engine.session, device=Other())


# -- a worker that is killed -------------------------------------------------------------------------------------------


def export_until_killed(socket: str, key: bytes, session: str, test: Any) -> None:
    """A worker process: two outputs complete, one half sent, one never complete; then nothing, for ever."""
    device = Stalling()
    side = WorkerSide(types.SimpleNamespace(socket=socket, key=key), session, device=device)  # type: ignore[arg-type]
    test.send("open")
    test.recv()
    side.send({"image": content(torch.float32, (FLOATS // 4,), 1), "n": np.arange(5000)}, "complete 1")
    side.send([content(torch.bfloat16, (5, 7), 2)], "complete 2")
    side.exporter.stage([torch.ones(10)], "half sent")
    device.stalled = True
    side.send([torch.ones(FLOATS // 4)], "incomplete")
    test.send("sent")
    test.recv()


def test_of_a_killed_worker_what_was_complete_is_delivered_and_the_rest_fails_and_no_lease_is_left(small):
    spawn = multiprocess.get_context("spawn")
    test, child = spawn.Pipe()
    with contextlib.closing(EngineSide(small)) as engine:
        process = spawn.Process(target=export_until_killed, args=(small.socket, small.key, engine.session, child))
        process.start()
        try:
            assert test.recv() == "open"
            small.signal(signal.SIGSTOP)  # so that the packer has everything still to do when the worker dies
            test.send("go")
            assert test.recv() == "sent"
            process.kill()
            process.join()
            small.signal(signal.SIGCONT)
        finally:
            process.kill()
        got = {received.output_id: received for received in (engine.next() for _ in range(4))}
        assert_same(
            got["complete 1"].output, {"image": content(torch.float32, (FLOATS // 4,), 1), "n": np.arange(5000)}
        )
        assert_same(got["complete 2"].output, [content(torch.bfloat16, (5, 7), 2)])
        assert "while it was sending" in got["half sent"].error
        assert "before the output was complete" in got["incomplete"].error
        del got
        engine.wait_no_lease()
        side = WorkerSide(small, engine.session, wait_s=DEADLINE_S)
        with contextlib.closing(side.exporter):
            side.send([torch.ones(2 * FLOATS)], "all of the pool")
            engine.output("all of the pool")


# -- as vllm-omni's pump reads it --------------------------------------------------------------------------------------


@pytest.fixture
def result_queue(packer):
    """vllm-omni's end, and a worker."""
    pytest.importorskip("vllm_omni")
    from worker_shim.engine.result_queue import PackerResultQueue

    session = secrets.token_hex(8)
    queue = PackerResultQueue(MAC_KEY, Delivered())
    connection = Connection(packer.connect("engine", session), DEADLINE_S)
    queue.resume(connection)
    side = WorkerSide(packer, session)
    with contextlib.closing(side.exporter):
        yield queue, side
    end(queue, connection)


def end(queue, connection: Connection) -> None:
    """As a link does, whose thread lasts as long as the queue reads."""
    queue.close()
    queue.read(connection)


def test_the_result_queue_gives_output_ready_messages_then_one_empty_one_then_timeouts(result_queue):
    queue, side = result_queue
    side.send([torch.ones(5)], "output")
    ready = queue.dequeue(DEADLINE_S)
    assert (ready.kind.name, ready.async_output_id, ready.error) == ("OUTPUT_READY", "output", None)
    assert torch.equal(ready.output[0], torch.ones(5))
    empty = queue.dequeue(DEADLINE_S)
    assert (empty.kind.name, empty.async_output_id, empty.output) == ("OUTPUT_READY", None, None)
    with pytest.raises(TimeoutError):
        queue.dequeue(0.01)


def test_the_result_queue_reports_the_error_of_one_output_as_that_outputs_own(result_queue):
    queue, side = result_queue
    side.send([torch.ones(5), Explosive()], "bad")
    side.send([torch.ones(5)], "good")
    bad = queue.dequeue(DEADLINE_S)
    assert (bad.async_output_id, bad.output) == ("bad", None)
    assert "no number" in bad.error
    good = queue.dequeue(DEADLINE_S)
    assert (good.async_output_id, good.error) == ("good", None)


def test_on_an_idle_engine_the_lease_returns_although_the_pump_still_waits(result_queue):
    """The pump's loop holds its last message in a local until the next one comes."""
    queue, side = result_queue
    got: list[Any] = []
    stop = threading.Event()

    def pump() -> None:
        while not stop.is_set():
            try:
                message = queue.dequeue(0.2)
            except TimeoutError:
                continue
            if message.async_output_id is not None:
                got.append(message.output)

    thread = threading.Thread(target=pump)
    thread.start()
    try:
        side.send([torch.ones(5)], "output")
        wait_until(lambda: got, "the output")
        assert queue._receiver.leases.outstanding == 1
        got.clear()
        wait_until(lambda: queue._receiver.leases.outstanding == 0, "the lease returns")
    finally:
        stop.set()
        thread.join(DEADLINE_S)


def test_the_result_queue_of_a_dead_packer_times_out_and_does_not_spin(tmp_path):
    pytest.importorskip("vllm_omni")
    from worker_shim.engine.result_queue import PackerResultQueue

    with running_packer(tmp_path / "run") as packer:
        queue = PackerResultQueue(MAC_KEY, Delivered())
        connection = Connection(packer.connect("engine", "session-1"), DEADLINE_S)
        queue.resume(connection)
        packer.process.kill()
        packer.wait()
        before = time.process_time()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                queue.dequeue(0.2)
        assert time.process_time() - before < 0.3
        end(queue, connection)
