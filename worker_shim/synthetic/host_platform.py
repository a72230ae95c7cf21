"""The vllm-omni platform of a machine with no GPU; worker_shim.synthetic.engine registers it.

vLLM's own CPU platform, with the answers added that vllm-omni's diffusion worker asks of an accelerator: there is one
device, it is the host, everything on it has already happened, and its memory is the machine's. It imports vllm_omni, so
only vllm-omni, which resolves it by name, may import it.
"""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class HostOmniPlatform(OmniPlatform, CpuPlatform):
    """Host memory as vllm-omni's device. It has no streams, events or allocator, so nothing to wait for or to reset."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        pass

    @classmethod
    def synchronize(cls) -> None:
        pass

    empty_cache = synchronize

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return psutil.virtual_memory().total

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return psutil.virtual_memory().available

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """(free, total) bytes, as torch.cuda.mem_get_info has them."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    # What torch's allocator holds and held: on the host it keeps no count.

    @classmethod
    def reset_peak_memory_stats(cls, device: torch.device | None = None) -> None:
        pass

    @classmethod
    def memory_allocated(cls, device: torch.device | int | None = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated
