"""Every order of what can happen to an output, with a real session: its threads, channels, memfds, and a pool with little room.

One worker exports, completes, withdraws, dies; one engine reads or does not. Whatever they do, each output ends once, what is
published is complete and right, what was coming is taken back, and nothing is left over.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import Counter
from unittest import mock

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from packer_process import MAC, MIB, wait_until

from packer_service.config import Settings
from packer_service.devices.host import HostDevice, HostStream
from packer_service.errors import DeviceBusy, DeviceError, PeerClosed
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage
from packer_service.pool.budget import Budget
from packer_service.pool.pool import Pool
from packer_service.sessions.engine import EngineSession
from packer_service.sessions.output import COPYING, TRANSITIONS, Event, Output, State
from packer_service.sessions.worker import WorkerSession
from packer_service.stats import Stats
from packer_service.wire import protocol
from packer_service.wire.channel import Channel, close_fds
from packer_service.wire.protocol import (
    Ack,
    Body,
    Export,
    MapChunk,
    MapTimeline,
    Nack,
    OutputComing,
    OutputGone,
    OutputReady,
    Piece,
    Ping,
    Pong,
    Release,
    Skeleton,
    Withdraw,
)

DEADLINE_S = 10.0
POOL = 2 * MIB
SMALL, LARGE = 1000, 700_000  # bytes of a piece: of the large ones two find room, and not three
SLOT = 2 * LARGE
SLOTS = 24
PAYLOAD = bytes(3000)  # a few unread fill a connection


class FailingChannel(Channel):
    """The engine's, on which OUTPUT_READY fails while ``broken``: a fault of the kernel's that cannot be had at will."""

    broken = False

    def try_send(self, message, fd=None):
        if self.broken and isinstance(message, OutputReady):
            raise OSError(109, "Too many references")
        return super().try_send(message, fd)


def connection() -> tuple[socket.socket, socket.socket]:
    """Ends of one that little fits."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    return pair


class Exported:
    """One output as its worker knows it."""

    def __init__(self, number: int, sizes: tuple[int, ...], ready: int, own: int | None) -> None:
        self.id = f"output-{number}"
        self.sizes = sizes
        self.ready = ready
        self.chunk, self.offset = own or 0, number * SLOT  # its own chunk, if any, is the same memory
        self.data = [bytes([number + 1]) * nbytes for nbytes in sizes]
        self.second: Skeleton | Withdraw | None = None
        self.complete = not sizes
        self.incomplete = False  # the worker said that it will never be complete

    def pieces(self) -> tuple[Piece, ...]:
        return tuple(Piece(self.chunk, self.offset + n * LARGE, nbytes) for n, nbytes in enumerate(self.sizes))


def check_invariants(output: Output) -> None:
    """What holds in the state that was just entered."""
    if output.state in COPYING:
        assert output.marker is not None
        assert len(output.regions) == len(output.export.pieces)
    if output.state in (State.QUEUED_WHOLE, State.COPYING_WHOLE, State.DECIDING):
        assert output.second is not None
    if output.state is State.PUBLISHING:
        assert isinstance(output.second, Skeleton)
        assert not output.failure
    if output.state in (State.FAILING, State.DECLINED, State.ENDED):
        assert (output.regions, output.host_fd) == ([], None)
    if output.state is State.DECLINED:
        assert output.failure


