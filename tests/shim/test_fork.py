"""What a forked child inherits of the engine's side: its own copy of every output, and nothing that keeps a packer alive."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from packer_process import DEADLINE_S, MIB, running_packer, wait_until

torch = pytest.importorskip("torch")

from sides import FLOATS, EngineSide, WorkerSide, working  # noqa: E402

from packer_service.config import Settings  # noqa: E402
from worker_shim.engine import fork  # noqa: E402
from worker_shim.engine.supervisor import Supervisor  # noqa: E402

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
OUTPUT_MIB = 3


@pytest.fixture(scope="module")
def packer(tmp_path_factory):
    with running_packer(
        tmp_path_factory.mktemp("packer") / "run", pool_bytes="8MiB", pool_max_bytes="8MiB", wait_s="20"
    ) as packer:
        yield packer
        assert packer.process.poll() is None


@pytest.fixture
def sides(packer) -> Iterator[tuple[EngineSide, WorkerSide]]:
    with contextlib.closing(EngineSide(packer)) as engine, working(engine, packer) as worker:
        yield engine, worker


def delivered(engine: EngineSide, worker: WorkerSide, name: str, value: float) -> dict[str, Any]:
    """An output of OUTPUT_MIB through the packer, with a host array of as much, both full of ``value``."""
    size = OUTPUT_MIB * FLOATS
    worker.send({"video": torch.full((size,), value), "audio": np.full(size, value, np.float32)}, name)
    return engine.output(name)


class Child:
    """A forked child that answers questions: each is a function of what it inherited, and its answer is pickled."""

    def __init__(self) -> None:
        self._ask_read, self._ask_write = os.pipe()
        self._answer_read, self._answer_write = os.pipe()
        self._questions: list[Callable[[], Any]] = []

    def fork(self, *questions: Callable[[], Any]) -> Child:
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._ask_write)
                torch.set_num_threads(1)  # the threads of a pool are not inherited, and it waits for them
                with os.fdopen(self._answer_write, "wb") as answers, os.fdopen(self._ask_read, "rb") as asked:
                    while number := asked.read(1):
                        pickle.dump(questions[number[0]](), answers)
                        answers.flush()
                status = 0
            finally:
                os._exit(status)
        os.close(self._ask_read)
        os.close(self._answer_write)
        self._answers = os.fdopen(self._answer_read, "rb")
        return self

    def ask(self, number: int = 0) -> Any:
        os.write(self._ask_write, bytes([number]))
        return pickle.load(self._answers)

    def end(self) -> None:
        os.close(self._ask_write)
        self._answers.close()
        assert os.waitpid(self.pid, 0)[1] == 0


@contextlib.contextmanager
def forked(*questions: Callable[[], Any]) -> Iterator[Child]:
    child = Child().fork(*questions)
    try:
        yield child
    finally:
        child.end()


def values(output: dict[str, Any]) -> dict[str, set[float]]:
    return {name: set(np.unique(np.asarray(array)).tolist()) for name, array in output.items()}


def both(value: float) -> dict[str, set[float]]:
    return {"video": {value}, "audio": {value}}


def overwrite(engine: EngineSide, worker: WorkerSide, label: str, count: int = 10) -> None:
    """``count`` more outputs, each dropped at once: more than the pool holds."""
    for number in range(count):
        output = delivered(engine, worker, f"{label}-{number}", 100.0 + number)
        assert values(output) == both(100.0 + number)
        del output


def test_a_forked_child_keeps_the_bytes_of_an_output_that_its_parent_drops(sides):
    engine, worker = sides
    output = delivered(engine, worker, "kept", 1.0)
    inherited = [output]
    with forked(lambda: values(inherited[0])) as child:
        del output
        inherited.clear()
        overwrite(engine, worker, "after")
        assert child.ask() == both(1.0)
    engine.wait_no_lease()


def test_neither_parent_nor_child_sees_what_the_other_writes(sides):
    engine, worker = sides
    output = delivered(engine, worker, "written", 5.0)

    def clamp() -> dict[str, set[float]]:
        output["video"].clamp_(0, 1)
        output["audio"].clip(0, 1, out=output["audio"])
        return values(output)

    with forked(lambda: values(output), clamp) as child:
        output["video"].fill_(7.0)
        output["audio"][:] = 7.0
        assert child.ask(0) == both(5.0)
        assert child.ask(1) == both(1.0)
        assert values(output) == both(7.0)
        assert child.ask(0) == both(1.0)


def test_what_a_parent_writes_after_a_fork_is_not_in_the_output_that_comes_next_to_the_same_place(sides):
    engine, worker = sides
    for number in range(5):
        output = delivered(engine, worker, f"round-{number}", float(number))
        assert values(output) == both(number)
        with forked(lambda held=output: values(held)) as child:
            output["video"].fill_(-1.0)
            assert child.ask() == both(number)
        del output, child
        engine.wait_no_lease()


def test_a_grandchild_keeps_what_it_inherited_after_its_parent_ended(sides):
    engine, worker = sides
    output = delivered(engine, worker, "grand", 2.0)
    inherited = [output]
    reader, writer = os.pipe()

    def fork_again() -> int:
        os.close(writer)
        if pid := os.fork():
            return pid
        os.setsid()
        os.read(reader, 1)  # until the test closes it
        os._exit(values(inherited[0]) != both(2.0))

    with forked(fork_again) as child:
        grandchild = child.ask()
    del output
    inherited.clear()
    overwrite(engine, worker, "after-grand", 3)
    wait_until(lambda: engine.leases.outstanding == 1, "all but the grandchild's went back")
    process = psutil.Process(grandchild)
    os.close(writer)
    os.close(reader)
    process.wait(DEADLINE_S)
    engine.wait_no_lease()


def test_a_lease_that_only_a_child_uses_returns_when_it_ends_and_when_it_becomes_another_program(sides):
    engine, worker = sides
    output = delivered(engine, worker, "exec", 3.0)
    reader, writer = os.pipe()
    with forked(lambda: None) as child:
        child.ask()
        pid = os.fork()
        if not pid:
            os.dup2(reader, 0)
            os.execvp("cat", ["cat"])
        del output
        gc.collect()
        assert engine.leases.outstanding == 1
    os.close(reader)
    try:
        engine.wait_no_lease()  # though the program runs
    finally:
        os.close(writer)
        os.waitpid(pid, 0)


def test_a_lease_whose_pages_cannot_be_shared_again_never_returns_and_ends_the_connection(sides, monkeypatch):
    engine, worker = sides
    inherited = [delivered(engine, worker, "unshared", 6.0)]

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(fork, "share", refuse)
    with forked(lambda: None) as child:
        child.ask()
        inherited.clear()
        gc.collect()
    wait_until(lambda: engine.receive(0.01) is None and engine.broken, "the connection is given up")


def test_what_goes_wrong_before_a_fork_is_logged_when_others_may_use_the_pool_again(sides, monkeypatch):
    engine, worker = sides
    inherited = [delivered(engine, worker, "unfollowed", 8.0)]

    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    said: list[tuple[str, bool]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.getMessage(), fork.lock.locked()))  # type: ignore[method-assign]
    monkeypatch.setattr(fork, "create_memfd", refuse)
    fork.logger.addHandler(handler)
    try:
        with forked(lambda: values(inherited[0])) as child:
            assert child.ask() == both(8.0)
    finally:
        fork.logger.removeHandler(handler)
    ((message, locked),) = said
    assert "a forked child cannot be followed: [Errno 24] Too many open files" in message
    assert not locked


def test_a_child_that_closes_every_descriptor_keeps_its_output_all_the_same(sides):
    engine, worker = sides
    inherited = [delivered(engine, worker, "daemon", 4.0)]
    reader, writer = os.pipe()
    os.dup2(reader, 0)  # the one that it keeps
    pid = os.fork()
    if not pid:
        os.closerange(1, 4096)
        os.read(0, 1)
        os._exit(values(inherited[0]) != both(4.0))
    inherited.clear()
    overwrite(engine, worker, "after-daemon")
    os.write(writer, b"x")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(reader)
    os.close(writer)
    engine.wait_no_lease()


def test_an_output_that_outlives_its_session_is_a_forked_childs_own_too(packer):
    with contextlib.closing(EngineSide(packer)) as engine, working(engine, packer) as worker:
        output = delivered(engine, worker, "outlives", 6.0)
    with forked(lambda: output["video"].fill_(0.0).sum().item()) as child:
        assert child.ask() == 0.0
        assert values(output) == both(6.0)


def ours(target: str) -> bool:
    return target.startswith("socket:") or "packer-segment" in target


def connected_socket(worker: WorkerSide) -> Any:
    return worker.exporter.exchange.link._connection._channel._socket


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_a_child_inherits_no_memory_of_the_pool_beyond_its_outputs_and_no_connection(sides):
    engine, worker = sides

    def seen() -> tuple[int, list[str]]:
        maps = Path("/proc/self/maps").read_text()
        ranges = re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ \S+ +/memfd:packer-segment", maps, re.M)
        mapped = sum(int(end, 16) - int(start, 16) for start, end in ranges)
        return mapped, [target for fd in os.listdir("/proc/self/fd") if ours(target := link(fd))]

    output = delivered(engine, worker, "one", 1.0)
    here = seen()[0]
    connections = {
        f"socket:[{os.fstat(s.fileno()).st_ino}]"
        for s in (engine._connection._channel._socket, connected_socket(worker))
    }
    with forked(seen) as child:
        mapped, descriptors = child.ask()
    assert mapped == OUTPUT_MIB * MIB
    assert here > mapped
    assert connections < set(seen()[1])
    assert not connections & set(descriptors)
    assert len(descriptors) <= len(seen()[1]) - len(connections) - 1  # that of the segment
    del output
    engine.wait_no_lease()
    with forked(seen) as child:
        assert child.ask()[0] == 0


def mean(output: dict[str, Any]) -> float:
    torch.set_num_threads(1)
    return output["video"].mean().item()


def test_a_process_and_a_pool_of_multiprocessing_read_what_they_inherit(sides):
    engine, worker = sides
    context = multiprocessing.get_context("fork")
    output = delivered(engine, worker, "mp", 2.0)
    inherited.append(output)
    results = context.SimpleQueue()
    process = context.Process(target=lambda: results.put(mean(inherited[0])))
    process.start()
    with context.Pool(2) as pool:
        inherited.clear()
        del output
        overwrite(engine, worker, "after-mp", 3)
        assert results.get() == 2.0
        assert pool.map(_mean_of_inherited, range(2)) == [2.0, 2.0]
    process.join()
    engine.wait_no_lease()


inherited: list[Any] = []


def _mean_of_inherited(_: int) -> float:
    return mean(inherited[0])


def test_children_forked_on_another_thread_while_outputs_arrive_each_see_what_they_inherit(sides):
    engine, worker = sides
    latest: list[Any] = [(0.0, delivered(engine, worker, "first", 0.0))]
    done, failures, forks = threading.Event(), [], []

    def fork_on() -> None:
        while not done.is_set():
            value, output = latest[0]
            pid = os.fork()
            if not pid:
                time.sleep(0.01)  # for what might overwrite it to come
                os._exit(values(output) != both(value))
            del output
            failures.extend([value] * (os.waitpid(pid, 0)[1] != 0))
            forks.append(pid)

    thread = threading.Thread(target=fork_on)
    thread.start()
    try:
        number = 0
        while len(forks) < 20 and thread.is_alive():
            number += 1
            latest[0] = (float(number), delivered(engine, worker, f"arriving-{number}", float(number)))
    finally:
        done.set()
        thread.join()
    assert (failures, len(forks) >= 20) == ([], True)
    latest.clear()
    engine.wait_no_lease()


def test_finalizers_and_ends_in_a_child_change_nothing_for_its_parent(packer):
    with contextlib.closing(EngineSide(packer)) as engine, working(engine, packer) as worker:
        held = [delivered(engine, worker, "one", 1.0)]

        def end_everything() -> int:
            held.clear()
            gc.collect()
            waiting = engine.leases._deaths.qsize()
            engine.close()
            return waiting

        with forked(end_everything) as child:
            assert child.ask() == 0
        assert values(held[0]) == both(1.0)
        delivered(engine, worker, "two", 2.0)


def test_a_supervisor_that_is_stopped_in_a_child_leaves_its_parents_packers_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    supervisor = Supervisor(Settings(pool_bytes=2 * MIB, pool_max_bytes=2 * MIB))
    try:
        packer = supervisor.start("host")
        with forked(supervisor.stop) as child:
            child.ask()
        assert packer.process.poll() is None
        assert Path(packer.socket).exists()
    finally:
        supervisor.stop()


ENGINE = """
import os, sys, time
from packer_service.wire import handshake
from packer_service.config import Settings
from worker_shim.connection import Connection
from worker_shim.engine.receiver import Delivered, Receiver
from worker_shim.engine.supervisor import Supervisor
supervisor = Supervisor(Settings(pool_bytes=2 << 20, pool_max_bytes=2 << 20))
packer = supervisor.start("host")
channel, _ = handshake.connect(packer.socket, supervisor.key, "engine", "0123456789abcdef")
receiver = Receiver(Connection(channel, 10.0), bytes(32), Delivered())
child = os.fork()
if child:
    print(child, packer.process.pid, file=sys.stderr, flush=True)
time.sleep(3600)
"""


def test_the_packer_of_a_killed_engine_ends_though_a_forked_child_lives(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(HELPERS), "XDG_RUNTIME_DIR": str(tmp_path)}
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], env=environment, stderr=subprocess.PIPE, text=True)
    child = None
    try:
        said = next(line for line in engine.stderr if re.fullmatch(r"\d+ \d+\n", line))
        child, packer = (psutil.Process(int(pid)) for pid in said.split())
        engine.kill()
        engine.wait()
        packer.wait(DEADLINE_S)
        assert child.is_running()
    finally:
        engine.kill()
        engine.wait()
        engine.stderr.close()
        if child is not None:
            child.kill()
