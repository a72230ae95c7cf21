"""A worker or an engine dies, or a worker's device does: what was finished is delivered, the rest fails, all is given back."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from packer_process import MIB, Worker, running_packer, session, stopped, transfer, wait_until

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from any_output import content  # noqa: E402
from engine_checks import (  # noqa: E402
    DEADLINE_S,
    References,
    Residue,
    assert_same,
    in_packer_memory,
    named_memory,
    outputs,
    packer_engine,
    packer_pid,
    worker_pid,
)
from engine_harness import engine  # noqa: E402
from engine_load import images, submit, wait_computed  # noqa: E402
from sides import FLOATS, EngineSide, Kept, working  # noqa: E402
from stalling_device import Stalling  # noqa: E402

from worker_shim.engine import executor  # noqa: E402
from worker_shim.worker.in_flight import State  # noqa: E402

# -- a worker ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("event", ["timeline", pytest.param("ipc", marks=pytest.mark.gpu)])
def test_of_a_killed_worker_the_engine_delivers_what_was_finished_before_it_fails(event):
    """The packer still has the copies to do when the worker dies; one request is not even started."""
    residue = Residue()
    with engine("uni", "RequestPipeline") as running:
        expected = References(running)(*images(1, 2, 3))
    with packer_engine(packer={"pool_bytes": 32 * MIB, "event": event}) as running:
        outputs(running, *images(0))
        with stopped(packer_pid(running)):
            finished = submit(running, *images(1, 2, 3))
            wait_computed(running, 3)
            os.kill(worker_pid(running), signal.SIGSTOP)
            unfinished = submit(running, *images(4))
            mapped = Path(f"/proc/{worker_pid(running)}/maps").read_text()
            queues = [name for name in named_memory() if f"/dev/shm/{name}" in mapped]
            os.kill(worker_pid(running), signal.SIGKILL)
        got = [future.result(DEADLINE_S) for future in finished]
        assert_same([result.output for result in got], expected)
        assert all(in_packer_memory(result.output) for result in got)
        (failed,) = (future.result(DEADLINE_S) for future in unfinished)
        assert failed.error is not None
        assert str(failed.error)
    assert_same([result.output for result in got], expected)  # after the engine is closed, too
    del got, finished

    def left() -> dict[str, object]:
        # vllm-omni's own queues have names, and a killed worker does not remove its own
        return {name: what for name, what in residue.found().items() if what and name != "named shared memory"}

    wait_until(lambda: not left(), "nothing of ours is left")
    for name in queues:  # tests in another process would find them left behind
        Path("/dev/shm", name).unlink(missing_ok=True)


def close_all_and_live_on() -> None:
    os.closerange(3, 4096)
    signal.pause()


def test_a_worker_that_has_closed_its_files_counts_as_dead_though_nobody_can_wait_for_it_yet():
    """A killed process that used a GPU is there for a while after its sentinel told its end, on which vllm-omni acts."""
    process = multiprocessing.get_context("fork").Process(target=close_all_and_live_on)
    process.start()
    try:
        wait_until(lambda: executor._has_ended(process), "its sentinel tells")
        assert process.is_alive()
    finally:
        process.kill()
        process.join()
    assert executor._has_ended(process)


def test_a_killed_workers_imports_and_regions_are_given_back_and_other_sessions_do_not_notice(tmp_path):
    with (
        running_packer(tmp_path / "run", pool_max_bytes="4MiB") as packer,
        session(packer) as (other, its_worker),
        contextlib.closing(EngineSide(packer)) as engine_side,
    ):
        transfer(other, its_worker)
        maps = Path(f"/proc/{packer.process.pid}/maps")
        arenas = maps.read_text().count("packer-arena")
        code = (
            "import sys, worker_shim.synthetic.engine as e; e.prepare(); import killed_worker;"
            " killed_worker.export_and_wait(sys.argv[1], bytes.fromhex(sys.argv[2]), sys.argv[3])"
        )
        command = [sys.executable, "-c", code, packer.socket, packer.key.hex(), engine_side.session]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                while (line := process.stdout.readline()) and line != b"sent\n":
                    pass
                assert line == b"sent\n"
                assert maps.read_text().count("packer-arena") > arenas
                transfer(other, its_worker)
            finally:
                process.kill()
        got = {one.output_id: one for one in (engine_side.next(), engine_side.next())}
        assert_same(got["complete"].output, [content(torch.float32, (1000,), 1)])
        assert "the worker died before the output was complete" in got["incomplete"].error
        wait_until(lambda: maps.read_text().count("packer-arena") == arenas, "the imports are closed")
        wait_until(lambda: maps.read_text().count("packer-timeline") == 1, "and its timeline, but not the other's")
        del got
        engine_side.wait_no_lease()
        transfer(other, its_worker)
        with working(engine_side, packer) as successor:  # the whole pool of its session can be had
            successor.send([torch.ones(FLOATS // 2)], "all of it")
            engine_side.output("all of it")


class Breaking(Stalling):
    """A device whose context broke: no signal comes any more, and every call to it fails."""

    broken = False

    def failure(self) -> str:
        return "CUDA_ERROR_ILLEGAL_ADDRESS" if self.broken else ""

    def reached(self, value: int) -> bool:
        return self.timeline.counter >= value

    @contextlib.contextmanager
    def after(self, value: int):
        if self.broken:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        yield


def test_when_a_workers_device_breaks_its_pending_outputs_fail_at_once_and_its_neighbours_go_on(tmp_path):
    device = Breaking()
    with (
        running_packer(tmp_path / "run") as packer,
        contextlib.closing(EngineSide(packer)) as engine_side,
        working(engine_side, packer, device=device) as worker,
        working(engine_side, packer) as neighbour,
        session(packer) as (other, its_worker),
    ):
        worker.send([torch.ones(10)], "complete")
        engine_side.output("complete")
        device.stalled = True
        worker.send([torch.ones(10)], "sent whole")
        half = worker.exporter.stage([torch.ones(10)], "half sent")
        neighbour.send([torch.ones(20)], "a neighbour's")
        assert engine_side.next().output_id == "a neighbour's"
        device.broken = True
        failed = {one.output_id: one.error for one in (engine_side.next(), engine_side.next())}
        assert set(failed) == {"sent whole", "half sent"}
        assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in error for error in failed.values())
        worker.exporter.submit(half)  # too late, and harmless
        worker.wait_settled("complete", "sent whole", "half sent")
        assert worker.arena_idle()
        assert worker.exporter.exchange.pending == {}
        neighbour.send([torch.ones(30)], "another of its")
        engine_side.output("another of its")
        transfer(other, its_worker)


def test_when_device_and_packer_are_both_gone_the_outputs_come_back_to_fail_rather_than_vanish(tmp_path):
    """The packer dies before it has heard of the failure: nobody but the worker can tell the engine."""
    device = Breaking()
    with running_packer(tmp_path / "run") as packer, contextlib.closing(Kept(packer.socket, packer.key)) as engine_side:
        with working(engine_side, device=device, restart_wait_s=1.0) as worker:
            device.stalled = True
            packer.signal(signal.SIGSTOP)
            worker.send([torch.ones(10)], "output")
            device.broken = True
            wait_until(lambda: worker.exporter.exchange.pending["output"].state is State.LOST, "it is failed")
            packer.signal(signal.SIGKILL)
            assert "output" in worker.wait_fallen_back(1)
            (staged, _) = worker.fallen_back[0]
            assert "CUDA_ERROR_ILLEGAL_ADDRESS" in staged.error
            assert worker.settled == []
            worker.exporter.release(staged)
            assert engine_side.got == {}


# -- an engine ---------------------------------------------------------------------------------------------------------

ENGINE = """
import sys, time
from packer_process import Engine
from packer_service.wire import handshake
class P:
    def connect(self, role, session):
        return handshake.connect(sys.argv[1], open(sys.argv[2], "rb").read(), role, session)[0]
