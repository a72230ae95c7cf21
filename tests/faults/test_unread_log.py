"""A packer whose log nobody reads: it serves on, it ends when it is told to, and it says how much of its log is missing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time

from packer_process import DEADLINE_S, Packer, Worker, running_packer, session, transfer

EXIT_HUNG = 70


def send(worker: Worker, output: str) -> None:
    worker.export(output, worker.write(b"x" * 1000))
    worker.skeleton(output)


@contextlib.contextmanager
def full_pipe():
    """A pipe that nobody reads: both ends, and what fills it up."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)

    def fill() -> None:
        flags = fcntl.fcntl(writer, fcntl.F_GETFL)
        fcntl.fcntl(writer, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"x")
        fcntl.fcntl(writer, fcntl.F_SETFL, flags)

    try:
        yield writer, fill
    finally:
        os.close(reader)
        os.close(writer)


def test_a_packer_whose_log_nobody_reads_serves_on_and_ends_when_it_is_told_to(tmp_path):
    with full_pipe() as (log, fill), contextlib.closing(Packer(tmp_path / "run", log_to=log)) as packer:
        fill()
        for _ in range(2):
            with session(packer) as (engine, worker):
                transfer(engine, worker)
        begin = time.monotonic()
        packer.signal(signal.SIGTERM)
        assert packer.wait() == 0
        assert time.monotonic() - begin < 3
        assert not os.path.exists(packer.socket)


def test_a_packer_whose_log_nobody_reads_still_ends_of_a_stuck_copy(tmp_path, faults):
    with (
        full_pipe() as (log, fill),
        running_packer(tmp_path / "run", hang_s=1, log_level="error", log_to=log) as packer,
        session(packer) as (engine, worker),
    ):
        transfer(engine, worker)
        fill()
        with faults.active("copy"):
            send(worker, "stuck")
            assert packer.wait() == EXIT_HUNG


def test_a_packer_ends_although_another_thread_holds_the_lock_of_its_log():
    code = """
import logging, threading, time
from packer_service.log import LogWriter
from packer_service.server import Server
handler = LogWriter(2)
logging.getLogger().addHandler(handler)
threading.Thread(target=lambda: (handler.acquire(), time.sleep(60)), daemon=True).start()
while handler.lock.acquire(blocking=False):
    handler.lock.release()
    time.sleep(0.001)
Server.__new__(Server)._die("a test says so")
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=DEADLINE_S, check=False).returncode == EXIT_HUNG
