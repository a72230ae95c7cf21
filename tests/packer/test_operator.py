"""What an operator may ask of a live packer: how it is, to pause its workers, and to drain."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import pytest
from packer_process import Engine, running_packer, session, transfer, wait_until

from packer_service import log
from packer_service.config import Settings
from packer_service.door import MAX_OPERATORS
from packer_service.errors import HandshakeError, NotNow
from packer_service.operator import Operator
from packer_service.server import Server
from packer_service.status import Status
from packer_service.wire import handshake
from packer_service.wire.protocol import Ack, Leaving, Nack, Pause, Paused


@pytest.fixture(scope="module")
def packer(tmp_path_factory):
    with running_packer(tmp_path_factory.mktemp("packer"), max_sessions=8) as one:
        yield one


@pytest.fixture
def operator(packer):
    with Operator(packer.socket, packer.key) as one:
        wait_until(lambda: idle(one.status()), "the sessions of earlier tests have ended")
        yield one


def idle(status: Status) -> bool:
    return not status.engines and not status.workers


def entered(packer) -> Operator | None:
    try:
        return Operator(packer.socket, packer.key)
    except NotNow:
        return None


def drained(packer, timeout_s: float = 30.0) -> list[int]:
    """What was in flight at each report, the last included, and the packer ends."""
    with Operator(packer.socket, packer.key) as operator:
        return [report.in_flight for report in operator.drain(timeout_s)]


def test_the_status_names_the_packer_and_its_device(packer, operator):
    status = operator.status()
    assert (status.pid, status.socket, status.device) == (packer.process.pid, packer.socket, "host")
    assert (status.mode, status.state, status.restarts) == ("sidecar", "ready", None)
    assert status.device_uuid == "host"
    assert time.time() - 60 < status.started_at < time.time()


def test_the_status_counts_outputs_their_bytes_and_their_times(packer, operator):
    before = operator.status()
    with session(packer) as (engine, worker):
        for _ in range(3):
            transfer(engine, worker, 5000)
        # An output is counted when its engine was told.
        wait_until(lambda: operator.status().published - before.published == 3, "they are counted")
        status = operator.status()
    assert status.published - before.published == 3
    assert status.published_bytes - before.published_bytes == 15000
    assert status.handoff.p99_ms >= status.handoff.p50_ms >= status.copy.p50_ms > 0.0


def test_the_status_tells_engines_apart_and_who_holds_how_much(packer, operator):
    with session(packer) as (engine, worker), session(packer) as (idle, _):
        worker.export("held", worker.write(bytes(8192)))
        worker.skeleton("held")
        ready = engine.next()
        wait_until(lambda: operator.status().workers == 2, "both sessions are open")
        engines = {each.session: each for each in operator.status().engines}
        assert engines.keys() == {engine.session, idle.session}
        assert engines[engine.session].pid == os.getpid()
        assert (engines[engine.session].leases, engines[engine.session].leased_bytes) == (1, 8192)
        assert engines[engine.session].oldest_lease_s > 0.0
        assert (engines[idle.session].leases, engines[idle.session].workers) == (0, 1)
        engine.release(ready.leases[0].lease)
        wait_until(lambda: not any(each.leases for each in operator.status().engines), "the lease is back")


def test_an_output_in_flight_is_counted_until_it_has_ended(packer, operator):
    with session(packer) as (engine, worker):
        worker.export("waits", worker.write(b"data"), complete=False)
        worker.skeleton("waits")
        wait_until(lambda: operator.status().in_flight == 1, "the output is in flight")
        worker.reach(worker.value)
        engine.next()
        wait_until(lambda: operator.status().in_flight == 0, "the output has ended")


def test_what_is_declined_is_counted_by_its_cause(packer, operator):
    before = operator.status().declined.get("device", 0)
    with session(packer) as (_, worker):
        worker.channel.send(handshake.protocol.Export("event", 1, (worker.write(b"data"),), bytes(64)))
        worker.skeleton("event")
        assert isinstance(worker.answer(), Nack)
    assert operator.status().declined["device"] == before + 1


def test_operators_are_let_in_where_every_place_of_a_session_is_taken_and_are_bounded_themselves(packer):
    with Operator(packer.socket, packer.key) as operator:
        wait_until(lambda: idle(operator.status()), "the sessions of earlier tests have ended")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(session(packer))
        with pytest.raises(HandshakeError, match="max_sessions"):
            Engine(packer)
        for _ in range(MAX_OPERATORS):
            operator = stack.enter_context(
                wait_until(lambda: entered(packer), "the operator of an earlier test has left")
            )
            assert len(operator.status().engines) == 4
        with pytest.raises(NotNow, match="operators"):
            Operator(packer.socket, packer.key)
    with Operator(packer.socket, packer.key) as operator:
        wait_until(lambda: idle(operator.status()), "the sessions have ended")


def test_an_operator_needs_a_key(packer):
    with pytest.raises(HandshakeError, match="key"):
        Operator(packer.socket, bytes(32))


def test_the_operators_key_opens_nothing_but_an_operators_session(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    server = Server(Settings(device="host", socket=str(tmp_path / "run" / "p.sock"), pool_bytes=2 << 20), bytes(32))
    server.start()
    try:
        with Operator(server.settings.socket, server.operator_key) as operator:
            assert operator.status().pid == os.getpid()
        for role in ("engine", "worker"):
            with pytest.raises(HandshakeError, match="key"):
                handshake.connect(server.settings.socket, server.operator_key, role, "a-session")
    finally:
        assert server.close()


def test_the_status_has_the_last_error(packer, operator):
    assert log.last_error.record is None  # another process's
    with session(packer) as (_, worker):
        worker.channel.send(Ack("not a worker's to send"))
        worker.answer()
    assert "broke the protocol" in operator.status().last_error.text


def test_a_pause_reaches_every_worker_of_the_engine_it_names_and_counts_their_answers(packer, operator):
    with session(packer) as (engine, worker), session(packer) as (_, other):
        answers = []
        asking = threading.Thread(target=lambda: answers.append(operator.set_paused(True, engine.session)))
        asking.start()
        assert worker.answer() == Pause(True)
        worker.channel.send(Paused(True))
        asking.join()
        assert (answers[0].asked, answers[0].answered) == (1, 1)
        paused = {each.session: each.paused_workers for each in operator.status().engines}
        assert paused.pop(engine.session) == 1
        assert set(paused.values()) == {0}
        assert other.channel.receive(0.0) is None


def test_a_worker_that_does_not_answer_a_pause_is_counted_as_such(packer, operator):
    with session(packer):
        wait_until(lambda: operator.status().workers == 1, "its session is open")
        answer = operator.set_paused(True, timeout_s=0.1)
    assert (answer.asked, answer.answered) == (1, 0)


def test_a_drain_tells_everybody_lets_nobody_in_finishes_what_is_in_flight_and_ends(tmp_path):
    with running_packer(tmp_path / "packer") as packer, session(packer) as (engine, worker):
        worker.export("waits", worker.write(b"the data"), complete=False)
        worker.skeleton("waits")
        with Operator(packer.socket, packer.key) as operator:
            wait_until(lambda: operator.status().in_flight == 1, "the output is in flight")
        reports: list[int] = []
        draining = threading.Thread(target=lambda: reports.extend(drained(packer)))
        draining.start()
        assert isinstance(worker.answer(), Leaving)
        with pytest.raises(NotNow, match="drained"):
            Engine(packer)
        assert isinstance(engine.channel.receive(5.0)[0], (Leaving, handshake.protocol.MapSegment))
        worker.reach(worker.value)
        draining.join()
        assert reports[0] == 1
        assert reports[-1] == 0
        assert packer.wait() == 0
        assert "packer stops: drained" in packer.log


def test_a_drain_ends_in_time_where_a_forward_does_not_and_says_how_much_was_left(tmp_path):
    with running_packer(tmp_path / "packer") as packer, session(packer) as (_, worker):
        worker.export("waits", worker.write(b"data"), complete=False)
        with Operator(packer.socket, packer.key) as operator:
            wait_until(lambda: operator.status().in_flight == 1, "the output is in flight")
        assert drained(packer, 0.2)[-1] == 1
        assert packer.wait() == 0
        assert "with 1 outputs unfinished after 0.2 s" in packer.log


def test_a_drain_goes_on_when_its_operator_is_gone(tmp_path):
    with running_packer(tmp_path / "packer") as packer, session(packer) as (_, worker):
        worker.export("waits", worker.write(b"data"), complete=False)
        with Operator(packer.socket, packer.key) as operator:
            wait_until(lambda: operator.status().in_flight == 1, "the output is in flight")
            next(operator.drain(30.0))
        worker.skeleton("waits")
        worker.reach(worker.value)
        assert packer.wait() == 0


def test_an_idle_packer_drains_at_once(tmp_path):
    with running_packer(tmp_path / "packer") as packer:
        assert drained(packer) == [0]
        assert packer.wait() == 0
