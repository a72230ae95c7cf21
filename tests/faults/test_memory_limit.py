"""A packer under the memory limit of a real cgroup, alone and beside a process that uses most of it.

Beyond its limit the kernel kills a process of the cgroup, and not always the one that asked: in a container that would be
the engine or the worker. So a pool that would go there does not grow.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from packer_process import MIB, Engine, Packer, Worker, running_packer, session, transfer, wait_until

from packer_service.wire.protocol import Ack, Nack

LIMIT = 320 * MIB
NEIGHBOUR = 160 * MIB
EIGHT = {"pool_bytes": "8MiB", "pool_step_bytes": "8MiB"}  # as large as an output here


class Cgroup:
    """A memory cgroup with LIMIT, below the root of a hierarchy. OSError where none can be made."""

    def __init__(self, root: Path, limit: str, own: str) -> None:
        self._root, self._own = root, own
        self._folder = root / f"packer-test-{secrets.token_hex(4)}"
        self._folder.mkdir()
        try:
            with (self._folder / limit).open("r+") as file:  # never made by us: where it is missing this is no cgroup
                file.write(str(LIMIT))
        except OSError:
            self._folder.rmdir()
            raise

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """What this process starts meanwhile is in the cgroup."""
        self._enter(self._folder)
        try:
            yield
        finally:
            self._enter(Path(f"{self._root}{self._own}"))

    @staticmethod
    def _enter(folder: Path) -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def kills(self) -> int:
        """Processes that the kernel killed for it."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                for line in (self._folder / name).read_text().splitlines():
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        raise AssertionError("the kernel does not say")

    def usage(self) -> int:
        for name in ("memory.current", "memory.usage_in_bytes"):
            with contextlib.suppress(FileNotFoundError):
                return int((self._folder / name).read_text())
        raise AssertionError("the kernel does not say")

    def remove(self) -> None:
        wait_until(self._try_remove, "the cgroup is empty")

    def _try_remove(self) -> bool:
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        return not self._folder.exists()


@pytest.fixture
def limited() -> Iterator[Cgroup]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, own = line.split(":", 2)
        try:
            if number == "0":
                made = Cgroup(Path("/sys/fs/cgroup"), "memory.max", own)
            elif "memory" in controllers.split(","):
                made = Cgroup(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", own)
            else:
                continue
        except OSError:
            continue
        try:
            yield made
        finally:
            made.remove()
        return
    pytest.skip("no memory cgroup can be made here: that takes root, and a writable /sys/fs/cgroup")


@contextlib.contextmanager
def neighbour(limited: Cgroup) -> Iterator[subprocess.Popen[str]]:
    """A process of the same cgroup that holds NEIGHBOUR bytes."""
    code = f"held = bytearray({NEIGHBOUR})\nheld[::4096] = b'x' * len(held[::4096])\nprint(flush=True)\ninput()"
    with limited.inside():
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def packer_in(limited: Cgroup, directory: Path, **settings: object) -> Iterator[Packer]:
    with contextlib.ExitStack() as stack:
        with limited.inside():
            packer = stack.enter_context(running_packer(directory, **settings))
        yield packer


def outputs_until_one_comes_back(engine: Engine, worker: Worker, nbytes: int) -> tuple[int, str]:
    """How many outputs were delivered, none of which is released, before one was declined; and why that was."""
    for number in range(100):
        output = f"output {number}"
        worker.export(output, worker.write(bytes(nbytes)))
        worker.skeleton(output)
        answer = worker.answer()
        if isinstance(answer, Nack):
            return number, answer.reason
        assert answer == Ack(output)
        engine.next()
    raise AssertionError("the pool grows without end")


def test_the_default_pool_is_a_quarter_of_the_limit(limited, tmp_path):
    with (
        packer_in(limited, tmp_path / "run", **EIGHT, pool_max_bytes="0", wait_s=0.5) as packer,
        session(packer, arena_bytes=8 * MIB) as (engine, worker),
    ):
        delivered, reason = outputs_until_one_comes_back(engine, worker, 8 * MIB)
    assert delivered == LIMIT // 4 // (8 * MIB)
    assert f"pool_max_bytes = {LIMIT // 4}" in reason


def test_a_pool_larger_than_the_limit_is_refused_at_the_start(limited, tmp_path):
    with limited.inside():
        started = subprocess.run(
            [sys.executable, "-m", "packer_service", "serve", "--device=host", f"--pool-max-bytes={LIMIT + MIB}"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert started.returncode == 1
    assert f"more than the {LIMIT} bytes this process may use" in started.stderr
    assert "raise the memory limit of the cgroup (systemd MemoryMax, container memory limit)" in started.stderr


def test_a_pool_that_would_pass_the_limit_does_not_grow_and_nobody_is_killed(limited, tmp_path):
    with (
        neighbour(limited) as beside,
        packer_in(limited, tmp_path / "run", **EIGHT, pool_max_bytes="256MiB", wait_s=0.5) as packer,
        session(packer, arena_bytes=8 * MIB) as (engine, worker),
    ):
        delivered, reason = outputs_until_one_comes_back(engine, worker, 8 * MIB)
        assert 0 < delivered < 256 // 8
        assert "of the cgroup's memory limit" in reason
        assert "lower pool_bytes and pool_max_bytes, or raise that limit" in reason
        assert beside.poll() is None
        assert psutil.Process(packer.process.pid).is_running()
        assert limited.kills == 0
        # and when there is room again, it grows again
        beside.kill()
        beside.communicate()
        wait_until(lambda: outputs_until_one_comes_back(engine, worker, 8 * MIB)[0], "the pool grows again")
        assert limited.kills == 0


def test_a_packer_whose_first_segment_would_pass_the_limit_says_so_and_ends(limited, tmp_path):
    with neighbour(limited) as beside:
        with limited.inside():
            packer = Packer(tmp_path / "run", pool_bytes="128MiB", pool_max_bytes="256MiB")
        assert packer.wait() == 1
        assert "lower pool_bytes and pool_max_bytes, or raise that limit" in packer.report["error"]
        assert beside.poll() is None
        assert limited.kills == 0


READ_TWICE = """
import os, sys
with open(sys.argv[1], "wb+") as file:
    file.write(bytes(int(sys.argv[2])))
    os.fsync(file)  # what is dirty cannot be dropped
    for _ in range(3):
        file.seek(0)
        while file.read(1 << 20):
            pass
"""


def test_files_that_were_read_again_and_again_take_no_room_from_the_pool(limited, tmp_path):
    """Freshly loaded weights look like that: the kernel calls those pages active, and drops them all the same."""
    file = tmp_path / "weights"
    with limited.inside():
        subprocess.run([sys.executable, "-c", READ_TWICE, file, str(160 * MIB)], check=True)
    used = limited.usage()
    if used < 160 * MIB:
        pytest.skip("this file system's cache does not count for the cgroup")
    with (
        packer_in(limited, tmp_path / "run", pool_bytes="160MiB", pool_max_bytes="160MiB") as packer,
        session(packer, arena_bytes=8 * MIB) as (engine, worker),
    ):
        transfer(engine, worker, 8 * MIB)
        assert limited.kills == 0
        assert limited.usage() < LIMIT


def test_what_is_left_is_the_limit_less_what_is_used(limited):
    code = "from packer_service.pool.cgroup import memory_limit, memory_left; print(memory_limit(), memory_left())"
    with limited.inside():
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    limit, left = map(int, run.stdout.split())
    assert limit == LIMIT
    assert LIMIT - 64 * MIB < left < LIMIT
