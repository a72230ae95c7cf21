"""The gap that an output leaves between two steps: from the end of the one that made it to the beginning of the next.

    python -m benchmarks.overlap --json FILE

Two requests are in flight and ``max_num_seqs=1``, so the second waits for the first. ``step``: the gap between the final step
of the first request and the first step of the second. ``stream`` (each request yields chunks): the gap between the last
step of a chunk and the first step of the next chunk. ``between_p50_ms`` is the gap between steps that carry no output, on the
same side: what vllm-omni itself needs for a step. The worker measures, on its stream (benchmarks.step_pipeline, Note [The
gap]), and each output carries its gaps. Sides: ``packer`` and vllm-omni's own ``mp``, which in step mode runs without a GPU
too; both are up at once and take turns. Each output of each cell and side is compared bit for bit once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.harness import (
    REQUEST_TIMEOUT_S,
    Budget,
    Side,
    arguments,
    device,
    is_quick,
    milliseconds,
    open_sides,
    say,
    set_up,
    settings_in_force,
    table,
)
from benchmarks.percentile import percentile
from worker_shim.synthetic.engine import STEP, STREAM

SECONDS = 60.0
PIPELINE = "benchmarks.step_pipeline.StepPipeline"
MODES: dict[str, dict[str, Any]] = {"step": {**STEP, "max_num_seqs": 1}, "stream": {**STREAM, "max_num_seqs": 1}}
IN_FLIGHT = 2
CHUNKS = {"step": 1, "stream": 3}  # of a request
STEPS = 4  # of a chunk
_WARM_UP = 3  # pairs of ours after the one that is compared: arena and pool find their size


class Case(NamedTuple):
    """What is handed over, and how many pairs of requests each side runs: by turns, in ``rounds``."""

    mode: str
    shape: tuple[int, ...]
    dtype: str
    rounds: int
    pairs: dict[str, int]  # by impl, in a round

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"float32": 4, "bfloat16": 2, "uint8": 1}[self.dtype]

    def gaps(self, impl: str) -> int:
        """How many a full run has."""
        of_a_pair = 1 if self.mode == "step" else IN_FLIGHT * (CHUNKS[self.mode] - 1)
        return self.rounds * self.pairs[impl] * of_a_pair

    def __str__(self) -> str:
        return f"{self.mode}, {self.nbytes / 1e6:.1f} MB {self.dtype}"


_IMAGE, _VIDEO = (1, 3, 1, 1024, 1024), (1, 3, 81, 768, 768)  # 12 MB; 573 MB (10^6)
ON_GPU = [
    Case("step", _IMAGE, "float32", 20, {"packer": 4, "mp": 1}),
    Case("step", _VIDEO, "float32", 7, {"packer": 6, "mp": 1}),
    Case("stream", _IMAGE, "float32", 10, {"packer": 2, "mp": 1}),
    Case("stream", _VIDEO, "float32", 3, {"packer": 4, "mp": 1}),
]
QUICK = [
    Case(mode, shape, "float32", 10, {"packer": 1, "mp": 1})
    for mode in MODES
    for shape in ((1, 3, 1, 512, 512), _IMAGE)  # 3 MB, 12 MB
]


class Gap(NamedTuple):
    """Seconds."""

    behind_output: float
    between: float


class Pairs:
    """Runs requests on one engine, two at a time: its thread begins the first only when it has both.

    Without that the second could come after the first has ended, and its gap would be our own delay.
    ``_awaited`` is written by the caller before a pair is sent and by the engine's thread when it has come.
    """

    def __init__(self, side: Side) -> None:
        self.impl = side.impl
        self._running = side.running
        self._awaited = 0
        engine = side.running.diffusion_engine
        self._scheduler, self._execute = engine.scheduler, engine.execute_fn
        engine.execute_fn = self._execute_when_both_are_there

    def _execute_when_both_are_there(self, scheduled: Any) -> Any:
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while len(self._scheduler._request_states) < self._awaited and time.monotonic() < deadline:
            time.sleep(1e-4)
        self._awaited = 0
        return self._execute(scheduled)

    def run(self, case: Case) -> list[list[Any]]:
        """What the two requests yielded, in order, an OmniRequestOutput a chunk. Drop it at once: it may be leases."""
        requests = [
            self._running.request(
                seed=number * CHUNKS[case.mode],
                num_inference_steps=STEPS,
                shape=list(case.shape),
                dtype=case.dtype,
                chunks=CHUNKS[case.mode],
            )
            for number in range(IN_FLIGHT)
        ]
        self._awaited = len(requests)
        results = self._running.run(requests, REQUEST_TIMEOUT_S)
        for result in results.values():
            if result.error is not None:
                raise result.error
        return [results[request.request_id].yielded for request in requests]

    def gaps(self, case: Case) -> list[Gap]:
        """Those of one pair that lie behind an output with more to do: see the module."""
        from benchmarks.step_pipeline import GAP_BEFORE, GAP_BETWEEN

        first, second = self.run(case)
        behind = [second[0]] if case.mode == "step" else [*first[1:], *second[1:]]
        return [Gap(each.stage_durations[GAP_BEFORE], each.stage_durations[GAP_BETWEEN]) for each in behind]


def measure(cases: list[Case], seconds: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each case as soon as they are there. Each mode has engines of its own, whose starts do not count."""
    for mode, config in MODES.items():
        of_mode = [case for case in cases if case.mode == mode]
        if not of_mode:
            continue
        with open_sides(PIPELINE, **config) as sides:
            pairs = [Pairs(side) for side in sides]
            budget = Budget(seconds / len(MODES), len(of_mode))
            for case in of_mode:
                deadline, begin = budget.next_deadline(), time.monotonic()
                expected = _expected(case)
                for each in pairs:
                    _warm_up(each, case, expected)
                del expected
                yield _rows(case, _run(pairs, case, deadline))
                say(f"overlap: {case}: {time.monotonic() - begin:.1f} s")


