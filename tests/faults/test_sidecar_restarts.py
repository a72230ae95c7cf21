"""A packer that somebody else runs goes away and comes back: engine and worker find it again by themselves."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from packer_process import DEADLINE_S, running_packer, wait_until

from packer_service.errors import PackerUnavailable

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from delivery import GIVEN, assert_delivered, kept, send  # noqa: E402
from engine_checks import assert_same, warnings_logged  # noqa: E402
from sides import WorkerSide, working  # noqa: E402
from stalling_device import Stalling  # noqa: E402


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("load", ["at rest", "under load"])
def test_a_restarted_sidecar_serves_the_same_engine_and_worker_on(tmp_path, number, load):
    device = Stalling()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first))
        worker = stack.enter_context(working(engine, **GIVEN, device=device))
        assert_delivered(engine, worker, send(worker, "before"))
        device.stalled = load == "under load"
        pending = send(worker, "copied again", "and again") if device.stalled else {}
        first.signal(number)
        code = first.wait()
        assert code == (0 if number == signal.SIGTERM else -number)
        away = send(worker, "while it is away")
        stack.enter_context(running_packer(tmp_path / "run"))
        device.timeline.counter = device._value
        device.stalled = False
        assert_delivered(engine, worker, {**pending, **away})
        assert_delivered(engine, worker, send(worker, "after"))


@pytest.mark.parametrize("impostor", ["another version", "another key"])
def test_a_packer_that_came_back_different_is_refused_and_outputs_take_the_own_path(tmp_path, faults, impostor):
    given = {**GIVEN, "restart_wait_s": 2.0, "retry_s": 0.3}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first, **given))
        worker = stack.enter_context(working(engine, **given))
        assert_delivered(engine, worker, send(worker, "before"))
        log = stack.enter_context(warnings_logged())
        first.signal(signal.SIGTERM)
        first.wait()
        away = send(worker, "for the own path")
        with contextlib.ExitStack() as other:
            if impostor == "another version":
                other.enter_context(faults.active("version"))
                directory = tmp_path / "run"
                reason = "speaks protocol"
            else:
                directory = tmp_path / "other"
                reason = "the key is not this packer's"
            second = other.enter_context(running_packer(directory, socket=first.socket))
            (why,) = worker.wait_fallen_back(1).values()
            assert reason in why
            wait_until(
                lambda: any(reason in line and "is tried again every" in line for line in log), "the log says so"
            )
            assert engine.packer_pid is None
            away |= send(worker, "another")
            worker.wait_fallen_back(2)
            assert "connected" not in second.log, "it was half-used"
        for staged, _ in worker.fallen_back:
            assert_same(worker.exporter.rebuild(staged), away.pop(staged.output_id))
            worker.exporter.release(staged)
        assert not away
        worker.fallen_back.clear()
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        stack.enter_context(running_packer(tmp_path / "run"))
        wait_until(lambda: engine.packer_pid and not worker.exporter.broken, "both are connected again")
        assert_delivered(engine, worker, send(worker, "after"))


def test_a_sidecar_that_came_back_on_another_device_is_not_used_until_it_is_the_first_again(tmp_path, faults):
    given = {**GIVEN, "restart_wait_s": 0.5, "retry_s": 0.3}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first, **given))
        log = stack.enter_context(warnings_logged())
        first.signal(signal.SIGTERM)
        first.wait()
        with faults.active("another device"), running_packer(tmp_path / "run") as second:
            reason = f"packer {second.process.pid} serves another device, and the worker runs on host"
            wait_until(lambda: any(reason in line for line in log), "it is said")
            assert engine.packer_pid is None
        successor = stack.enter_context(running_packer(tmp_path / "run"))
        wait_until(lambda: engine.packer_pid == successor.process.pid, "the engine is connected again")


def test_a_packer_that_never_comes_back_hands_everything_over_to_the_own_path(tmp_path):
    given = {**GIVEN, "restart_wait_s": 0.3}
    with running_packer(tmp_path / "run") as packer, kept(packer, **given) as engine:
        with working(engine, **given) as worker:
            packer.signal(signal.SIGKILL)
            packer.wait()
            expected = send(worker, "one", "two")
            assert set(worker.wait_fallen_back(2)) == {"one", "two"}
            for staged, _ in worker.fallen_back:
                assert_same(worker.exporter.rebuild(staged), expected[staged.output_id])
                worker.exporter.release(staged)
            assert worker.arena_idle()
            assert worker.settled == []


# -- while a worker loads its weights ----------------------------------------------------------------------------------


def test_a_packer_that_dies_before_the_engine_has_a_pump_is_missed_at_once_and_its_successor_found(tmp_path):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first, reads=False))
        assert engine.packer_pid == first.process.pid
        first.signal(signal.SIGKILL)
        wait_until(lambda: engine.packer_pid is None, "nothing goes through it any more")
        second = stack.enter_context(running_packer(tmp_path / "run"))
        wait_until(lambda: engine.packer_pid == second.process.pid, "the next serves")
        worker = stack.enter_context(working(engine, **GIVEN))
        expected = send(worker, "before the pump")
        worker.wait_settled(*expected)
        engine.reading.set()
        assert_delivered(engine, worker, expected)


def test_a_packer_that_hangs_before_the_engine_has_a_pump_is_missed(tmp_path):
    with running_packer(tmp_path / "run") as packer, kept(packer, reads=False, hang_s=1.0) as engine:
        packer.signal(signal.SIGSTOP)
        wait_until(lambda: engine.packer_pid is None, "it was silent")


def test_a_worker_waits_for_a_packer_that_is_away_when_it_is_ready(tmp_path):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first))
        first.signal(signal.SIGKILL)
        first.wait()
        background = stack.enter_context(ThreadPoolExecutor(1))
        coming = background.submit(lambda: stack.enter_context(working(engine, **GIVEN)))
        stack.enter_context(running_packer(tmp_path / "run"))
        worker = coming.result(DEADLINE_S)
        assert not worker.exporter.broken
        assert_delivered(engine, worker, send(worker, "output"))


def test_a_worker_waits_for_an_engine_that_is_not_back_at_its_packer_yet(tmp_path):
    session = secrets.token_hex(8)
    with contextlib.ExitStack() as stack:
        packer = stack.enter_context(running_packer(tmp_path / "run"))
        background = stack.enter_context(ThreadPoolExecutor(1))
        coming = background.submit(WorkerSide, packer, session)
        packer.wait_log("a peer was refused: session .* has no engine here")
        stack.enter_context(contextlib.closing(packer.connect("engine", session)))
        worker = coming.result(DEADLINE_S)
        stack.enter_context(contextlib.closing(worker.exporter))
        assert not worker.exporter.broken


def test_a_packer_that_dies_in_mid_probe_is_followed_by_the_next(tmp_path):
    device = Stalling()
    device.stalled = True
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first))
        background = stack.enter_context(ThreadPoolExecutor(1))
        coming = background.submit(lambda: stack.enter_context(working(engine, **GIVEN, device=device)))
        wait_until(lambda: device._value, "the packer waits for the probe's marker")
        device.stalled = False
        first.signal(signal.SIGKILL)
        first.wait()
        stack.enter_context(running_packer(tmp_path / "run"))
        worker = coming.result(DEADLINE_S)
        assert not worker.exporter.broken
        assert_delivered(engine, worker, send(worker, "output"))


def test_a_worker_that_waited_in_vain_uses_the_packer_that_comes_later(tmp_path):
    given = {**GIVEN, "start_timeout_s": 0.2, "restart_wait_s": 0.1, "retry_s": 0.1}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first, **given))
        first.signal(signal.SIGKILL)
        first.wait()
        log = stack.enter_context(warnings_logged())
        worker = stack.enter_context(working(engine, **given))
        assert any("The worker waited 0." in line and "own path" in line for line in log)
        away = send(worker, "for the own path")
        worker.wait_fallen_back(1)
        ((staged, _),) = worker.fallen_back
        assert_same(worker.exporter.rebuild(staged), away[staged.output_id])
        worker.exporter.release(staged)
        worker.fallen_back.clear()
        stack.enter_context(running_packer(tmp_path / "run"))
        wait_until(lambda: not worker.exporter.broken, "it is connected")
        assert_delivered(engine, worker, send(worker, "after"))


def test_a_worker_that_waited_in_vain_refuses_where_fallback_is_fail(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with running_packer(tmp_path / "run") as packer, kept(packer) as engine:
        packer.signal(signal.SIGKILL)
        packer.wait()
        with pytest.raises(PackerUnavailable, match=r"The worker waited 0\.\d+ s for it"):
            with working(engine, start_timeout_s=0.2, fallback="fail"):
                pytest.fail("it started")
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the timeline is the device's


def test_two_engines_of_one_sidecar_both_come_back_and_do_not_mix(tmp_path):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engines = [stack.enter_context(kept(first)) for _ in range(2)]
        workers = [stack.enter_context(working(engine, **GIVEN)) for engine in engines]
        first.signal(signal.SIGKILL)
        first.wait()
        expected = [send(worker, f"{index} a", f"{index} b") for index, worker in enumerate(workers)]
        stack.enter_context(running_packer(tmp_path / "run"))
        for engine, worker, outputs in zip(engines, workers, expected, strict=True):
            assert_delivered(engine, worker, outputs)
            assert set(engine.got) == set(outputs)
