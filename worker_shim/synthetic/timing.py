"""The clock of the demo and the benchmarks: from ``_return_result`` in the worker to the output at the engine.

Both processes read CLOCK_MONOTONIC, which is one clock for the whole machine. The stamps travel in the output's own
``stage_durations``, so the same code times any executor of vllm-omni, ours or its own.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from vllm_omni.diffusion.worker import diffusion_worker

from worker_shim.synthetic.pipeline import SyntheticPipeline

ENTERED = "return_result_entered_s"
PREVIOUS_COST = "previous_return_result_s"
UNCLAIMED = "unclaimed"


class TimedPipeline(SyntheticPipeline):
    """SyntheticPipeline, whose worker stamps each output on entry into ``_return_result``, and with the last call's time."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        _stamp(diffusion_worker.WorkerProc)  # the one this worker process runs


def _stamp(worker_proc: Any) -> None:
    original = worker_proc._return_result
    cost = 0.0

    def timed(self: Any, output: Any, rpc_id: str | None = None) -> None:
        nonlocal cost
        durations = getattr(output, "stage_durations", None)
        if durations is None:
            original(self, output, rpc_id)
            return
        entered = time.perf_counter()
        durations[ENTERED], durations[PREVIOUS_COST] = entered, cost
        begin = time.perf_counter()
        original(self, output, rpc_id)
        cost = time.perf_counter() - begin

    worker_proc._return_result = timed


class Arrival(NamedTuple):
    """One output in the engine's hands; all in seconds, ``at`` of CLOCK_MONOTONIC."""

    at: float
    handoff_s: float
    previous_cost_s: float  # of ``_return_result``, for the output before


class Arrivals:
    """Reads the stamps at the moment the executor has an output in hand. One lock; ``take`` on any thread.

    An output stamped UNCLAIMED, which nobody waits for, ends here.
    """

    def __init__(self, executor: Any) -> None:
        self._lock = threading.Lock()
        self._arrivals: list[Arrival] = []
        finish = executor._finish_output

        def arrived(async_output_id: str, result: Any, exc: BaseException | None) -> None:
            at = time.perf_counter()
            stamps = getattr(result, "stage_durations", None) or {}
            if UNCLAIMED in stamps:
                return
            if ENTERED in stamps:
                with self._lock:
                    self._arrivals.append(Arrival(at, at - stamps[ENTERED], stamps[PREVIOUS_COST]))
            finish(async_output_id, result, exc)

        executor._finish_output = arrived

    def take(self) -> list[Arrival]:
        """Those since the last call."""
        with self._lock:
            taken, self._arrivals = self._arrivals, []
        return taken
