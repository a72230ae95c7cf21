"""The machines a packer can copy from: ``cuda``, and ``host`` where there is no GPU."""

from __future__ import annotations

import re

from packer_service.devices.base import Device
from packer_service.errors import SettingError

_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9a-fA-F-]+")


def device_named(name: str) -> tuple[str, str]:
    """The kind of device that ``name`` says, and which one: ``host``, ``cuda``, ``cuda:N`` or ``cuda:GPU-UUID``. SettingError
    for another name."""
    kind, _, which = name.partition(":")
    if (kind == "host" and not which) or (kind == "cuda" and (not which or _GPU.fullmatch(which))):
        return kind, which or "0"
    raise SettingError(f"device is {name!r}; allowed are 'host', 'cuda', 'cuda:N' and 'cuda:UUID' (nvidia-smi -L)")


def open_device(name: str) -> Device:
    """The device called ``name`` (see ``device_named``; a number counts this process's visible GPUs).

    SettingError for another name; DeviceError where the device cannot be had.
    """
    kind, which = device_named(name)
    if kind == "host":
        from packer_service.devices.host import HostDevice

        return HostDevice()
    from packer_service.devices.cuda import CudaDevice

    return CudaDevice(which)
