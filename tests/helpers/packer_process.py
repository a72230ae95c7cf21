"""A live packer as the tests use it: the real command in a process of its own, and peers that speak its protocol by hand.

``Engine`` and ``Worker`` do what worker_shim does, one message at a time, so that a test can also do it wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packer_service import board
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import (
    Ack,
    Body,
    Export,
    MapChunk,
    MapTimeline,
    Message,
    OutputReady,
    Piece,
    Skeleton,
)

MIB = 1 << 20
DEADLINE_S = 20.0  # of whatever a test waits for; nothing comes near it unless it is broken
MAC = bytes(32)  # the packer does not look at it

_DEFAULTS = {
    "device": "host",
    "pool_bytes": "2MiB",
    "pool_max_bytes": "16MiB",
    "pool_step_bytes": "2MiB",
    "wait_s": "10",
    "exit_after_s": "0",
    "log_level": "debug",
    "metrics_address": "off",
}


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = DEADLINE_S) -> Any:
    """What ``condition`` returns as soon as that is true. AssertionError naming ``what`` where it never is."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.002)
    return result


def wait_stopped(pid: int) -> None:
    """Until all threads of a process that was sent SIGSTOP have stopped: some run on for a moment."""

    def all_stopped() -> bool:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    wait_until(all_stopped, f"process {pid} stops")


