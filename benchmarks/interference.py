"""What an output on its way does to the forward beside it: its time over that of the same forward alone.

    python -m benchmarks.interference --json FILE

Forwards: ``launch_bound`` (3000 tiny kernels), ``mixed`` (small kernels and matrix products), ``gemm`` (large products).
The worker of a real engine times them itself, one alone and one beside an output by turns; the time of a forward begins
before the output is handed to ``_return_result`` and so counts that call and the staging copy too (benchmarks.pipelines,
Note [A forward beside an output]). ``none`` is the forward alone in the packer's worker; ``alone_p50_ms`` and
``alone_p95_ms`` of a row are the forward alone in that row's own worker, and the ratios are over those.
``varying``: the size of each output differs, between half of ``nbytes`` and all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.harness import (
    ALONE,
    BESIDE,
    MIB,
    NO_MP,
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
VIDEO_BYTES = 768 * 768 * 81 * 3 * 4  # 573 MB (10^6)
_PAIRS_A_REQUEST = 10


class Plan(NamedTuple):
    """Sizes, and pairs of forwards in each cell; ``mp_video_pairs`` of it where one output lasts many forwards."""

    sizes: tuple[int, ...]
    pairs: int
    mp_video_pairs: int


ON_GPU = Plan((12 * MIB, VIDEO_BYTES), 110, 8)
QUICK = Plan((3 * MIB,), 20, 8)


class Cell(NamedTuple):
    forward: str
    nbytes: int
    varying: bool


def measure(sides: list[Side], plan: Plan, seconds: float) -> Iterator[list[dict[str, Any]]]:
    """The rows of each forward, size and variation, as soon as they are there."""
    cells = [
        Cell(forward, nbytes, varying)
        for nbytes in plan.sizes
        for forward in ("launch_bound", "mixed", "gemm")
        for varying in (False, True)
    ]
    budget = Budget(seconds, len(cells))
    for side in sides:
        side.one(shape=[64], dtype="float32")  # from it the pipeline learns of its worker
    for cell in cells:
        deadline = budget.next_deadline()
        begin = time.monotonic()
        for side in sides:
            _ask(side, cell, 2)
        yield _rows(cell, plan, _run(sides, cell, plan, deadline))
        say(f"interference: {cell}: {time.monotonic() - begin:.1f} s")


def _ask(side: Side, cell: Cell, pairs: int) -> dict[float, list[float]]:
    """Seconds of forwards, by ALONE and BESIDE. The samples travel as an output of their own, a few bytes."""
    samples = side.one(**cell._asdict(), pairs=pairs).tolist()
    return {wanted: [seconds for kind, seconds in samples if kind == wanted] for wanted in (ALONE, BESIDE)}


def _pairs(impl: str, cell: Cell, plan: Plan) -> int:
    return plan.mp_video_pairs if impl == "mp" and cell.nbytes > 100 * MIB else plan.pairs


def _run(sides: list[Side], cell: Cell, plan: Plan, deadline: float) -> dict[str, dict[float, list[float]]]:
    """A few pairs of each side by turns, until each has its number or the time is up."""
    measured: dict[str, dict[float, list[float]]] = {side.impl: {ALONE: [], BESIDE: []} for side in sides}
    rounds = max(plan.pairs // _PAIRS_A_REQUEST, 1)
    for number in range(rounds):
        for side in sides:
            pairs = _pairs(side.impl, cell, plan)
            share = (number + 1) * pairs // rounds - number * pairs // rounds
            if share:
                for kind, seconds in _ask(side, cell, share).items():
                    measured[side.impl][kind] += seconds
        if time.monotonic() > deadline and all(kinds[BESIDE] for kinds in measured.values()):
            break
    return measured


def _rows(cell: Cell, plan: Plan, measured: dict[str, dict[float, list[float]]]) -> list[dict[str, Any]]:
    rows = [_row(cell, "none", measured["packer"][ALONE], measured["packer"][ALONE], plan.pairs)]
    for impl, kinds in measured.items():
        rows.append(_row(cell, impl, kinds[BESIDE], kinds[ALONE], _pairs(impl, cell, plan)))
    return rows


def _row(cell: Cell, impl: str, samples: list[float], alone: list[float], planned: int) -> dict[str, Any]:
    p50, p95 = percentile(samples, 50), percentile(samples, 95)
    alone_p50, alone_p95 = percentile(alone, 50), percentile(alone, 95)
    row = {
        "forward": cell.forward,
        "impl": impl,
        "nbytes": cell.nbytes,
        "varying": cell.varying,
        "samples": len(samples),
        "p50_ms": milliseconds(p50),
        "p95_ms": milliseconds(p95),
        "max_ms": milliseconds(max(samples)),
        "alone_p50_ms": milliseconds(alone_p50),
        "alone_p95_ms": milliseconds(alone_p95),
        "p50_ratio": round(p50 / alone_p50, 4),
        "p95_ratio": round(p95 / alone_p95, 4),
    }
    if len(alone) < planned:
        row["trimmed_from"] = planned
    return row


def facts() -> dict[str, Any]:
    """What a result of this benchmark says beside its rows."""
    return {"settings": settings_in_force(), "notes": [] if machine.gpus() else [NO_MP]}


def main() -> None:
    options = arguments(__doc__, SECONDS, "--json").parse_args()
    stdout = set_up()
    recorder = machine.Recorder(options.json, "interference", **facts())
    with open_sides() as sides:
        for rows in measure(sides, QUICK if is_quick(options) else ON_GPU, options.seconds):
            recorder.add(*rows)
    print(table("interference", recorder.rows), file=stdout, flush=True)


if __name__ == "__main__":
    main()
