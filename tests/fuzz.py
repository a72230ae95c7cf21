"""Fuzz the protocol: its decoders with any bytes, and a live packer with any frames, while an honest session works beside it.

    python -m tests.fuzz --decoder 1000000 --live 100000 --seed 1 --json benchmarks/results/fuzz_host.json

A decoder may answer with a message or a ProtocolError, and with nothing else. Each frame sent to the packer must end in an
answer or in a closed connection. The packer must live, log no traceback, do the honest session's transfers right, and hold
no more descriptors, threads and memory at the end than after the first tenth. The last line is a summary; the exit code is 1
where any of this failed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import resource
import select
import shlex
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, f"{Path(__file__).resolve().parent}/helpers")  # as pytest does it

from packer_process import DEADLINE_S, MIB, Packer, running_packer, session, transfer, wait_until
from wire_messages import MESSAGES

from benchmarks import machine
from packer_service.errors import PackerError, PeerClosed, ProtocolError
from packer_service.memory.memfd import SharedMemory, create_memfd
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import (
    Ack,
    Body,
    Export,
    MapAcks,
    MapChunk,
    MapTimeline,
    Message,
    OutputReady,
    Piece,
    Probe,
    Release,
    Skeleton,
    UnmapChunk,
    Withdraw,
)

MAX_GROWTH_BYTES = 16 * MIB  # of the packer's own memory: the allocator's arenas, which come with threads, vary by less
FRAMES_A_VISIT = 40
FINISH_S = 120.0  # for all that has piled up
_OUTPUTS = [f"output-{n}" for n in range(6)]
_MOST_THREADS = 50  # max_sessions is 64, and a visit takes two of them
_SIZES = (0, 1, 100, 4096, MIB, 2 * MIB, 2 * MIB + 1, 1 << 40, 1 << 62)
_NUMBERS = (0, 1, 2, 3, 7, 4095, 4096, 1 << 31, 1 << 32, (1 << 62) - 1, 1 << 62)
# array32, map32, str32, bin32, ext32 that claim four gigabytes, and their smaller relatives
_HUGE = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
    *(b"\xc9\xff\xff\xff\xff\x01", b"\xdc\xff\xff", b"\xda\xff\xff", b"\xc5\xff\xff"),
)
_NASTY: tuple[Any, ...] = (
    *(None, True, -1, 0, 1 << 62, (1 << 64) - 1, -(1 << 63), 1.5, float("nan"), float("inf")),
    *("", "x" * 129, "x" * 5000, "\0\n\x1b[2J", b"", bytes(32), bytes(33), bytes(40_000)),
    *(msgspec.Raw(opener * 30_000 + b"\xc0") for opener in (b"\x91", b"\x81\xa1a")),
    *([], [[]], [[0, 0, 1]] * 1025, {}, {"a": [1]}, ["Export"], msgspec.msgpack.Ext(1, b"x")),
)


class Mutator:
    """Makes bytes that are nearly, or not at all, the messages of the protocol."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._kinds = (self.noise, self.flip, self.cut, self.splice, self.lengthen, self.nest, self.replace_field)

    def __call__(self, data: bytes) -> bytes:
        return self.rng.choice(self._kinds)(data)

    def noise(self, data: bytes) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 8, 60, 300, 300, 300, 70_000)))

    def flip(self, data: bytes) -> bytes:
        mutable = bytearray(data)
        for _ in range(self.rng.randint(1, 4)):
            mutable[self.rng.randrange(len(mutable))] = self.rng.randrange(256)
        return bytes(mutable)

    def cut(self, data: bytes) -> bytes:
        return data[: self.rng.randrange(len(data))]

    def splice(self, data: bytes) -> bytes:
        other = protocol.encode(self.rng.choice(MESSAGES)[1])
        return data[: self.rng.randrange(len(data) + 1)] + other[self.rng.randrange(len(other)) :]

    def lengthen(self, data: bytes) -> bytes:
        at = self.rng.randrange(len(data))
        return data[:at] + self.rng.choice(_HUGE) + data[at:]

    def nest(self, data: bytes) -> bytes:
        depth, opener = self.rng.choice((5, 500, 30_000)), self.rng.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"))
        return data[: self.rng.choice((0, 1, len(data)))] + opener * depth + b"\xc0"

    def replace_field(self, data: bytes) -> bytes:
        fields = msgspec.msgpack.decode(data)
        for _ in range(self.rng.randint(1, 2)):
            fields[self.rng.randrange(len(fields))] = self.rng.choice(_NASTY)
        if self.rng.random() < 0.2:
            fields.append(self.rng.choice(_NASTY))
        return msgspec.msgpack.encode(fields)


