"""What a result has to say about where it was measured."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "vllm", "vllm-omni", "cuda-bindings", "msgspec", "numpy")


def machine() -> dict[str, Any]:
    """Processor, memory, kernel, and the GPUs with their driver."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "gpus": gpus(),
        "thp_shmem": "".join(_lines("/sys/kernel/mm/transparent_hugepage/shmem_enabled")).strip(),
    }


def gpus() -> list[str]:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,pcie.link.gen.max,pcie.link.width.max",
        "--format=csv,noheader",
    ]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = ""
    return found


def result(benchmark: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The one object a benchmark writes."""
    return {
        "benchmark": benchmark,
        "machine": machine(),
        "versions": versions(),
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **more,
        "rows": rows,
    }


def percentile(samples: list[float], percent: float) -> float:
    """The nearest-rank percentile: always a value that was measured."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * len(ordered) + 0.5) - 1))]


def write(path: str | None, value: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(value, indent=1) + "\n")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
