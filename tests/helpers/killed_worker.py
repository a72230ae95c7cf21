"""A worker in a process of its own, which test_worker_or_engine_dies kills."""

from __future__ import annotations

import signal

import torch
from any_output import content
from sides import FLOATS, WorkerSide
from stalling_device import Stalling


def export_and_wait(socket: str, key: bytes, session_name: str) -> None:
    """Say what it has sent, then wait to be killed."""
    device = Stalling()
    packer = type("Packer", (), {"socket": socket, "key": key})
    side = WorkerSide(packer, session_name, device=device)  # type: ignore[arg-type]
    side.send([content(torch.float32, (1000,), 1)], "complete")
    device.stalled = True
    side.send([torch.ones(FLOATS // 4)], "incomplete")
    print("sent", flush=True)
    signal.pause()
