"""What the export thread is given to do: one kind of job for each way that an output can take.

An ``InFlight`` is a job as well: the rest of it is to be submitted. Every job has the ``output_id`` of its output.
"""

from __future__ import annotations

import queue
from typing import Any, NamedTuple

from worker_shim.outputs.own_path import OwnPathReason
from worker_shim.worker.in_flight import InFlight


class OwnPath(NamedTuple):
    """An output that was not staged: vllm-omni's own path, into named SHM and through the worker's own result queue."""

    output_id: str
    output: object
    event: Any = None  # after which it is complete on the device
    reason: OwnPathReason = OwnPathReason.OTHER


class Fallback(NamedTuple):
    """An output that was staged and falls back: it is rebuilt from where it was staged, and then takes the own path."""

    in_flight: InFlight
    reason: str

    @property
    def output_id(self) -> str:
        return self.in_flight.output_id


class Unsent(NamedTuple):
    """An output that the engine was not promised: the message that names it could not be sent."""

    job: InFlight | OwnPath

    @property
    def output_id(self) -> str:
        return self.job.output_id


class Foreign:
    """A job that vllm-omni itself queued, as other versions do: a tuple, of which only their own loop knows what it is.

    ``settled`` once that loop has counted it as done: where it fails before, nobody else will.
    """

    def __init__(self, job: Any) -> None:
        self.jobs: queue.Queue[Any] = queue.Queue()  # for that loop, which ends at None
        self.jobs.put(job)
        self.jobs.put(None)
        self.settled = False
        parts = job if isinstance(job, tuple) else ()
        self.output_id = next((part for part in parts if isinstance(part, str)), f"of an unknown {type(job).__name__}")


Job = InFlight | OwnPath | Fallback | Unsent | Foreign


def as_job(queued: Any) -> Job:
    """What was queued, as one of ours."""
    return queued if isinstance(queued, (InFlight, OwnPath, Fallback, Unsent)) else Foreign(queued)
