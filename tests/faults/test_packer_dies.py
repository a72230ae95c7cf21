"""A managed packer dies at every point of an output's way: it is started again and every output arrives once.

No engine here: the worker's exporter and the engine's keeper, receiver and result queue, with a packer that the supervisor
runs. tests/faults/test_engine_faults.py has the same under the real engine, batches included; tests/chaos.py has it at random.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time

import pytest
from packer_process import wait_until

from packer_service.memory.ack_page import AckPage

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from any_output import content  # noqa: E402
from engine_checks import assert_same, warnings_logged  # noqa: E402
from sides import FLOATS, Kept, WorkerSide, managed, working  # noqa: E402
from stalling_device import Stalling  # noqa: E402

from worker_shim.worker.exchange import Exchange  # noqa: E402

RESTARTS = 1000  # more than these tests need: what happens beyond is a test of its own
RESTART_LIMIT_S = 10.0  # the promise is 2 s; a loaded CI machine may be slower


@pytest.fixture(scope="module")
def kept(module_faults, tmp_path_factory, module_monkeypatch):
    module_monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("run")))
    with managed(max_restarts=RESTARTS) as kept:
        yield kept


def some_outputs(seed: int) -> dict[str, object]:
    """Large and small arrays, one of them the rows of a batch, one with arrays of the host, one with none."""
    return {
        f"{seed} image": [content(torch.float32, (FLOATS // 2,), seed)],
        f"{seed} batch": [row.clone() for row in content(torch.bfloat16, (4, FLOATS // 4), seed + 1)],
        f"{seed} dict": {"small": content(torch.int64, (7, 3), seed + 2), "array": content(torch.uint8, (99,)).numpy()},
        f"{seed} text": {"text": "x" * 1000},
    }


def kill(kept: Kept, number: int) -> float:
    """When it was killed."""
    pid = kept.packer_pid
    assert pid
    now = time.monotonic()
    os.kill(pid, number)
    return now


def wait_restarted(kept: Kept, old_pid: int, since: float) -> float:
    """Seconds until another packer served."""
    wait_until(lambda: kept.packer_pid not in (None, old_pid), "another packer serves")
    took = time.monotonic() - since
    print(f"packer started again and connected to after {took:.3f} s")
    assert took < RESTART_LIMIT_S
    return took


def assert_delivered(kept: Kept, worker: WorkerSide, expected: dict[str, object]) -> None:
    for got, (output_id, output) in zip(kept.wait(*expected), expected.items(), strict=True):
        assert_same(got, output, output_id)
    worker.wait_settled(*expected)
    assert worker.fallen_back == []
    assert worker.arena_idle()
    assert worker.exporter.exchange.pending == {}


SIGNALS = pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=lambda number: number.name)


@SIGNALS
def test_a_packer_that_dies_at_rest_is_started_again_and_serves_the_next_output(kept, number):
    with working(kept) as worker:
        before = some_outputs(100 + number)
        for output_id, output in before.items():
            worker.send(output, output_id)
        assert_delivered(kept, worker, before)
        old = kept.packer_pid
        wait_restarted(kept, old, kill(kept, number))
        after = some_outputs(200 + number)
        for output_id, output in after.items():
            worker.send(output, output_id)
        assert_delivered(kept, worker, after)
        assert_delivered(kept, worker, before)  # what was delivered stays readable


@SIGNALS
def test_a_packer_that_dies_before_the_worker_has_signalled_costs_nothing(kept, number):
    device = Stalling()
    with working(kept, device=device) as worker:
        expected = some_outputs(300 + number)
        device.stalled = True
        for output_id, output in expected.items():
            worker.send(output, output_id)
        old = kept.packer_pid
        wait_restarted(kept, old, kill(kept, number))
        device.timeline.counter = device._value  # the forward ends
        assert_delivered(kept, worker, expected)


@SIGNALS
def test_a_packer_that_dies_in_mid_copy_copies_everything_again(kept, module_faults, number):
    with working(kept) as worker:
        expected = some_outputs(400 + number)
        with module_faults.active("copy"):
            for output_id, output in expected.items():
                worker.send(output, output_id)
            module_faults.wait_reached("copy")
            old = kept.packer_pid
            since = kill(kept, number)
        wait_restarted(kept, old, since)
        assert_delivered(kept, worker, expected)


@SIGNALS
def test_a_packer_that_dies_between_copy_and_skeleton_gets_both_halves_again(kept, number):
    with working(kept) as worker:
        expected = some_outputs(500 + number)
        staged = [worker.exporter.stage(output, output_id) for output_id, output in expected.items()]
        worker.send([torch.ones(3)], f"{number} round trip")  # behind the copies of the others
        kept.wait(f"{number} round trip")
        old = kept.packer_pid
        since = kill(kept, number)
        worker.exporter.submit(staged[0])  # to nobody
        wait_restarted(kept, old, since)
        for one in staged[1:]:
            worker.exporter.submit(one)
        assert_delivered(kept, worker, expected)


@SIGNALS
def test_a_packer_that_dies_between_delivery_and_ack_delivers_nothing_twice(kept, module_faults, number):
    with working(kept) as worker:
        expected = some_outputs(600 + number)
        first = next(iter(expected))
        with module_faults.active("ack"):
            for output_id, output in expected.items():
                worker.send(output, output_id)
            kept.wait(first)
            module_faults.wait_reached("ack")
            old = kept.packer_pid
            since = kill(kept, number)
        wait_restarted(kept, old, since)
        assert_delivered(kept, worker, expected)


def test_what_a_dead_packer_had_acknowledged_is_not_exported_again(kept, monkeypatch):
    """Nor does it fall back where no other packer comes: its ack is on the page, and nobody had looked."""
    monkeypatch.setattr(Exchange, "look", lambda self: None)
    monkeypatch.setattr(Exchange, "take", lambda self, message: None)
    with working(kept) as worker:
        expected = some_outputs(650)
        for output_id, output in expected.items():
            worker.send(output, output_id)
        kept.wait(*expected)
        # The dict has a host array, and an ack by message.
        acknowledged = [output_id for output_id in expected if not output_id.endswith("dict")]
        page = worker.exporter.exchange.ack_page
        wait_until(lambda: page._ring[len(acknowledged) - 1], "the acks are on the page")
        old = kept.packer_pid
        wait_restarted(kept, old, kill(kept, signal.SIGKILL))
        wait_until(lambda: worker.exporter.exchange.link.connections == 2, "the worker is connected again")
        assert worker.exporter.exchange.pending.keys().isdisjoint(acknowledged)
        assert worker.exporter.exchange.ack_page is not page
        worker.wait_settled(*acknowledged)


def test_a_worker_without_memory_for_an_ack_page_connects_as_soon_as_there_is_some(kept, monkeypatch):
    create = AckPage.create
    missing = [OSError(errno.EMFILE, "injected"), MemoryError("injected"), OSError(errno.ENOMEM, "injected")]

    def create_once_there_is_memory() -> AckPage:
        if missing:
            raise missing.pop()
        return create()

    with working(kept, max_restarts=RESTARTS) as worker, monkeypatch.context() as patch:
        patch.setattr(AckPage, "create", create_once_there_is_memory)
        old = kept.packer_pid
        wait_restarted(kept, old, kill(kept, signal.SIGKILL))
        expected = some_outputs(670)
        for output_id, output in expected.items():
            worker.send(output, output_id)
        assert_delivered(kept, worker, expected)
        assert not missing
        assert worker.exporter.exchange.link.connections == 2, "a connection that was not used counts as one"


@SIGNALS
def test_what_a_dead_packer_had_sent_is_read_before_its_successor_is_asked(kept, number):
    """The engine has not read what was delivered and acknowledged when the packer dies: only the connection still has it."""
    with working(kept) as worker:
        expected = some_outputs(700 + number)
        kept.reading.clear()
        for output_id, output in expected.items():
            worker.send(output, output_id)
        worker.wait_settled(*expected)
        old = kept.packer_pid
        since = kill(kept, number)
        kept.reading.set()
        assert_delivered(kept, worker, expected)
        wait_restarted(kept, old, since)


def test_more_outputs_than_a_connection_holds_acks_for_wait_for_the_next_packer_and_all_arrive(kept):
    """Those without device arrays are acknowledged as fast as they are read: the worker must read while it sends."""
    ids = [f"text {number}" for number in range(1500)]
    with working(kept) as worker:
        old = kept.packer_pid
        os.kill(old, signal.SIGSTOP)
        staged = [worker.exporter.stage({"text": output_id}, output_id) for output_id in ids]
        since = kill(kept, signal.SIGKILL)
        for one in staged:
            worker.exporter.submit(one)
        wait_restarted(kept, old, since)
        assert kept.wait(*ids) == [{"text": output_id} for output_id in ids]
        worker.wait_settled(*ids)


def test_a_packer_that_dies_too_often_is_left_alone_for_a_while_and_said_so_once(faults, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = {"max_restarts": 1, "retry_s": 1.0}
    with warnings_logged() as log, managed(**given) as kept, working(kept, **given) as worker:
        first = kept.packer_pid
        wait_restarted(kept, first, kill(kept, signal.SIGKILL))
        wait_until(lambda: worker.exporter.exchange.link.connections == 2, "the worker is connected again")
        with faults.active("copy"):
            pending = some_outputs(1)
            for output_id, output in pending.items():
                worker.send(output, output_id)
            faults.wait_reached("copy")
            second = kept.packer_pid
            kill(kept, signal.SIGKILL)
            # pending and new ones: vllm-omni's own path
            # The text, which waits for no copy, may be on its way to the engine when the packer dies.
            wait_until(lambda: len(worker.fallen_back) + ("1 text" in kept.got) == len(pending), "each goes one way")
            reasons = worker.wait_fallen_back(len(pending) - ("1 text" in kept.got))
            assert all("does not come back" in reason for reason in reasons.values())
            buffer = torch.ones(FLOATS)
            worker.send([buffer], "new")
            buffer.fill_(2)  # as the next forward of a pipeline that uses it again
            pending["new"] = [torch.ones(FLOATS)]
            assert "does not come back" in worker.wait_fallen_back(len(reasons) + 1)["new"]
        for staged, _ in worker.fallen_back:
            assert_same(worker.exporter.rebuild(staged), pending[staged.output_id])
            worker.exporter.release(staged)
        assert worker.arena_idle()
        # and it is tried again without anybody's doing
        wait_until(lambda: kept.packer_pid not in (None, first, second), "a third packer serves")
        wait_until(lambda: not worker.exporter.broken, "the worker exports again")
        again = some_outputs(50)
        worker.fallen_back.clear()
        for output_id, output in again.items():
            worker.send(output, output_id)
        assert_delivered(kept, worker, again)
    # once by the engine and once by the worker, which are one process here
    said = [line for line in log if "does not come back" in line and "still" not in line]
    assert len(said) == 2, log
    assert all(line.startswith("outputs take vllm-omni's own path") for line in said), log


def test_a_packer_that_comes_up_on_another_device_is_killed_and_not_used(faults, tmp_path, monkeypatch):
    """As one would whose GPUs are counted otherwise by then. With the device back it serves again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    given = {"max_restarts": 1000, "restart_wait_s": 0.5, "retry_s": 0.3}
    with warnings_logged() as log, managed(**given) as kept, working(kept, **given) as worker:
        old = kept.packer_pid
        with faults.active("another device"):
            kill(kept, signal.SIGKILL)
            reason = "came up on another device, while this engine's worker runs on host"
            wait_until(lambda: any("does not come back" in line and reason in line for line in log), "it is said")
            worker.send({"text": "x"}, "for the own path")
            worker.wait_fallen_back(1)
            assert kept.packer_pid is None
        wait_until(lambda: kept.packer_pid not in (None, old), "another packer serves")
        wait_until(lambda: not worker.exporter.broken, "the worker exports again")
        worker.fallen_back.clear()
        worker.send({"text": "y"}, "after")
        assert kept.wait("after") == [{"text": "y"}]
    assert len([line for line in log if reason in line]) == 1, log