engine = Engine(P())
print(engine.session, flush=True)
ready = engine.next()
print("leased", flush=True)
time.sleep(600)
"""


def test_a_killed_engine_gives_its_leases_back_and_the_sidecar_serves_the_next_with_all_of_its_pool(tmp_path):
    with running_packer(tmp_path / "run", pool_bytes="2MiB", pool_max_bytes="8MiB") as packer:
        command = [sys.executable, "-c", ENGINE, packer.socket, str(tmp_path / "run" / "key")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            name = process.stdout.readline().strip()
            with contextlib.closing(Worker(packer, name, arena_bytes=8 * MIB)) as worker:
                worker.export("leased", worker.write(b"x" * 6 * MIB))
                worker.skeleton("leased")
                assert process.stdout.readline() == "leased\n"
                worker.answer()
                assert segment_bytes(packer.process.pid) == 8 * MIB
                process.kill()
                packer.wait_log(f"engine {name} is gone")
        wait_until(lambda: segment_bytes(packer.process.pid) == 0, "its pages go back to the system")
        with session(packer, arena_bytes=8 * MIB) as (engine_side, worker):
            transfer(engine_side, worker, 8 * MIB)


def segment_bytes(pid: int) -> int:
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) .*packer-segment", Path(f"/proc/{pid}/maps").read_text(), re.M)
    return sum(int(end, 16) - int(start, 16) for start, end in found)
