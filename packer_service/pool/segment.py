"""One segment of a pool: memory that the kernel has given, the device knows and the engine may map.

It knows which of its bytes are taken, but not by whom.
"""

from __future__ import annotations

from collections.abc import Callable

from packer_service.devices.base import Device, nothing
from packer_service.memory.extents import Extents
from packer_service.memory.memfd import SharedMemory

_POPULATE_THREADS = 8


class Segment:
    """One memfd: populated, then registered. It owns both; ``close`` undoes both, soon (see ``Device.drain``)."""

    def __init__(self, device: Device, number: int, nbytes: int) -> None:
        self.number = number
        self.memory = SharedMemory.create(f"packer-segment-{number}", nbytes)
        self.extents = Extents(nbytes)
        self._device = device
        try:
            self.memory.populate(_POPULATE_THREADS)
            device.register(self.memory.address, nbytes)
        except BaseException:
            self.memory.close()
            raise

    def close(self, then: Callable[[], None] = nothing) -> None:
        def unmap() -> None:
            self.memory.close()
            then()

        self._device.unregister(self.memory.address, self.memory.nbytes, unmap)
