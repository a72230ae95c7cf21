"""Peers that mean harm, or are broken in a way that looks like it: the packer lives, and nobody else notices.

Each test misuses a live packer and ends with transfers of an honest session beside it that must be right.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from packer_process import (
    DEADLINE_S,
    MAC,
    MIB,
    Engine,
    Packer,
    Worker,
    full_table,
    running_packer,
    session,
    transfer,
    wait_until,
)

from packer_service.config import Settings
from packer_service.devices.host import HostDevice
from packer_service.door import MAX_UNPROVEN
from packer_service.errors import PackerError, PeerClosed, ProtocolError
from packer_service.memory.memfd import SharedMemory, create_memfd
from packer_service.pool.budget import Budget
from packer_service.pool.pool import Pool
from packer_service.sessions.engine import EngineSession
from packer_service.sessions.imports import MAX_CHUNKS
from packer_service.sessions.worker import MAX_HOST_MEMFDS, WorkerSession
from packer_service.stats import Stats
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import (
    Ack,
    Body,
    Export,
    MapChunk,
    MapTimeline,
    Nack,
    OutputReady,
    Piece,
    Refused,
    Skeleton,
)

POOL = 2 * MIB


@pytest.fixture
def packer(tmp_path):
    with running_packer(tmp_path / "run") as packer:
        yield packer
        assert packer.process.poll() is None, packer.log
        assert "Traceback" not in packer.log, packer.log


@pytest.fixture
def others(packer):
    """Another engine with its worker, whose transfers must not notice anything."""
    with session(packer) as (engine, worker):
        transfer(engine, worker)
        yield engine, worker
        transfer(engine, worker, 100_000)


def count(packer: Packer, kind: str) -> int:
    """How many descriptors ("fd") or threads ("task") the packer has."""
    return len(os.listdir(f"/proc/{packer.process.pid}/{kind}"))


def wait_count(packer: Packer, kind: str, number: int) -> None:
    wait_until(lambda: count(packer, kind) <= number, f"{kind} go back to {number}")


# -- descriptors -------------------------------------------------------------------------------------------------------


def test_the_packer_takes_all_the_descriptors_the_system_lets_it_have(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with running_packer(tmp_path / "run") as packer:
            assert resource.prlimit(packer.process.pid, resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_host_memfds_that_wait_for_a_stalled_device_are_bounded_and_the_rest_is_declined(packer, others):
    with session(packer) as (engine, worker):
        transfer(engine, worker)
        before = count(packer, "fd")
        number = MAX_HOST_MEMFDS + 36
        fd = create_memfd("host", 100)
        for n in range(number):
            worker.export(f"output-{n}", worker.write(b"x", 64 * n), complete=False)
            worker.skeleton(f"output-{n}", b"", fd, host_nbytes=100)
        worker.export("text", complete=False)  # needs no copy, so its answer says that everything before it was read
        worker.skeleton("text")
        assert worker.answer() == Ack("text")
        assert count(packer, "fd") == before + MAX_HOST_MEMFDS
        worker.reach(worker.value)
        answers = [worker.answer() for _ in range(number)]
        assert answers[:MAX_HOST_MEMFDS] == [Ack(f"output-{n}") for n in range(MAX_HOST_MEMFDS)]
        assert all(isinstance(answer, Nack) and "wait for their copies" in answer.reason for answer in answers[-36:])
        assert len([engine.next() for _ in range(1 + MAX_HOST_MEMFDS)]) == 1 + MAX_HOST_MEMFDS
        worker.export("after", worker.write(b"x"))  # there is room again
        worker.skeleton("after", b"", fd, host_nbytes=100)
        assert worker.answer() == Ack("after")
        assert count(packer, "fd") == before
        os.close(fd)


def test_an_output_whose_memfd_finds_no_room_in_the_packers_table_is_declined(packer, others):
    with session(packer) as (engine, worker):
        transfer(engine, worker)
        fd = create_memfd("host", 100)
        with full_table(packer.process.pid):
            for output in ("one", "other"):
                worker.export(output, worker.write(b"x"))
                worker.skeleton(output, b"", fd, host_nbytes=100)
                answer = worker.answer()
                assert isinstance(answer, Nack)
                assert "too many open files" in answer.reason
            transfer(engine, worker)
            transfer(*others)
        worker.export("output", worker.write(b"x"))
        worker.skeleton("output", b"", fd, host_nbytes=100)
        assert worker.answer() == Ack("output")
        os.close(fd)


def test_a_chunk_whose_memfd_finds_no_room_in_the_packers_table_declines_its_outputs_only(packer, others):
    with session(packer) as (engine, worker):
        transfer(engine, worker)
        with full_table(packer.process.pid):
            worker.channel.send(MapChunk(1, worker.arena.nbytes), worker.arena.fd)
            transfer(engine, worker)
        worker.export("output", Piece(1, 0, 10))
        worker.skeleton("output")
        answer = worker.answer()
        assert isinstance(answer, Nack)
        assert "too many open files" in answer.reason
        transfer(engine, worker)


def test_a_timeline_that_finds_no_room_ends_its_worker_with_the_setting_to_raise(packer, others):
    with contextlib.closing(Engine(packer)) as engine:
        with contextlib.closing(packer.connect("worker", engine.session)) as channel:
            fd = create_memfd("timeline", 4096)
            with full_table(packer.process.pid):
                channel.send(MapTimeline(), fd)
                message, _ = channel.receive(DEADLINE_S)
            assert isinstance(message, Refused)
            assert "LimitNOFILE" in message.reason
            os.close(fd)
        packer.wait_log("worker .* cannot be served and is disconnected")
        assert "broke the protocol" not in packer.log


def test_a_peer_that_finds_no_room_in_the_packers_table_waits_until_there_is_some(packer, others):
    with full_table(packer.process.pid), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(DEADLINE_S)
        peer.connect(packer.socket)
        packer.wait_log("cannot accept a connection: .*LimitNOFILE")
        transfer(*others)
    with session(packer) as (engine, worker):
        transfer(engine, worker)


def test_chunks_are_bounded(packer, others):
    with session(packer) as (_, worker):
        fd = create_memfd("chunk", 4096)
        for number in range(1, MAX_CHUNKS + 1):
            worker.channel.send(MapChunk(number, 4096), fd)
        answer = worker.answer()
        assert isinstance(answer, Refused)
        assert f"{MAX_CHUNKS} chunks" in answer.reason
        os.close(fd)


def test_a_timeline_that_cannot_be_written_ends_its_worker(packer, others):
    with contextlib.closing(Engine(packer)) as engine:
        fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        with contextlib.closing(packer.connect("worker", engine.session)) as channel:
            channel.send(MapTimeline(), fd)
            message, _ = channel.receive(DEADLINE_S)
            assert isinstance(message, Refused)
        os.close(fd)


# -- leases ------------------------------------------------------------------------------------------------------------


def test_an_engine_cannot_give_back_a_region_that_is_still_the_packers(packer):
    with session(packer) as (engine, worker):
        worker.export("output", worker.write(b"right"), complete=False)
        worker.skeleton("output")
        worker.export("text", complete=False)
        worker.skeleton("text")
        assert worker.answer() == Ack("text")  # so the region of the first is taken
        engine.next()
        engine.release(*range(8))  # a fresh pool counts its regions from 1
        packer.wait_log("lease 1 is not out")
        worker.export("other", worker.write(b"other", 4096), complete=False)
        worker.skeleton("other")
        worker.reach(worker.value)
        first, second = engine.next(), engine.next()
        assert (engine.read(first), engine.read(second)) == ([b"right"], [b"other"])
        assert [worker.answer(), worker.answer()] == [Ack("output"), Ack("other")]
        engine.release(first.leases[0].lease, second.leases[0].lease)
        transfer(engine, worker, POOL)


def test_a_withdrawn_output_whose_region_the_engine_gave_back_before_does_not_stop_its_session(packer):
    with session(packer) as (engine, worker):
        worker.export("output", worker.write(b"x"), complete=False)
        worker.export("text", complete=False)
        worker.skeleton("text")
        worker.answer()
        engine.next()
        engine.release(1)
        packer.wait_log("lease 1 is not out")
        worker.channel.send(protocol.Withdraw("output"))
        worker.reach(worker.value)
        assert worker.answer() == Ack("output")
        transfer(engine, worker, POOL)


class MuteChannel(Channel):
    """An engine's connection on which OUTPUT_READY cannot be sent: a fault of the kernel's that cannot be had at will."""

    error: Exception | None = None

    def try_send(self, message, fd=None):
        if self.error is not None and isinstance(message, OutputReady):
            raise self.error
        return super().try_send(message, fd)


@contextlib.contextmanager
def in_process(device: HostDevice) -> Iterator[tuple[EngineSession, Channel, threading.Thread, SharedMemory]]:
    """An engine's session in this process, a worker's end of a connection to its packer, and the thread that serves it."""
    pool = Pool(device, Budget(POOL), keep_bytes=POOL, step_bytes=POOL, idle_s=60)
    pool.grow(POOL)
    ours, engines = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs, workers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        contextlib.closing(EngineSession("engine", MuteChannel(ours, protocol.from_engine), pool, str)) as engine,
        contextlib.closing(Channel(workers, protocol.to_worker)) as worker,
        contextlib.closing(engines),
        contextlib.closing(SharedMemory.create("arena", 4096)) as arena,
    ):
        channel = Channel(theirs, protocol.from_worker)
        served = WorkerSession(
            "worker", channel, engine, device, Settings(), threading.Event(), Stats(), lambda reason: None
        )
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        worker.send(MapTimeline(), arena.fd)
        worker.send(MapChunk(0, 4096), arena.fd)
        yield engine, worker, thread, arena


@pytest.mark.parametrize(
    "error", [OSError(109, "Too many references"), ProtocolError("an OutputReady of 70000 bytes exceeds")], ids=repr
)
@pytest.mark.parametrize("guessed", [False, True], ids=["", "and the engine guesses the lease"])
def test_an_output_that_cannot_be_published_is_declined_and_leaves_nothing(error, guessed):
    with in_process(HostDevice()) as (engine, worker, thread, arena):
        pool = engine.pool
        engine._channel.error = error
        if guessed:
            lease = pool.lease
            pool.lease = lambda regions: (lease(regions), pool.end_lease(regions[0].number))
        worker.send(protocol.Probe(0, Piece(0, 0, 10)))
        assert isinstance(worker.receive(DEADLINE_S)[0], protocol.Probed)  # so both are mapped
        before = len(os.listdir("/proc/self/fd"))
        worker.send(Export("output", 0, (Piece(0, 0, 10), Piece(0, 10, 10))))
        worker.send(Skeleton("output", Body(b"", MAC, 100)), arena.fd)
        (answer, _) = worker.receive(DEADLINE_S)
        assert isinstance(answer, Nack)
        assert (answer.output, str(error) in answer.reason) == ("output", True)
        wait_until(lambda: not pool._regions, "no region is out")
        assert len(os.listdir("/proc/self/fd")) == before
        worker.close()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_a_worker_for_whom_no_thread_can_be_had_leaves_its_stream_to_others(monkeypatch):
    class Counting(HostDevice):
        streams = 0

        def open_stream(self):
            self.streams += 1
            stream = super().open_stream()
            close = stream.close
            stream.close = lambda: (close(), setattr(self, "streams", self.streams - 1))
            return stream

    device = Counting()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(ours):
        channel = Channel(theirs, protocol.from_worker)
        served = WorkerSession(
            "worker", channel, None, device, Settings(), threading.Event(), Stats(), lambda reason: None
        )
        start = threading.Thread.start

        def fail(thread):
            if thread.name.startswith("finisher"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fail)
        with pytest.raises(PackerError, match="pids"):
            served.serve()
        assert not device.streams
        channel.close()


# -- peers that hold a thread ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counter_held_at_zero(worker: Worker) -> Iterator[None]:
    """The worker writes 0 into its counter, again and again."""
    stop = threading.Event()

    def hold():
        while not stop.is_set():
            for _ in range(1000):
                worker.timeline.counter = 0

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_worker_that_broke_the_protocol_and_moves_its_counter_back_holds_nothing_but_its_own_until_it_dies(
    packer, others
):
    before = {kind: count(packer, kind) for kind in ("task", "fd")}
    with session(packer) as (engine, worker):
        worker.export("pending", worker.write(b"x"), complete=False)
        worker.skeleton("pending")
        with counter_held_at_zero(worker):
            worker.channel._socket.send(b"\xc1")
            assert isinstance(worker.answer(), Refused)
            with contextlib.closing(Worker(packer, engine.session)) as another:
                transfer(engine, another)
            engine.close()
            with session(packer) as (other_engine, its_worker):
                transfer(other_engine, its_worker, POOL)
        worker.close()
        for kind, number in before.items():
            wait_count(packer, kind, number)


def test_a_worker_that_broke_the_protocol_and_does_not_read_does_not_hold_its_thread(packer, others):
    before = {kind: count(packer, kind) for kind in ("task", "fd")}
    number = 1000  # more answers than fit the worker's socket
    with session(packer) as (engine, worker):
        for n in range(number):
            worker.export(f"output-{n}", worker.write(b"x"), complete=False)
            worker.skeleton(f"output-{n}")
        worker.channel._socket.send(b"\xc1")
        worker.reach(worker.value)
        assert {engine.next().output for _ in range(number)} == {f"output-{n}" for n in range(number)}
    for kind, before_ in before.items():
        wait_count(packer, kind, before_)


def test_an_engine_that_broke_the_protocol_and_does_not_read_does_not_hold_its_workers(packer, others):
    before = {kind: count(packer, kind) for kind in ("task", "fd")}
    with session(packer) as (engine, worker):
        for number in range(10):  # more than fits the engine's socket, less than fits it and the worker's
            worker.export(f"unread-{number}")
            worker.skeleton(f"unread-{number}", bytes(protocol.MAX_PAYLOAD_BYTES))
        acks = 0
        while worker.channel.receive(0.5) is not None:  # until the packer is blocked in a send to the engine
            acks += 1
        assert 0 < acks < 10
        engine.channel._socket.send(b"\xc1")
        with contextlib.suppress(PeerClosed):
            while worker.answer():
                pass
        worker.close()
        for kind, number in before.items():
            wait_count(packer, kind, number)


def test_two_engines_that_open_one_session_at_the_same_moment_leave_nothing_behind(packer, others):
    before = {kind: count(packer, kind) for kind in ("task", "fd")}
    for _ in range(50):
        name = secrets.token_hex(8)
        with contextlib.ExitStack() as stack:
            twins = []
            for _ in range(2):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                sock.connect(packer.socket)
                channel = Channel(sock, protocol.from_server)
                challenge, _ = channel.receive(DEADLINE_S)
                proof = handshake.client_proof(packer.key, challenge, "engine", name, bytes(32))
                twins.append((channel, protocol.Hello(protocol.VERSION, "engine", name, bytes(32), proof)))
            for channel, hello in twins:
                channel.send(hello)
            answers = [channel.receive(DEADLINE_S)[0] for channel, _ in twins]
            assert any(isinstance(answer, protocol.Welcome) for answer in answers)
    for kind, number in before.items():
        wait_count(packer, kind, number)


# -- floods ------------------------------------------------------------------------------------------------------------


def silent_peer(packer: Packer) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(DEADLINE_S)
    peer.connect(packer.socket)
    assert peer.recv(1000)  # the challenge
    return peer


@pytest.fixture
def patient(tmp_path):
    """A packer that gives a silent peer a minute and has room for four sessions."""
    with running_packer(tmp_path / "run", handshake_timeout_s=60, max_sessions=4) as packer:
        yield packer
        assert "Traceback" not in packer.log, packer.log


def test_silent_peers_take_no_place_of_a_session_and_the_oldest_of_a_flood_is_closed(patient):
    with session(patient) as (engine, worker), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(silent_peer(patient)) for _ in range(3 * MAX_UNPROVEN)]
        for peer in silent[: 2 * MAX_UNPROVEN]:
            assert peer.recv(1000) == b""
        assert count(patient, "task") <= 4 * 3 + MAX_UNPROVEN + 8
        with session(patient) as (another, its_worker):
            transfer(another, its_worker)
            with pytest.raises(PackerError, match="max_sessions = 4 are open"):
                Engine(patient)
        transfer(engine, worker)


FLOOD = """
import socket, sys
peers = []
for _ in range(300):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(sys.argv[1])
    peers.append(peer)
    peer.recv(1000)
