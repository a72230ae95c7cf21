"""What the driver says of a GPU before anybody has a context there, in a process of its own: cuInit may hang, or fail for good.

    python -m packer_service.doctor.gpu_facts INDEX

It prints one JSON object with as much as could be found, and "failed" with why that is not all. It allocates nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator
from typing import Any

from packer_service.devices.driver import call, device_uuid, driver, visible_gpu

COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def collect(which: str) -> Iterator[tuple[str, Any]]:
    """One fact after the other. RuntimeError (of cuda-bindings) and DeviceError where the driver answers no further."""
    if driver is None:
        yield "failed", "cuda-bindings is not installed"
        return
    yield "bindings", importlib.metadata.version("cuda-bindings")
    yield "driver_cuda", int(call(driver.cuDriverGetVersion))
    call(driver.cuInit, 0)
    yield "count", int(call(driver.cuDeviceGetCount))
    device = visible_gpu(which)
    yield "name", call(driver.cuDeviceGetName, 96, device).split(b"\0")[0].decode()
    yield "uuid", device_uuid(device)
    yield "pci_bus_id", call(driver.cuDeviceGetPCIBusId, 32, device).split(b"\0")[0].decode()
    yield "memory_bytes", int(call(driver.cuDeviceTotalMem, device))
    for name, attribute in (
        ("compute_mode", "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE"),
        ("mps_enabled", "CU_DEVICE_ATTRIBUTE_MPS_ENABLED"),
    ):
        wanted = getattr(driver.CUdevice_attribute, attribute, None)
        if wanted is None:  # of a newer cuda-bindings than is installed
            continue
        status, value = driver.cuDeviceGetAttribute(wanted, device)
        if not status:  # an older driver does not know each of them
            yield name, int(value)


def main(which: str) -> None:
    facts: dict[str, Any] = {}
    try:
        for name, value in collect(which):
            facts[name] = value
    except Exception as error:  # whatever cuda-bindings raises where there is no driver
        facts["failed"] = f"{error} ({type(error).__name__})"
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
