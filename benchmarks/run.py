"""All benchmarks that this machine can run, in one process: the engines of request mode are started once.

    python -m benchmarks.run [--only BENCHMARK ...] [--out DIR]

They are handoff, worker_cost, interference, overlap, steps and footprint, each also a module of its own: `python -m
benchmarks.handoff`; `--only` takes some of them (worker_cost comes with handoff). `--seconds` is for handoff and for
interference, each; overlap takes at most a minute of it, and steps and footprint together about one and a half on a GPU.

Writes DIR/<benchmark>_<machine>.json, anew with every row: a run that is cut short leaves what it has measured. DIR is
benchmarks/results on a GPU and build/benchmarks elsewhere or with --quick. `python -m benchmarks.report` makes
docs/benchmarks.md of benchmarks/results.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import footprint, handoff, interference, machine, overlap, steps
from benchmarks.harness import ROOT, Side, arguments, is_quick, open_sides, say, set_up, table

BENCHMARKS = ("footprint", "handoff", "interference", "overlap", "steps")


def main() -> None:
    parser = arguments(__doc__, handoff.SECONDS)
    parser.add_argument("--out", metavar="DIR", type=Path)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    options = parser.parse_args()
    quick = is_quick(options)
    stdout = set_up()
    out = options.out or ROOT / ("build/benchmarks" if quick else "benchmarks/results")
    out.mkdir(parents=True, exist_ok=True)

    def recorder(benchmark: str, facts: dict[str, Any]) -> machine.Recorder:
        recorders.append(machine.Recorder(out / f"{benchmark}_{machine.name()}.json", benchmark, **facts))
        return recorders[-1]

    def run_footprint() -> None:
        found = recorder("footprint", footprint.facts(quick))
        for row in footprint.measure(footprint.plan(footprint.SECONDS, quick)):
            found.add(row)

    def run_overlap() -> None:
        found = recorder("overlap", overlap.facts())
        seconds = min(options.seconds, overlap.SECONDS)
        for rows in overlap.measure(overlap.QUICK if quick else overlap.ON_GPU, seconds):
            found.add(*rows)

    def run_steps() -> None:
        found = recorder("steps", steps.facts())
        for rows in steps.measure(steps.QUICK if quick else steps.ON_GPU):
            found.add(*rows)

    def run_handoff(sides: list[Side]) -> None:
        found, costs = recorder("handoff", handoff.facts()), recorder("worker_cost", handoff.facts())
        for measured in handoff.measure(sides, handoff.QUICK if quick else handoff.ON_GPU, options.seconds):
            found.add(*measured.handoff)
            costs.add(*measured.worker_cost)

    def run_interference(sides: list[Side]) -> None:
        found = recorder("interference", interference.facts())
        plan = interference.QUICK if quick else interference.ON_GPU
        for rows in interference.measure(sides, plan, options.seconds):
            found.add(*rows)

    recorders: list[machine.Recorder] = []
    failed = 0
    if "footprint" in options.only:
        failed += _failed(run_footprint)
    with_engines = {"handoff": run_handoff, "interference": run_interference}
    if wanted := [run for name, run in with_engines.items() if name in options.only]:
        with open_sides() as sides:
            failed += sum(_failed(functools.partial(run, sides)) for run in wanted)
    if "overlap" in options.only:
        failed += _failed(run_overlap)
    if "steps" in options.only:
        failed += _failed(run_steps)
    for each in recorders:
        print(table(each.benchmark, each.rows), file=stdout, flush=True)
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
