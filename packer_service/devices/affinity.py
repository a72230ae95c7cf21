"""Keep the packer, and with it the memory it touches first, on the NUMA node its GPU hangs on. It never fails a start."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

_SYS = Path("/sys")


def pin_near(pci_bus_id: str, sys: Path = _SYS) -> set[int]:
    """Bind this process to the cores of the GPU's node; those cores. Empty, and nothing done, where there is one node.

    Call it before memory is touched and before the threads that do so are started: both go by it.
    """
    try:
        nodes = list((sys / "devices/system/node").glob("node[0-9]*"))
        node = int((sys / "bus/pci/devices" / pci_bus_id.lower() / "numa_node").read_text())
        cores = parse_cores((sys / f"devices/system/node/node{node}/cpulist").read_text())
        cores &= os.sched_getaffinity(0)
        if len(nodes) < 2 or not cores:
            return set()
        os.sched_setaffinity(0, cores)
    except (
        OSError,
        ValueError,
    ) as error:  # a container may lack the files, a seccomp profile refuse: copies are only slower
        logger.info("not bound to the NUMA node of GPU %s: %s", pci_bus_id, error)
        return set()
    logger.info("bound to NUMA node %d (%d cores), where GPU %s is", node, len(cores), pci_bus_id)
    return cores


def parse_cores(text: str) -> set[int]:
    """The kernel's list format: ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
