"""Where the time of one hand-off goes: every step in worker, packer and engine, on one clock.

    python -m benchmarks.steps --json FILE

One output at a time, 2 ms apart, as in benchmarks.handoff. A row is one step: when it begins and ends after
``_return_result`` was entered, and how long it takes (medians, microseconds). Steps overlap: they run in three processes.
The clock costs about a microsecond a step.
"""

from __future__ import annotations

import bisect
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import machine, stopwatch
from benchmarks.harness import MIB, ROOT, Side, arguments, is_quick, open_sides, say, set_up, settings_in_force, table
from benchmarks.percentile import percentile
from benchmarks.stopwatch import ENTERED, Call, Stopwatch

PIPELINE = "benchmarks.steps_pipeline.SteppedPipeline"
_WARM_UP = 8
_APART_S = 0.002
_WRITTEN_S = 2.0  # after the last output: by then worker and packer have written their calls (see stopwatch)


class Plan(NamedTuple):
    """Which outputs are handed over (bytes), and how many of each."""

    sizes: tuple[int, ...]
    samples: int


ON_GPU = Plan((3 * MIB, 12 * MIB, 256 * MIB), 100)
QUICK = Plan((3 * MIB,), 25)


def measure(plan: Plan) -> Iterator[list[dict[str, Any]]]:
    """The rows of each size, once all are measured."""
    with tempfile.TemporaryDirectory(prefix="benchmark-steps-") as directory:
        os.environ[stopwatch.DIRECTORY] = directory
        path = os.environ["PYTHONPATH"]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks" / "inject"), path])
        try:
            engine = Stopwatch("engine")
            with open_sides(PIPELINE, only="packer") as (side,):
                _time_engine(engine)
                spans = [_run(side, nbytes, plan.samples) for nbytes in plan.sizes]
                time.sleep(_WRITTEN_S)
                calls = {"worker": stopwatch.read("worker"), "packer": stopwatch.read("packer"), "engine": engine.calls}
        finally:
            os.environ["PYTHONPATH"] = path
            del os.environ[stopwatch.DIRECTORY]
    for nbytes, (begin, end) in zip(plan.sizes, spans, strict=True):
        yield rows(nbytes, {process: _between(those, begin, end) for process, those in calls.items()})


def _time_engine(engine: Stopwatch) -> None:
    from vllm_omni.diffusion.executor.multiproc_executor import MultiprocDiffusionExecutor

    from worker_shim.engine.assembly import Assembler
    from worker_shim.engine.receiver import Receiver

    engine.time(Receiver, "_take", "take a message of the packer")
    engine.time(Assembler, "assemble", "put the output together")
    engine.time(MultiprocDiffusionExecutor, "_finish_output", "hand it to whoever waits (vllm-omni)")


def _run(side: Side, nbytes: int, samples: int) -> tuple[float, float]:
    """Hand over ``samples`` outputs, one at a time. Returns when the first began and the last had ended."""
    request = {"seed": 7, "shape": [nbytes // 4], "dtype": "float32"}
    for _ in range(_WARM_UP):
        side.one(**request)
    begin = time.perf_counter()
    for _ in range(samples):
        side.one(**request)
        time.sleep(_APART_S)
    say(f"steps: {nbytes / 1e6:.1f} MB")
    return begin, time.perf_counter()


def _between(calls: list[Call], begin: float, end: float) -> list[Call]:
    return [call for call in calls if begin <= call[1] <= end]


def rows(nbytes: int, calls: dict[str, list[Call]]) -> list[dict[str, Any]]:
    """One row a step, by the time it begins; a step that an output takes twice has two rows.

    ``calls`` of each process, between the same two times, in which outputs followed one another.
    """
    entries = sorted(begin for step, begin, _ in calls["worker"] if step == ENTERED)
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for process, those in calls.items():
        seen: dict[tuple[str, int], int] = {}
        for step, begin, end in sorted(those, key=lambda call: call[1]):
            output = bisect.bisect_right(entries, begin) - 1
            if output >= 0:
                number = seen[step, output] = seen.get((step, output), -1) + 1
                found.setdefault((process, step, number), []).append((begin - entries[output], end - entries[output]))
    result = [
        {
            "process": process,
            "step": step,
            "nbytes": nbytes,
            "samples": len(times),
            "begin_us": _median_us([begin for begin, _ in times]),
            "end_us": _median_us([end for _, end in times]),
            "p50_us": _median_us([end - begin for begin, end in times]),
            "p99_us": round(percentile([end - begin for begin, end in times], 99) * 1e6, 1),
        }
        for (process, step, _), times in found.items()
        if len(times) >= len(entries) / 2  # what happens now and then is no step
    ]
    return sorted(result, key=lambda row: row["begin_us"])


def _median_us(seconds: list[float]) -> float:
    return round(percentile(seconds, 50) * 1e6, 1)


def facts() -> dict[str, Any]:
    """What a result of this benchmark says beside its rows."""
    return {"settings": settings_in_force(), "notes": []}


def main() -> None:
    options = arguments(__doc__, None, "--json").parse_args()
    stdout = set_up()
    recorder = machine.Recorder(options.json, "steps", **facts())
    for found in measure(QUICK if is_quick(options) else ON_GPU):
        recorder.add(*found)
    print(table("steps", recorder.rows), file=stdout, flush=True)


if __name__ == "__main__":
    main()
