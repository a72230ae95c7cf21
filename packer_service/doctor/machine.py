"""The machine: its kernel, whether it is WSL, and whether this process may run near its GPU."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packer_service.doctor.finding import Finding, note, ok, warning

_POPULATE = (5, 14)  # the first kernel that faults many pages in at once (MADV_POPULATE_WRITE)


def check_kernel(release: str | None = None) -> Finding:
    release = platform.release() if release is None else release
    numbers = tuple(int(number) for number in re.findall(r"\d+", release)[:2])
    if numbers < _POPULATE:
        text = f"Linux {release} gives the pool its pages one by one: growing it is slower"
        return note(
            "kernel", text, "Linux 5.14 or newer; or set pool_bytes to what is needed, so that it need not grow"
        )
    return ok("kernel", f"Linux {release}")


def check_wsl(device: str, proc: Path = Path("/proc")) -> Finding:
    try:
        version = (proc / "version").read_text()
    except OSError:
        version = ""
    if "microsoft" not in version.lower():
        return ok("WSL", "this is not WSL")
    text = "this is WSL: it limits pinned memory, and CUDA IPC works there or not with the driver; see hand-off"
    mend = "set memory= in .wslconfig; where the hand-off fails, run on Linux itself"
    return note("WSL", text, mend) if device != "host" else ok("WSL", "this is WSL; the host device does not mind")


def check_numa(device: str, facts: Mapping[str, Any], sys: Path = Path("/sys")) -> Finding:
    """A packer binds itself to the GPU's node where it may: see packer_service.devices.cuda.pin_near."""
    name = "NUMA"
    nodes = sorted((sys / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return ok(name, "one node, or as many as this container shows")
    if device == "host" or "pci_bus_id" not in facts:
        return ok(name, f"{len(nodes)} nodes; no GPU to be near to")
    from packer_service.devices.cuda import parse_cores

    bus = facts["pci_bus_id"].lower()
    try:
        node = int((sys / "bus/pci/devices" / bus / "numa_node").read_text())
        near = parse_cores((sys / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError) as failure:
        text = f"{len(nodes)} nodes, and which of them GPU {bus} is on is not known here ({failure})"
        return note(
            name, f"{text}: the packer runs where it is put", "numactl --cpunodebind=NODE, or systemd CPUAffinity="
        )
    mine = os.sched_getaffinity(0)
    if not near & mine:
        text = f"GPU {bus} is on node {node} (cores {_ranges(near)}), and this process may run on {_ranges(mine)} only"
        return warning(
            name,
            f"{text}: copies are slower",
            f"give it cores of that node: systemd CPUAffinity={_ranges(near)} or AllowedCPUs=, docker run --cpuset-cpus"
            f" {_ranges(near)}",
        )
    return ok(name, f"GPU {bus} is on node {node}; the packer binds itself to {len(near & mine)} of its cores")


def _ranges(cores: set[int]) -> str:
    """The kernel's list format: ``0-3,8``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
