"""What the packer process is free of, what it leaves behind, and whose socket it takes: the process as its host sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_checks import mapped_elsewhere
from packer_process import MIB, Packer, running_packer, session, transfer, wait_until

from packer_service.config import Settings
from packer_service.descriptors import raise_descriptor_limit
from packer_service.memory.memfd import SharedMemory
from worker_shim.engine.supervisor import Supervisor

HEAVY = ("torch", "vllm", "vllm_omni", "numpy", "transformers", "pandas", "worker_shim", "multiprocess")


def modules_after(code: str) -> set[str]:
    """The modules of a fresh Python after ``code``."""
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return set(shown.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["packer_service.server", "packer_service.cli", "packer_service.sessions.worker", "packer_service.devices.cuda"],
)
def test_the_packers_modules_import_no_framework(module):
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert {name for name in loaded if name.partition(".")[0] in HEAVY} == set()


@pytest.mark.parametrize("module", ["packer_service.server", "packer_service.devices.host"])
def test_what_serves_has_not_even_loaded_pickle(module):
    assert not {"pickle", "_pickle", "multiprocessing", "dill"} & modules_after(f"import {module}")


def test_nothing_of_the_packer_names_pickle_or_the_worker_side():
    package = Path(sys.modules["packer_service"].__file__).parent
    for path in package.rglob("*.py"):
        lines = [line for line in path.read_text().splitlines() if line.lstrip().startswith(("import ", "from "))]
        found = [line for line in lines if any(word in line for word in ("pickle", "worker_shim", "torch", "vllm"))]
        assert found == [], path


@pytest.mark.parametrize("library", ["torch", "vllm_omni", "numpy"])
def test_a_packer_that_has_served_maps_no_library_of_a_framework(tmp_path, library):
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        transfer(engine, worker, MIB)
        assert f"/{library}/" not in Path(f"/proc/{packer.process.pid}/maps").read_text()


def test_a_managed_packer_does_not_inherit_what_the_engine_preloads_for_its_workers(tmp_path, monkeypatch):
    library = next(Path(torch.__file__).parent.glob("lib*/libgomp*.so*"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    supervisor = Supervisor(Settings())
    try:
        packer = supervisor.start("host")
        assert library.name not in Path(f"/proc/{packer.process.pid}/maps").read_text()
    finally:
        supervisor.stop()


def test_no_shared_memory_has_a_name_but_the_status_board_and_every_other_mapping_is_a_memfd(tmp_path):
    before = set(os.listdir("/dev/shm"))

    def added() -> set[str]:
        names = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sm_packer-")}
        return names and names - mapped_elsewhere(names)  # other tests run beside this one

    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        transfer(engine, worker, MIB)
        wait_until(lambda: not added(), "nothing has a name")
        maps = Path(f"/proc/{packer.process.pid}/maps").read_text().splitlines()
        shared = [line for line in maps if line.split()[1] == "rw-s"]
        assert shared
        board = f"/dev/shm/sm_packer-{packer.process.pid}-"
        assert [line for line in shared if board in line]
        assert all("/memfd:" in line or board in line for line in shared)
    wait_until(lambda: not added(), "nothing has a name")


def test_a_packer_that_was_killed_leaves_no_memory_behind(tmp_path):
    before = segments()  # of a packer that an earlier test had in this process
    with running_packer(tmp_path / "run", pool_bytes="16MiB") as packer, session(packer) as (engine, worker):
        transfer(engine, worker, MIB)
        assert segments() > before
        packer.process.kill()
        packer.wait()
        engine.close()
    assert segments() == before


def segments() -> int:
    """Mappings and descriptors that this process has of segments."""
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "packer-segment" in line]
    return len(mapped) + len([name for name in open_files() if "packer-segment" in name])


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def test_the_standard_output_stays_empty_and_the_ready_pipe_says_who_is_there(tmp_path):
    with running_packer(tmp_path / "run") as packer:
        assert packer.report == {"pid": packer.process.pid, "device_uuid": "host"}


def test_the_packers_descriptors_are_not_inherited_by_a_child_and_none_is_anybodys_file(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        transfer(engine, worker)
        directory = Path(f"/proc/{packer.process.pid}/fdinfo")
        for info in directory.iterdir():
            flags = next(line for line in info.read_text().splitlines() if line.startswith("flags:"))
            close_on_exec = int(flags.split()[1], 8) & os.O_CLOEXEC
            assert int(info.name) <= 2 or close_on_exec, os.readlink(directory.parent / "fd" / info.name)


def test_a_packer_started_with_its_standard_descriptors_closed_opens_them_first(tmp_path, monkeypatch):
    """Else the next memfd is its standard error, and whoever complains there writes into an output."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" <&- >&- 2>&-\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        fds = Path(f"/proc/{packer.process.pid}/fd")
        assert [os.readlink(fds / str(number)) for number in range(3)] == ["/dev/null"] * 3
        transfer(engine, worker)


