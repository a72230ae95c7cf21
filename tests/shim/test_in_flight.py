"""Every order of what can happen to a worker's outputs: a real exporter, device and ack page, and a scripted packer.

The packer here is a model: it remembers what it was told on this connection, and answers when the walk says so. Nothing has a
thread: the walk is the main thread, the export thread and the link's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from packer_service.config import Settings
from packer_service.memory.ack_page import AckPage
from packer_service.wire.protocol import Ack, Export, MapAcks, Message, Nack, Skeleton, Withdraw

torch = pytest.importorskip("torch")

from stalling_device import Failing  # noqa: E402

from worker_shim.worker import exchange, exporter  # noqa: E402
from worker_shim.worker.device import Allocation, Signal  # noqa: E402
from worker_shim.worker.in_flight import Event, InFlight, State  # noqa: E402

MIB = 1 << 20
KINDS = {"small": 1000, "an arena and a half": MIB, "direct": 5 * MIB, "nothing": 0}
SETTINGS = {"arena_max_bytes": "4MiB", "arena_step_bytes": "2MiB", "overflow_max_bytes": "3MiB", "wait_s": 0.0}
TOLD = {State.EXPORTED, State.SUBMITTED, State.WITHDRAWN, State.LOST, State.DROPPED}


class Device(Failing):
    """Host memory that can leave directly, too, and a signal that fails when told. It counts the signals that come back."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.announced = 0  # the value that an output has already, when its signal is given
        self.given: Counter[int] = Counter()  # for how many outputs
        self.retired: Counter[int] = Counter()

    def find_allocation(self, tensor: torch.Tensor) -> Allocation:
        return Allocation(b"", tensor.nbytes, 0)

    def next_signal(self) -> Signal:
        self.announced = self._value + 1
        self.given[self.announced] += 1
        return super().next_signal()

    def signal(self) -> Signal:
        announced, self.announced = self.announced, 0
        if self.breaks:
            raise RuntimeError("the device is broken")
        if announced != self._value + 1:
            self.given[self._value + 1] += 1
        return super().signal()

    def retire(self, signal: Signal) -> None:
        self.retired[signal.ready] += 1


@dataclass
class Packer:
    """What a packer knows of outputs on one connection: which were exported, and the last word on each."""

    exported: dict[str, Export] = field(default_factory=dict)
    last: dict[str, Message] = field(default_factory=dict)
    page: AckPage | None = None

    def hear(self, message: Message, fd: int | None) -> None:
        match message:
            case Export():
                assert message.output not in self.exported, "exported twice on one connection"
                self.exported[message.output] = message
            case Withdraw(incomplete=True):
                if message.output in self.exported:
                    self.last[message.output] = message
            case Skeleton() | Withdraw():
                assert message.output in self.exported, "the rest of an output that was not exported, or is answered"
                assert message.output not in self.last, "a second last word"
                if isinstance(message, Skeleton):
                    assert bool(message.body.host_nbytes) == (fd is not None)
                self.last[message.output] = message
            case MapAcks():
                assert fd is not None
                self.page = AckPage.attach(os.dup(fd))

    def forget(self, output_id: str) -> None:
        del self.exported[output_id], self.last[output_id]

    def close(self) -> None:
        if self.page is not None:
            self.page.close()


class ScriptedLink:
    """A link whose packer is a model, and whose connection ends when the walk says so."""

    def __init__(self, connect: Any, client: Any, settings: Settings, *, name: str) -> None:
        self.lock = threading.RLock()
        self.connections = 0
        self.packer: Packer | None = None
        self._client = client

    @property
    def connected(self) -> bool:
        return self.packer is not None

    def open(self, *_: Any) -> None:
        with self.lock:
            packets = self._client.resume(None)
            self.connections += 1
            self.packer = Packer()
            for message, fd in packets:
                self.packer.hear(message, fd)

    def end(self) -> None:
        assert self.packer is not None
        self.packer.close()
        with self.lock:
            self.packer = None
            self._client.suspend()

    def post(self, message: Message, fd: int | None = None) -> None:
        assert self.lock._is_owned()  # type: ignore[attr-defined]
        if self.packer is not None:
            self.packer.hear(message, fd)

    def start(self) -> None:
        pass

    def finish(self, timeout_s: float) -> None:
        if self.packer is not None:
            self.end()


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


@dataclass
class Known:
    """What the walk knows of one output."""

    output: InFlight
    fill: int
    nbytes: int
    passed_on: bool = False  # to the export thread, or submitted
    withdrawn: bool = False
    answered: bool = False  # acknowledged, on the page or by message, or withdrawn before anybody heard of it
    hosts: list[Any] = field(default_factory=list)


