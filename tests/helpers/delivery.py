"""Outputs that go through a packer which may be away for a while, and that each arrives once, whole."""

from __future__ import annotations

import contextlib

import torch
from any_output import content
from engine_checks import assert_same
from packer_process import Packer
from sides import Kept, WorkerSide

GIVEN = {"restart_wait_s": 60.0, "max_restarts": 1000}


@contextlib.contextmanager
def kept(packer: Packer, **given: object):
    with contextlib.closing(Kept(packer.socket, packer.key, **{**GIVEN, **given})) as engine:
        yield engine


def send(worker: WorkerSide, *names: str) -> dict[str, object]:
    outputs = {name: [content(torch.float32, (50_000 + 1000 * len(name),), hash(name) % 1000)] for name in names}
    for name, output in outputs.items():
        worker.send(output, name)
    return outputs


def assert_delivered(engine: Kept, worker: WorkerSide, expected: dict[str, object]) -> None:
    assert_same(engine.wait(*expected), list(expected.values()))
    worker.wait_settled(*expected)
    assert worker.fallen_back == []
    assert worker.arena_idle()
