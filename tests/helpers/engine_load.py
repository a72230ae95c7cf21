"""Images that a test asks a running engine for, and outputs that it holds on their way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from engine_checks import DEADLINE_S
from engine_harness import RunningEngine
from packer_process import wait_until

IMAGE = {"height": 512, "width": 512}  # 3 MiB of float32


def images(*seeds: int, **request: Any) -> list[dict[str, Any]]:
    return [{"seed": seed, **IMAGE, **request} for seed in seeds]


def submit(running: RunningEngine, *requests: dict[str, Any]) -> list[Future[Any]]:
    return [running.submit(running.request(**request)) for request in requests]


def received(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(DEADLINE_S).output for future in futures]


def wait_computed(running: RunningEngine, number: int) -> None:
    """Until the forwards of ``number`` requests are over and their outputs, which are not there yet, are waited for."""
    wait_until(lambda: len(running.executor._output_futures) == number, f"{number} outputs are waited for")


@contextlib.contextmanager
def pump_held(running: RunningEngine) -> Iterator[None]:
    """The pump reads nothing from the packer meanwhile: what comes stays in the connection."""
    (keeper,) = running.executor._packers.keepers
    queue = keeper.queue
    dequeue, held, inside = queue.dequeue, threading.Event(), threading.Event()

    def gated(*args: Any, **kwargs: Any) -> Any:
        if queue._quiet:  # else the pump still has the last output in its hands
            inside.set()
            assert held.wait(DEADLINE_S)
        return dequeue(*args, **kwargs)

    queue.dequeue = gated
    try:
        assert inside.wait(DEADLINE_S)
        yield
    finally:
        held.set()
        del queue.dequeue
