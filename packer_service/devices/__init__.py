"""The machines a packer can copy from: ``cuda``, and ``host`` where there is no GPU."""

from __future__ import annotations

from packer_service.devices.base import Device
from packer_service.errors import SettingError


def device_named(name: str) -> tuple[str, int]:
    """The kind and the index that a device's name says: ``host``, ``cuda`` or ``cuda:N``. SettingError for another name."""
    kind, _, index = name.partition(":")
    if (kind == "host" and not index) or (kind == "cuda" and (not index or index.isdecimal())):
        return kind, int(index or 0)
    raise SettingError(f"device is {name!r}; allowed are 'host', 'cuda' and 'cuda:N'")


def open_device(name: str) -> Device:
    """The device called ``host``, ``cuda`` or ``cuda:N`` (N counts this process's visible GPUs).

    SettingError for another name; DeviceError where the device cannot be had.
    """
    kind, index = device_named(name)
    if kind == "host":
        from packer_service.devices.host import HostDevice

        return HostDevice()
    from packer_service.devices.cuda import CudaDevice

    return CudaDevice(index)
