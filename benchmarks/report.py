"""Writes docs/benchmarks.md and its plots from benchmarks/results/*.json alone.

    python -m benchmarks.report [--results DIR] [--out FILE]

The same results give the same bytes. ``notes`` of a result are printed below its table. Plots need matplotlib.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import MIB, ROOT

Result = dict[str, Any]
Row = dict[str, Any]

MB = 10**6
VIDEO_BYTES = 768 * 768 * 81 * 3 * 4

_INTRO = """# Benchmarks

<!-- Written by `python -m benchmarks.report` from benchmarks/results/*.json. Do not edit. -->

How fast the packer is, and what it costs, beside vllm-omni's own `mp` executor and beside the physical limit: a bare copy of
the same bytes into pinned memory. All sides of a table were up at once and took turns, sample by sample, so that what a
machine does to one it does to the others. Ratios travel between machines; times do not. `make bench` measures this machine.
"""

_ABOUT = {
    "handoff": (
        "Hand-off",
        "From `_return_result` entered in the worker to the output on the host in the engine's process. The pipeline returns"
        " an output it made before: no forward is counted. With eight in flight the latencies include the wait behind the"
        " outputs before, `outputs/s` is the rate of arrivals, and PCIe is that rate over the bare copy's. With a GPU, an"
        " output below 1 MB comes out of `mp` on the GPU again: its time includes that copy, and not a later one to the host.",
    ),
    "worker_cost": (
        "Worker cost",
        "Time inside `_return_result`, on the worker's main thread.",
    ),
    "interference": (
        "Interference",
        "Time of a forward that begins with the hand-off of an output, over the same forward alone in the same worker. The"
        " call of `_return_result` and the staging copy are inside the time. Forwards follow one another until the output is"
        " packed and sent (`mp`) or acknowledged (the packer), and each of them is a sample. `varying`: sizes from half to all"
        " of what is named.",
    ),
    "overlap": (
        "Overlap",
        "The gap that an output leaves on the worker's device between the end of the step that made it and the beginning of"
        " the next: `step`, from the final step of one request to the first of the next, with two in flight and"
        " `max_num_seqs=1`; `stream`, from the last step of a chunk to the first of the next chunk. The steps take next to no"
        " time, so nothing is hidden behind them. `between`: the gap between steps that carry no output, on the same side.",
    ),
    "steps": (
        "Steps of a hand-off",
        "Where the time of one hand-off goes, one output at a time: when each step begins and ends after `_return_result` was"
        " entered, and how long it takes; medians, microseconds. The steps of three processes overlap; what lies between two"
        " of them is waking the other process, and the Python that takes its message in.",
    ),
    "observed": (
        "Watched and not watched",
        "Hand-offs of two packers, by turns: one without status board and metrics (`off`), one with both (`on`). Two engines"
        " are never quite alike, so that their ratio is taken while nobody asks, and while the board is read, the metrics of"
        " packer and engine are scraped and an operator asks for the status, each once a second. The last row of a size is the"
        " second over the first: what asking does.",
    ),
    "footprint": (
        "Footprint",
        "The packer's process with an engine and a worker connected, beside a process that makes a CUDA context and a pinned"
        " buffer of the same size through torch. Memory without the pool and the buffer; `waiting`: CPU while it waits for a"
        " forward that does not end.",
    ),
}


_NO_BENCHMARKS = ("chaos", "dead_worker", "fuzz", "soak")  # their results say whether, not how fast


class Target(NamedTuple):
    """One line of the table of what must be shown."""

    figure: str
    line: str
    measured: str
    met: bool | None  # None: not measured


def load(directory: Path) -> dict[str, dict[str, Result]]:
    """The results by machine and benchmark, both sorted, from <benchmark>_<machine>.json."""
    found: dict[str, dict[str, Result]] = {}
    for path in sorted(directory.glob("*.json")):
        result = json.loads(path.read_text())
        if result["benchmark"] in _NO_BENCHMARKS:
            continue
        machine = path.stem.removeprefix(result["benchmark"] + "_")
        found.setdefault(machine, {})[result["benchmark"]] = result
    return dict(sorted(found.items()))


# -- targets -----------------------------------------------------------------------------------------------------------


def targets(results: dict[str, Result]) -> list[Target]:
    """What was to be shown on this machine, and what was measured: the worst of the rows that each line is about."""
    handoff = _rows(results, "handoff")
    single = _by_impl(row for row in handoff if row["in_flight"] == 1)
    ours = single.get("packer", {})
    bare, theirs = single.get("bare_copy", {}), single.get("mp", {})
    costs = [row for row in _rows(results, "worker_cost") if row["impl"] == "packer"]
    beside = [row for row in _rows(results, "interference") if row["impl"] == "packer"]
    gaps = [
        row for row in _rows(results, "overlap") if row["impl"] == "packer" and _key(row) == (VIDEO_BYTES, "float32")
    ]
    footprint = [row for row in _rows(results, "footprint") if row["impl"] == "packer"]
    full = [
        row
        for row in handoff
        if row["impl"] == "packer"
        and row["in_flight"] == 8
        and (row["nbytes"], row["dtype"]) == (VIDEO_BYTES, "float32")
    ]

    def over(reference: dict[Any, Row], rows: Iterable[Row]) -> list[tuple[float, str]]:
        known = [row for row in rows if _key(row) in reference]
        return [(row["p50_ms"] / reference[_key(row)]["p50_ms"], _name(row)) for row in known]

    large = [row for row in ours.values() if row["nbytes"] >= 256 * MIB]
    small = [row for row in ours.values() if 3 * MIB <= row["nbytes"] <= 12 * MIB and _key(row) in bare]
    found = [
        _most("hand-off p50 over bare pinned copy, >= 256 MB", 1.10, over(bare, large)),
        _most(
            "hand-off p50 minus bare copy, 3 MB and 12 MB",
            0.30,
            [(row["p50_ms"] - bare[_key(row)]["p50_ms"], _name(row)) for row in small],
            " ms",
        ),
        _most(
            "hand-off p99 over p50, >= 12 MB",
            1.5,
            [(row["p99_ms"] / row["p50_ms"], _name(row)) for row in ours.values() if row["nbytes"] >= 12 * MIB],
        ),
    ]
    for nbytes, dtype, name, times in (
        (VIDEO_BYTES, "float32", "573 MB float32", 40),
        (VIDEO_BYTES // 2, "bfloat16", "287 MB bfloat16", 80),
        (12 * MIB, "float32", "12 MB float32", 15),
    ):
        pairs = over(theirs, [row for row in ours.values() if _key(row) == (nbytes, dtype)])
        found.append(_fraction(f"ours over vllm-omni `mp`, {name}", times, pairs))
    for mode, figure in (
        ("step", "gap between requests in step mode, 573 MB: ours over `mp`"),
        ("stream", "gap between streamed chunks, 573 MB: ours over `mp`"),
    ):
        found.append(_fraction(figure, 10, [(row["ratio_to_mp"], "") for row in gaps if row["mode"] == mode]))
    found += [
        _least(
            "8 in flight, 573 MB: PCIe bandwidth used", 95.0, [(row["pcie_fraction"] * 100, "") for row in full], " %"
        ),
        _most("forward beside our output over alone: p50", 1.02, [(row["p50_ratio"], _cell(row)) for row in beside]),
        _most("forward beside our output over alone: p95", 1.05, [(row["p95_ratio"], _cell(row)) for row in beside]),
        _most("`_return_result`, p50", 80, [(row["p50_us"], _name(row)) for row in costs], " us"),
        _most("`_return_result`, p99", 250, [(row["p99_us"], _name(row)) for row in costs], " us"),
        _most("packer resident memory beside the pool", 160, [(row["rss_mb"], "") for row in footprint], " MB"),
        _most("packer GPU memory", 530, [(row["gpu_mb"], "") for row in footprint], " MB"),
        _most("packer ready with a 1 GiB pool", 1.5, [(row["ready_s"], "") for row in footprint], " s"),
        _most("idle CPU of the packer", 0.1, [(row["idle_cpu_percent"], "") for row in footprint], " %"),
        _most("CPU of the packer that waits", 0.1, [(row["waiting_cpu_percent"], "") for row in footprint], " %"),
    ]
    return found


def _rows(results: dict[str, Result], benchmark: str) -> list[Row]:
    rows: list[Row] = results.get(benchmark, {}).get("rows", [])
    return rows


def _key(row: Row) -> tuple[int, str]:
    return row["nbytes"], row["dtype"]


def _by_impl(rows: Iterable[Row]) -> dict[str, dict[tuple[int, str], Row]]:
    found: dict[str, dict[tuple[int, str], Row]] = {}
    for row in rows:
        found.setdefault(row["impl"], {})[_key(row)] = row
    return found


def _most(figure: str, line: float, values: Sequence[tuple[float, str]], unit: str = "") -> Target:
    return _judge(figure, line, values, unit, max, lambda value: value <= line, "at most")


def _least(figure: str, line: float, values: Sequence[tuple[float, str]], unit: str = "") -> Target:
    return _judge(figure, line, values, unit, min, lambda value: value >= line, "at least")


def _judge(
    figure: str,
    line: float,
    values: Sequence[tuple[float, str]],
    unit: str,
    worst_of: Callable[..., tuple[float, str]],
    is_met: Callable[[float], bool],
    word: str,
) -> Target:
    text = f"{word} {line:g}{unit}"
    if not values:
        return Target(figure, text, "", None)
    value, where = worst_of(values)
    return Target(figure, text, _number(value) + unit + (f" ({where})" if where else ""), is_met(value))


def _fraction(figure: str, times: int, pairs: Sequence[tuple[float, str]]) -> Target:
    if not pairs:
        return Target(figure, f"at most 1/{times}", "", None)
    value = pairs[0][0]
    return Target(figure, f"at most 1/{times}", f"1/{_number(1 / value)}", value <= 1 / times)


def _name(row: Row) -> str:
    """An output in words. Sizes that are a power of two are MB of 2^20 bytes, the others of 10^6, as everywhere here."""
    nbytes = row["nbytes"]
    if nbytes < MIB:
        size = f"{nbytes / 1024:g} KiB"
    else:
        size = f"{nbytes / MIB:g} MB" if nbytes % MIB == 0 else f"{nbytes / MB:.0f} MB"
    return size + (f" {row['dtype']}" if "dtype" in row else "")


def _cell(row: Row) -> str:
    return f"{row['forward']}, {_name(row)}" + (", varying" if row["varying"] else "")


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


# -- the page ----------------------------------------------------------------------------------------------------------


def markdown(found: dict[str, dict[str, Result]]) -> str:
    """The whole page."""
    parts = [_INTRO]
    for machine, results in found.items():
        parts.append(_machine(machine, results))
    return "\n".join(parts)


def _machine(machine: str, results: dict[str, Result]) -> str:
    described = next(iter(results.values()))
    gpus, versions = described["machine"]["gpus"], described["versions"]
    lines = [
        f"## {machine}",
        "",
        "; ".join(map(_gpu, gpus)) or "No GPU: the host device. It shows that the path works, not how fast it is.",
        "",
        f"Python {versions['python']}, torch {versions['torch']}, vllm-omni {versions['vllm-omni']}.",
        "",
    ]
    if gpus:
        judged = targets(results)
        verdict = {True: "met", False: "**missed**", None: "not measured"}
        lines += ["### What must be shown", ""]
        lines += _table(
            ["figure", "line", "measured (the worst)", ""],
            [[target.figure, target.line, target.measured, verdict[target.met]] for target in judged],
        )
    order = [name for name in _ABOUT if name in results] + sorted(results.keys() - _ABOUT.keys())
    for benchmark in order:
        lines += _section(machine, benchmark, results[benchmark])
    return "\n".join(lines)


def _gpu(line: str) -> str:
    """A GPU as benchmarks.machine has it from nvidia-smi: name, driver, PCIe generation and width."""
    name, driver, generation, width = line.split(", ")
    return f"{name}, driver {driver}, PCIe {generation} x{width}"


def _section(machine: str, benchmark: str, result: Result) -> list[str]:
    title, about = _ABOUT.get(benchmark, (benchmark, ""))
    lines = [f"### {title}", ""]
    if about:
        lines += [about, ""]
    lines += _TABLES.get(benchmark, _any_table)(result["rows"])
    if benchmark in _PLOTS:
        lines += [f"![{title} on {machine}](plots/{benchmark}_{machine}.svg)", ""]
    for note in result.get("notes", []):
        lines += [f"Note: {note}", ""]
    trimmed = sum("trimmed_from" in row for row in result["rows"])
    if trimmed:
        lines += [f"{trimmed} rows have fewer samples than planned (`trimmed_from`): the time was up.", ""]
    settings = ", ".join(f"{name} = {value}" for name, value in result.get("settings", {}).items())
    lines += [f"`{result['command']}`, {result['date']}" + (f"; settings: {settings}" if settings else "") + ".", ""]
    host = result["machine"]
    lines += [f"{host['cpu']}, {host['cores']} cores, {host['memory_gib']:g} GiB, Linux {host['kernel']}.", ""]
    return lines


def _handoff_table(rows: list[Row]) -> list[str]:
    bare = {_key(row): row["p50_ms"] for row in rows if row["impl"] == "bare_copy" and row["in_flight"] == 1}
    body = []
    for row in rows:
        limit = bare.get(_key(row)) if row["in_flight"] == 1 else None
        body.append(
            [
                _name(row),
                row["in_flight"],
                row["impl"],
                row["samples"],
                *(_number(row[key]) for key in ("p50_ms", "p95_ms", "p99_ms", "max_ms")),
                _number(row["p50_ms"] / limit) if limit else "",
                _number(row["outputs_per_s"]),
                f"{row['pcie_gb_s']:.1f} GB/s, {row['pcie_fraction']:.1%}" if "pcie_fraction" in row else "",
            ]
        )
    head = ["output", "in flight", "side", "samples", "p50 ms", "p95", "p99", "max", "over bare", "outputs/s", "PCIe"]
    return _table(head, body)


def _worker_cost_table(rows: list[Row]) -> list[str]:
    body = [[_name(row), row["impl"], _number(row["p50_us"]), _number(row["p99_us"])] for row in rows]
    return _table(["output", "side", "p50 us", "p99 us"], body)


def _interference_table(rows: list[Row]) -> list[str]:
    body = [
        [
            row["forward"],
            _name(row),
            "yes" if row["varying"] else "no",
            row["impl"],
            row["samples"],
            *(_number(row[key]) for key in ("p50_ms", "p95_ms", "max_ms")),
            *(f"{row[key]:.3f}" if row["impl"] != "none" else "" for key in ("p50_ratio", "p95_ratio")),
        ]
        for row in rows
    ]
    head = [
        "forward",
        "output",
        "varying",
        "side",
        "samples",
        "p50 ms",
        "p95",
        "max",
        "p50 over alone",
        "p95 over alone",
    ]
    return _table(head, body)


def _overlap_table(rows: list[Row]) -> list[str]:
    body = [
        [
            row["mode"],
            _name(row),
            row["impl"],
            row["samples"],
            *(_number(row[key]) for key in ("p50_ms", "p95_ms", "max_ms", "between_p50_ms")),
            _number(row["ratio_to_mp"]) if "ratio_to_mp" in row else "",
        ]
        for row in rows
    ]
    return _table(["mode", "output", "side", "samples", "p50 ms", "p95", "max", "between p50", "p50 over mp"], body)


def _steps_table(rows: list[Row]) -> list[str]:
    body = [
        [
            f"{row['nbytes'] / MB:.1f} MB",
            row["process"],
            row["step"],
            *(f"{row[key]:.0f}" for key in ("begin_us", "end_us", "p50_us", "p99_us")),
        ]
        for row in rows
    ]
    return _table(["output", "process", "step", "begins", "ends", "p50 us", "p99 us"], body)


def _footprint_table(rows: list[Row]) -> list[str]:
    body = [
        [
            row["impl"],
            *(_number(row[key]) for key in ("rss_mb", "gpu_mb", "ready_s", "idle_cpu_percent")),
            _number(row["waiting_cpu_percent"]) if "waiting_cpu_percent" in row else "",
            row["threads"],
        ]
        for row in rows
    ]
    return _table(
        ["side", "resident MB", "GPU MB", "ready s", "idle CPU % of a core", "waiting CPU %", "threads"], body
    )


def _observed_table(rows: list[Row]) -> list[str]:
    keys = ("p50_ratio", "p95_ratio", "p99_ratio", "return_result_p50_ratio")
    body = [
        [f"{row['nbytes'] / MB:.1f} MB", row["impl"], *(f"{row[key]:.3f}" for key in keys)]
        for row in rows
        if "p50_ratio" in row
    ]
    return _table(["output", "", "p50", "p95", "p99", "`_return_result` p50"], body)


def _any_table(rows: list[Row]) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return _table(keys, [[row.get(key, "") for key in keys] for row in rows])


def _table(head: Sequence[str], body: Sequence[Sequence[object]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return [*("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines), ""]


_TABLES: dict[str, Callable[[list[Row]], list[str]]] = {
    "handoff": _handoff_table,
    "worker_cost": _worker_cost_table,
    "interference": _interference_table,
    "overlap": _overlap_table,
    "steps": _steps_table,
    "observed": _observed_table,
    "footprint": _footprint_table,
}

# -- plots -------------------------------------------------------------------------------------------------------------

_COLOURS = {"packer": "#1f77b4", "mp": "#d62728", "bare_copy": "#7f7f7f", "torch": "#d62728", "none": "#7f7f7f"}


def write_plots(found: dict[str, dict[str, Result]], directory: Path) -> list[Path]:
    """One SVG for each machine and benchmark that has one. The same results give the same bytes."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "packer-service", "svg.fonttype": "none", "font.size": 9})
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for machine, results in found.items():
        for benchmark, draw in _PLOTS.items():
            if not _rows(results, benchmark):
                continue
            figure = draw(pyplot, results[benchmark]["rows"])
            figure.suptitle(f"{_ABOUT[benchmark][0]} on {machine}")
            figure.tight_layout()
            written.append(directory / f"{benchmark}_{machine}.svg")
            figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
            pyplot.close(figure)
    return written


def _lines(axes: Any, rows: list[Row], value: str, **style: Any) -> None:
    """``value`` over nbytes, one line an implementation. Where dtypes share a size, the larger value is drawn."""
    for impl in dict.fromkeys(row["impl"] for row in rows):
        points: dict[float, float] = {}
        for row in rows:
            if row["impl"] == impl:
                size = row["nbytes"] / MB
                points[size] = max(points.get(size, 0.0), row[value])
        sizes = sorted(points)
        axes.plot(sizes, [points[size] for size in sizes], color=_COLOURS[impl], label=f"{impl} {value[:3]}", **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("output, MB (10^6)")
    axes.grid(visible=True, which="both", alpha=0.3)


def _plot_handoff(pyplot: Any, rows: list[Row]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    single = [row for row in rows if row["in_flight"] == 1]
    _lines(axes, single, "p50_ms", marker="o")
    _lines(axes, [row for row in single if row["impl"] != "bare_copy"], "p99_ms", linestyle=":", marker=".")
    axes.set_ylabel("ms, one in flight")
    axes.legend()
    return figure


def _plot_worker_cost(pyplot: Any, rows: list[Row]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    _lines(axes, rows, "p50_us", marker="o")
    _lines(axes, rows, "p99_us", linestyle=":", marker=".")
    axes.set_ylabel("us in _return_result")
    axes.legend()
    return figure


def _plot_interference(pyplot: Any, rows: list[Row]) -> Any:
    figure, all_axes = pyplot.subplots(1, 2, figsize=(10, 5), sharey=True)
    cells = list(dict.fromkeys(_cell(row) for row in rows))
    impls = [impl for impl in ("packer", "mp") if any(row["impl"] == impl for row in rows)]
    for axes, value in zip(all_axes, ("p50_ratio", "p95_ratio"), strict=True):
        for number, impl in enumerate(impls):
            ratios = {_cell(row): row[value] for row in rows if row["impl"] == impl}
            heights = [index + (number - (len(impls) - 1) / 2) * 0.4 for index in range(len(cells))]
            axes.barh(heights, [ratios.get(cell, 0.0) for cell in cells], 0.4, color=_COLOURS[impl], label=impl)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set_xlabel(f"{value[:3]} over alone")
        axes.set_yticks(range(len(cells)), cells)
        axes.set_xscale("log")
        axes.grid(visible=True, axis="x", which="both", alpha=0.3)
    all_axes[0].invert_yaxis()
    all_axes[0].legend()
    return figure


def _plot_overlap(pyplot: Any, rows: list[Row]) -> Any:
    figure, all_axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, mode in zip(all_axes, ("step", "stream"), strict=True):
        of_mode = [row for row in rows if row["mode"] == mode]
        _lines(axes, of_mode, "p50_ms", marker="o")
        _lines(axes, of_mode, "p95_ms", linestyle=":", marker=".")
        axes.set_title(mode)
    all_axes[0].set_ylabel("ms without a step")
    all_axes[0].legend()
    return figure


def _plot_steps(pyplot: Any, rows: list[Row]) -> Any:
    sizes = list(dict.fromkeys(row["nbytes"] for row in rows))
    nbytes = sizes[:2][-1]  # an image: the second of those that steps.ON_GPU has
    shown = [row for row in rows if row["nbytes"] == nbytes]
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(shown) + 1.5))
    colours = {"worker": "#2ca02c", "packer": "#1f77b4", "engine": "#ff7f0e"}
    axes.barh(
        range(len(shown)),
        [row["end_us"] - row["begin_us"] for row in shown],
        left=[row["begin_us"] for row in shown],
        color=[colours[row["process"]] for row in shown],
    )
    axes.set_yticks(range(len(shown)), [f"{row['process']}: {row['step']}" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel(f"us after _return_result was entered, {nbytes / MB:.1f} MB")
    axes.grid(visible=True, axis="x", alpha=0.3)
    return figure


def _plot_footprint(pyplot: Any, rows: list[Row]) -> Any:
    values = {"rss_mb": "resident MB", "gpu_mb": "GPU MB", "ready_s": "ready s", "idle_cpu_percent": "idle CPU %"}
    figure, all_axes = pyplot.subplots(1, len(values), figsize=(10, 3))
    for axes, (key, label) in zip(all_axes, values.items(), strict=True):
        axes.bar(
            [row["impl"] for row in rows], [row[key] for row in rows], color=[_COLOURS[row["impl"]] for row in rows]
        )
        axes.set_title(label)
    return figure


_PLOTS: dict[str, Callable[[Any, list[Row]], Any]] = {
    "handoff": _plot_handoff,
    "worker_cost": _plot_worker_cost,
    "interference": _plot_interference,
    "overlap": _plot_overlap,
    "steps": _plot_steps,
    "footprint": _plot_footprint,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="DIR", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--out", metavar="FILE", type=Path, default=ROOT / "docs/benchmarks.md")
    options = parser.parse_args()
    found = load(options.results)
    if not found:
        raise SystemExit(f"there are no results in {options.results}: python -m benchmarks.run makes them")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(markdown(found))
    write_plots(found, options.out.parent / "plots")
    for machine, results in found.items():
        if any(result["machine"]["gpus"] for result in results.values()):
            met = [target.met for target in targets(results)]
            print(f"{machine}: {met.count(True)} met, {met.count(False)} missed, {met.count(None)} not measured")
    print(options.out)


if __name__ == "__main__":
    main()
