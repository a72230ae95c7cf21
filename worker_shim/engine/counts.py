"""What the threads of an executor count: plain numbers, each with one writer. Reading them waits for nobody."""

from __future__ import annotations

import enum
from typing import Any

from worker_shim.outputs.own_path import OwnPathReason


class ErrorKind(enum.Enum):
    """Where an output failed that the engine was promised."""

    PACKER = "packer"  # the packer said so, which counts the cause
    ASSEMBLY = "assembly"  # here, where it was put together
    WORKER = "worker"  # on vllm-omni's own path: the worker could not send it


class Counts:
    """One thread's. All keys are there from the start, so that whoever reads never meets a dict that grows."""

    def __init__(self, engine: EngineCounts) -> None:
        self.outputs = 0  # that came through a packer
        self.nbytes = 0  # of the arrays in them
        self.errors = {kind.value: 0 for kind in ErrorKind}
        self.own_path = {reason.value: 0 for reason in OwnPathReason}
        self._engine = engine

    def add_output(self, nbytes: int) -> None:
        self.outputs += 1
        self.nbytes += nbytes
        self._engine.paused = False

    def add(self, other: Counts) -> None:
        """Sum up. ``other`` may be counting meanwhile."""
        self.outputs += other.outputs
        self.nbytes += other.nbytes
        for kind, number in other.errors.items():
            self.errors[kind] += number
        for reason, number in other.own_path.items():
            self.own_path[reason] += number

    def add_error(self, kind: ErrorKind) -> None:
        self.errors[kind.value] += 1

    def add_own_path(self, message: Any) -> None:
        """``message``: the OUTPUT_READY of an output that took vllm-omni's own path, or failed there."""
        if message.error:
            self.add_error(ErrorKind.WORKER)
            return
        reason = getattr(message, "reason", OwnPathReason.OTHER.value)
        self.own_path[reason] += 1
        self._engine.paused = reason == OwnPathReason.PAUSED.value


class EngineCounts:
    """All of one executor. ``paused``: the last output took vllm-omni's own path because an operator paused its worker."""

    def __init__(self) -> None:
        self.paused = False
        self._each: list[Counts] = []

    def new(self) -> Counts:
        """For one more thread that counts."""
        counts = Counts(self)
        self._each.append(counts)
        return counts

    def add_to(self, total: Counts) -> None:
        """Add what was counted so far, also by threads that ended."""
        for counts in list(self._each):
            total.add(counts)
