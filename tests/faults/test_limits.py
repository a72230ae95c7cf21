"""What is full, refused or missing: the pool, host memory, the arena, the device, descriptors, the socket's directory."""

from __future__ import annotations

import ast
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from packer_process import (
    MIB,
    Engine,
    Packer,
    Worker,
    running_packer,
    session,
    transfer,
    wait_until,
)

from packer_service.errors import DeviceError, PackerError
from packer_service.wire.channel import close_fds
from packer_service.wire.protocol import Ack, Nack

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from any_output import content  # noqa: E402
from engine_checks import (  # noqa: E402
    GPUS,
    Residue,
    assert_same,
    children,
    outputs,
    packer_engine,
    run_directories,
    warnings_logged,
)
from sides import FLOATS, EngineSide, managed, working  # noqa: E402
from vllm_omni.diffusion.data import DiffusionOutput  # noqa: E402
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm, unpack_diffusion_output_shm  # noqa: E402

from worker_shim.worker.device import Chunk  # noqa: E402
from worker_shim.worker.device_host import HostExportDevice  # noqa: E402

STOP_S = 10.0
ROOT = Path(__file__).resolve().parents[2]

# -- a full pool -------------------------------------------------------------------------------------------------------


def test_with_a_leaking_consumer_outputs_take_the_own_path_and_come_back_when_leases_return(tmp_path):
    """The worker's main thread stages meanwhile without waiting: a wait for the pool would be wait_s long."""
    with (
        running_packer(tmp_path / "run", pool_max_bytes="2MiB", wait_s=0.5) as packer,
        contextlib.closing(EngineSide(packer)) as engine,
        working(engine, packer) as worker,
    ):
        worker.send([torch.ones(FLOATS * 2)], "leaks")
        leaked = engine.output("leaks")
        expected = {f"full {n}": [content(torch.float32, (FLOATS // 4,), n)] for n in range(3)}
        longest = 0.0
        for name, output in expected.items():
            begin = time.monotonic()
            staged = worker.exporter.stage(output, name)
            longest = max(longest, time.monotonic() - begin)
            worker.exporter.submit(staged)
        assert longest < 0.4
        reasons = worker.wait_fallen_back(3)
        assert all(
            "in 1 regions (1 of them leases), the oldest for" in reason and "pool_max_bytes" in reason
            for reason in reasons.values()
        )
        for staged, _ in worker.fallen_back:
            assert_same(worker.exporter.rebuild(staged), expected[staged.output_id])
            worker.exporter.release(staged)
        worker.fallen_back.clear()
        packer.wait_log("output full 0 of worker .* is declined")
        del leaked
        engine.wait_no_lease()
        worker.send([torch.ones(FLOATS * 2)], "after")
        engine.output("after")
        assert worker.fallen_back == []


def test_what_falls_back_passes_vllm_omnis_own_path_unchanged(tmp_path):
    """It looks at storages: a scalar, an empty and a small tensor must not be small views of a large one."""
    expected = {
        "image": content(torch.float32, (FLOATS,)),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "small": content(torch.bfloat16, (3, 5)),
    }
    with (
        running_packer(tmp_path / "run", pool_max_bytes="2MiB", wait_s=0.0) as packer,
        contextlib.closing(EngineSide(packer)) as engine,
        working(engine, packer) as worker,
    ):
        worker.send([torch.ones(FLOATS * 2)], "leaks")
        leaked = engine.output("leaks")
        worker.send(expected, "output")
        worker.wait_fallen_back(1)
        (staged, _) = worker.fallen_back[0]
        packed = pack_diffusion_output_shm(DiffusionOutput(output=worker.exporter.rebuild(staged)))
        assert_same(unpack_diffusion_output_shm(packed).output, expected)
        worker.exporter.release(staged)
        del leaked


# -- host memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["memfd", "mmap", "register"])
def test_a_pool_that_cannot_grow_stays_at_what_it_has_says_why_and_keeps_nothing_half_made(tmp_path, faults, fault):
    with (
        running_packer(tmp_path / "run", wait_s=0.2) as packer,
        session(packer, arena_bytes=8 * MIB) as (engine, worker),
    ):
        transfer(engine, worker)
        process = Path(f"/proc/{packer.process.pid}")
        segments, descriptors = (process / "maps").read_text().count("packer-segment"), len(os.listdir(process / "fd"))
        with faults.active(fault):
            worker.export("large", worker.write(b"x" * (4 * MIB)))
            worker.skeleton("large")
            answer = worker.answer()
            assert isinstance(answer, Nack)
            assert "unable to grow" in answer.reason
            packer.wait_log("the pool stays at 2 MiB: unable to grow .*pool_max_bytes and the memory limit")
            transfer(engine, worker, MIB)  # what there is still serves
            assert (process / "maps").read_text().count("packer-segment") == segments
            assert len(os.listdir(process / "fd")) == descriptors


def test_a_pool_that_gets_no_threads_to_touch_its_pages_with_touches_them_with_one(tmp_path, faults):
    faults.set("threads")
    with running_packer(tmp_path / "run", pool_bytes="64MiB", pool_max_bytes="64MiB") as packer:
        with session(packer, arena_bytes=64 * MIB) as (engine, worker):
            transfer(engine, worker, 48 * MIB)


def test_under_an_address_space_limit_the_pool_stays_at_what_it_has(tmp_path):
    with running_packer(tmp_path / "run", pool_max_bytes="1GiB", wait_s=0.2) as packer:
        with session(packer, arena_bytes=64 * MIB) as (engine, worker):
            transfer(engine, worker)
            now = int(Path(f"/proc/{packer.process.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(packer.process.pid, resource.RLIMIT_AS, (now + 16 * MIB, now + 16 * MIB))
            worker.export("large", worker.write(b"x" * (48 * MIB)))
            worker.skeleton("large")
            assert isinstance(worker.answer(), Nack)
            packer.wait_log("the pool stays at 2 MiB")
            transfer(engine, worker, MIB)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("memfd", "injected"), ("register", "CUDA_ERROR_OUT_OF_MEMORY"), ("context", "CUDA_ERROR_DEVICE_UNAVAILABLE")],
)
def test_a_packer_that_cannot_get_its_memory_or_its_device_says_so_and_exits(tmp_path, faults, fault, reason):
    faults.set(fault)
    packer = Packer(tmp_path / "run")
    assert packer.wait() == 1
    assert reason in packer.report["error"]
    assert "Traceback" not in packer.log
    assert not os.path.exists(packer.socket)


# -- device memory, and a device that cannot be had --------------------------------------------------------------------


class Exhausted(HostExportDevice):
    """A device whose memory runs out after a number of chunks."""

    chunks = 1

    def allocate(self, nbytes: int) -> Chunk:
        if not self.chunks:
            raise DeviceError("CUDA_ERROR_OUT_OF_MEMORY")
        self.chunks -= 1
        return super().allocate(nbytes)


def test_an_arena_that_cannot_grow_lets_outputs_wait_beside_it_and_says_so(tmp_path):
    with (
        running_packer(tmp_path / "run") as packer,
        contextlib.closing(EngineSide(packer)) as engine,
        working(engine, packer, device=Exhausted(), wait_s=10.0) as worker,
    ):
        with warnings_logged() as log:
            outs = [torch.full((FLOATS * 3 // 2,), float(n)) for n in range(3)]
            staged = [worker.exporter.stage([output], str(n)) for n, output in enumerate(outs)]
            assert staged[-1] is not None
            for one in staged:
                worker.exporter.submit(one)
            for n, output in enumerate(outs):
                assert_same(engine.output(str(n)), [output])
        assert any("the arena stays at 2 MiB: CUDA_ERROR_OUT_OF_MEMORY" in line for line in log)


def test_an_arena_that_cannot_be_had_at_all_is_a_reason_to_fall_back(tmp_path):
    device = Exhausted()
    device.chunks = 0
    with running_packer(tmp_path / "run") as packer, contextlib.closing(EngineSide(packer)) as engine:
        with pytest.raises(PackerError, match="the arena cannot be allocated"):
            with working(engine, packer, device=device):
                pass


@pytest.mark.skipif(bool(GPUS), reason="the fault is the host device's")
def test_an_engine_whose_packer_gets_no_device_serves_all_the_same_with_one_warning(faults):
    residue = Residue()
    faults.set("context")
    with warnings_logged() as log, packer_engine() as running:
        assert running.executor.packer_pids == []
        (output,) = outputs(running, {"seed": 1})
        assert output.shape[-2:] == (64, 96)
        (warning,) = log
        assert "CUDA_ERROR_DEVICE_UNAVAILABLE" in warning
        assert "vllm-omni's own output path" in warning
    residue.assert_none()


# -- descriptors, directories, numbers ---------------------------------------------------------------------------------


def test_at_its_descriptor_limit_a_packer_turns_peers_away_and_serves_those_it_has(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        transfer(engine, worker)
        before = resource.prlimit(packer.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(packer.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # what is open stays open
        with pytest.raises(PackerError):
            packer.connect("engine", "one too many", timeout_s=1.0)
        packer.wait_log("cannot accept a connection: .*Too many open files")
        transfer(engine, worker)
        assert packer.log.count("cannot accept a connection") == 1
        resource.prlimit(packer.process.pid, resource.RLIMIT_NOFILE, before)
        with session(packer) as (another, its_worker):
            transfer(another, its_worker)


def test_in_a_process_with_more_than_1023_open_files_a_packer_is_started_and_started_again(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    open_files = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while open_files[-1] < 1024:
            open_files.append(os.dup(open_files[0]))
        with managed() as kept, working(kept) as worker:
            for number in range(2):
                worker.send([torch.ones(FLOATS), np.ones(FLOATS)], f"output-{number}")
                kept.wait(f"output-{number}")
                worker.wait_settled(f"output-{number}")
                if not number:
                    os.kill(kept.packer_pid, signal.SIGKILL)
    finally:
        close_fds(open_files)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("what", ["socket", "directory"])
def test_a_socket_that_somebody_removes_is_there_again_and_who_is_connected_notices_nothing(tmp_path, what):
    run = tmp_path / "run" / "sub"
    (tmp_path / "run").mkdir(mode=0o700)
    with running_packer(tmp_path / "run", socket=run / "packer.sock") as packer, session(packer) as (engine, worker):
        if what == "socket":
            os.unlink(packer.socket)
        else:
            shutil.rmtree(run)
        wait_until(lambda: os.path.exists(packer.socket), "it listens again")
        transfer(engine, worker)
        with session(packer) as (another, its_worker):
            transfer(another, its_worker)
        packer.wait_log("was removed; listening there again")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory away")
def test_a_socket_directory_of_somebody_else_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    key = tmp_path / "key"
    key.mkdir(mode=0o700)
    os.chown(other, 65534, 65534)
    # root may use anybody's directory; the packer must not
    packer = Packer(key, socket=other / "packer.sock")
    assert packer.wait() == 1
    assert "must be ours" in packer.report["error"]


def test_no_decision_depends_on_the_wall_clock_which_may_jump():
    """Nothing of the packer or the shim asks what time it is; monotonic clocks do not jump."""
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
    found = []
    shown_to_people = {"packer_service/server.py", "packer_service/overview.py"}
    for package in ("packer_service", "worker_shim"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
                    owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
                    if (owner, node.attr) in wall and str(path.relative_to(ROOT)) not in shown_to_people:
                        found.append(f"{path}:{node.lineno}")
    assert found == []


UNGUARDED = """
import multiprocessing, sys
from worker_shim.synthetic.engine import engine, prepare
from pathlib import Path
prepare(Path({tests!r}))
with engine("worker_shim.PackerDiffusionExecutor", "pipelines.RequestPipeline") as running:
    pass
"""


def test_a_main_module_without_a_guard_fails_and_leaves_no_packer_behind(tmp_path):
    """Each spawned worker runs the module again, and so starts an engine, and a packer, of its own."""
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED.format(tests=str(ROOT / "tests")))
    before, environ = children(), {**os.environ, "TMPDIR": str(tmp_path)}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, str(script)], env=environ, stdout=log, stderr=log)
        try:
            assert process.wait(120) != 0
        finally:
            process.kill()
    wait_until(lambda: children() <= before, "its processes end")
    wait_until(lambda: not list(tmp_path.glob("packer-*")), "its packers' directories go")
    assert run_directories(process.pid) == []


# -- SIGTERM in every state --------------------------------------------------------------------------------------------


def stop(packer: Packer) -> None:
    begin = time.monotonic()
    packer.signal(signal.SIGTERM)
    assert packer.wait() == 0
    assert time.monotonic() - begin < STOP_S
    assert not os.path.exists(packer.socket)
    assert "Traceback" not in packer.log, packer.log


def test_sigterm_ends_an_idle_packer(tmp_path):
    with running_packer(tmp_path / "run") as packer:
        stop(packer)


def test_sigterm_ends_a_packer_that_copies(tmp_path, faults):
    with running_packer(tmp_path / "run") as packer, session(packer) as (_, worker), faults.active("copy"):
        worker.export("copying", worker.write(b"x" * 1000))
        worker.skeleton("copying")
        faults.wait_reached("copy")
        stop(packer)


def test_sigterm_ends_a_packer_that_waits_for_a_forward(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (_, worker):
        worker.export("waiting", worker.write(b"x" * 1000), complete=False)
        worker.skeleton("waiting")
        stop(packer)


def test_sigterm_ends_a_packer_with_one_worker_that_waits_for_a_forward_and_others_that_do_not(tmp_path):
    with (
        running_packer(tmp_path / "run") as packer,
        session(packer) as (engine, worker),
        session(packer) as (other, its),
    ):
        transfer(engine, worker)
        transfer(other, its)
        worker.export("waiting", worker.write(b"x" * 1000), complete=False)
        worker.skeleton("waiting")
        begin = time.monotonic()
        stop(packer)
        assert time.monotonic() - begin < 4


def test_sigterm_ends_a_packer_whose_pool_is_full(tmp_path):
    with (
        running_packer(tmp_path / "run", pool_max_bytes="2MiB", wait_s=60) as packer,
        session(packer) as (engine, worker),
    ):
        worker.export("fills", worker.write(b"x" * 2 * MIB))
        worker.skeleton("fills")
        engine.next()
        assert worker.answer() == Ack("fills")
        worker.export("waits", worker.write(b"x" * 1000))
        worker.skeleton("waits")
        worker.export("text")  # which the reader takes after the other
        worker.skeleton("text")
        assert engine.next().output == "text"
        stop(packer)


def test_sigterm_ends_a_packer_between_a_dead_worker_and_a_living_engine(tmp_path):
    with running_packer(tmp_path / "run") as packer, contextlib.closing(Engine(packer)) as engine:
        worker = Worker(packer, engine.session)
        transfer(engine, worker)
        worker.close()
        packer.wait_log("worker .* is gone")
        stop(packer)


def test_two_engines_on_one_sidecar_do_not_see_each_others_end(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (one, its_worker):
        with session(packer) as (other, others_worker):
            transfer(one, its_worker)
            transfer(other, others_worker)
        packer.wait_log(f"engine {other.session} is gone")
        transfer(one, its_worker)
