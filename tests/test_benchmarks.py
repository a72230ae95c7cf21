"""The benchmarks' own arithmetic, their command lines, and the report. What they measure is asserted nowhere."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import footprint, handoff, harness, machine, overlap, report, steps, stopwatch
from benchmarks.percentile import percentile

ROOT = Path(__file__).resolve().parent.parent
MODULES = ["engine_smoke", "footprint", "handoff", "interference", "overlap", "report", "run", "steps", "worker_cost"]
VIDEO = 768 * 768 * 81 * 3 * 4


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 50), (95, 95), (99, 99), (100, 100)])
def test_percentile_is_a_value_that_was_measured(percent, value):
    assert percentile([float(number) for number in range(100, 0, -1)], percent) == value
    assert percentile([7.0], percent) == 7.0


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_how_it_is_called(module):
    shown = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert f"python -m benchmarks.{module}" in shown.stdout


def test_samples_of_the_slower_side_are_spread_over_the_rounds():
    due = [number for number in range(300) if handoff._is_due(number, 20, 300)]
    assert (len(due), due[0]) == (20, 0)
    assert max(later - earlier for earlier, later in itertools.pairwise(due)) <= 30
    assert all(handoff._is_due(number, 300, 300) for number in range(300))


def test_the_cells_have_the_sizes_that_the_figures_are_about():
    sizes = {(case.nbytes, case.dtype, case.in_flight) for case in handoff.ON_GPU}
    mib = 1 << 20
    assert sizes >= {
        *((n * mib, "float32", 1) for n in (3, 12, 48, 256)),
        (VIDEO, "float32", 1),
        (VIDEO // 2, "bfloat16", 1),
        (VIDEO, "uint8", 1),
        (12 * mib, "float32", 8),
        (VIDEO, "float32", 8),
    }


def test_what_a_part_leaves_of_the_budget_the_next_may_use():
    budget = harness.Budget(100.0, 2)
    assert budget.next_deadline() - time.monotonic() == pytest.approx(50, abs=1)
    assert budget.next_deadline() - time.monotonic() == pytest.approx(100, abs=1)
    assert harness.Budget(0.0, 1).next_deadline() <= time.monotonic()


def test_a_process_is_measured_from_proc():
    found = footprint.status("self")
    assert found.rss_bytes > 1 << 20
    assert found.threads >= 1


@pytest.mark.engine
def test_the_gaps_of_both_sides_are_measured_and_every_output_compared():
    case = overlap.Case("stream", (1, 3, 1, 64, 64), "float32", 2, {"packer": 2, "mp": 1})
    (rows,) = overlap.measure([case], 60.0)
    assert {row["impl"]: row["samples"] for row in rows} == {"packer": 16, "mp": 8}
    for row in rows:
        assert (row["mode"], row["nbytes"], row["dtype"]) == ("stream", 3 * 64 * 64 * 4, "float32")
        assert 0 < row["p50_ms"] <= row["p95_ms"] <= row["max_ms"]
        assert row["between_p50_ms"] > 0
        assert "trimmed_from" not in row
    assert ["ratio_to_mp" in row for row in rows] == [True, False]


@pytest.mark.engine
def test_a_gap_lies_between_the_last_end_and_the_first_beginning_after_it():
    from benchmarks.step_pipeline import Gaps

    gaps = Gaps(on_gpu=False)
    gaps.begin()
    assert gaps.take() == [], "no step ended before it"
    gaps.end()
    before = time.perf_counter()
    gaps.end()
    gaps.begin()
    longest = time.perf_counter() - before
    gaps.begin()
    gaps.end()
    gaps.begin()
    (first, _) = gaps.take()
    assert 0 <= first <= longest
    assert gaps.take() == []


@pytest.mark.gpu
@pytest.mark.engine
def test_a_gap_on_a_gpu_is_the_devices_time_not_the_cpus():
    import torch

    from benchmarks.step_pipeline import Gaps

    gaps = Gaps(on_gpu=True)
    gaps.end()  # makes the context
    gaps.begin()
    torch.cuda._sleep(200_000_000)  # about 0.1 s of the device; the CPU goes on
    gaps.end()
    gaps.begin()
    torch.cuda._sleep(200_000_000)
    gaps.end()
    torch.cuda._sleep(200_000_000)
    gaps.begin()
    _, behind_a_step, idle = gaps.take()
    assert behind_a_step < 0.01
    assert idle > 0.05


def test_outputs_that_are_not_what_the_worker_made_end_the_run():
    torch = pytest.importorskip("torch")

    class Chunk:
        def __init__(self, *values):
            self.images = [torch.tensor(values)]

    class Pairs:
        impl = "mp"

        def run(self, case):
            return [[Chunk(1.0, 0.0)], [Chunk(2.0)]]

    case = overlap.Case("step", (2,), "float32", 1, {"mp": 1})
    overlap._warm_up(Pairs(), case, [torch.tensor([1.0, 0.0]), torch.tensor([2.0])])
    for other in ([1.0, -0.0], [1.0], [1.0, float("nan")]):
        with pytest.raises(SystemExit, match="not what the worker made"):
            overlap._warm_up(Pairs(), case, [torch.tensor(other), torch.tensor([2.0])])
    with pytest.raises(SystemExit, match="not what the worker made"):
        overlap._warm_up(Pairs(), case, [torch.tensor([1.0, 0.0])])


def test_a_run_that_is_cut_short_leaves_its_rows(tmp_path):
    recorder = machine.Recorder(tmp_path / "a_host.json", "a", notes=["why"])
    recorder.add({"impl": "packer", "p50_ms": 1.0})
    written = json.loads((tmp_path / "a_host.json").read_text())
    assert {"benchmark", "machine", "versions", "command", "date", "rows", "notes"} <= written.keys()
    assert written["rows"] == [{"impl": "packer", "p50_ms": 1.0}]


# -- the report --------------------------------------------------------------------------------------------------------


def handoff_row(impl, nbytes, p50_ms, *, dtype="float32", in_flight=1, **more):
    latencies = {"p50_ms": p50_ms, "p95_ms": p50_ms * 1.1, "p99_ms": p50_ms * 1.2, "max_ms": p50_ms * 2}
    common = {"impl": impl, "nbytes": nbytes, "dtype": dtype, "in_flight": in_flight, "samples": 300}
    return {**common, **latencies, "outputs_per_s": 1000 / p50_ms, **more}


def forward_row(impl, p50_ratio, p95_ratio):
    common = {"forward": "gemm", "impl": impl, "nbytes": VIDEO, "varying": True, "samples": 100}
    return {**common, "p50_ms": 20.0, "p95_ms": 21.0, "max_ms": 22.0, "p50_ratio": p50_ratio, "p95_ratio": p95_ratio}


def gap_row(mode, impl, nbytes, p50_ms, **more):
    common = {"mode": mode, "impl": impl, "nbytes": nbytes, "dtype": "float32", "samples": 30}
    return {**common, "p50_ms": p50_ms, "p95_ms": p50_ms * 1.1, "max_ms": p50_ms * 2, "between_p50_ms": 1.0, **more}


def footprint_row(impl, **more):
    return {
        "impl": impl,
        "rss_mb": 150.0,
        "gpu_mb": 524,
        "ready_s": 0.9,
        "idle_cpu_percent": 0.01,
        "threads": 8,
        **more,
    }


ROWS = {
    "handoff": [
        handoff_row("packer", VIDEO, 11.0),
        handoff_row("bare_copy", VIDEO, 10.4),
        handoff_row("mp", VIDEO, 700.0),
        handoff_row("packer", 12 << 20, 0.7, trimmed_from=400),
        handoff_row("bare_copy", 12 << 20, 0.24),
        handoff_row("packer", VIDEO, 80.0, in_flight=8, pcie_gb_s=54.0, pcie_fraction=0.97),
    ],
    "worker_cost": [
        {"impl": "packer", "nbytes": VIDEO, "dtype": "float32", "p50_us": 60.0, "p99_us": 300.0},
        {"impl": "mp", "nbytes": VIDEO, "dtype": "float32", "p50_us": 90.0, "p99_us": 900.0},
    ],
    "interference": [forward_row("none", 1, 1), forward_row("packer", 1.01, 1.2), forward_row("mp", 1.1, 20.0)],
    "overlap": [
        gap_row("step", "packer", 12 << 20, 2.0, ratio_to_mp=0.12),
        gap_row("step", "mp", 12 << 20, 16.0),
        gap_row("step", "packer", VIDEO, 2.5, ratio_to_mp=0.002),
        gap_row("step", "mp", VIDEO, 1250.0),
        gap_row("stream", "packer", VIDEO, 130.0, ratio_to_mp=0.11),
        gap_row("stream", "mp", VIDEO, 1180.0),
    ],
    "steps": [
        {"process": "worker", "step": "copy", "nbytes": 1, "begin_us": 1.0, "end_us": 2.0, "p50_us": 1.0, "p99_us": 2.0}
    ],
    "footprint": [footprint_row("packer", waiting_cpu_percent=0.02), footprint_row("torch")],
}


@pytest.fixture
def results(tmp_path):
    gpu = {"cpu": "a CPU", "cores": 16, "memory_gib": 126.0, "kernel": "6.18", "gpus": ["NVIDIA H200, 580, 5, 16"]}
    versions = {"python": "3.12.3", "torch": "2.11.0", "vllm-omni": "0.30.0"}
    for benchmark, rows in ROWS.items():
        common = {"benchmark": benchmark, "versions": versions, "command": "python -m benchmarks.run", "date": "then"}
        for name, header in {"h200": gpu, "host": {**gpu, "gpus": []}}.items():
            value = {**common, "machine": header, "notes": [f"a note on {benchmark}"], "rows": rows}
            (tmp_path / f"{benchmark}_{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_each_line_of_the_issue_is_judged_by_its_worst_row(results):
    judged = {target.figure: target for target in report.targets(report.load(results)["h200"])}
    assert judged["hand-off p50 over bare pinned copy, >= 256 MB"].met
    assert judged["hand-off p50 minus bare copy, 3 MB and 12 MB"][2:] == ("0.46 ms (12 MB float32)", False)
    assert judged["ours over vllm-omni `mp`, 573 MB float32"][1:] == ("at most 1/40", "1/63.6", True)
    assert judged["ours over vllm-omni `mp`, 12 MB float32"].met is None
    assert judged["gap between requests in step mode, 573 MB: ours over `mp`"][1:] == ("at most 1/10", "1/500", True)
    assert judged["gap between streamed chunks, 573 MB: ours over `mp`"][2:] == ("1/9.09", False)
    assert judged["8 in flight, 573 MB: PCIe bandwidth used"][2:] == ("97 %", True)
    assert judged["forward beside our output over alone: p95"][2:] == ("1.2 (gemm, 573 MB, varying)", False)
    assert judged["`_return_result`, p99"].met is False
    assert judged["packer resident memory beside the pool"].met


def test_the_page_follows_from_the_results_alone(results):
    page = report.markdown(report.load(results))
    assert page == report.markdown(report.load(results))
    assert page.index("## h200") < page.index("## host")
    assert page.count("### What must be shown") == 1, "the host device is held to none of the lines"
    assert "**missed**" in page
    assert "not measured" in page
    assert "Note: a note on interference" in page
    assert "1 rows have fewer samples than planned" in page


def test_the_plots_are_the_same_bytes_for_the_same_results(results, tmp_path):
    pytest.importorskip("matplotlib")
    found = report.load(results)
    first = report.write_plots(found, tmp_path / "first")
    second = report.write_plots(found, tmp_path / "second")
    assert len(first) == 2 * len(ROWS)
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_steps_row_is_a_median_over_outputs_and_what_happens_now_and_then_is_no_step():
    calls = {"worker": [], "packer": [("early", -1.0, -0.9)], "engine": []}
    for number in range(10):
        entered = 10.0 * number
        calls["worker"] += [(stopwatch.ENTERED, entered, entered + 3), ("send", entered + 1, entered + 2)]
        calls["worker"].append(("send", entered + 4, entered + 4.5 + 0.1 * number))
        calls["engine"].append(("take", entered + 6, entered + 7))
        if number == 3:
            calls["packer"].append(("grow", entered + 2, entered + 9))
    found = [(row["process"], row["step"], row["begin_us"] / 1e6, row["p50_us"] / 1e6) for row in steps.rows(1, calls)]
    assert found == [
        ("worker", stopwatch.ENTERED, 0.0, 3.0),
        ("worker", "send", 1.0, 1.0),
        ("worker", "send", 4.0, pytest.approx(0.9, abs=0.11)),
        ("engine", "take", 6.0, 1.0),
    ]
    assert {row["samples"] for row in steps.rows(1, calls)} == {10}
