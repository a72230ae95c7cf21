"""What a result has to say about where it was measured."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
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


@functools.cache  # nvidia-smi takes up to a second
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


def name() -> str:
    """What results of this machine are called: "h200" for an NVIDIA H200, "host" where there is no GPU."""
    found = gpus()
    if not found:
        return "host"
    return re.sub(r"[^a-z0-9]+", "-", found[0].split(",")[0].lower().removeprefix("nvidia")).strip("-")


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
        "command": shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **more,
        "rows": rows,
    }


def write(path: str | None, value: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps(value, indent=1) + "\n")


class Recorder:
    """Writes the one object anew with every row, so that a run that is cut short leaves what it has measured."""

    def __init__(self, path: str | Path | None, benchmark: str, **more: Any) -> None:
        self.benchmark = benchmark
        self.rows: list[dict[str, Any]] = []
        self._path = None if path is None else str(path)
        self._value = result(benchmark, self.rows, **more)

    def add(self, *rows: dict[str, Any]) -> None:
        self.rows.extend(rows)
        write(self._path, self._value)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
