"""What an operator's pause and drain mean to engine and worker: outputs take vllm-omni's own path at once, none is lost."""

from __future__ import annotations

import contextlib

import pytest
from packer_process import running_packer, wait_until

from packer_service.operator import Operator

pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from delivery import GIVEN, assert_delivered, kept, send  # noqa: E402
from engine_checks import assert_same  # noqa: E402
from sides import WorkerSide, working  # noqa: E402
from stalling_device import Stalling  # noqa: E402


def assert_fallen_back(worker: WorkerSide, outputs: dict, reason: str) -> None:
    """Each of them came back for the own path, with its bytes, for that reason."""
    left = dict(outputs)
    worker.wait_fallen_back(len(left))
    for staged, why in worker.fallen_back:
        assert reason in why
        assert_same(worker.exporter.rebuild(staged), left.pop(staged.output_id))
        worker.exporter.release(staged)
    worker.fallen_back.clear()
    assert not left


def test_a_paused_worker_exports_nothing_until_it_is_resumed(tmp_path):
    with contextlib.ExitStack() as stack:
        packer = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(packer))
        worker = stack.enter_context(working(engine, **GIVEN))
        operator = stack.enter_context(Operator(packer.socket, packer.key))
        assert_delivered(engine, worker, send(worker, "before"))
        published = operator.status().published
        assert operator.set_paused(True).answered == 1
        assert_fallen_back(worker, send(worker, "paused", "paused too"), "packer-service resume")
        assert operator.status().published == published
        assert operator.status().engines[0].paused_workers == 1
        assert operator.set_paused(False).answered == 1
        assert_delivered(engine, worker, send(worker, "after"))


def test_a_pause_lets_pass_what_is_in_flight(tmp_path):
    device = Stalling()
    with contextlib.ExitStack() as stack:
        packer = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(packer))
        worker = stack.enter_context(working(engine, **GIVEN, device=device))
        operator = stack.enter_context(Operator(packer.socket, packer.key))
        device.stalled = True
        pending = send(worker, "in flight")
        assert operator.set_paused(True).answered == 1
        device.timeline.counter = device._value
        device.stalled = False
        assert_delivered(engine, worker, pending)


def test_a_pause_outlives_the_packer(tmp_path):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first))
        worker = stack.enter_context(working(engine, **GIVEN))
        with Operator(first.socket, first.key) as operator:
            assert operator.set_paused(True).answered == 1
        first.close()
        second = stack.enter_context(running_packer(tmp_path / "run"))
        operator = stack.enter_context(Operator(second.socket, second.key))
        wait_until(lambda: [each.paused_workers for each in operator.status().engines] == [1], "the worker says so")
        assert_fallen_back(worker, send(worker, "still paused"), "packer-service resume")
        assert operator.set_paused(False).answered == 1
        assert_delivered(engine, worker, send(worker, "after"))


def test_when_a_packer_was_drained_nobody_waits_for_it_and_the_next_one_is_used(tmp_path):
    device = Stalling()
    given = {**GIVEN, "restart_wait_s": 600.0, "retry_s": 0.1}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first, **given))
        worker = stack.enter_context(working(engine, **given, device=device))
        device.stalled = True
        pending = send(worker, "in flight")
        with Operator(first.socket, first.key) as operator:
            reports = operator.drain(60.0)
            assert next(reports).in_flight == 1
            wait_until(lambda: worker.exporter.broken, "the worker was told")
            device.timeline.counter = device._value
            device.stalled = False
            assert_delivered(engine, worker, pending)
            assert [report.in_flight for report in reports][-1] == 0
        assert first.wait() == 0
        wait_until(lambda: engine.packer_pid is None, "the engine knows")
        assert_fallen_back(worker, send(worker, "away"), "drain")
        stack.enter_context(running_packer(tmp_path / "run"))
        wait_until(lambda: engine.packer_pid and not worker.exporter.broken, "both are connected again")
        assert_delivered(engine, worker, send(worker, "after"))
