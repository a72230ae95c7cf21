"""A packer that is there and does not answer: stopped, or in a copy that never ends."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from packer_process import Worker, running_packer, session, transfer, wait_until

from packer_service.wire.protocol import MAX_PAYLOAD_BYTES, Export

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from any_output import content  # noqa: E402
from delivery import assert_delivered, kept, send  # noqa: E402
from engine_checks import assert_same, warnings_logged  # noqa: E402
from sides import FLOATS, Kept, managed, working  # noqa: E402
from stalling_device import Stalling  # noqa: E402

HANG = {"hang_s": 1.0, "max_restarts": 1000}
EXIT_HUNG = 70


def wait_another(engine: Kept, old: int) -> None:
    wait_until(lambda: engine.packer_pid not in (None, old), "another packer serves")


def test_a_stopped_managed_packer_is_noticed_killed_and_its_outputs_go_through_the_next(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with warnings_logged() as log, managed(**HANG) as engine, working(engine, **HANG) as worker:
        assert_delivered(engine, worker, send(worker, "before"))
        old = engine.packer_pid
        os.kill(old, signal.SIGSTOP)
        expected = send(worker, "waiting", "waiting too")
        assert_delivered(engine, worker, expected)
        wait_another(engine, old)
        assert not os.path.exists(f"/proc/{old}")
    assert any("was silent for hang_s = 1 s" in line for line in log)


def test_a_stuck_copy_ends_the_packer_which_is_started_again_and_copies_it(tmp_path, monkeypatch, faults):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with managed(**HANG) as engine, working(engine, **HANG) as worker:
        assert_delivered(engine, worker, send(worker, "before"))
        old = engine.packer_pid
        faults.set("copy")
        expected = send(worker, "stuck", "behind it")
        faults.wait_reached("copy")
        wait_until(lambda: engine.packer_pid is None, "the packer ends itself")
        faults.clear("copy")
        assert_delivered(engine, worker, expected)
        wait_another(engine, old)


def test_a_sidecar_with_a_stuck_copy_says_which_and_exits_for_whoever_runs_it(tmp_path, faults):
    with running_packer(tmp_path / "run", hang_s=1) as packer, session(packer) as (_, worker), faults.active("copy"):
        worker.export("stuck", worker.write(b"x" * 1000))
        worker.skeleton("stuck")
        assert packer.wait() == EXIT_HUNG
        assert "the copy of output stuck of worker" in packer.log
        assert "hang_s = 1" in packer.log


def test_a_copy_that_waits_for_a_long_forward_is_not_taken_for_stuck(tmp_path):
    """Nor is one behind it in the stream whose own wait is met already: a clone that was staged late."""
    with running_packer(tmp_path / "run", hang_s=1) as packer, session(packer) as (engine, worker):
        worker.reach(1)
        worker.channel.send(Export("long forward", 2, (worker.write(b"x" * 100),)))
        worker.skeleton("long forward")
        worker.channel.send(Export("staged late", 1, (worker.write(b"y" * 100, 4096),)))
        worker.skeleton("staged late")
        with session(packer) as (other, its_worker):
            transfer(other, its_worker)
            with pytest.raises(AssertionError):
                wait_until(lambda: packer.process.poll() is not None, "the watchdog ends it", timeout_s=3.5)
            transfer(other, its_worker)
        worker.reach(2)
        assert [engine.next().output, engine.next().output] == ["long forward", "staged late"]


@pytest.mark.parametrize("plain", [False, True])
def test_copies_of_an_engine_that_does_not_read_are_not_taken_for_stuck(tmp_path, plain):
    with running_packer(tmp_path / "run", hang_s=1) as packer, session(packer) as (engine, worker):
        transfer(engine, worker)  # it knows the pool
        for number in range(12):  # more than fits the engine's socket
            worker.export(f"unread-{number}", worker.write(b"x"))
            worker.skeleton(f"unread-{number}", bytes(MAX_PAYLOAD_BYTES), plain=plain)
        with session(packer) as (other, its_worker):
            with pytest.raises(AssertionError):
                wait_until(lambda: packer.process.poll() is not None, "the watchdog ends it", timeout_s=3.5)
            transfer(other, its_worker)
        assert [engine.next().output for _ in range(12)] == [f"unread-{number}" for number in range(12)]


def test_a_stopped_sidecar_costs_the_own_path_and_serves_again_when_it_goes_on(tmp_path):
    given = {**HANG, "restart_wait_s": 0.5, "retry_s": 0.5, "handshake_timeout_s": 0.5}
    with running_packer(tmp_path / "run") as packer, kept(packer, **given) as engine:
        with working(engine, **given) as worker:
            assert_delivered(engine, worker, send(worker, "before"))
            packer.signal(signal.SIGSTOP)
            expected = send(worker, "one", "two")
            reasons = worker.wait_fallen_back(2)
            assert all("does not come back" in reason or "hangs" in reason for reason in reasons.values())
            for staged, _ in worker.fallen_back:
                assert_same(worker.exporter.rebuild(staged), expected[staged.output_id])
                worker.exporter.release(staged)
            worker.fallen_back.clear()
            packer.signal(signal.SIGCONT)
            wait_until(lambda: engine.packer_pid and not worker.exporter.broken, "both are connected again")
            assert_delivered(engine, worker, send(worker, "after"))
            assert not set(expected) & set(engine.got), "an output that went the own way came through the packer too"


@pytest.mark.parametrize("when", ["before the copy", "in mid-copy"])
def test_a_packer_that_goes_on_publishes_nothing_of_memory_that_was_used_again(tmp_path, faults, when):
    """The worker took its slots back and staged other outputs there while the packer was stopped with the old copies.

    The engine is more patient, and still listens to what the packer may have to say of them.
    """
    given = {**HANG, "restart_wait_s": 0.3, "retry_s": 0.3, "handshake_timeout_s": 0.3, "arena_max_bytes": "2MiB"}
    device = Stalling()
    old = {name: [content(torch.uint8, (FLOATS,), seed)] for seed, name in enumerate(("old 1", "old 2"))}
    new = {name: [content(torch.uint8, (FLOATS,), seed)] for seed, name in enumerate(("new 1", "new 2"), 10)}
    with running_packer(tmp_path / "run") as packer, kept(packer, hang_s=60.0) as engine:
        with working(engine, device=device, **given) as worker:
            if when == "in mid-copy":
                faults.set("copy")
            else:
                device.stalled = True
            for name, output in old.items():
                worker.send(output, name)
            if when == "in mid-copy":
                faults.wait_reached("copy")
            packer.signal(signal.SIGSTOP)
            worker.wait_fallen_back(2)
            for staged, _ in worker.fallen_back:
                worker.exporter.release(staged)  # the worker sent it its own way
            worker.fallen_back.clear()
            # The slots are used again: by hand, because nothing is staged while there is no packer.
            (chunk, _) = next(iter(worker.exporter.placement.arena._chunks.values()))
            chunk.tensor.fill_(0xEE)
            device.timeline.counter = device._value
            device.stalled = False
            faults.clear("copy")
            packer.signal(signal.SIGCONT)
            wait_until(lambda: engine.packer_pid and not worker.exporter.broken, "both are connected again")
            for name, output in new.items():
                worker.send(output, name)
            assert_delivered(engine, worker, new)
            maps = Path(f"/proc/{packer.process.pid}/maps")
            wait_until(lambda: maps.read_text().count("packer-timeline") == 1, "the packer is done with the old ones")
            assert set(engine.got) == set(new)
            with session(packer) as (other, its_worker):
                transfer(other, its_worker)


def test_a_worker_back_at_the_same_packer_gets_its_unfinished_output_right_although_the_first_copy_goes_on(
    tmp_path, faults
):
    """Only the worker hung up: old and new copies of one output, from one slot, in one packer at a time."""
    with running_packer(tmp_path / "run") as packer, kept(packer) as engine:
        with working(engine, max_restarts=1000) as worker:
            with faults.active("copy"):
                expected = send(worker, "one", "two")
                faults.wait_reached("copy")
                worker.exporter.exchange.link._connection.shutdown()
                wait_until(lambda: worker.exporter.exchange.link.connections == 2, "the worker is back")
            assert_delivered(engine, worker, expected)
            assert_delivered(engine, worker, send(worker, "after"))


def test_workers_of_other_sessions_do_not_notice_a_worker_that_hangs_up(tmp_path):
    with running_packer(tmp_path / "run") as packer, session(packer) as (engine, worker):
        worker.export("unfinished", worker.write(b"x"), complete=False)
        worker.channel.close()
        with session(packer) as (other, its_worker):
            transfer(other, its_worker)
        with contextlib.closing(Worker(packer, engine.session)) as successor:
            transfer(engine, successor)