class Life:
    """A packer's session with one engine and one worker, both of which are this thread."""

    # -- both sides ----------------------------------------------------------------------------------------------------

    def __init__(self, end: str) -> None:
        self.end = end
        self.stack = contextlib.ExitStack()
        self.fds_before = len(os.listdir("/proc/self/fd"))
        self.alive = True  # the worker; of a process's own record lock it cannot be asked whether it is held
        self.broken = False  # OUTPUT_READY could not be sent for a while
        self.defects: list[str] = []
        self.walked: Counter[tuple[str, State]] = Counter()
        self.exported: dict[str, Exported] = {}
        self.answers: dict[str, list[str]] = {}
        self.ends: dict[str, list[OutputReady]] = {}
        self.coming: dict[int, OutputComing] = {}
        self.segments: dict[int, SharedMemory] = {}
        self.leases: list[int] = []
        self.workers_gone = 0
        enter = self.stack.enter_context
        enter(mock.patch.object(TimelinePage, "owner_lives", self._lives))
        enter(mock.patch.object(Output, "on", self._walk(Output.on)))
        self.trouble: Exception | None = None
        enter(mock.patch.object(HostStream, "copy_to_host", self._copy_to_host(HostStream.copy_to_host)))
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: self.defects.append(record.getMessage()) if record.exc_info else None
        logging.getLogger("packer_service").addHandler(handler)
        self.stack.callback(logging.getLogger("packer_service").removeHandler, handler)
        self.device = enter(contextlib.closing(HostDevice()))
        self.pool = Pool(self.device, Budget(POOL), keep_bytes=POOL, step_bytes=POOL, idle_s=60)
        self.pool.grow(POOL)
        ours, engine = connection()
        self.engine = Channel(engine, protocol.to_engine)
        self.engines_channel = FailingChannel(ours, protocol.from_engine)
        self.engine_session = EngineSession("engine", self.engines_channel, self.pool, str)
        self.engine_thread = self._run(self.engine_session.serve)
        ours, worker = connection()
        self.worker = Channel(worker, protocol.to_worker)
        self.timeline = enter(contextlib.closing(TimelinePage.create()))
        self.arena = enter(contextlib.closing(SharedMemory.create("arena", SLOTS * SLOT)))
        self.session = WorkerSession(
            "worker",
            Channel(ours, protocol.from_worker),
            self.engine_session,
            self.device,
            Settings(wait_s=0.01),
            threading.Event(),
            Stats(),
            self.defects.append,
        )
        self.thread = self._run(self.session.serve)
        self.send(MapTimeline(), self.timeline.fd)
        self.send(MapChunk(0, SLOTS * SLOT), self.arena.fd)

    def _lives(self) -> bool:
        return self.alive

    def _run(self, serve) -> threading.Thread:
        def run() -> None:
            try:
                serve()
            except Exception as error:
                self.defects.append(repr(error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _walk(self, on):
        """``Output.on``, looked at. A session in which this fails has a defect, and says so."""

        def walk(output: Output, event: Event) -> State:
            before = output.state
            if event in (Event.OVER, Event.SECOND):
                assert self.session._outputs.lock.locked()
            on(output, event)
            assert TRANSITIONS[before][event] is output.state
            self.walked[output.id, output.state] += 1
            if before not in (State.QUEUED, State.QUEUED_WHOLE, State.COPIED):  # whose rest is sent back after that
                check_invariants(output)
            return output.state

        return walk

    def send(self, message, fd=None) -> None:
        """Also to a packer whose connection is full: it waits for nobody, so it makes room."""
        wait_until(lambda: self.worker.try_send(message, fd), "the packer takes a message", DEADLINE_S)

    # -- the worker ----------------------------------------------------------------------------------------------------

    def export(self, sizes, own) -> None:
        for number in range(len(self.exported), min(len(self.exported) + len(sizes), SLOTS)):
            sent = Exported(number, sizes.pop(), number + 1, number + 1 if own else None)
            self.exported[sent.id] = sent
            if own:
                self.send(MapChunk(number + 1, SLOTS * SLOT), self.arena.fd)
            self.send(Export(sent.id, sent.ready, sent.pieces(), close=(number + 1,) if own else ()))

    def _take_waiting(self, number: int) -> list[Exported]:
        """Outputs without their second message: ``number`` of them, where there are so many."""
        return [sent for sent in self.exported.values() if sent.second is None][:number]

    def skeleton(self, number, plain, host) -> None:
        for sent in self._take_waiting(number):
            sent.second = Skeleton(sent.id, Body(PAYLOAD, MAC, 100 if host else 0), plain)
            self.send(sent.second, self.arena.fd if host else None)

    def withdraw(self, error) -> None:
        for sent in self._take_waiting(1):
            sent.second = Withdraw(sent.id, error)
            self.send(sent.second)

    def complete(self, part) -> None:
        """The device goes on, with some of the outputs that it has not reached."""
        left = [sent for sent in self.exported.values() if not sent.complete and not sent.incomplete]
        for sent in left[: round(part * len(left) + 0.5)]:
            for piece, data in zip(sent.pieces(), sent.data, strict=True):
                self.arena.buffer[piece.offset : piece.offset + piece.nbytes] = data
            sent.complete = True
            self.timeline.counter = max(self.timeline.counter, sent.ready)

    def break_device(self) -> None:
        """It completes nothing of what it has, and the worker says so, in order."""
        for sent in self.exported.values():
            if not sent.complete and not sent.incomplete:
                sent.incomplete = True
                withdrawn = isinstance(sent.second, Withdraw)
                sent.second = sent.second if withdrawn else Withdraw(sent.id, "broken")
                self.send(Withdraw(sent.id, "broken", incomplete=True))

    def read_answers(self) -> None:
        self.send(Ping())
        while self._read_answer(DEADLINE_S) != Pong():
            pass

    def _read_answer(self, timeout_s):
        received = self.worker.receive(timeout_s)
        if received is None:
            return None
        message, fds = received
        assert not fds
        if isinstance(message, (Ack, Nack)):
            self.answers.setdefault(message.output, []).append(type(message).__name__)
        else:
            assert message == Pong(), message
        return message

    def let_it_copy(self) -> None:
        """Until the packer has copied what is complete and found room."""

        def idle() -> bool:
            outputs = self.session._outputs
            with outputs.lock:
                waiting = outputs.within(COPYING)
            return not any(output.export.ready <= self.timeline.counter for output in waiting[:1])

        wait_until(idle, "the copies end", DEADLINE_S)

    # -- the engine ----------------------------------------------------------------------------------------------------

    def read_outputs(self) -> None:
        while self._read_output():
            pass

    def _read_output(self) -> bool:
        try:
            received = self.engine.receive(0.0)
        except PeerClosed:
            return False
        if received is None:
            return False
        message, fds = received
        match message:
            case protocol.MapSegment():
                self.segments[message.segment] = SharedMemory.attach(fds.pop(), message.nbytes)
            case OutputComing():
                assert len(fds) == bool(message.body.host_nbytes)
                assert message.leases[0].lease not in self.coming
                self.coming[message.leases[0].lease] = message
            case OutputGone():
                del self.coming[message.lease]
            case OutputReady():
                self._take_ready(message, fds)
            case protocol.WorkerGone():
                self.workers_gone += 1
            case _:
                raise AssertionError(message)
        close_fds(fds)
        return True

    def _take_ready(self, ready: OutputReady, fds: list[int]) -> None:
        assert not self.workers_gone, "an output came after the end of its worker"
        self.ends.setdefault(ready.output, []).append(ready)
        if ready.error:
            assert not ready.leases
            return
        sent = self.exported[ready.output]
        coming = self.coming.pop(ready.leases[0].lease, None) if ready.leases else None
        assert (ready.body is None) == (coming is not None)
        assert coming is None or (coming.output, coming.leases) == (ready.output, ready.leases)
        if ready.body is not None:
            assert len(fds) == bool(ready.body.host_nbytes)
        for lease, data in zip(ready.leases, sent.data, strict=True):
            buffer = self.segments[lease.segment].buffer
            assert buffer[lease.offset : lease.offset + lease.nbytes] == data, f"{sent.id} is incomplete, or void"
        self.leases += (lease.lease for lease in ready.leases)

    def release(self, which) -> None:
        if self.leases:
            self.engine.send(Release((self.leases.pop(which % len(self.leases)),)))

    def break_sends(self) -> None:
        self.engines_channel.broken = self.broken = True

    def mend_sends(self) -> None:
        self.engines_channel.broken = False

    # -- the packer's device -------------------------------------------------------------------------------------------

    def trouble_device(self) -> None:
        self.trouble = DeviceError("refused") if self.trouble is None else DeviceBusy("not now")

    def leave_device(self) -> None:
        self.trouble = None

    def _copy_to_host(self, copy_to_host):
        def troubled(*args) -> None:
            if self.trouble is not None:
                raise self.trouble
            copy_to_host(*args)

        return troubled

    # -- the end -------------------------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        """And use the memory again; then the device gets to the end of what it had."""
        self.worker.shutdown()
        self.timeline.generation += 1
        self.arena.buffer[: SLOT * len(self.exported)] = b"\xff" * SLOT * len(self.exported)
        self.timeline.counter = 1 << 40

    def finish(self) -> None:
        self.engines_channel.broken, self.trouble = False, None
        if self.end == "all is delivered":
            self.complete(1.0)
            for sent in self._take_waiting(SLOTS):
                sent.second = Withdraw(sent.id)
                self.send(sent.second)
            wait_until(self._all_answered, "every output is answered", DEADLINE_S)
        if self.end == "worker dies":
            self.alive = False
            self.worker.shutdown()
        else:
            self._hang_up()
        if self.end == "engine dies":  # what the server does then
            self.engine.shutdown()
            self.engine_thread.join(DEADLINE_S)
            self.pool.refuse()
            self.session.disconnect()
        wait_until(
            lambda: [self._read_output(), self._drain_answers()] and not self.thread.is_alive(), "the end", DEADLINE_S
        )
        wait_until(
            lambda: not self._read_output() and self.engine_session._outbox.flush(0.0),
            "the engine reads it all",
            DEADLINE_S,
        )
        while self._read_output():
            pass
        if self.end != "engine dies":
            assert not self.coming, "what was coming was not taken back"
        assert not self.session._outputs
        for sent in self.exported.values():
            self._check_end(sent)
        if self.end != "engine dies":
            self.engine.send(Release(tuple(self.leases)))
            wait_until(lambda: not self.pool._regions, "all regions return", DEADLINE_S)
            assert not self.pool._leased
        self.close()
        assert not self.defects, self.defects
        assert len(os.listdir("/proc/self/fd")) == self.fds_before

    def close(self) -> None:
        self.engine_session.disconnect()
        self.engine_thread.join(DEADLINE_S)
        self.engine_session.close()
        self.worker.close()
        self.engine.close()
        for segment in self.segments.values():
            segment.close()
        self.stack.close()

    def _all_answered(self) -> bool:
        self._read_output()
        self._drain_answers()
        return self.answers.keys() == self.exported.keys()

    def _drain_answers(self) -> None:
        with contextlib.suppress(PeerClosed):
            while self._read_answer(0.0):
                pass

    def _check_end(self, sent: Exported) -> None:
        answers, ends = self.answers.get(sent.id, []), self.ends.get(sent.id, [])
        assert len(answers) <= 1
        assert len(ends) <= 1
        assert self.walked[sent.id, State.ENDED] == (sent.id in self._taken()), "it did not end once"
        withdrawn = isinstance(sent.second, Withdraw) and not sent.second.error
        if self.end == "all is delivered":
            assert len(answers) == 1
            engine_hears = answers == ["Ack"] and not withdrawn
            assert len(ends) == engine_hears or sent.incomplete or self.broken
        if self.end == "worker dies" and sent.id in self._taken():
            assert ends or answers == ["Nack"] or withdrawn or self.broken, "the engine would wait for ever"

    def _taken(self) -> set[str]:
        """Outputs that the packer has heard of."""
        return {output for output, _ in self.walked}


SIZES = st.lists(st.sampled_from([(), (SMALL,), (SMALL, LARGE), (LARGE,)]), min_size=1, max_size=4)
STEP = st.one_of(
    st.tuples(st.just(Life.export), SIZES, st.booleans()),
    st.tuples(st.just(Life.skeleton), st.integers(1, 4), st.booleans(), st.booleans()),
    st.tuples(st.just(Life.skeleton), st.integers(1, 4), st.just(True), st.just(False)),
    st.tuples(st.just(Life.withdraw), st.sampled_from(["", "cancelled"])),
    st.tuples(st.just(Life.complete), st.floats(0, 1)),
    st.tuples(st.just(Life.let_it_copy)),
    st.tuples(st.just(Life.read_answers)),
    st.tuples(st.just(Life.read_outputs)),
    st.tuples(st.just(Life.release), st.integers(0)),
    st.tuples(
        st.sampled_from([Life.break_device, Life.break_sends, Life.mend_sends, Life.trouble_device, Life.leave_device])
    ),
)
ENDS = ["all is delivered", "worker dies", "worker hangs up", "engine dies"]


# An example that fails often waits for something that does not come: to make it smaller would take minutes.
@settings(deadline=None, max_examples=50, phases=[Phase.explicit, Phase.generate])
@given(end=st.sampled_from(ENDS), steps=st.lists(STEP, min_size=8, max_size=40))
def test_whatever_happens_each_output_ends_once_and_right_and_nothing_is_left_over(end, steps):
    life = Life(end)
    with contextlib.closing(life.stack):
        for step, *arguments in steps:
            step(life, *arguments)
        life.finish()


def test_what_cannot_follow_ends_the_session_and_publishes_nothing():
    life = Life("worker hangs up")
    with contextlib.closing(life.stack):
        life.stack.enter_context(mock.patch.dict(TRANSITIONS[State.DECIDING], clear=True))
        life.export([(SMALL,)], False)
        life.skeleton(1, False, False)
        life.complete(1.0)
        with pytest.raises(PeerClosed):
            life.worker.receive(DEADLINE_S)
        life._hang_up()
        life.thread.join(DEADLINE_S)
        assert not life.thread.is_alive()
        life.read_outputs()
        assert not life.ends
        assert life.defects
        life.close()
