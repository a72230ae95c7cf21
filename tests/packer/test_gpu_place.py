"""Which GPU it is and where it hangs, with no GPU: a driver and a /sys that are laid out by hand."""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packer_service.devices import cuda, driver

GPU, SLICE = bytes(range(16)), bytes(range(16, 32))


class Uuid:
    def __init__(self, data: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(data, 16)

    def getPtr(self) -> int:
        return ctypes.addressof(self._buffer)


def answers(data: bytes) -> Any:
    return lambda device: (0, Uuid(data))


def test_slices_of_one_gpu_are_told_apart_alike_by_every_release_of_cuda_bindings(monkeypatch):
    """12.x has the call that answers the GPU's own UUID, and _v2; 13.x has only the newer one, under the old name."""
    old = types.SimpleNamespace(cuDeviceGetUuid=answers(GPU), cuDeviceGetUuid_v2=answers(SLICE))
    new = types.SimpleNamespace(cuDeviceGetUuid=answers(SLICE))
    seen = []
    for release in (old, new):
        monkeypatch.setattr(driver, "driver", release)
        seen.append(driver.device_uuid(0))
    assert seen == ["GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"] * 2


@pytest.fixture
def sys(tmp_path: Path) -> Iterator[Path]:
    """/sys of a machine with two nodes; the second, where the GPU is, has one core that this process may use."""
    core = min(os.sched_getaffinity(0))
    for number, cores in enumerate(("100000-100003", str(core))):
        node = tmp_path / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    gpu = tmp_path / "bus/pci/devices/0000:1a:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    before = os.sched_getaffinity(0)
    try:
        yield tmp_path
    finally:
        os.sched_setaffinity(0, before)


def test_a_packer_is_bound_to_the_cores_of_its_gpus_node(sys):
    core = min(os.sched_getaffinity(0))
    assert cuda.pin_near("0000:1A:00.0", sys) == {core}
    assert os.sched_getaffinity(0) == {core}


def refuse(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("broken", ["numa_node", "cpulist", "no such GPU", "affinity refused", "affinity not told"])
def test_what_cannot_be_read_or_done_stops_no_start(broken, sys, monkeypatch):
    before, bus_id = os.sched_getaffinity(0), "0000:1A:00.0"
    if broken == "numa_node":
        (sys / "bus/pci/devices/0000:1a:00.0/numa_node").write_bytes(b"\xff")
    elif broken == "cpulist":
        (sys / "devices/system/node/node1/cpulist").write_text("0-many")
    elif broken == "no such GPU":
        bus_id = "0000:2B:00.0"
    with monkeypatch.context() as patch:
        if broken == "affinity refused":
            patch.setattr(os, "sched_setaffinity", refuse)
        elif broken == "affinity not told":
            patch.setattr(os, "sched_getaffinity", refuse)
        assert cuda.pin_near(bus_id, sys) == set()
    assert os.sched_getaffinity(0) == before
