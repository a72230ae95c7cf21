"""What the demo measures: the rows of its table, their hand-offs in a running engine, and the same bytes merely copied.

It imports torch: ``worker_shim.synthetic.engine.prepare`` comes first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from worker_shim.synthetic.engine import RunningEngine
from worker_shim.synthetic.pipeline import Arrivals, content


class Case(NamedTuple):
    """One row: what is asked for, by shape and dtype."""

    name: str
    height: int
    width: int
    num_frames: int
    dtype: str

    def content(self, seed: int, device: torch.device) -> torch.Tensor:
        """What the pipeline makes of this seed."""
        return content((1, 3, self.num_frames, self.height, self.width), self.dtype, seed, device)


ON_HOST = [
    Case("image", 512, 512, 1, "float32"),
    Case("image", 1024, 1024, 1, "float32"),
    Case("image", 1024, 1024, 1, "bfloat16"),
    Case("video", 256, 256, 17, "uint8"),
    Case("video", 512, 512, 17, "float32"),
]
ON_GPU = [*ON_HOST, Case("video", 768, 768, 81, "bfloat16"), Case("video", 768, 768, 81, "float32")]


class Clock:
    """Runs the cases in an engine, and times their hand-offs."""

    def __init__(self, running: RunningEngine, device: torch.device) -> None:
        self._running = running
        self._device = device
        self._arrivals = Arrivals(running.executor)

    def row(self, case: Case, requests: int, advance: Callable[[], object]) -> dict[str, Any]:
        """Hand over ``requests`` outputs one at a time, and then as many at once: a row of the report."""
        mismatches = 0
        for seed in range(2):  # the arena and the pool find their size
            self._at_once(case, [seed])
        self._arrivals.take()
        before = self._running.executor.packer_outputs
        for seed in range(requests):
            mismatches += self._at_once(case, [seed])[0]
            advance()
        latencies = sorted(arrival.handoff_s for arrival in self._arrivals.take())
        wrong, wall_s = self._at_once(case, range(requests))
        self._arrivals.take()
        advance()
        through_packer = self._running.executor.packer_outputs - before
        nbytes, copy_s = _bare_copy(case, self._device, max(requests, 5))
        p50_s, p99_s = statistics.median_low(latencies), latencies[-1 - len(latencies) // 100]
        return {
            "output": case.name,
            "dtype": case.dtype,
            "nbytes": nbytes,
            "requests": 2 * requests,
            "handoff_p50_ms": round(p50_s * 1e3, 3),
            "handoff_p99_ms": round(p99_s * 1e3, 3),
            "bare_copy_ms": round(copy_s * 1e3, 3),
            "ratio": round(p50_s / copy_s, 2),
            "outputs_per_s": round(requests / wall_s, 1),
            "own_path": 2 * requests - through_packer,  # outputs that did not come through the packer
            "mismatches": mismatches + wrong,
        }

    def _at_once(self, case: Case, seeds: Iterable[int]) -> tuple[int, float]:
        """Run these requests at once; how many outputs were wrong, and in how many seconds they came."""
        given: dict[str, Any] = case._asdict()
        del given["name"]
        requests = {seed: self._running.request(seed=seed, synchronize=True, **given) for seed in seeds}
        begin = time.perf_counter()
        results = self._running.run(requests.values())
        wall_s = time.perf_counter() - begin
        outputs = {seed: results[request.request_id].output for seed, request in requests.items()}
        return sum(not _equal(output, case.content(seed, self._device)) for seed, output in outputs.items()), wall_s


def _equal(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Byte for byte."""
    if output.dtype != expected.dtype or output.shape != expected.shape:
        return False
    return torch.equal(output.reshape(-1).view(torch.uint8), expected.cpu().reshape(-1).view(torch.uint8))


def _bare_copy(case: Case, device: torch.device, samples: int) -> tuple[int, float]:
    """The bytes of a case, and the seconds that copying them to the host takes: to pinned memory, where there is a GPU."""
    source = case.content(1, device)
    target = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
    seconds = []
    for _ in range(1 + samples):
        begin = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return source.nbytes, statistics.median_low(seconds[1:])  # the first faults pages in
