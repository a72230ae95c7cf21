"""Engine and sidecar start at the same time: real packers, and the part of the executor that looks for them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packer_process import DEADLINE_S, running_packer, wait_until

from packer_service.errors import HandshakeError, PackerUnavailable

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from worker_shim import PackerDiffusionExecutor  # noqa: E402

PATIENT = 600.0  # longer than a test may take: nothing here waits so long


class Found(Exception):
    """The packers are there, and vllm-omni would start workers now; ``pids`` are theirs."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__(pids)
        self.pids = pids


class Config:
    """As much of vllm-omni's configuration as is read until the packers are there."""

    step_execution = True

    def __init__(self, executor: PackerDiffusionExecutor, packer: dict[str, Any]) -> None:
        self.additional_config = {"packer": packer}
        self._executor = executor

    @property
    def num_gpus(self) -> int:
        raise Found(self._executor.packer_pids)


def looking_for(*sockets: Path, key_file: Path, **given: Any) -> PackerDiffusionExecutor:
    """An executor that has yet to start, and gets no further than to its packers."""
    settings = {"mode": "sidecar", "socket": ",".join(map(str, sockets)), "key_file": str(key_file), "fallback": "fail"}
    executor = object.__new__(PackerDiffusionExecutor)
    executor.od_config = Config(executor, {**settings, "start_timeout_s": PATIENT, **given})
    return executor


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    path = directory / "key"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What worker_shim logs, at every level. vLLM's loggers do not propagate to pytest's."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler, logger = Collect(), logging.getLogger("vllm.worker_shim")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class Start:
    """An executor's start on a thread of its own."""

    def __init__(self, executor: PackerDiffusionExecutor) -> None:
        self._outcome: Exception | None = None
        self._executor = executor
        self._thread = threading.Thread(target=self._run, name="executor-start", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._executor._init_executor()
        except Exception as error:
            self._outcome = error

    def wait(self) -> Any:
        """What it came to: Found, or why not."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "it still waits"
        return self._outcome


def waiting(log: list[str]) -> list[str]:
    return [line for line in log if "waiting up to" in line]


@pytest.mark.parametrize("before", ["nothing is there", "no directory is there", "a stale socket is there"])
def test_an_engine_that_starts_before_its_packer_waits_for_it_and_says_so_once(before, tmp_path, key_file, log):
    path = key_file.parent / "packer.sock"
    if before == "no directory is there":
        path = tmp_path / "later" / "packer.sock"
    elif before == "a stale socket is there":
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
            gone.bind(str(path))
    start = Start(looking_for(path, key_file=key_file))
    wait_until(lambda: waiting(log), "it says that it waits")
    with running_packer(key_file.parent, socket=path) as packer:
        outcome = start.wait()
        assert isinstance(outcome, Found), outcome
        assert outcome.pids == [packer.process.pid]
    (line,) = waiting(log)
    assert line.startswith("INFO ")
    assert str(path) in line
    assert "600 s" in line
    assert "start_timeout_s" in line
    assert not [line for line in log if line.startswith(("WARNING", "ERROR"))]


def test_packers_that_start_one_after_the_other_are_all_waited_for(key_file, log):
    paths = [key_file.parent / f"gpu{number}.sock" for number in range(2)]
    start = Start(looking_for(*paths, key_file=key_file))
    with contextlib.ExitStack() as stack:
        wait_until(lambda: waiting(log), "it waits for the first")
        first = stack.enter_context(running_packer(key_file.parent, socket=paths[0]))
        wait_until(lambda: len(waiting(log)) == 2, "it waits for the second")
        second = stack.enter_context(running_packer(key_file.parent, socket=paths[1]))
        assert start.wait().pids == [first.process.pid, second.process.pid]


def test_a_packer_that_answers_and_refuses_is_not_waited_for(tmp_path, key_file, log):
    other = tmp_path / "other"
    with running_packer(other) as packer:
        outcome = Start(looking_for(Path(packer.socket), key_file=key_file)).wait()
    assert isinstance(outcome, HandshakeError)
    assert "the key is not this packer's" in str(outcome)
    assert waiting(log) == []


def test_a_packer_that_does_not_come_is_given_up_after_start_timeout_s(key_file, log):
    path = key_file.parent / "packer.sock"
    outcome = Start(looking_for(path, key_file=key_file, start_timeout_s=0.3)).wait()
    assert isinstance(outcome, PackerUnavailable)
    assert f"no packer listens at {path}" in str(outcome)
    assert "The engine waited 0." in str(outcome)
    assert len(waiting(log)) == 1


@pytest.mark.parametrize("fallback", ["own", "fail"])
def test_shutting_the_executor_down_ends_its_wait_and_starts_nothing(fallback, key_file, log):
    executor = looking_for(key_file.parent / "packer.sock", key_file=key_file, fallback=fallback)
    start = Start(executor)
    wait_until(lambda: waiting(log), "it waits")
    executor.shutdown()
    outcome = start.wait()
    assert isinstance(outcome, PackerUnavailable)
    assert "shutting down" in str(outcome)
    assert not [line for line in log if "own output path" in line]
    executor.shutdown()  # idempotent


def test_ctrl_c_ends_the_wait(key_file, log):
    executor = looking_for(key_file.parent / "packer.sock", key_file=key_file, fallback="own")

    def press() -> None:
        wait_until(lambda: waiting(log), "it waits")
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press, name="ctrl-c", daemon=True)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, and by pytest-xdist
    try:
        presser.start()
        with pytest.raises(KeyboardInterrupt):
            executor._init_executor()
    finally:
        signal.signal(signal.SIGINT, handler)
    presser.join()
    assert executor.packer_pids == []
