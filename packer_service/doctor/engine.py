"""The engine's side: vllm-omni and what we take hold of in it, torch's allocator, torch's threads."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from packer_service.config import Settings
from packer_service.doctor.child import Child, Ended
from packer_service.doctor.finding import Finding, error, note, ok, shown_bytes, warning

_HOOKS_S = 240.0
_SHOWN = 3
_FEW_THREADS = 4  # post-processing was fastest with so many, or nearly, of 1, 4 and 16 on an H200 host


def start_hooks() -> Child | None:
    """Start the comparison of vllm-omni with what we rely on, in a process that imports it; None where it is not installed."""
    if importlib.util.find_spec("vllm_omni") is None or importlib.util.find_spec("worker_shim") is None:
        return None
    return Child("worker_shim.compat", "--check")


def check_hooks(child: Child | None, settings: Settings) -> Finding:
    if child is None:
        text = "vllm-omni is not installed in this Python: a packer alone needs none"
        return note(
            "vllm-omni",
            text,
            "run packer-service doctor with the engine's Python too (pip install 'packer-service[vllm]')",
        )
    return judge_hooks(child.end(_HOOKS_S), settings)


def judge_hooks(ended: Ended, settings: Settings) -> Finding:
    """``ended``: a run of ``python -m worker_shim.compat --check``."""
    name = "vllm-omni"
    try:
        found: dict[str, Any] = json.loads(ended.output.strip().splitlines()[-1])
    except (IndexError, ValueError):
        text = f"it cannot be imported, so no engine runs with this Python: {ended.reason}"
        return error(name, text, "python -c 'import vllm_omni' says why; pip install 'packer-service[vllm]'")
    tested = found["tested"]
    mend = f"pip install vllm-omni=={tested}"
    if missing := found["missing"]:
        text = f"{found['version']}: {_some(missing)}: engines take vllm-omni's own executor"
        return error(name, text, mend)
    if changed := found["changed"]:
        text = f"{found['version']}: functions differ from those tested with {tested}: {_some(changed)}"
        if settings.compatibility == "lenient":
            return warning(name, f"{text}; compatibility is lenient, so engines go on", mend)
        mend = f"{mend}, or set PACKER_COMPATIBILITY=lenient"
        return error(name, f"{text}: engines take vllm-omni's own executor", mend)
    return ok(name, f"{found['version']}: everything that we take hold of is as it was when tested")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'; '.join(names[:_SHOWN])}{more}"


def check_allocator(settings: Settings, environ: Mapping[str, str]) -> Finding:
    """Torch's allocator hands out memory that cannot be exported with some settings. Staged outputs do not mind."""
    name = "allocator"
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environ.get(variable, "")
        if re.search(r"expandable_segments\s*:\s*true", value, re.I):
            which = "expandable segments"
        elif re.search(r"backend\s*:\s*cudaMallocAsync", value, re.I):
            which = "cudaMallocAsync"
        else:
            continue
        text = (
            f"{variable} turns on {which}, whose memory cannot be exported. Outputs are staged in memory of the driver's own"
            f" and do not mind; one larger than arena_max_bytes ({shown_bytes(settings.arena_max_bytes)}) falls back"
        )
        return note(name, text, f"for such outputs: raise PACKER_ARENA_MAX_BYTES, or unset {variable}")
    return ok(name, "no setting of torch's allocator that keeps its memory from being exported")


def check_torch_threads(environ: Mapping[str, str]) -> Finding:
    """How many threads torch has in the engine's process, where post-processing runs."""
    name = "torch threads"
    value = environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0))
    few = min(_FEW_THREADS, cores)
    if not value:
        text = "OMP_NUM_THREADS is not set: torch's threads, and so post-processing in the engine, go by the number of cores"
        return note(
            name, f"{text} ({cores} here)", "try OMP_NUM_THREADS=4 for the engine, and measure; a packer has none"
        )
    first = value.split(",")[0].strip()
    if not first.isdecimal() or int(first) == 0:
        return warning(
            name,
            f"OMP_NUM_THREADS is {value!r}, which is no number of threads",
            f"set OMP_NUM_THREADS={few}, or unset it",
        )
    if int(first) > cores:
        text = f"OMP_NUM_THREADS is {value}, and this process may use {cores} cores: threads wait for one another"
        return warning(name, text, f"set OMP_NUM_THREADS to {cores} at most")
    return ok(name, f"OMP_NUM_THREADS is {value}, of {cores} cores")
