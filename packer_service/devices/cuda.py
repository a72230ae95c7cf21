"""The CUDA device: this process's context on one GPU, its few streams, and what it opens for sessions.

It goes through the driver API, with no torch and no runtime library: about 120 MB resident, most of it the driver's own.

Note [Waiting without burning a core or a connection]
The context is made with blocking synchronization: a thread that waits for a copy sleeps in the kernel. A stream that waits
for a forward occupies a hardware connection, and whatever else was put on that connection waits with it. Each connection
costs the process 10 MB of resident memory and 17 ms of its start, so there are few: ``_WAITING_STREAMS`` sessions have a
stream, and with it a connection, of their own; all others share one more, on which nothing ever waits: their outputs are
submitted when the forward is over, which somebody has to poll for (DeviceBusy).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packer_service.devices.closer import Closer, nothing
from packer_service.devices.cuda_memory import CudaTimeline, ImportedCudaChunk, Registrations
from packer_service.devices.cuda_stream import CudaStream
from packer_service.devices.driver import call, context_failure, device_uuid, driver, visible_gpu
from packer_service.errors import DeviceError
from packer_service.memory.timeline import TimelinePage

logger = logging.getLogger(__name__)

_WAITING_STREAMS = 3


class CudaDevice:
    """One GPU and this process's primary context on it."""

    kind = "cuda"

    def __init__(self, which: str) -> None:
        if driver is None:
            raise DeviceError("cuda-bindings is not installed: pip install 'packer-service[cuda]'")
        # The driver reads this when it is initialized. Whatever was set, it has to be the number of our streams.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(_WAITING_STREAMS + 1)
        try:
            call(driver.cuInit, 0)
        except (DeviceError, RuntimeError) as error:
            raise DeviceError(
                f"there is no CUDA driver to talk to: install NVIDIA's, or try without a GPU with the setting device = host"
                f" ({error})"
            ) from error
        self._device = visible_gpu(which)
        pin_near(call(driver.cuDeviceGetPCIBusId, 32, self._device).split(b"\0")[0].decode())
        flags = driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC
        call(driver.cuDevicePrimaryCtxSetFlags, self._device, flags)
        self._context = call(driver.cuDevicePrimaryCtxRetain, self._device)
        self.bind_thread()
        self.uuid = device_uuid(self._device)
        self.name = call(driver.cuDeviceGetName, 96, self._device).split(b"\0")[0].decode()
        self._lock = threading.Lock()  # guards _waiting_streams
        self.closer = Closer(self.bind_thread)
        self._registrations = Registrations(self.closer)
        self._shared_stream, *self._waiting_streams = (
            call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            for _ in range(_WAITING_STREAMS + 1)
        )

    def bind_thread(self) -> None:
        call(driver.cuCtxSetCurrent, self._context)

    def register(self, address: int, nbytes: int) -> None:
        self._registrations.register(address, nbytes)

    def unregister(self, address: int, nbytes: int, then: Callable[[], None] = nothing) -> None:
        self._registrations.unregister(address, nbytes, then)

    def open_chunk(self, handle: bytes, fds: list[int], nbytes: int) -> ImportedCudaChunk:
        return ImportedCudaChunk(handle, nbytes, self.closer)

    def open_timeline(self, page: TimelinePage) -> CudaTimeline:
        return CudaTimeline(page, self.closer)

    def open_stream(self) -> CudaStream:
        with self._lock:
            if self._waiting_streams:
                stream = self._waiting_streams.pop()
                give_back = functools.partial(self._take_back, stream)
                return CudaStream(self._registrations, self.closer, stream, may_wait=True, give_back=give_back)
        return CudaStream(self._registrations, self.closer, self._shared_stream, may_wait=False)

    def _take_back(self, stream: Any) -> None:
        """The session that had ``stream`` to itself is closed: the next one may have it."""
        with self._lock:
            self._waiting_streams.append(stream)

    def failure(self) -> str:
        return context_failure()

    def close(self) -> None:
        self.closer.stop()
        call(driver.cuDevicePrimaryCtxRelease, self._device)


def pin_near(pci_bus_id: str, sys: Path = Path("/sys")) -> set[int]:
    """Bind this process to the cores of the NUMA node that its GPU hangs on; those cores. Empty, and nothing done, where there
    is one node. It never fails a start.

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
    except (OSError, ValueError) as error:
        # A container may lack the files, a seccomp profile refuse: copies are only slower.
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
