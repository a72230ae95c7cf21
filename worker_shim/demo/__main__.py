"""``packer-service demo``: synthetic images and videos through vllm-omni and a packer, every byte checked, all timed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from packer_service.config import Settings
from packer_service.errors import PackerError
from worker_shim.synthetic.engine import engine, nvidia_gpus, prepare

EXECUTOR = "worker_shim.PackerDiffusionExecutor"
PIPELINE = "worker_shim.synthetic.pipeline.TimedPipeline"
MIB = 1 << 20


def measure(console: Console, requests: int) -> dict[str, Any]:
    """Run every case; the object that ``--json`` prints."""
    import torch

    from worker_shim.demo.cases import ON_GPU, ON_HOST, Clock

    on_gpu = bool(nvidia_gpus())
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    cases = ON_GPU if on_gpu else ON_HOST
    with Progress(console=console, transient=True) as progress, engine(EXECUTOR, PIPELINE) as running:
        task = progress.add_task("requests", total=len(cases) * (requests + 1))
        packer_pids = running.executor.packer_pids
        clock = Clock(running, device)
        rows = [clock.row(case, requests, lambda: progress.advance(task)) for case in cases]
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else "host",
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
    table = Table(title=f"{path} on {result['device']}")
    for column in ("output", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("MiB", "p50 ms", "p99 ms", "copy ms", "ratio", "out/s", "wrong"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in result["rows"]:
        times = [f"{row[name]:.2f}" for name in ("handoff_p50_ms", "handoff_p99_ms", "bare_copy_ms", "ratio")]
        numbers = [f"{row['nbytes'] / MIB:.1f}", *times, f"{row['outputs_per_s']:.1f}", str(row["mismatches"])]
        table.add_row(row["output"], row["dtype"], *numbers)
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
