"""``packer-service demo``: synthetic images and videos through the whole path, every byte checked, every hand-off timed.

With vllm-omni installed it is the real engine and its worker (``engine_side``); without, a small engine and worker of the
demo's own (``small_side``). The packer is the real one either way.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from packer_service.config import Settings
from packer_service.errors import PackerError
from worker_shim.demo.cases import ON_GPU, ON_HOST, BareCopy
from worker_shim.demo.engine_side import EngineSide
from worker_shim.synthetic.engine import engine, nvidia_gpus, prepare
from worker_shim.synthetic.percentile import percentile

MIB = 1 << 20


@contextlib.contextmanager
def open_side(device: Any) -> Iterator[Any]:
    if importlib.util.find_spec("vllm_omni") is None:
        from worker_shim.demo.small_side import SmallSide

        with SmallSide(on_gpu=device.type == "cuda") as side:
            yield side
        return
    import torch

    executor, pipeline = "worker_shim.PackerDiffusionExecutor", "worker_shim.synthetic.timing.TimedPipeline"
    with engine(executor, pipeline, dtype=torch.float32) as running:
        yield EngineSide(running, device)


def measure(console: Console, requests: int) -> dict[str, Any]:
    """Run every case; the object that ``--json`` prints."""
    import torch

    gpus = nvidia_gpus()
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    cases = ON_GPU if gpus else ON_HOST
    rows = []
    with Progress(console=console, transient=True) as progress, open_side(device) as side:
        task = progress.add_task("requests", total=len(cases) * (requests + 1))
        packer_pids = side.packer_pids
        for case in cases:
            handoffs = side.run(case, requests, lambda: progress.advance(task))
            bare = BareCopy(case, device)
            copies = [bare.run() for _ in range(max(requests, 5))]
            nbytes = bare.source.nbytes
            del bare
            p50, copy = percentile(handoffs.latencies_s, 50), percentile(copies, 50)
            rows.append(
                {
                    "output": case.name,
                    "dtype": case.dtype,
                    "nbytes": nbytes,
                    "requests": 2 * requests,
                    "handoff_p50_ms": round(p50 * 1e3, 3),
                    "handoff_p99_ms": round(percentile(handoffs.latencies_s, 99) * 1e3, 3),
                    "bare_copy_ms": round(copy * 1e3, 3),
                    "ratio": round(p50 / copy, 2),
                    "outputs_per_s": round(requests / handoffs.wall_s, 1),
                    "own_path": handoffs.own_path,
                    "mismatches": handoffs.mismatches,
                }
            )
    return {
        "device": torch.cuda.get_device_name(0) if gpus else "host",
        "engine": "vllm-omni"
        if importlib.util.find_spec("vllm_omni")
        else "the demo's own (vllm-omni is not installed)",
        "packer": bool(packer_pids),
        "packer_pids": packer_pids,
        "mode": Settings.load().mode,
        "outputs": sum(row["requests"] for row in rows),
        "own_path": sum(row["own_path"] for row in rows),
        "mismatches": sum(row["mismatches"] for row in rows),
        "rows": rows,
    }


def show(console: Console, result: dict[str, Any]) -> None:
    packers = ", ".join(map(str, result["packer_pids"]))
    path = f"worker -> packer {packers} ({result['mode']}) -> engine" if packers else "worker -> engine, no packer"
    table = Table(title=f"{path} on {result['device']}, engine: {result['engine']}")
    for column in ("output", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("MiB", "p50 ms", "p99 ms", "copy ms", "ratio", "out/s", "wrong"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["output"],
            row["dtype"],
            f"{row['nbytes'] / MIB:.1f}",
            f"{row['handoff_p50_ms']:.2f}",
            f"{row['handoff_p99_ms']:.2f}",
            f"{row['bare_copy_ms']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['outputs_per_s']:.1f}",
            str(row["mismatches"]),
        )
    console.print(table)
    console.print(
        "p50, p99: from the worker's _return_result to the output in the engine's hands; copy: the same bytes to the host"
        " and nothing else; out/s: all requests at once, forwards included; wrong: outputs with a wrong byte, to be 0."
    )
    if result["own_path"]:
        console.print(
            f"{result['own_path']} of {result['outputs']} outputs took vllm-omni's own path: run it again with"
            " PACKER_LOG_LEVEL=info VLLM_LOGGING_LEVEL=INFO to see why."
        )
    if result["device"] == "host":
        console.print("There is no GPU here: the host device shows that the path works, not how fast it is.")


def main() -> None:
    parser = argparse.ArgumentParser(prog="packer-service demo", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=16)
    arguments = parser.parse_args()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vllm-omni and its workers print goes to stderr; the report alone to stdout
    console = Console(file=sys.stderr)
    if importlib.util.find_spec("vllm_omni") is None:
        console.print("vllm-omni is not installed: the packer serves a small worker and engine of this demo's own.")
    # Ends engine and packer, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    prepare()
    if not os.environ.get("VLLM_LOGGING_LEVEL"):
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ.setdefault("PACKER_LOG_LEVEL", "warning")
        logging.disable(logging.INFO)
    os.environ.setdefault("PACKER_FALLBACK", "fail")  # own would serve without the packer, which is no demo of it
    try:
        result = measure(console, arguments.requests)
    except PackerError as error:
        raise SystemExit(f"the demo failed: {error}") from error
    if arguments.json:
        print(json.dumps(result, indent=1), file=report, flush=True)
    else:
        show(Console(file=report), result)
    if result["mismatches"] or not result["packer"]:
        raise SystemExit("the demo failed: " + ("wrong bytes" if result["mismatches"] else "no packer was used"))


if __name__ == "__main__":
    main()