def _expected(case: Case) -> list[Any]:
    """The outputs of a pair in order, on this process's view of the device."""
    from worker_shim.synthetic.pipeline import content

    return [content(case.shape, case.dtype, seed, device()) for seed in range(IN_FLIGHT * CHUNKS[case.mode])]


def _warm_up(pairs: Pairs, case: Case, expected: list[Any]) -> None:
    """The outputs are made and checked, each of them; then arena, pool and every cache find their size."""
    received = [chunk.images[0] for yielded in pairs.run(case) for chunk in yielded]
    if len(received) != len(expected) or not all(map(_equal, received, expected)):
        raise SystemExit(f"{pairs.impl}: the outputs of {case} are not what the worker made")
    del received
    for _ in range(_WARM_UP if pairs.impl != "mp" else 0):
        pairs.run(case)


def _equal(output: Any, expected: Any) -> bool:
    """Bit for bit; on the device, which is quicker at it."""
    import torch

    if (output.dtype, output.shape) != (expected.dtype, expected.shape):
        return False
    return torch.equal(output.to(expected.device).reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def _run(pairs: list[Pairs], case: Case, deadline: float) -> dict[str, list[Gap]]:
    """A few pairs of each side by turns, until all rounds are through or the time is up."""
    measured: dict[str, list[Gap]] = {each.impl: [] for each in pairs}
    for _ in range(case.rounds):
        for each in pairs:
            for _ in range(case.pairs[each.impl]):
                measured[each.impl] += each.gaps(case)
        if time.monotonic() > deadline:
            break
    return measured


def _rows(case: Case, measured: dict[str, list[Gap]]) -> list[dict[str, Any]]:
    behind = {impl: [gap.behind_output for gap in gaps] for impl, gaps in measured.items()}
    rows = []
    for impl, gaps in behind.items():
        row: dict[str, Any] = {
            "mode": case.mode,
            "impl": impl,
            "nbytes": case.nbytes,
            "dtype": case.dtype,
            "samples": len(gaps),
            "p50_ms": milliseconds(percentile(gaps, 50)),
            "p95_ms": milliseconds(percentile(gaps, 95)),
            "max_ms": milliseconds(max(gaps)),
            "between_p50_ms": milliseconds(percentile([gap.between for gap in measured[impl]], 50)),
        }
        if impl != "mp":
            row["ratio_to_mp"] = round(percentile(gaps, 50) / percentile(behind["mp"], 50), 4)
        if len(gaps) < case.gaps(impl):
            row["trimmed_from"] = case.gaps(impl)
        rows.append(row)
    return rows


def facts() -> dict[str, Any]:
    """What a result of this benchmark says beside its rows."""
    return {"settings": settings_in_force()}


def main() -> None:
    options = arguments(__doc__, SECONDS, "--json").parse_args()
    stdout = set_up()
    recorder = machine.Recorder(options.json, "overlap", **facts())
    for rows in measure(QUICK if is_quick(options) else ON_GPU, options.seconds):
        recorder.add(*rows)
    print(table("overlap", recorder.rows), file=stdout, flush=True)


if __name__ == "__main__":
    main()
