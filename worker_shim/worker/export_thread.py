"""What the export thread does with an output once its forward is done. It settles, or has settled, every job that it takes.

Note [Nothing may raise after COMPUTE_DONE] (worker_shim.worker.proc): whatever fails here is sent to the engine as an error.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from packer_service.errors import DeviceError
from worker_shim.log import get_logger
from worker_shim.worker.exporter import Exporter
from worker_shim.worker.in_flight import InFlight
from worker_shim.worker.jobs import Fallback, Foreign, Job, OwnPath, Unsent, as_job
from worker_shim.worker.own_path import OwnPathSender, fail_unpicklable

logger = get_logger(__name__)


class ExportThread:
    """Runs jobs one by one. ``settled`` is told of each output whose end is known here; the exporter tells it of the others.

    ``leave_to_vllm_omni`` does a foreign job, sends its message and settles it.
    """

    def __init__(
        self,
        exporter: Exporter | None,
        own_path: OwnPathSender,
        settled: Callable[[str], None],
        leave_to_vllm_omni: Callable[[Foreign], None],
    ) -> None:
        self._exporter = exporter
        self._own_path = own_path
        self._settled = settled
        self._leave_to_vllm_omni = leave_to_vllm_omni

    def run(self, jobs: queue.Queue[Any], who: str) -> None:
        """Until None comes, which vllm-omni's shutdown sends; nothing else ends it."""
        try:
            if self._exporter is not None:
                self._exporter.device.bind_thread()
        except Exception:
            logger.exception("the device of %s does not work: its outputs will fail one by one", who)
        while (queued := jobs.get()) is not None:
            self._run(as_job(queued))
            del queued  # else its output would stay until the next one comes

    def _run(self, job: Job) -> None:
        try:
            self._hand_over(job)
        except BaseException as error:  # SystemExit, too: somebody's pickling may raise it
            logger.exception("output %s failed after its forward", job.output_id)
            if not isinstance(job, Unsent):
                self._own_path.send_error(job.output_id, error)
            # The first is settled by the packer's ack of its withdrawal; the second may have been by vllm-omni's own loop.
            if not (isinstance(job, InFlight) or (isinstance(job, Foreign) and job.settled)):
                self._settled(job.output_id)

    def _hand_over(self, job: Job) -> None:
        match job:
            case Foreign():
                self._leave_to_vllm_omni(job)
            case InFlight():
                assert self._exporter is not None
                self._exporter.submit(job, fail_unpicklable)
            case Fallback():
                self._send_fallback(job)
            case OwnPath():
                self._own_path.send(job)
                self._settled(job.output_id)
            case Unsent(InFlight() as in_flight):
                assert self._exporter is not None
                self._exporter.withdraw(in_flight)
            case Unsent():
                self._settled(job.output_id)

    def _send_fallback(self, job: Fallback) -> None:
        """Rebuild the output from where it was staged, and send it."""
        assert self._exporter is not None
        in_flight = job.in_flight
        # Of a packer that is gone for a while was said that outputs go this way.
        level = logging.DEBUG if self._exporter.broken else logging.WARNING
        logger.log(level, "output %s takes vllm-omni's own path: %s", job.output_id, job.reason)
        try:
            if in_flight.error:  # and the packer never told the engine
                raise DeviceError(in_flight.error)
            with self._exporter.device.after(in_flight.signal.ready):
                output = self._exporter.rebuild(in_flight)
            self._own_path.send(OwnPath(job.output_id, output, reason=in_flight.own_path))
        finally:
            self._exporter.release(in_flight)
        self._settled(job.output_id)
