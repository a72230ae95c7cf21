"""How much memory of the GPU the processes of a test have in use, also that which only an import in a packer keeps alive.

Nobody tells that directly: nvidia-smi says what each process allocated, and counts what it imported for nobody once the
process that allocated it is gone. So it is what the whole GPU has in use, less what nvidia-smi says of strangers' processes.
In a container nvidia-smi may name no process, or name it by its pid outside. Then strangers cannot be told from the test's
own, and the whole GPU is what is measured. The marker ``whole_gpu`` is for the tests that need it to themselves there.
"""

from __future__ import annotations

import os
import subprocess

import psutil
import torch

from packer_service.devices.driver import call, device_uuid, driver

MIB = 1 << 20


def _allocated() -> dict[int, int]:
    """Bytes of the current GPU by pid, as far as nvidia-smi can say."""
    uuid = device_uuid(call(driver.cuDeviceGet, torch.cuda.current_device()))
    command = ["nvidia-smi", "-i", uuid, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    found = {}
    for line in subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.splitlines():
        pid, _, mebibytes = line.partition(", ")
        if mebibytes.isdigit():  # not "[N/A]"
            found[int(pid)] = int(mebibytes) * MIB
    return found


class GpuMemory:
    """Strangers are whoever uses the GPU now and is not of this process's family. A stranger that comes later counts as ours:
    that may fail a test, and never passes one."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # this process uses the GPU: nvidia-smi names it, if it can
        allocated = _allocated()
        family = {os.getpid()} | {child.pid for child in psutil.Process().children(recursive=True)}
        self._strangers = allocated.keys() - family if os.getpid() in allocated else set()

    def in_use(self) -> int:
        torch.cuda.synchronize()
        strangers = _allocated() if self._strangers else {}
        free, total = torch.cuda.mem_get_info()
        return total - free - sum(strangers.get(pid, 0) for pid in self._strangers)