def fuzz_decoders(number: int, seed: int) -> dict[str, Any]:
    """Every decoder under ``number`` inputs. ``failures`` lists what was neither a message nor a ProtocolError."""
    rng = random.Random(seed)
    mutate = Mutator(rng)
    encoded = [(decoder, protocol.encode(message)) for decoder, message in MESSAGES]
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    begin, before = time.monotonic(), 0
    for index in range(number):
        if index == number // 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        decoder, data = rng.choice(encoded)
        data = mutate(data)
        try:
            outcomes["messages" if isinstance(decoder(data), Message) else "crashes"] += 1
        except ProtocolError:
            outcomes["refused"] += 1
        except Exception:
            outcomes["crashes"] += 1
            failures.append(f"decoder input {index} ({data[:80]!r}…): {traceback.format_exc()}")
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if growth > MAX_GROWTH_BYTES:
        failures.append(f"decoding took {growth} bytes more after the first tenth; {MAX_GROWTH_BYTES} are allowed")
    return {
        "part": "decoder",
        "inputs": number,
        **{kind: outcomes[kind] for kind in ("messages", "refused", "crashes")},
        "peak_growth_bytes": growth,
        "seconds": round(time.monotonic() - begin, 1),
        "failures": failures[:20],
    }


class Descriptors:
    """What a peer may attach to a frame: memory that is sound, memory that is not, and what is no memory at all."""

    def __init__(self) -> None:
        self.page = SharedMemory.create("fuzz-page", 4096)
        # The packer writes into this one, and would into a timeline's generation.
        self.acks = SharedMemory.create("fuzz-acks", 4096)
        self.chunk = SharedMemory.create("fuzz-chunk", 2 * MIB)
        read_only = os.memfd_create("fuzz-read-only", os.MFD_ALLOW_SEALING)
        os.ftruncate(read_only, 4096)
        fcntl.fcntl(read_only, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        unsealed = os.memfd_create("fuzz-unsealed")
        os.ftruncate(unsealed, 4096)
        self.vast = create_memfd("fuzz-vast", 1 << 50)
        self.foreign = [
            *(read_only, unsealed, create_memfd("fuzz-small", 100), self.vast),
            *os.pipe(),
            *(sock.detach() for sock in socket.socketpair()),
            *(os.open(path, os.O_RDONLY) for path in ("/dev/null", "/")),
            os.open("/dev/zero", os.O_RDWR),
        ]

    def forget(self) -> None:
        """Undo what packers wrote in earlier visits: an ack where the next worker's timeline has its generation voids all of
        that worker's outputs, and so does what was noted of a worker that was taken for dead."""
        self.page.buffer[:] = struct.pack("<Q", 1) + bytes(self.page.nbytes - 8)
        self.chunk.buffer[:4096] = bytes(4096)
        os.pwrite(self.vast, bytes(4096), 0)

    def some(self, rng: random.Random, message: Message | None = None) -> list[int]:
        """What ``message`` needs, most of the time, so that frames get past the first check; else anything."""
        needs = isinstance(message, MapAcks | MapChunk | MapTimeline) or (
            isinstance(message, Skeleton) and message.body.host_nbytes
        )
        if rng.random() < 0.75:
            memory = (self.acks,) if isinstance(message, MapAcks) else (self.page, self.chunk)
            return [rng.choice(memory).fd] if needs else []
        return rng.choices(self.foreign, k=rng.choice((1, 1, 1, 1, 2, 5)))

    def close(self) -> None:
        for memory in (self.page, self.acks, self.chunk):
            memory.close()
        close_fds(self.foreign)


class Peer:
    """A fuzzed connection: any frame may go out, what comes back must be of the protocol."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.socket: socket.socket = channel._socket

    def send(self, data: bytes, fds: list[int]) -> None:
        """PeerClosed where the packer has hung up already."""
        try:
            self.socket.sendmsg(
                [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
            )
        except (BrokenPipeError, ConnectionError) as error:
            raise PeerClosed(str(error)) from error


def _is_meant(data: bytes) -> bool:
    """Whether an operator's frame happens to say what the packer should do: to drain, or to pause the honest session."""
    try:
        message = protocol.from_operator(data)
    except ProtocolError:
        return False
    return isinstance(message, protocol.Drain | protocol.SetPaused)


class Live:
    """Frames to a live packer, one visit after another, each as nobody, a worker, an engine or an operator."""

    def __init__(self, packer: Packer, seed: int) -> None:
        self.packer = packer
        self.rng = random.Random(seed)
        self.mutate = Mutator(self.rng)
        self.descriptors = Descriptors()
        self.outcomes: Counter[str] = Counter()
        self.frames = 0
        self.leases: list[int] = []  # of the engine of this visit
        self.exported: list[str] = []  # by the worker of this visit, and waiting for their second message
        self.delivered = 0
        self._syncs = 0

    def run(self, frames: int) -> None:
        """At least so many frames more."""
        until = self.frames + frames
        while self.frames < until:
            visits = self.visit_as_nobody, self.visit_as_worker, self.visit_as_worker, self.visit_as_engine
            self.rng.choice((*visits, self.visit_as_operator))()

    def close(self) -> None:
        self.descriptors.close()

    def count(self, outcome: str) -> None:
        self.frames += 1
        self.outcomes[outcome] += 1

    # -- who sends -----------------------------------------------------------------------------------------------------

    def visit_as_nobody(self) -> None:
        """One frame instead of a Hello. Only the end of the connection is right: nobody here can prove the key."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(self.packer.socket)
            challenge, peer = sock.recv(1000), Peer(Channel(sock, protocol.from_server))
            assert challenge, "the packer closed a connection before it said anything"
            hello = protocol.encode(
                protocol.Hello(protocol.VERSION, "engine", "fuzz-session", bytes(32), self.rng.randbytes(32))
            )
            with contextlib.suppress(PeerClosed):
                peer.send(hello if self.rng.random() < 0.1 else self.mutate(hello), self.descriptors.some(self.rng))
            with contextlib.suppress(ConnectionError):
                while sock.recv(70_000):
                    pass
            self.count("closed")

    def visit_as_worker(self) -> None:
        with self.joined() as (engine, worker):
            for _ in range(FRAMES_A_VISIT):
                message = self.from_worker()
                try:
                    worker.send(self.frame(message), self.descriptors.some(self.rng, message))
                    self.sync(engine, worker, withdraw=self.rng.random() < 0.7)
                except PeerClosed:
                    self.count("closed")
                    return
                self.count("answered")

    def visit_as_engine(self) -> None:
        with self.joined() as (engine, worker):
            for _ in range(FRAMES_A_VISIT):
                lease = self.rng.choice([*self.leases, *_NUMBERS])
                data = self.frame(Release((lease,) * self.rng.choice((0, 1, 1, 2, 1024))))
                try:
                    engine.send(data, self.descriptors.some(self.rng))
                    wait_until(lambda: not unread_bytes(engine.socket), "the packer takes an engine's frame")
                    self.sync(engine, worker, withdraw=False)
                except PeerClosed:
                    self.count("closed")
                    return
                self.count("answered")

    def visit_as_operator(self) -> None:
        """Anything but what would end the packer, or pause the honest session."""
        with contextlib.closing(self.packer.connect("operator", self.rng.randbytes(8).hex())) as channel:
            operator = Peer(channel)
            for _ in range(FRAMES_A_VISIT):
                nobodys = protocol.SetPaused(self.rng.random() < 0.5, "nobody's", self.rng.choice((0.0, 0.01, 86400.0)))
                data = self.frame(self.rng.choice((protocol.GetStatus(), protocol.Ping(), nobodys)))
                if _is_meant(data):
                    data = protocol.encode(nobodys)
                try:
                    operator.send(data, self.descriptors.some(self.rng))
                    operator.send(protocol.encode(protocol.GetStatus()), [])
                    self.await_status(channel)
                except PeerClosed:
                    self.count("closed")
                    return
                self.count("answered")

    def await_status(self, channel: Channel) -> None:
        """The answer to our question; those to the frame before it, where that was a question too, come later or never."""
        while True:
            received = channel.receive(DEADLINE_S)
            assert received is not None, "the packer does not answer an operator"
            close_fds(received[1])
            if isinstance(received[0], protocol.StatusIs):
                return

    @contextlib.contextmanager
    def joined(self) -> Iterator[tuple[Peer, Peer]]:
        """An engine and its worker, past their handshakes, most of the time with a timeline and a chunk."""
        # On a busy machine a packer may be so far behind with the ends of earlier visits that it takes no more sessions.
        wait_until(
            lambda: footprint(self.packer)["threads"] < _MOST_THREADS, "the packer ends earlier sessions", FINISH_S
        )
        name, self.leases, self.exported = self.rng.randbytes(8).hex(), [], []
        with (
            contextlib.closing(self.packer.connect("engine", name)) as engine,
            contextlib.closing(self.packer.connect("worker", name)) as worker,
        ):
            self.descriptors.forget()
            bare = self.rng.random() < 0.3
            if not bare or self.rng.random() < 0.3:
                worker.send(
                    MapTimeline(), self.rng.choice(self.descriptors.foreign) if bare else self.descriptors.page.fd
                )
            if not bare:
                worker.send(MapChunk(0, self.descriptors.chunk.nbytes), self.descriptors.chunk.fd)
            yield Peer(engine), Peer(worker)

    # -- what is sent --------------------------------------------------------------------------------------------------

    def frame(self, message: Message) -> bytes:
        data = protocol.encode(message)
        return data if self.rng.random() < 0.85 else self.mutate(data)

    def piece(self) -> Piece:
        choose = self.rng.choice
        if self.rng.random() < 0.95:
            return Piece(0, choose((0, 1, 4096, MIB)), choose((1, 100, 4096, MIB)))
        return Piece(choose((0, 1, 2)), choose(_SIZES), max(choose(_SIZES), 1))

    def from_worker(self) -> Message:
        """A message that the decoder takes, and that makes sense often enough for whole outputs to get through."""
        rng, choose = self.rng, self.rng.choice
        ready = choose((0, *(1,) * 15, 2, 1 << 62))
        kind = choose(("export", "export", "export", "second", "second", "second", "second", "probe", "map"))
        if kind == "second" and (self.exported or rng.random() < 0.1):
            output = choose(_OUTPUTS)
            if self.exported and rng.random() < 0.95:
                output = self.exported.pop(rng.randrange(len(self.exported)))
            if rng.random() < 0.2:
                return Withdraw(output, choose(("", "out of memory", "\0\n\x1b[2J" * 100)))
            payload, nbytes = rng.randbytes(choose((0, 100, protocol.MAX_PAYLOAD_BYTES))), choose((0, 0, 0, 100))
            body = Body(payload, rng.randbytes(32), nbytes, choose((0, 0, 100)))
            return Skeleton(output, body, plain=rng.random() < 0.5)
        if kind == "probe":
            return Probe(ready, self.piece())
        if kind == "map":
            number, nbytes = choose((1, 1, 1, 0, 2)), max(choose(_SIZES), 1)
            return choose(
                (MapChunk(number, nbytes), MapChunk(number, 4096), UnmapChunk(number), MapTimeline(), MapAcks())
            )
        output = choose(_OUTPUTS) if rng.random() < 0.05 else f"output-{self.frames}"
        self.exported.append(output)
        pieces = tuple(self.piece() for _ in range(choose((0, 1, 1, 1, 2, 30))))
        event = rng.randbytes(64) if rng.random() < 0.05 else b""
        return Export(output, ready, pieces, event, tuple(choose((1, 2)) for _ in range(choose((0, 0, 0, 0, 0, 1, 3)))))

    # -- what comes back -----------------------------------------------------------------------------------------------

    def sync(self, engine: Peer, worker: Peer, *, withdraw: bool) -> None:
        """An output that needs no copy, whose answer says that all before it was handled. PeerClosed where the end came.

        The worker's Ack if it is withdrawn; else the engine's OUTPUT_READY too.
        """
        self._syncs += 1
        name, mac = f"sync-{self._syncs}", bytes(32)
        worker.channel.send(Export(name, 0, ()))
        worker.channel.send(Withdraw(name) if withdraw else Skeleton(name, Body(b"", mac)))
        missing = {worker} if withdraw else {worker, engine}
        deadline = time.monotonic() + DEADLINE_S
        while missing:
            ready, _, _ = select.select([engine.socket, worker.socket], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise AssertionError(f"frame {self.frames}: neither an answer nor the end came within {DEADLINE_S:g} s")
            for peer in (engine, worker):
                if peer.socket not in ready:
                    continue
                received = peer.channel.receive(0)
                if received is None:
                    continue
                message, fds = received
                close_fds(fds)
                if isinstance(message, OutputReady):
                    self.take(engine, message)
                if isinstance(message, OutputReady | Ack) and message.output == name:
                    missing.discard(peer)

    def take(self, engine: Peer, ready: OutputReady) -> None:
        """Give back most leases at once, keep some to be given back by a frame."""
        leases = [lease.lease for lease in ready.leases]
        self.delivered += bool(leases)
        if self.rng.random() < 0.3:
            self.leases.extend(leases)
        elif leases:
            engine.channel.send(Release(tuple(leases)))


def unread_bytes(sock: socket.socket) -> int:
    """What was sent on an AF_UNIX socket and not taken by the other end yet (SIOCOUTQ)."""
    return int(struct.unpack("i", fcntl.ioctl(sock, 0x5411, bytes(4)))[0])


class Honest:
    """A session beside the fuzzed ones whose transfers must all be right."""

    def __init__(self, packer: Packer) -> None:
        self.transfers = 0
        self.failure = ""
        self.session = ""
        self._packer = packer
        self._stop = threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honest", daemon=True)
        self._thread.start()
        assert self._started.wait(DEADLINE_S), self.failure

    def _run(self) -> None:
        try:
            with session(self._packer) as (engine, worker):
                self.session = engine.session
                while not self._stop.is_set():
                    try:
                        transfer(engine, worker, 100_000)
                    except AssertionError:
                        self.failure = f"the worker has {worker.channel.receive(0)}, "
                        raise
                    self.transfers += 1
                    self._started.set()
                    self._stop.wait(0.005)  # leave the processor to the fuzzer
        except (PackerError, AssertionError, OSError):
            self.failure += traceback.format_exc()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(DEADLINE_S)


def open_files(packer: Packer) -> list[str]:
    """What the packer's descriptors are; one may be closed while we look."""
    names = []
    for fd in Path("/proc", str(packer.process.pid), "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(fd))
    return sorted(names)


def footprint(packer: Packer) -> dict[str, int]:
    """What the packer holds: descriptors, threads, and its own resident memory; the segments of its pools apart.

    Those have a bound of their own, and the honest session's pool grows where its leases come back late.
    """
    process, names = Path("/proc", str(packer.process.pid)), open_files(packer)
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    segments = [name for name in names if "packer-segment" in name]
    return {
        "fds": len(names) - len(segments),
        "segments": len(segments) // 2,  # a mapping holds a descriptor of its own
        "threads": int(status["Threads"]),
        "rss_bytes": int(status["RssAnon"].split()[0]) << 10,
    }


def fuzz_live(number: int, seed: int) -> dict[str, Any]:
    """A packer under ``number`` frames. ``failures`` lists everything that was not as the module's docstring wants it."""
    failures: list[str] = []
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="packer-fuzz-") as directory,
        running_packer(Path(directory) / "run", log_level="info", pool_max_bytes="32MiB") as packer,
        contextlib.closing(Honest(packer)) as honest,
        contextlib.closing(Live(packer, seed)) as live,
    ):
        idle = footprint(packer)

        def settled() -> dict[str, int]:
            """The footprint once the fuzzed sessions are over."""
            wait_until(lambda: footprint(packer)["threads"] <= idle["threads"], "the threads of fuzzed sessions end")
            wait_until(lambda: footprint(packer)["fds"] <= idle["fds"], "the descriptors of fuzzed sessions are closed")
            return footprint(packer)

        after_a_tenth = at_the_end = idle
        try:
            live.run(number // 10)
            after_a_tenth = settled()
            live.run(number - live.frames)
            at_the_end = settled()
        except (PackerError, AssertionError, OSError):
            failures.append(f"{traceback.format_exc()}with {open_files(packer)} open, {idle} when idle")
        growth = at_the_end["rss_bytes"] - after_a_tenth["rss_bytes"]
        if growth > MAX_GROWTH_BYTES:
            failures.append(f"the packer grew by {growth} bytes; {MAX_GROWTH_BYTES} are allowed")
        if packer.process.poll() is not None:
            failures.append(f"the packer died with code {packer.process.returncode}")
        honest.close()
        with contextlib.suppress(AssertionError):
            wait_until(lambda: footprint(packer)["segments"] == 0, "every pool gives its segments back")
        if left := footprint(packer)["segments"]:
            failures.append(f"{left} segments are left after the last session")
        log = packer.log
        lines = [line for line in log.splitlines() if honest.session in line]
        if failures:
            failures.append("\n".join(["the log of the honest session:", *lines[:20]]))
        if honest.failure:
            failures.append("\n".join([f"the honest session: {honest.failure}", *lines[:20]]))
        tracebacks = log.count("Traceback")
        if tracebacks:
            at = log.index("Traceback")
            failures.append(
                f"{tracebacks} tracebacks in the packer's log, the first:\n{log[max(at - 300, 0) : at + 3000]}"
            )
        return {
            "part": "live",
            "frames": live.frames,
            **{kind: live.outcomes[kind] for kind in ("answered", "closed")},
            "delivered_with_leases": live.delivered,
            "honest_transfers": honest.transfers,
            "tracebacks": tracebacks,
            "after_a_tenth": after_a_tenth,
            "at_the_end": at_the_end,
            "max_growth_bytes": MAX_GROWTH_BYTES,
            "honest_pool": [line.split("] ", 1)[1] for line in lines if "pool grew" in line],
            "log_bytes": len(log),
            "seconds": round(time.monotonic() - begin, 1),
            "failures": failures[:20],
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", type=int, default=100_000, help="inputs for the decoders")
    parser.add_argument("--live", type=int, default=3_000, help="frames for a live packer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the result to this file")
    options = parser.parse_args()
    rows = [fuzz_decoders(options.decoder, options.seed), fuzz_live(options.live, options.seed)]
    command = shlex.join(["python", "-m", "tests.fuzz", *sys.argv[1:]])
    machine.write(options.json, machine.result("fuzz", rows, command=command, seed=options.seed))
    failures = [failure for row in rows for failure in row["failures"]]
    for failure in failures:
        print(failure, file=sys.stderr)
    print(json.dumps([{key: value for key, value in row.items() if key != "failures"} for row in rows]))
    decoder, live = rows
    print(
        f"fuzz, seed {options.seed}: {decoder['inputs']} decoder inputs, {decoder['crashes']} crashes;"
        f" {live['frames']} live frames, {live['tracebacks']} tracebacks, {len(failures)} failures"
    )
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
