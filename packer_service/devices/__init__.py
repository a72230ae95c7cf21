"""The machines a packer can copy from: ``cuda``, and ``host`` where there is no GPU."""

from __future__ import annotations

from packer_service.devices.base import Device
from packer_service.errors import SettingError


def open_device(name: str) -> Device:
    """The device called ``host``, ``cuda`` or ``cuda:N`` (N counts this process's visible GPUs).

    SettingError for another name; DeviceError where the device cannot be had.
    """
    kind, _, index = name.partition(":")
    if kind == "host" and not index:
        from packer_service.devices.host import HostDevice

        return HostDevice()
    if kind == "cuda" and (not index or index.isdecimal()):
        from packer_service.devices.cuda import CudaDevice

        return CudaDevice(int(index or 0))
    raise SettingError(f"device is {name!r}; allowed are 'host', 'cuda' and 'cuda:N'")
