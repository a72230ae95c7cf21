"""A packer on a GPU is killed, or hangs, while outputs wait for their forward: the next packer delivers each of them once.

tests/faults/test_packer_dies.py and test_packer_hangs.py have every other point of an output's way, on the host device. That
has no events, which the next packer has to open afresh.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from packer_process import MIB, wait_until

torch = pytest.importorskip("torch")
pytest.importorskip("vllm_omni")
pytestmark = [pytest.mark.gpu, pytest.mark.engine]

from delivery import assert_delivered  # noqa: E402
from sides import WorkerSide, managed, working  # noqa: E402

from worker_shim.worker.device_cuda import CudaExportDevice  # noqa: E402

GIVEN = {
    "hang_s": 3.0,
    "max_restarts": 1000,
    "arena_step_bytes": "64MiB",
    "arena_max_bytes": "64MiB",
    "pool_bytes": "128MiB",
    "pool_max_bytes": "128MiB",
}
FORWARD_CYCLES = 2_000_000_000  # about a second of an H200


def send(worker: WorkerSide, name: str) -> dict[str, Any]:
    """Four outputs whose forward takes about a second."""
    outputs = {
        f"{name} {number}": {
            "large": torch.full((4 * MIB,), number, dtype=torch.uint8, device="cuda"),
            "small": torch.full((9, 5), number, dtype=torch.bfloat16, device="cuda"),
        }
        for number in range(4)
    }
    torch.cuda._sleep(FORWARD_CYCLES)
    for output_id, output in outputs.items():
        output["large"].add_(100)
        worker.send(output, output_id)
    return outputs


@pytest.mark.parametrize("event", ["timeline", "ipc"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_packer_that_goes_while_outputs_wait_is_replaced_and_each_arrives_once(tmp_path, monkeypatch, number, event):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    device = CudaExportDevice(0, events=event == "ipc")
    given = {**GIVEN, "event": event}
    with managed("cuda:0", **given) as kept, working(kept, device=device, **given) as worker:
        assert_delivered(kept, worker, send(worker, "before"))
        old = kept.packer_pid
        waiting = send(worker, "waiting")
        os.kill(old, number)
        away = send(worker, "while it is away")
        assert_delivered(kept, worker, {**waiting, **away})
        wait_until(lambda: kept.packer_pid not in (None, old), "another packer serves")
        assert not os.path.exists(f"/proc/{old}")
        assert_delivered(kept, worker, send(worker, "after"))
        assert all(len(came) == 1 for came in kept.got.values())
        wait_until(lambda: not device._busy_events, "nobody waits for an event")
