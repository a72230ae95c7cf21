"""A worker dies while the packer waits for its device, which may write the counter for a while longer.

benchmarks/dead_worker.py has what a GPU does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from packer_process import MIB, Engine, Packer, Worker, running_packer, session, transfer, wait_until

from packer_service.wire.protocol import ChunkUnmapped, Export, MapChunk, MapTimeline, Piece, UnmapChunk, Withdraw


@pytest.fixture(scope="module")
def packer(tmp_path_factory, module_faults) -> Iterator[Packer]:
    with running_packer(tmp_path_factory.mktemp("packer") / "run", pool_max_bytes="2MiB") as packer:
        yield packer
        assert "Traceback" not in packer.log, packer.log


def export_one_in_mid_copy_and_another(worker: Worker, faults) -> None:
    worker.export("complete", worker.write(b"complete"))
    worker.skeleton("complete")
    faults.wait_reached("copy")
    worker.export("incomplete", worker.write(b"x", 4096), complete=False)
    worker.skeleton("incomplete")


def assert_all_is_given_back(packer: Packer, engine: Engine) -> None:
    with contextlib.closing(Worker(packer, engine.session)) as successor:
        transfer(engine, successor, 2 * MIB)  # the whole pool
        successor.channel.send(UnmapChunk(0))
        assert successor.answer() == ChunkUnmapped(0)


def test_a_counter_that_a_dead_workers_device_lowers_again_holds_up_nothing(packer, module_faults):
    with session(packer) as (engine, worker):
        with module_faults.active("copy"):
            export_one_in_mid_copy_and_another(worker, module_faults)
            worker.timeline.let_go()  # as if it died
            worker.channel.close()
            wait_until(lambda: worker.timeline.counter == 2, "the counter is forced")
            worker.reach(1)  # what its device still writes
        ready = engine.next()
        assert engine.read(ready) == [b"complete"]
        assert "the worker died before the output was complete" in engine.next().error
        wait_until(lambda: engine.poll() or engine.workers_gone, "the session ends")
        engine.release(ready.leases[0].lease)
        assert_all_is_given_back(packer, engine)


def test_a_counter_that_a_broken_device_lowers_again_holds_up_nothing(packer, module_faults):
    with session(packer) as (engine, worker):
        with module_faults.active("copy"):
            export_one_in_mid_copy_and_another(worker, module_faults)
            worker.channel.send(Withdraw("incomplete", "device-side assert", incomplete=True))
            wait_until(lambda: worker.timeline.counter == 2, "the counter is forced")
            worker.reach(1)
        ready = engine.next()
        assert engine.read(ready) == [b"complete"]
        assert engine.next().error == "device-side assert"
        engine.release(ready.leases[0].lease)
        worker.channel.close()
        assert_all_is_given_back(packer, engine)


def test_a_counter_forced_for_an_earlier_connection_of_a_dead_worker_completes_no_output_of_its_last(packer):
    """Both wait for one value of one page; the packer learns of the death from the first."""
    with session(packer) as (engine, worker):
        value = worker.export("earlier", worker.write(b"unfinished"), complete=False)
        wait_until(lambda: engine.describe("earlier").startswith("waiting"), "it is exported")
        worker.channel.close()
        worker.timeline.generation += 1
        worker.channel = packer.connect("worker", engine.session)
        worker.channel.send(MapTimeline(worker.timeline.generation), worker.timeline.fd)
        worker.channel.send(MapChunk(0, worker.arena.nbytes), worker.arena.fd)
        worker.channel.send(Export("output", value, (Piece(0, 0, 10),)))
        worker.skeleton("output")
        wait_until(lambda: engine.describe("output") == "waiting for the worker's forward", "it is exported again")
        worker.timeline.let_go()
        wait_until(lambda: worker.timeline.counter == value, "the counter is forced")
        wait_until(lambda: engine.describe("output").startswith("not here"), "the copy has passed")
        worker.channel.close()
        assert "the worker died before the output was complete" in engine.next().error
        assert_all_is_given_back(packer, engine)


def test_an_event_that_a_broken_device_never_completes_holds_up_nothing(packer, module_faults):
    with session(packer) as (engine, worker):
        with module_faults.active("event"):
            worker.channel.send(Export("output", 1, (worker.write(b"content"),), event=b"e" * 64))
            worker.skeleton("output")
            worker.channel.send(Withdraw("output", "device-side assert", incomplete=True))
            assert engine.next().error == "device-side assert"
        worker.channel.close()
        assert_all_is_given_back(packer, engine)


@pytest.mark.parametrize("complete", [True, False])
def test_an_event_of_a_dead_worker_that_never_completes_holds_up_nothing(packer, module_faults, complete):
    with session(packer) as (engine, worker), module_faults.active("event"):
        piece = worker.write(b"content")
        worker.channel.send(Export("output", 1, (piece,), event=b"e" * 64))
        worker.skeleton("output")
        waiting = "waiting for the worker's forward"
        wait_until(lambda: engine.describe("output") == waiting, "the packer waits for the event")
        if complete:
            worker.reach(1)  # the event would be next
        worker.timeline.let_go()
        worker.channel.close()
        ready = engine.next()
        if complete:
            assert engine.read(ready) == [b"content"]
            engine.release(ready.leases[0].lease)
        else:
            assert "the worker died before the output was complete" in ready.error
        assert_all_is_given_back(packer, engine)