print("flooded", flush=True)
sys.stdin.read()
"""


def test_a_process_that_floods_the_packer_closes_its_own_connections_only(patient):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(patient.socket)
        slow = Channel(sock, protocol.from_server)
        challenge, _ = slow.receive(DEADLINE_S)
        command = [sys.executable, "-c", FLOOD, patient.socket]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
            assert flood.stdout.readline() == b"flooded\n"
            patient.wait_log(f"of pid {flood.pid}: its oldest is closed")
            proof = handshake.client_proof(patient.key, challenge, "engine", "slow-session", bytes(32))
            slow.send(protocol.Hello(protocol.VERSION, "engine", "slow-session", bytes(32), proof))
            assert isinstance(slow.receive(DEADLINE_S)[0], protocol.Welcome)
            with session(patient) as (engine, worker):
                transfer(engine, worker)
            flood.stdin.close()


def test_silent_peers_do_not_delay_the_end(patient):
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(silent_peer(patient))
        begin = time.monotonic()
        patient.signal(signal.SIGTERM)
        assert patient.wait() == 0
        assert time.monotonic() - begin < 3


# -- what the log says -------------------------------------------------------------------------------------------------


def test_an_exhausted_pool_names_who_holds_it_and_since_when_without_flooding_the_log(tmp_path):
    with (
        running_packer(tmp_path / "run", pool_max_bytes="2MiB", wait_s=0) as packer,
        session(packer) as (hoarder, its_worker),
        session(packer) as (engine, worker),
    ):
        its_worker.export("kept", its_worker.write(b"k" * POOL))
        its_worker.skeleton("kept")
        assert len(hoarder.next().leases) == 1
        begin = time.monotonic()
        for number in range(50):
            worker.export(f"output-{number}", worker.write(secrets.token_bytes(10)))
            worker.skeleton(f"output-{number}")
            assert isinstance(worker.answer(), Nack)
        lines = [line for line in packer.log.splitlines() if "the pool is exhausted" in line]
        assert 1 <= len(lines) <= 1 + (time.monotonic() - begin)
        held = (
            f"engine {hoarder.session} holds 2097152 of 2097152 bytes in 1 regions (1 of them leases), the oldest for "
        )
        assert held in lines[0]
        assert f"engine {engine.session} holds 0 of 0 bytes" in lines[0]
