"""Which export device a worker has."""

from __future__ import annotations

import torch

from worker_shim.worker.device import ExportDevice
from worker_shim.worker.device_cuda import CudaExportDevice
from worker_shim.worker.device_host import HostExportDevice


def open_export_device(device: torch.device, *, events: bool) -> ExportDevice:
    """The export side of the worker's device. DeviceError where it cannot export."""
    if device.type == "cuda":
        return CudaExportDevice(device.index or 0, events=events)
    return HostExportDevice()