def stop(pid: int) -> None:
    """Stop the process, and return when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_stopped(pid)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process is stopped meanwhile, and goes on at the end if it still can."""
    try:
        stop(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full_table(pid: int) -> Iterator[None]:
    """That process can open nothing more within the block."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    if pid == os.getpid():  # os.listdir's own is gone
        taken = {number for number in taken if os.path.exists(f"/proc/self/fd/{number}")}
    free = next(number for number in itertools.count() if number not in taken)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


class Packer:
    """One ``packer_service serve`` process. ``report`` is what it wrote when it was ready, or why it never was."""

    def __init__(self, directory: Path, *flags: str, log_to: int | None = None, **settings: object) -> None:
        """``log_to``: the descriptor that it logs to, in place of the file behind ``log``."""
        directory.mkdir(mode=0o700, exist_ok=True)
        key_file = directory / "key"
        if not key_file.exists():
            key_file.touch(mode=0o600)
            key_file.write_bytes(secrets.token_hex(32).encode())
        self.key = key_file.read_bytes()
        given = {"socket": directory / "packer.sock", "key_file": key_file, **_DEFAULTS, **settings}
        self.socket = str(given["socket"])
        self._log = directory / f"log-{secrets.token_hex(4)}"
        reader, writer = os.pipe()
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "packer_service", "serve", f"--ready-fd={writer}", *flags, *options],
                # An engine that ran earlier in the test's own process may have set it: see worker_shim/engine/supervisor.py.
                env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
                stderr=log if log_to is None else log_to,
            )
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            ready = select.poll()
            ready.register(pipe, select.POLLIN)
            assert ready.poll(DEADLINE_S * 1000), "the packer neither started nor said why not"
            self.report = json.loads(pipe.readline() or b"{}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_log(self, pattern: str, count: int = 1) -> None:
        """Until the packer has logged ``pattern`` (a regular expression) ``count`` times."""
        wait_until(lambda: len(re.findall(pattern, self.log)) >= count, f"{pattern!r} in the log:\n{self.log}")

    def connect(self, role: str, session: str, **options: Any) -> Channel:
        options = {"key": self.key, "device_uuid": "host", "timeout_s": DEADLINE_S, **options}
        return handshake.connect(self.socket, options.pop("key"), role, session, **options)[0]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            wait_stopped(self.process.pid)

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        board.remove_dead()  # as the next packer would, or a command


@contextlib.contextmanager
def running_packer(directory: Path, *flags: str, **settings: Any) -> Iterator[Packer]:
    """A packer that is ready, stopped at the end of the block."""
    packer = Packer(directory, *flags, **settings)
    try:
        assert "pid" in packer.report, packer.report
        yield packer
    finally:
        packer.close()


class Engine:
    """The engine's end, by hand: maps what it is told to, keeps leases until ``release``."""

    def __init__(self, packer: Packer) -> None:
        self.session = secrets.token_hex(8)
        self.channel = packer.connect("engine", self.session)
        self.segments: dict[int, SharedMemory] = {}
        self.fds: list[int] = []  # of the last message
        self.workers_gone = 0
        self.pongs = 0
        self.states: dict[str, str] = {}  # what the packer said of outputs
        self.coming: dict[int, protocol.OutputComing] = {}  # by first lease

    def next_coming(self) -> protocol.OutputComing:
        """What comes next and is still on its way; no OUTPUT_READY does before it."""

        def some() -> bool:
            assert self.poll() is None
            return bool(self.coming)

        wait_until(some, "an output that is coming")
        (coming,) = self.coming.values()
        return coming

    def next(self, timeout_s: float = DEADLINE_S) -> OutputReady:
        """The next OUTPUT_READY; what came before it is taken care of."""
        deadline = time.monotonic() + timeout_s
        while (ready := self._take(deadline - time.monotonic())) is None:
            assert time.monotonic() < deadline, "no OUTPUT_READY came"
        return ready

    def poll(self) -> OutputReady | None:
        """Take what is there; an OUTPUT_READY, if that comes first."""
        return self._take(0.0)

    def _take(self, timeout_s: float) -> OutputReady | None:
        received = self.channel.receive(timeout_s)
        if received is None:
            return None
        close_fds(self.fds)
        message, self.fds = received
        match message:
            case OutputReady():
                return message
            case protocol.MapSegment():
                self.segments[message.segment] = SharedMemory.attach(self.fds.pop(), message.nbytes)
            case protocol.WorkerGone():
                self.workers_gone += 1
            case protocol.Pong():
                self.pongs += 1
            case protocol.Described():
                self.states[message.output] = message.state
            case protocol.OutputComing():
                self.coming[message.leases[0].lease] = message
            case protocol.OutputGone():
                del self.coming[message.lease]
            case _:
                raise AssertionError(message)
        return None

    def read(self, ready: OutputReady) -> list[bytes]:
        """The bytes of each lease."""
        assert not ready.error, ready.error
        return [
            self.segments[lease.segment].buffer[lease.offset : lease.offset + lease.nbytes] for lease in ready.leases
        ]

    def describe(self, output: str) -> str:
        """How far the packer says that an output is."""
        self.states.clear()
        self.channel.send(protocol.Describe(output))
        wait_until(lambda: self.poll() or self.states, f"the state of {output}")
        return self.states[output]

    def release(self, *leases: int) -> None:
        self.channel.send(protocol.Release(leases))

    def close(self) -> None:
        self.channel.close()
        close_fds(self.fds)
        self.fds = []
        for segment in self.segments.values():
            segment.close()


class Worker:
    """The worker's end, by hand: one arena chunk, one timeline, and nothing that would stop a test from misusing them."""

    def __init__(self, packer: Packer, session: str, arena_bytes: int = 2 * MIB) -> None:
        self.channel = packer.connect("worker", session)
        self.timeline = TimelinePage.create()
        self.arena = SharedMemory.create("test-arena", arena_bytes)
        self.value = 0  # the last that was given to an export
        self.channel.send(MapTimeline(), self.timeline.fd)
        self.channel.send(MapChunk(0, arena_bytes), self.arena.fd)

    def reach(self, value: int) -> None:
        """Everything up to ``value`` is complete on the device."""
        self.timeline.counter = value

    def write(self, data: bytes, offset: int = 0) -> Piece:
        """Put ``data`` into the arena."""
        self.arena.buffer[offset : offset + len(data)] = data
        return Piece(0, offset, len(data))

    def export(self, output: str, *pieces: Piece, complete: bool = True) -> int:
        """Have the packer start on ``output``; the timeline value it waits for, which is reached if ``complete``."""
        self.value += 1
        if complete:
            self.reach(self.value)
        self.channel.send(Export(output, self.value, pieces))
        return self.value

    def skeleton(
        self, output: str, payload: bytes = b"", fd: int | None = None, *, plain: bool = False, **fields: int
    ) -> None:
        self.channel.send(Skeleton(output, Body(payload, MAC, **fields), plain), fd)

    def answer(self, timeout_s: float = DEADLINE_S) -> Message:
        """The packer's next message to this worker."""
        received = self.channel.receive(timeout_s)
        assert received is not None, "the packer did not answer"
        close_fds(received[1])
        return received[0]

    def close(self) -> None:
        self.channel.close()
        self.timeline.close()
        self.arena.close()


def transfer(engine: Engine, worker: Worker, nbytes: int = 5000) -> None:
    """One output of random bytes the whole way and its lease back, checked at every step."""
    output, data = f"transfer-{secrets.token_hex(8)}", secrets.token_bytes(nbytes)
    worker.export(output, worker.write(data))
    worker.skeleton(output, b"skeleton")
    ready = engine.next()
    assert (ready.output, ready.body.payload) == (output, b"skeleton")
    assert engine.read(ready) == [data]
    assert worker.answer() == Ack(output)
    engine.release(*(lease.lease for lease in ready.leases))


@contextlib.contextmanager
def session(packer: Packer, **options: Any) -> Iterator[tuple[Engine, Worker]]:
    """An engine and a worker in one session."""
    with (
        contextlib.closing(Engine(packer)) as engine,
        contextlib.closing(Worker(packer, engine.session, **options)) as worker,
    ):
        yield engine, worker
