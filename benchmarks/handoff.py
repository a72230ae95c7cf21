"""The hand-off: from ``_return_result`` entered in the worker to the output on the host in the engine's process.

    python -m benchmarks.handoff --json FILE [--worker-cost-json FILE]

Sides: ``packer``, vllm-omni's own ``mp`` (GPU only) and ``bare_copy``, the same bytes from this process's side of the GPU
into pinned memory. All are up at once and take turns, sample by sample. The pipeline returns an output that it made once
(benchmarks.pipelines): no forward is counted, and none delays the next output. One output of each cell and side is
compared bit for bit.

One in flight: ``outputs_per_s`` is what one client gets that waits for each output, engine included. Eight in flight: it
is the rate of arrivals while eight requests are kept in flight, and ``pcie_fraction`` is that rate over the bare copy's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.harness import (
    NO_MP,
    BareCopy,
    Budget,
    Side,
    arguments,
    is_quick,
    milliseconds,
    open_sides,
    say,
    set_up,
    settings_in_force,
    table,
)
from benchmarks.percentile import percentile

SECONDS = 180.0
BARE = "bare_copy"
SEED = 7
_WARM_UP = 6
_BLOCKS = 3  # of each side, by turns, where several outputs are in flight


class Case(NamedTuple):
    """What is handed over, and how many samples each side shall have."""

    shape: tuple[int, ...]
    dtype: str
    in_flight: int
    samples: dict[str, int]  # by impl

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * {"float32": 4, "bfloat16": 2, "uint8": 1}[self.dtype]

    def __str__(self) -> str:
        return f"{self.nbytes / 1e6:.1f} MB {self.dtype}, {self.in_flight} in flight"


def _samples(ours: int, theirs: int) -> dict[str, int]:
    return {"packer": ours, "mp": theirs, BARE: ours}


_MANY, _FEW = _samples(300, 100), _samples(300, 20)
ON_GPU = [
    # 16 KiB, and 256: is the packer worth it there (setting min_bytes)?
    Case((1, 1, 1, 64, 64), "float32", 1, _MANY),
    Case((1, 1, 1, 256, 256), "float32", 1, _MANY),
    Case((1, 3, 1, 512, 512), "float32", 1, _MANY),  # 3 MB
    Case((1, 3, 1, 1024, 1024), "float32", 1, _MANY),  # 12 MB
    Case((1, 3, 1, 2048, 2048), "float32", 1, _MANY),  # 48 MB
    Case((1, 4, 16, 1024, 1024), "float32", 1, _FEW),  # 256 MB, with an alpha channel
    Case((1, 3, 81, 768, 768), "bfloat16", 1, _FEW),  # 287 MB (10^6)
    Case((1, 3, 324, 768, 768), "uint8", 1, _FEW),  # 573 MB (10^6)
    Case((1, 3, 81, 768, 768), "float32", 1, _FEW),  # 573 MB (10^6)
    Case((1, 3, 1, 1024, 1024), "float32", 8, _samples(900, 90)),
    Case((1, 3, 81, 768, 768), "float32", 8, _samples(450, 12)),
]
QUICK = [
    Case((1, 3, 1, 512, 512), "float32", 1, _samples(30, 10)),
    Case((1, 3, 1, 1024, 1024), "bfloat16", 1, _samples(30, 10)),
    Case((1, 3, 1, 1024, 1024), "float32", 1, _samples(30, 10)),
    Case((1, 3, 1, 512, 512), "float32", 8, _samples(48, 24)),
]


class Measured(NamedTuple):
    """The rows that one case adds to each of the two results."""

    handoff: list[dict[str, Any]]
    worker_cost: list[dict[str, Any]]


class Samples:
    """What one side has shown so far of one case; seconds."""

    def __init__(self) -> None:
        self.handoffs: list[float] = []
        self.costs: list[float] = []
        self.busy_s = 0.0  # wall time in which ``counted`` outputs came
        self.counted = 0


def measure(sides: list[Side], cases: list[Case], seconds: float) -> Iterator[Measured]:
    """The rows of each case, as soon as it is done. Raises where a byte differs."""
    budget = Budget(seconds, len(cases))
    for case in cases:
        deadline = budget.next_deadline()
        begin = time.monotonic()
        bare = BareCopy(case.shape, case.dtype, SEED)
        request = {"seed": SEED, "shape": list(case.shape), "dtype": case.dtype}
        for side in sides:
            _warm_up(side, case, bare, request)
        run = _one_in_flight if case.in_flight == 1 else _many_in_flight
        measured = run(sides, case, bare, request, deadline)
        yield _rows(case, measured)
        say(f"handoff: {case}: {time.monotonic() - begin:.1f} s")


def _warm_up(side: Side, case: Case, bare: BareCopy, request: dict[str, Any]) -> None:
    """The arena, the pool and every cache find their size; the first output is checked."""
    if not bare.equals(side.one(**request)):
        raise SystemExit(f"{side.impl}: an output of {case} is not what the worker made")
    for _ in range(_WARM_UP if side.impl != "mp" else 1):
        side.one(**request)
    if case.in_flight > 1:
        side.many(case.in_flight * (4 if side.impl != "mp" else 1), case.in_flight, **request)
    side.arrivals.take()


def _one_in_flight(
    sides: list[Side], case: Case, bare: BareCopy, request: dict[str, Any], deadline: float
) -> dict[str, Samples]:
    measured = {impl: Samples() for impl in [*(side.impl for side in sides), BARE]}
    rounds = max(case.samples[impl] for impl in measured)
    for number in range(rounds):
        for side in sides:
            if _is_due(number, case.samples[side.impl], rounds):
                begin = time.perf_counter()
                side.one(**request)
                _count(measured[side.impl], side, time.perf_counter() - begin)
        if _is_due(number, case.samples[BARE], rounds):
            samples = measured[BARE]
            samples.handoffs.append(bare.one())
            samples.busy_s += samples.handoffs[-1]
            samples.counted += 1
        if number and time.monotonic() > deadline:
            break
    return measured


def _is_due(number: int, samples: int, rounds: int) -> bool:
    """Spreads ``samples`` evenly over ``rounds``, the first in round 0."""
    return number == 0 or number * samples // rounds > (number - 1) * samples // rounds


def _count(samples: Samples, side: Side, busy_s: float) -> None:
    for arrival in side.arrivals.take():
        samples.handoffs.append(arrival.handoff_s)
        samples.costs.append(arrival.previous_cost_s)
        samples.counted += 1
    samples.busy_s += busy_s


def _many_in_flight(
    sides: list[Side], case: Case, bare: BareCopy, request: dict[str, Any], deadline: float
) -> dict[str, Samples]:
    measured = {impl: Samples() for impl in [*(side.impl for side in sides), BARE]}
    for block in range(_BLOCKS):
        for side in sides:
            side.many(max(case.samples[side.impl] // _BLOCKS, case.in_flight), case.in_flight, **request)
            arrivals = side.arrivals.take()
            samples = measured[side.impl]
            samples.handoffs += [arrival.handoff_s for arrival in arrivals]
            _count_rate(samples, [arrival.at for arrival in arrivals])
        latencies, done_at = bare.many(case.samples[BARE] // _BLOCKS, case.in_flight)
        measured[BARE].handoffs += latencies
        _count_rate(measured[BARE], done_at)
        if block + 1 < _BLOCKS and time.monotonic() > deadline:
            break
    return measured


def _count_rate(samples: Samples, done_at: list[float]) -> None:
    """From the first arrival to the last: how long the first one took is no matter of rate."""
    samples.busy_s += max(done_at) - min(done_at)
    samples.counted += len(done_at) - 1


def _rows(case: Case, measured: dict[str, Samples]) -> Measured:
    common = {"nbytes": case.nbytes, "dtype": case.dtype}
    rates = {impl: samples.counted / samples.busy_s for impl, samples in measured.items()}
    handoff, worker_cost = [], []
    for impl, samples in measured.items():
        row = {"impl": impl, **common, "in_flight": case.in_flight, "samples": len(samples.handoffs)}
        for percent in (50, 95, 99):
            row[f"p{percent}_ms"] = milliseconds(percentile(samples.handoffs, percent))
        row["max_ms"] = milliseconds(max(samples.handoffs))
        row["outputs_per_s"] = round(rates[impl], 2)
        if case.in_flight > 1:
            row["pcie_gb_s"] = round(case.nbytes * rates[impl] / 1e9, 2)
            row["pcie_fraction"] = round(rates[impl] / rates[BARE], 4)
        trimmed = {"trimmed_from": case.samples[impl]} if len(samples.handoffs) < case.samples[impl] else {}
        handoff.append(row | trimmed)
        if samples.costs:
            row = {"impl": impl, **common, "samples": len(samples.costs)}
            for percent in (50, 99):
                row[f"p{percent}_us"] = round(percentile(samples.costs, percent) * 1e6, 1)
            worker_cost.append(row | trimmed)
    return Measured(handoff, worker_cost)


def facts() -> dict[str, Any]:
    """What a result of this benchmark says beside its rows."""
    return {"settings": settings_in_force(), "notes": [] if machine.gpus() else [NO_MP]}


def main() -> None:
    options = arguments(__doc__, SECONDS, "--json", "--worker-cost-json").parse_args()
    stdout = set_up()
    cases = QUICK if is_quick(options) else ON_GPU
    handoff = machine.Recorder(options.json, "handoff", **facts())
    worker_cost = machine.Recorder(options.worker_cost_json, "worker_cost", **facts())
    with open_sides() as sides:
        for measured in measure(sides, cases, options.seconds):
            handoff.add(*measured.handoff)
            worker_cost.add(*measured.worker_cost)
    print(table("handoff", handoff.rows), table("worker_cost", worker_cost.rows), sep="\n", file=stdout, flush=True)


if __name__ == "__main__":
    main()