def test_a_limit_of_open_files_that_cannot_be_raised_stops_no_start(monkeypatch, caplog):
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    with monkeypatch.context() as patch:
        patch.setattr("resource.setrlimit", refuse)
        raise_descriptor_limit()
    assert "LimitNOFILE or ulimit -n" in caplog.text


# -- the socket --------------------------------------------------------------------------------------------------------


def test_the_socket_and_its_directory_are_closed_to_others(tmp_path):
    run = tmp_path / "new" / "run"
    key = tmp_path / "k"
    key.mkdir(mode=0o700)
    with running_packer(key, socket=run / "packer.sock"):
        assert stat.S_IMODE(run.stat().st_mode) == 0o700
        assert stat.S_IMODE((run / "packer.sock").stat().st_mode) & stat.S_IRWXO == 0


def test_a_socket_left_by_a_killed_packer_is_replaced(tmp_path):
    with running_packer(tmp_path / "run") as packer:
        packer.process.kill()
        packer.wait()
        assert os.path.exists(packer.socket)
    with running_packer(tmp_path / "run") as successor, session(successor) as (engine, worker):
        assert "a stale socket is replaced" in successor.log
        transfer(engine, worker)


def failed(packer: Packer) -> str:
    """Why a packer did not start: the same sentence in its report and on standard error."""
    try:
        assert packer.wait() == 1
        assert packer.log.strip().endswith(f"packer-service serve: {packer.report['error']}")
        assert "Traceback" not in packer.log
        return packer.report["error"]
    finally:
        packer.close()


def test_a_second_packer_at_the_same_socket_refuses_and_the_first_serves_on(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        second = Packer(tmp_path / "run")
        assert "another packer listens at" in failed(second)
        assert "pool grew" in packer.log
        assert "pool grew" not in second.log, "it took the memory of a packer before it found that it may not be one"
        transfer(engine, worker)
        with session(packer) as (another, its_worker):
            transfer(another, its_worker)


def test_a_stopped_packers_socket_is_not_taken_for_a_stale_one(tmp_path):
    with running_packer(tmp_path / "run") as packer:
        packer.signal(signal.SIGSTOP)
        assert "another packer listens at" in failed(Packer(tmp_path / "run"))
        packer.signal(signal.SIGCONT)


def test_a_socket_of_another_kind_is_not_taken_for_a_stale_one(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.bind(str(tmp_path / "run" / "packer.sock"))
        stream.listen()
        assert "packer.sock', which somebody else uses" in failed(Packer(tmp_path / "run"))
        assert (tmp_path / "run" / "packer.sock").exists()


def test_a_file_where_the_socket_should_be_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "packer.sock").write_text("precious")
    assert "is there and is no socket" in failed(Packer(tmp_path / "run"))
    assert (tmp_path / "run" / "packer.sock").read_text() == "precious"


def test_a_directory_that_everybody_may_write_to_is_refused(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "not writable by everybody" in failed(Packer(tmp_path / "run", socket=shared / "packer.sock"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"socket": "/tmp/" + "x" * 120}, "allowed is a path of at most 107 bytes"),
        ({"socket": ""}, "socket is not set"),
        ({"socket": "/nowhere/0.sock,/nowhere/1.sock"}, "start one packer for each GPU"),
        ({"socket": "/proc/nowhere/packer.sock"}, "cannot be made"),
        ({"device": "tpu"}, "device is 'tpu'; allowed are 'host', 'cuda', 'cuda:N' and 'cuda:UUID'"),
        ({"device": "cuda:99"}, ""),
        ({"key_file": "/nowhere"}, "key_file is '/nowhere', which cannot be read"),
        ({"pool_bytes": "much"}, "pool_bytes is 'much'; allowed is a size"),
        ({"pool_max_bytes": "1000000GiB"}, "more than the"),
        ({"allowed_uids": "nobody"}, "allowed_uids is 'nobody'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_packer_that_cannot_start_says_why_in_one_sentence(tmp_path, settings, reason):
    assert reason in failed(Packer(tmp_path / "run", **settings))


def test_the_segments_a_peer_receives_cannot_be_resized_by_it(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        transfer(engine, worker)
        segment = next(iter(engine.segments.values()))
        assert isinstance(segment, SharedMemory)
        fds = Path(f"/proc/{packer.process.pid}/fd")
        path = next(fd for fd in fds.iterdir() if "packer-segment" in os.readlink(fd))
        with open(path, "r+b") as file, pytest.raises(PermissionError):
            file.truncate(0)
        transfer(engine, worker)
