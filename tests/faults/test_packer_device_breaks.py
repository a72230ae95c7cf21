"""The packer's device breaks for good: it says so, ends, is started again, and every output arrives once all the same.

On a GPU a kernel traps in the packer's own context; what the driver answers from then on is its own. On the host device the
same tests run with an error that is made up (tests/helpers/inject/faulty_packer.py has both).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from packer_process import DEADLINE_S, MIB, wait_until

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from any_output import content  # noqa: E402
from engine_checks import assert_same  # noqa: E402
from sides import Kept, WorkerSide, managed, working  # noqa: E402
from stalling_device import Stalling  # noqa: E402

from worker_shim.worker.device import Signal  # noqa: E402
from worker_shim.worker.device_cuda import CudaExportDevice  # noqa: E402

# On a GPU 1.5 GiB in flight: 29 ms of copies, so that the kernel traps among them.
ROOM = {
    "host": {"pool_bytes": "16MiB", "arena_step_bytes": "16MiB", "arena_max_bytes": "16MiB"},
    "cuda:0": {"pool_bytes": "2GiB", "pool_max_bytes": "4GiB", "arena_step_bytes": "2GiB", "arena_max_bytes": "2GiB"},
}
NBYTES = {"host": MIB, "cuda:0": 128 * MIB}
OUTPUTS = 12


class StallingCuda(CudaExportDevice):
    """As Stalling: what is staged from then on is complete in truth, and nobody says so."""

    stalled = False

    def signal(self) -> Signal:
        if not self.stalled:
            return super().signal()
        torch.cuda.synchronize()
        self._value += 1
        return Signal(self._value)


class Sides:
    """A managed packer on a device that can be broken, its engine's end, and a worker whose device can stall."""

    def __init__(self, device: str, kept: Kept, worker: WorkerSide) -> None:
        self.device = device
        self.kept = kept
        self.worker = worker
        self._fills = itertools.count(1)  # no two outputs are alike

    def send(self, name: str, count: int = OUTPUTS) -> dict[str, Any]:
        """What is sent, by its id. All fits the pool as it is at the start."""
        where = "cpu" if self.device == "host" else self.device
        outputs = {}
        for number in range(count):
            fill = next(self._fills)
            large = torch.full((NBYTES[self.device],), fill, dtype=torch.uint8, device=where)
            large[:: MIB // 8] = content(torch.uint8, (len(large) * 8 // MIB,), fill).to(where)
            outputs[f"{name} {number}"] = {"large": large, "small": content(torch.float32, (9, 5), fill).to(where)}
        for output_id, output in outputs.items():
            self.worker.send(output, output_id)
        return outputs

    def stall(self) -> None:
        self.worker.exporter.device.stalled = True

    def go_on(self, but: int = 0) -> None:
        """The forward ends, for everything that was staged but the last few."""
        export_device = self.worker.exporter.device
        export_device.stalled = bool(but)
        export_device.timeline.counter = export_device._value - but

    def wait_replaced(self, old: int) -> None:
        """Until another packer serves, and nothing is left of the old one."""
        wait_until(lambda: self.kept.packer_pid not in (None, old), "another packer serves")
        assert not os.path.exists(f"/proc/{old}")

    def assert_delivered(self, expected: dict[str, Any]) -> None:
        """Each once and right, and nothing of them left with the worker."""
        for got, (output_id, output) in zip(self.kept.wait(*expected), expected.items(), strict=True):
            assert_same(got, output, output_id)
        self.worker.wait_settled(*expected)
        assert self.worker.fallen_back == []
        assert self.worker.arena_idle()
        assert self.worker.exporter.exchange.pending == {}
        assert [output_id for output_id, all_that_came in self.kept.got.items() if len(all_that_came) != 1] == []


DEVICES = pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])


@pytest.fixture
def run_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@contextlib.contextmanager
def opened(device: str) -> Iterator[Sides]:
    """In the test itself and not in a fixture, so that capfd has the packers' logs."""
    given = {"max_restarts": 1000, **ROOM[device]}
    export_device = Stalling() if device == "host" else StallingCuda(0)
    with managed(device, **given) as kept, working(kept, device=export_device, **given) as worker:
        sides = Sides(device, kept, worker)
        sides.assert_delivered(sides.send("before", 1))
        yield sides


def assert_said_once(log: str, pid: int, device: str) -> None:
    """The packer's last words: why it ends, with the driver's name for it."""
    pattern = (
        rf"CRITICAL packer\[{pid} {device}\] packer ends so that it is started again: the device .*: CUDA_ERROR_\w+$"
    )
    said = re.findall(pattern, log, re.MULTILINE)
    assert len(said) == 1, log


@DEVICES
def test_a_device_that_breaks_while_outputs_wait_for_their_forward_costs_nothing(device, faults, run_directory, capfd):
    with opened(device) as sides:
        sides.stall()
        expected = sides.send("waiting")

        def describe(output_id):
            return sides.kept.keeper.queue.ask(output_id)(time.monotonic() + DEADLINE_S)

        for output_id in expected:
            wait_until(lambda output_id=output_id: "waiting for the worker's forward" in describe(output_id), output_id)
        old = sides.kept.packer_pid
        faults.set("trap")
        sides.wait_replaced(old)
        assert not set(expected) & set(sides.kept.got)
        sides.go_on()
        sides.assert_delivered(expected)
    assert_said_once(capfd.readouterr().err, old, device)


@DEVICES
def test_a_device_that_breaks_in_mid_copy_has_the_next_packer_copy_what_was_not_delivered(
    device, faults, run_directory, capfd
):
    with opened(device) as sides:
        sides.stall()
        expected = sides.send("copied")
        old = sides.kept.packer_pid
        if device == "host":
            with faults.active("copy"):
                sides.go_on()
                faults.wait_reached("copy")
                faults.set("trap")
                faults.wait_reached("trap")
        else:
            # The kernel traps while the first half is copied or, where others use the GPU too, later: the second half waits.
            sides.go_on(but=OUTPUTS // 2)
            faults.set("trap")
        wait_until(lambda: sides.kept.packer_pid != old, "the packer ends")
        delivered = len(set(expected) & set(sides.kept.got))
        sides.wait_replaced(old)
        sides.go_on()
        sides.assert_delivered(expected)
        assert delivered < OUTPUTS, "the device broke when nothing was in flight any more"
    assert_said_once(capfd.readouterr().err, old, device)


@DEVICES
def test_a_device_that_broke_at_rest_ends_the_packer_with_the_next_output(device, faults, run_directory, capfd):
    with opened(device) as sides:
        old = sides.kept.packer_pid
        faults.set("trap")
        faults.wait_reached("trap")
        expected = sides.send("after")
        sides.wait_replaced(old)
        sides.assert_delivered(expected)
    assert_said_once(capfd.readouterr().err, old, device)


@DEVICES
def test_a_device_that_broke_at_rest_ends_the_packer_with_the_next_worker_whom_the_next_packer_serves(
    device, faults, run_directory, capfd
):
    with opened(device) as sides:
        old = sides.kept.packer_pid
        faults.set("trap")
        faults.wait_reached("trap")
        another = Stalling() if device == "host" else StallingCuda(0)
        with working(sides.kept, device=another, **ROOM[device]) as worker:
            sides.wait_replaced(old)
            sides.worker = worker
            sides.assert_delivered(sides.send("of the next worker"))
    assert_said_once(capfd.readouterr().err, old, device)
