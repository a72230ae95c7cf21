"""NVIDIA's driver, called by name: what the packer and the worker both ask of it. It keeps no state of its own."""

from __future__ import annotations

import ctypes
from typing import Any

from packer_service.errors import DeviceError

try:
    from cuda.bindings import driver
except ImportError:  # there is no GPU stack here, and CudaDevice says so
    driver = None

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


def call(function: Any, *arguments: Any) -> Any:
    """One driver call: its result (None, one value or a tuple). DeviceError with the driver's own name for what went wrong."""
    status, *results = function(*arguments)
    if status:
        raise DeviceError(f"{function.__name__} answered {status.name} ({int(status)})")
    return results[0] if len(results) == 1 else tuple(results) or None


def context_failure(stream: int = 0) -> str:
    """The driver's name for what broke this thread's context; empty while it works.

    What a kernel or a copy died of is sticky: from then on every call answers it, the query of a stream too.
    """
    (status,) = driver.cuStreamQuery(stream)
    codes = driver.CUresult
    # These say something of this thread: that it has no context, and that it captures a graph.
    of_this_thread = status == codes.CUDA_ERROR_INVALID_CONTEXT or 900 <= int(status) <= 909
    return "" if status in (codes.CUDA_SUCCESS, codes.CUDA_ERROR_NOT_READY) or of_this_thread else str(status.name)


def handle_bytes(handle: Any) -> bytes:
    """The 64 bytes of an IPC memory or event handle."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def handle_from(kind: Any, data: bytes) -> Any:
    """The IPC handle (``driver.CUipcMemHandle`` or ``CUipcEventHandle``) that ``data`` carries."""
    if len(data) != HANDLE_BYTES:
        raise DeviceError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(data)}")
    handle = kind()
    ctypes.memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle


def device_uuid(device: Any) -> str:
    """The UUID of a GPU, or of a MIG slice of one; the same in every process, whatever CUDA_VISIBLE_DEVICES says.

    It is what nvidia-smi prints, except that a slice has the prefix of a GPU too: the driver does not say which of both it is.
    """
    # For a slice, cuDeviceGetUuid of cuda-bindings 12 answers the UUID of the whole GPU. In 13 it is what 12 calls _v2.
    get = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
    uuid = call(get, device)  # owns the bytes that getPtr points to
    digits = ctypes.string_at(uuid.getPtr(), 16).hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def visible_gpu(which: str) -> Any:
    """The GPU that ``which`` names: its number among those that this process sees, or its UUID. DeviceError if it is not there.

    The driver is initialized.
    """
    gpus = [call(driver.cuDeviceGet, number) for number in range(int(call(driver.cuDeviceGetCount)))]
    if which.isdecimal():
        if int(which) < len(gpus):
            return gpus[int(which)]
    else:
        digits = which.partition("-")[2].lower()  # the driver does not tell a slice's prefix from a GPU's
        for gpu in gpus:
            if device_uuid(gpu).partition("-")[2] == digits:
                return gpu
    raise DeviceError(
        f"cuda:{which} was asked for and {len(gpus)} GPU(s) are visible: see nvidia-smi -L, CUDA_VISIBLE_DEVICES"
    )
