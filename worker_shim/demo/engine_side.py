"""The demo on the real vllm-omni engine and its worker, with the packer behind them."""

from __future__ import annotations

import time
from typing import Any

from worker_shim.demo.cases import Case, Handoffs, equal


class EngineSide:
    """An engine that runs, and the clock of its hand-offs."""

    def __init__(self, running: Any, device: Any) -> None:
        from worker_shim.synthetic.timing import Arrivals

        self._running = running
        self._device = device
        self._timer = Arrivals(running.executor)

    @property
    def packer_pids(self) -> list[int]:
        return self._running.executor.packer_pids

    def run(self, case: Case, requests: int, advance: Any) -> Handoffs:
        mismatches = 0
        for seed in range(2):  # the arena and the pool find their size
            self._at_once(case, [seed])
        self._timer.take()
        before = self._running.executor.packer_outputs
        for seed in range(requests):
            mismatches += self._at_once(case, [seed])[0]
            advance()
        latencies = [handoff.handoff_s for handoff in self._timer.take()]
        wrong, wall_s = self._at_once(case, list(range(requests)))
        self._timer.take()
        advance()
        through_packer = self._running.executor.packer_outputs - before
        return Handoffs(latencies, wall_s, mismatches + wrong, 2 * requests - through_packer)

    def _at_once(self, case: Case, seeds: list[int]) -> tuple[int, float]:
        """Run these requests at once; how many outputs were wrong, and in how many seconds they came."""
        shape = {"height": case.height, "width": case.width, "num_frames": case.num_frames}
        requests = {
            seed: self._running.request(seed=seed, dtype=case.dtype, synchronize=True, **shape) for seed in seeds
        }
        begin = time.perf_counter()
        results = self._running.run(requests.values())
        wall_s = time.perf_counter() - begin
        outputs = {seed: results[request.request_id].output for seed, request in requests.items()}
        return sum(not equal(outputs[seed], case, seed, self._device) for seed in seeds), wall_s
