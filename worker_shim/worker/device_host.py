"""A worker's device where there is no GPU: its memory is memfds, and a signal is a store."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from packer_service.errors import DeviceError
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage
from worker_shim.worker.device import Allocation, Chunk, Signal


class HostExportDevice:
    """A worker's host memory. See the module, and ``ExportDevice`` for what each method does."""

    kind = "host"
    uuid = "host"

    def __init__(self) -> None:
        self.timeline = TimelinePage.create()
        self._value = 0
        self._chunks: dict[int, SharedMemory] = {}  # by address

    def bind_thread(self) -> None:
        pass

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def allocate(self, nbytes: int) -> Chunk:
        memory = SharedMemory.create("packer-arena", nbytes)
        tensor = torch.frombuffer(memory.buffer, dtype=torch.uint8)
        self._chunks[tensor.data_ptr()] = memory
        return Chunk(tensor, b"", memory.fd)

    def free(self, chunk: Chunk) -> None:
        self._chunks.pop(chunk.tensor.data_ptr()).close()

    def find_allocation(self, tensor: torch.Tensor) -> Allocation:
        raise DeviceError("host memory cannot be exported where it lies, only staged")

    def copy_bytes(self, target: int, source: int, nbytes: int, owner: torch.Tensor) -> None:
        ctypes.memmove(target, source, nbytes)

    def record_use(self, tensor: torch.Tensor) -> None:
        pass

    def next_signal(self) -> Signal:
        return Signal(self._value + 1)

    def signal(self) -> Signal:
        self._value += 1
        self.timeline.counter = self._value
        return Signal(self._value)

    def retire(self, signal: Signal) -> None:
        pass

    def reached(self, ready: int) -> bool:
        return ready <= self._value

    def failure(self) -> str:
        return ""

    @contextmanager
    def after(self, ready: int) -> Iterator[None]:
        yield

    def close(self) -> None:
        for memory in self._chunks.values():
            memory.close()
        self._chunks.clear()
        self.timeline.close()
