"""A call to the device that does not return: the packer ends itself, whatever else of it is stuck, for whoever started it."""

from __future__ import annotations

import contextlib

import pytest
from packer_process import MIB, Worker, running_packer, session, transfer, wait_until

from packer_service.memory.memfd import SharedMemory
from packer_service.wire.protocol import MapChunk, UnmapChunk

EXIT_HUNG = 70


def send(worker: Worker, output: str) -> None:
    worker.export(output, worker.write(b"x" * 1000))
    worker.skeleton(output)


def import_another(worker: Worker) -> None:
    with contextlib.closing(SharedMemory.create("another", MIB)) as another:
        worker.channel.send(MapChunk(7, MIB), another.fd)


def give_one_back(worker: Worker) -> None:
    import_another(worker)
    worker.channel.send(UnmapChunk(7))


def want_room(worker: Worker) -> None:
    for number in range(2):
        worker.export(f"large-{number}", worker.write(bytes(MIB + MIB // 2)))


STUCK = {
    "copy": (lambda worker: send(worker, "output"), "the copy of output output of worker"),
    "submission": (lambda worker: send(worker, "output"), "the submission of output output of worker"),
    "import": (import_another, "the import of chunk 7 of worker"),
    "close": (give_one_back, "memory that is given back"),
    "registration": (want_room, "the registration of"),
}


@pytest.mark.parametrize("point", STUCK)
def test_a_call_to_the_device_that_does_not_return_ends_the_packer_which_says_which(tmp_path, faults, point):
    call, what = STUCK[point]
    with running_packer(tmp_path / "run", hang_s=1) as packer, session(packer) as (engine, worker):
        transfer(engine, worker)
        with faults.active(point):
            call(worker)
            faults.wait_reached(point)
            assert packer.wait() == EXIT_HUNG
        assert what in packer.log
        assert "does not end (setting hang_s = 1)" in packer.log


def test_a_stuck_copy_ends_a_packer_that_is_to_close_a_chunk_and_to_copy_more(tmp_path, faults):
    with running_packer(tmp_path / "run", hang_s=1) as packer, session(packer) as (engine, worker):
        transfer(engine, worker)
        with faults.active("copy"), faults.active("close"):
            send(worker, "stuck")
            faults.wait_reached("copy")
            give_one_back(worker)
            faults.wait_reached("close")
            send(worker, "one more")
            assert packer.wait() == EXIT_HUNG


def test_a_watchdog_that_once_could_not_look_goes_on(tmp_path, faults):
    with running_packer(tmp_path / "run", hang_s=1) as packer, session(packer) as (engine, worker):
        with faults.active("look"):
            packer.wait_log("the watchdog could not look: RuntimeError")
        transfer(engine, worker)
        with faults.active("copy"):
            send(worker, "stuck")
            assert packer.wait() == EXIT_HUNG


def test_a_wait_for_the_pool_is_no_call_to_the_device(tmp_path):
    with (
        running_packer(tmp_path / "run", hang_s=1, pool_max_bytes="2MiB") as packer,
        session(packer) as (engine, worker),
    ):
        worker.export("all of it", worker.write(b"x" * 2 * MIB))
        worker.export("waits", worker.write(b"x"), complete=False)
        wait_until(lambda: engine.describe("waits").startswith("waiting for room"), "it waits")
        with pytest.raises(AssertionError):
            wait_until(lambda: packer.process.poll() is not None, "the watchdog ends it", timeout_s=2.5)