class Walk(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(exchange, "Link", ScriptedLink)
        self.settled: Counter[str] = Counter()
        self.fallbacks: list[tuple[InFlight, str]] = []
        self.fell_back: Counter[str] = Counter()
        self.known: dict[str, Known] = {}
        self.ids = itertools.count()
        self.device = Device()
        self.exporter = exporter.Exporter(
            Settings.load(SETTINGS, {}),
            self.device,
            socket="",
            key=b"",
            session="",
            mac_key=b"m" * 32,
            on_settled=lambda output_id: self.settled.update([output_id]),
            on_fallback=self._fall_back,
        )
        self.exchange = self.exporter.exchange
        self.link: Any = self.exchange.link

    def _fall_back(self, output: InFlight, reason: str) -> None:
        self.fell_back[output.output_id] += 1
        self.fallbacks.append((output, reason))

    # -- the main thread -----------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(sorted(KINDS)), rest=st.sampled_from(["plain", "host array", "long", "unpicklable"]))
    def stage(self, kind: str, rest: str) -> None:
        self._stage(kind, rest)

    def _stage(self, kind: str, rest: str) -> Known | None:
        number = next(self.ids)
        fill, nbytes, output_id = number % 251 + 1, KINDS[kind], f"output-{number}"
        content: dict[str, Any] = {"text": output_id}
        if nbytes:
            content["tensor"] = torch.full((nbytes,), fill, dtype=torch.uint8)
        if rest == "host array":
            content["array"] = torch.full((5000,), fill, dtype=torch.uint8).numpy()
        elif rest == "long":
            content["text"] = output_id + "x" * 40_000
        elif rest == "unpicklable":
            content["bad"] = Unpicklable()
        output = None
        with contextlib.suppress(RuntimeError):
            output = self.exporter.stage(content, output_id)
        if output is not None:
            self.known[output_id] = Known(output, fill, nbytes)
        return self.known.get(output_id)

    @rule(kind=st.sampled_from(sorted(KINDS)), rest=st.sampled_from(["plain", "host array", "long"]))
    def send(self, kind: str, rest: str) -> None:
        """Both halves at once, as the worker does it."""
        if (known := self._stage(kind, rest)) is not None:
            self._submit(known, now=True)

    @rule(now=st.booleans(), data=st.data())
    @precondition(lambda self: self._waiting())
    def submit(self, now: bool, data: st.DataObject) -> None:
        self._submit(data.draw(st.sampled_from(self._waiting())), now)

    def _submit(self, known: Known, now: bool) -> None:
        known.passed_on = True
        if now and self.exporter.submit_now(known.output):
            return
        try:
            self.exporter.submit(known.output)
        except TypeError:
            assert known.output.state in (State.WITHDRAWN, State.DROPPED, State.SETTLED)
            known.withdrawn = True
            known.answered = known.answered or known.output.state is State.SETTLED

    @rule(data=st.data())
    @precondition(lambda self: self._waiting())
    def withdraw(self, data: st.DataObject) -> None:
        """The engine could not be promised it."""
        known = data.draw(st.sampled_from(self._waiting()))
        known.passed_on = True
        before = known.output.state
        self.exporter.withdraw(known.output)
        known.withdrawn = True
        known.answered = known.answered or before is State.BESIDE or bool(self.exporter.broken)

    def _waiting(self) -> list[Known]:
        return [known for known in self.known.values() if not known.passed_on]

    # -- the packer ----------------------------------------------------------------------------------------------------

    def _answerable(self) -> list[str]:
        return list(self.link.packer.last) if self.link.packer is not None else []

    @rule(data=st.data(), answer=st.sampled_from(["page", "message", "decline"]))
    @precondition(lambda self: self._answerable())
    def answer(self, data: st.DataObject, answer: str) -> None:
        output_id = data.draw(st.sampled_from(self._answerable()))
        self._answer(output_id, answer)

    def _answer(self, output_id: str, answer: str) -> None:
        packer = self.link.packer
        export = packer.exported[output_id]
        self._assert_readable(export)
        last = packer.last[output_id]
        packer.forget(output_id)
        if answer == "decline" and isinstance(last, Skeleton):
            self.exchange.take(Nack(output_id, "no room"))
        elif answer == "page" and packer.page.put(export.ready):
            self._note_answered(output_id)
        else:
            self._note_answered(output_id)
            self.exchange.take(Ack(output_id))

    def _note_answered(self, output_id: str) -> None:
        if output_id in self.known:  # else nobody counts it: it could not be staged
            self.known[output_id].answered = True

    def _assert_readable(self, export: Export) -> None:
        """The packer finds in memory what was staged there."""
        known = self.known.get(export.output)
        if known is None:
            return
        for piece in export.pieces:
            if piece.chunk in export.close:
                memory = known.output.beside[export.pieces.index(piece)]
            else:
                memory = self.exporter.placement.arena._chunks[piece.chunk][0].tensor
            assert (memory[piece.offset : piece.offset + known.nbytes] == known.fill).all(), (
                "memory given back too early"
            )

    @rule(data=st.data())
    @precondition(lambda self: any(known.output.state is State.SETTLED for known in self.known.values()))
    def answer_late(self, data: st.DataObject) -> None:
        ended = [output_id for output_id, known in self.known.items() if known.output.state is State.SETTLED]
        before = self.settled.copy(), self.fell_back.copy()
        self.exchange._take_answer(data.draw(st.sampled_from(ended)), Event.ACK, "late")
        self.exchange._take_answer(data.draw(st.sampled_from(ended)), Event.FALL_BACK, "late")
        assert (self.settled, self.fell_back) == before

    @rule(give_up=st.booleans())
    def end_or_make_connection(self, give_up: bool) -> None:
        if self.link.connected:
            self.link.end()
        elif give_up and not self.exporter.broken:
            for known in self.known.values():
                known.answered = known.answered or known.withdrawn  # nobody waits for it, and nobody reads it any more
            self.exchange.give_up("the packer is gone")
        else:
            self._connect()

    def _connect(self) -> None:
        self.link.open()
        not_acknowledged = {output_id for output_id, known in self.known.items() if known.output.state in TOLD}
        exported = self.link.packer.exported.keys() & self.known.keys()
        assert exported == not_acknowledged
        assert not any(self.known[output_id].answered for output_id in exported), (
            "it was acknowledged, and is exported again"
        )

    # -- the device ----------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["stalls", "cannot signal", "breaks", "goes on"]))
    def device_changes(self, what: str) -> None:
        match what:
            case "stalls":
                self.device.stalled = True
            case "cannot signal":
                self.device.breaks = True
            case "breaks":
                self.device.why = "an illegal address"
                self.exchange.look()
                left = [output for output in self.exchange.pending.values() if output.allows(Event.LOSE)]
                assert all(self.device.reached(output.signal.ready) for output in left)
            case "goes on":
                self._go_on()

    def _go_on(self) -> None:
        self.device.stalled, self.device.breaks, self.device.why = False, False, ""
        self.device.timeline.counter = self.device._value

    @rule()
    def take_acks(self) -> None:
        self.exporter.take_acks()
        for output_id, known in self.known.items():
            if known.answered:
                assert known.output.state is State.SETTLED
                assert self.settled[output_id] == 1

    @rule()
    @precondition(lambda self: self.fallbacks)
    def send_fallback(self) -> None:
        """What the export thread does with it."""
        output, _ = self.fallbacks.pop(0)
        assert output.state is State.FALLING_BACK
        known = self.known[output.output_id]
        if not output.error:
            rebuilt = self.exporter.rebuild(output)
            assert rebuilt["text"].startswith(output.output_id)
            assert known.nbytes == 0 or (rebuilt["tensor"] == known.fill).all(), "memory given back too early"
            del rebuilt
        self.exporter.release(output)
        self.exporter.release(output)
        self.settled.update([output.output_id])

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_held_by_what_is_settled_and_everything_by_the_rest(self) -> None:
        if not hasattr(self, "link"):
            return
        overflow = 0
        for output_id, known in self.known.items():
            output = known.output
            if output.host is not None and output.host not in known.hosts:
                known.hosts.append(output.host)
            overflow += output.overflow_bytes
            ended = output.state is State.SETTLED
            assert self.settled[output_id] == ended
            assert (output_id in self.exchange.pending) == (output.state in TOLD)
            if ended:
                held = [*output.slots, *output.beside, output.host, output.signal.ready, output.overflow_bytes]
                assert not any(bool(one) for one in held)
                assert output.content is None
            elif known.nbytes:
                assert output.slots or output.beside
            assert all(host._closed == ended for host in known.hosts)
            assert known.answered or not ended or self.fell_back[output_id], "it is settled, and nobody said so"
        assert overflow + self.exporter.placement.overflow_left == 3 * MIB
        assert max(self.settled.values(), default=0) <= 1
        assert self.device.retired <= self.device.given
        assert max(self.fell_back.values(), default=0) <= 1
        taken = sum(len(extents._taken) for _, extents in self.exporter.placement.arena._chunks.values())
        abandoned = [one for name, one in self.exchange.pending.items() if name not in self.known]
        assert taken == sum(len(o.slots) for o in [*abandoned, *(known.output for known in self.known.values())])

    def teardown(self) -> None:
        """Everything ends: nothing is lost, and nothing stays behind."""
        try:
            if not hasattr(self, "link"):
                return
            self._go_on()
            for known in self._waiting():
                self._submit(known, now=False)
            if not self.link.connected:
                self._connect()
            for output_id in self._answerable():
                self._answer(output_id, "message")
            self.exporter.take_acks()
            while self.fallbacks:
                self.send_fallback()
            self.nothing_is_held_by_what_is_settled_and_everything_by_the_rest()
            assert self.settled == Counter(self.known.keys())
            assert not self.exchange.pending
            assert self.device.retired == self.device.given
            assert self.exporter.placement.arena.idle
            assert self.exporter.placement.overflow_left == 3 * MIB
            assert not [number for number in self.exchange.imports._mapped if number >= 1 << 32]
            self.exporter.close()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()


TestWalk = Walk.TestCase
TestWalk.settings = settings(
    database=None, deadline=None, max_examples=20, stateful_step_count=50, suppress_health_check=list(HealthCheck)
)


def test_a_transition_that_is_not_in_the_table_is_an_error_and_changes_nothing():
    output = InFlight("output", None, [])
    with pytest.raises(AssertionError, match="output output is new: it cannot ack"):
        output.on(Event.ACK)
    assert output.state is State.NEW