def test_a_sticky_error_of_its_device_ends_the_packer_which_is_started_again(kept, module_faults):
    with working(kept) as worker:
        expected = some_outputs(800)
        old = kept.packer_pid
        with module_faults.active("sticky"):
            since = time.monotonic()
            for output_id, output in expected.items():
                worker.send(output, output_id)
            wait_until(lambda: kept.packer_pid != old, "the packer ends itself")
        wait_restarted(kept, old, since)
        assert_delivered(kept, worker, expected)


def test_the_main_thread_never_waits_while_the_packer_is_away(kept):
    """A packer that reads nothing and then is gone: staging goes on, for as long as the arena has room."""
    with working(kept) as worker:
        old = kept.packer_pid
        os.kill(old, signal.SIGSTOP)
        staged = []

        def main() -> None:  # the worker's main thread
            for number in range(400):
                staged.append(worker.exporter.stage([torch.full((5,), float(number))], f"main {number}"))

        thread = threading.Thread(target=main)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "the main thread waits for the packer"
        kill(kept, signal.SIGKILL)
        for one in staged:
            worker.exporter.submit(one)
        ids = [f"main {number}" for number in range(400)]
        for number, (got,) in enumerate(kept.wait(*ids)):
            assert got[0] == number
        worker.wait_settled(*ids)
