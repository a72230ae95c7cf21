"""All benchmarks that this machine can run, in one process: the engines of request mode are started once.

    python -m benchmarks.run [--out DIR]

They are handoff, worker_cost, interference, overlap, steps and footprint, each also a module of its own: `python -m
benchmarks.handoff`. `--seconds` is for handoff and for interference, each; overlap takes at most a minute of it, and steps
and footprint together about one and a half on a GPU.

Writes DIR/<benchmark>_<machine>.json, anew with every row: a run that is cut short leaves what it has measured. DIR is
benchmarks/results on a GPU and build/benchmarks elsewhere or with --quick. `python -m benchmarks.report` makes
docs/benchmarks.md of benchmarks/results.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks import footprint, handoff, interference, machine, overlap, steps
from benchmarks.harness import ROOT, Side, arguments, is_quick, open_sides, say, set_up, table


def main() -> None:
    parser = arguments(__doc__, handoff.SECONDS)
    parser.add_argument("--out", metavar="DIR", type=Path)
    options = parser.parse_args()
    quick = is_quick(options)
    stdout = set_up()
    out = options.out or ROOT / ("build/benchmarks" if quick else "benchmarks/results")
    out.mkdir(parents=True, exist_ok=True)

    def file(benchmark: str) -> Path:
        return out / f"{benchmark}_{machine.name()}.json"

    costs = machine.Recorder(file("worker_cost"), "worker_cost", **handoff.facts())
    handoffs = machine.Recorder(file("handoff"), "handoff", **handoff.facts())
    forwards = machine.Recorder(file("interference"), "interference", **interference.facts())
    gaps = machine.Recorder(file("overlap"), "overlap", **overlap.facts())
    step_times = machine.Recorder(file("steps"), "steps", **steps.facts())
    footprints = machine.Recorder(file("footprint"), "footprint", **footprint.facts(quick))

    def run_footprint() -> None:
        for row in footprint.measure(footprint.plan(footprint.SECONDS, quick)):
            footprints.add(row)

    def run_overlap() -> None:
        seconds = min(options.seconds, overlap.SECONDS)
        for rows in overlap.measure(overlap.QUICK if quick else overlap.ON_GPU, seconds):
            gaps.add(*rows)

    def run_steps() -> None:
        for rows in steps.measure(steps.QUICK if quick else steps.ON_GPU):
            step_times.add(*rows)

    def run_handoff(sides: list[Side]) -> None:
        for measured in handoff.measure(sides, handoff.QUICK if quick else handoff.ON_GPU, options.seconds):
            handoffs.add(*measured.handoff)
            costs.add(*measured.worker_cost)

    def run_interference(sides: list[Side]) -> None:
        plan = interference.QUICK if quick else interference.ON_GPU
        for rows in interference.measure(sides, plan, options.seconds):
            forwards.add(*rows)

    failed = _failed(run_footprint)
    with open_sides() as sides:
        failed += _failed(lambda: run_handoff(sides)) + _failed(lambda: run_interference(sides))
    failed += _failed(run_overlap) + _failed(run_steps)
    for recorder in (handoffs, costs, forwards, gaps, step_times, footprints):
        print(table(recorder.benchmark, recorder.rows), file=stdout, flush=True)
    say(f"results are in {out}; {failed} benchmarks failed")
    raise SystemExit(1 if failed else 0)


def _failed(benchmark: Callable[[], None]) -> int:
    """1 where it failed: the others still run."""
    try:
        benchmark()
    except (Exception, SystemExit):
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
