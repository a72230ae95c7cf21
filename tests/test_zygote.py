"""A worker that the zygote forks is what one that multiprocessing spawns is: the same process, sooner."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import zygote

IMPORTED_S = 120.0  # torch, vllm and vllm-omni on a loaded machine
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(bool(zygote.GPUS), reason="beside a GPU every worker is spawned"),
]


def say_at_exit(path: str) -> None:
    Path(path).write_text("ended")


def report(connection: Any, ended: str, modules: tuple[str, ...]) -> None:
    """What a process can tell about itself when it has imported these."""
    module_path = list(sys.path)  # as it was given; what an import adds, the engine's process has and gives already
    for module in modules:
        importlib.import_module(module)
    atexit.register(say_at_exit, ended)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # listdir's own is gone
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
    connection.send(
        {
            "parent": os.getppid(),
            # The terminal's size: where pytest has imported readline, the C library's environment alone has it.
            "environment": {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")},
            "directory": os.getcwd(),
            "arguments": sys.argv,
            "module path": module_path,
            "name": multiprocessing.current_process().name,
            "key": bytes(multiprocessing.current_process().authkey),
            "threads": [thread.name for thread in threading.enumerate()],
            "signals": {each: str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
            "masks": {name: status[name].strip() for name in ("SigBlk", "SigIgn", "SigCgt")},
            "descriptors": sorted(descriptors),
            "memory of packers": Path("/proc/self/maps").read_text().count("/memfd:packer-"),
            "limits": status["Cpus_allowed_list"],
        }
    )
    assert connection.poll(IMPORTED_S)
    sys.exit(7)


@contextlib.contextmanager
def started(ended: Path, modules: tuple[str, ...] = ()) -> Any:
    """A process that has reported: it, and what it said. It waits for the block to end."""
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.Process(target=report, args=(its, str(ended), modules), name="Reporter")
    process.start()
    its.close()
    assert ours.poll(IMPORTED_S)
    try:
        yield process, ours.recv()
    finally:
        ours.close()
        process.join(IMPORTED_S)


def test_it_has_what_a_spawned_one_has_and_ends_like_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACKER_WAIT_S", "7")
    monkeypatch.setattr(sys, "argv", ["a test", "of this"])
    with started(tmp_path / "spawned", zygote.PRELOADED) as (spawned, expected):
        pass
    with zygote.forked_workers(), started(tmp_path / "forked", zygote.PRELOADED) as (forked, found):
        assert forked.is_alive()
        assert zygote.pids()
        assert forked.pid not in zygote.pids()
        assert str(zygote.__file__) in Path(f"/proc/{forked.pid}/cmdline").read_text(), "it was spawned"
    assert found == expected
    assert found["parent"] == os.getpid()
    assert forked.exitcode == spawned.exitcode == 7
    assert (tmp_path / "forked").read_text() == (tmp_path / "spawned").read_text() == "ended"


def test_it_dies_of_a_signal_like_a_spawned_one(tmp_path):
    with zygote.forked_workers(), started(tmp_path / "ended") as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        process.join(IMPORTED_S)
        assert process.exitcode == -signal.SIGKILL


def test_an_environment_in_which_an_import_may_go_another_way_has_a_zygote_of_its_own(tmp_path, monkeypatch):
    def zygote_of_the_next() -> set[int]:
        before = zygote.pids()
        with zygote.forked_workers(), started(tmp_path / "ended") as (_, found):
            assert found["environment"].get("NUMEXPR_MAX_THREADS") == os.environ.get("NUMEXPR_MAX_THREADS")
        return zygote.pids() - before

    monkeypatch.setattr(zygote, "_zygotes", {})
    monkeypatch.setattr(zygote, "PRELOADED", ("json",))
    assert zygote_of_the_next()
    monkeypatch.setenv("PACKER_WAIT_S", "8")
    assert not zygote_of_the_next()
    monkeypatch.setenv("NUMEXPR_MAX_THREADS", "3")
    assert zygote_of_the_next()
    assert not zygote_of_the_next()
    for each in zygote._zygotes.values():
        each.end()


def test_outside_of_it_processes_are_spawned_and_what_is_no_spawned_process_is_never_forked(tmp_path):
    with started(tmp_path / "ended") as (process, _):
        assert "spawn_main" in Path(f"/proc/{process.pid}/cmdline").read_text()
    with zygote.forked_workers():
        shown = subprocess.run(
            [sys.executable, "-c", "import sys; print('torch' in sys.modules)"], capture_output=True, text=True
        )
    assert shown.stdout == "False\n"
