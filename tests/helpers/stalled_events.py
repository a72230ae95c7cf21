"""Events of a process whose device gets on only when it is told: an output that is exported with one is not complete.

They are another process's than the worker's, because a stream that waits may hold up the other streams of its process. This
file is also what runs there; it needs cuda-bindings and no torch.
"""

from __future__ import annotations

import subprocess
import sys

from packer_service.devices.driver import call, driver, handle_bytes
from packer_service.memory.timeline import TimelinePage


class StalledEvents:
    """``handles`` are those of the events, as a worker exports them."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, __file__, str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.handles = [bytes.fromhex(self._process.stdout.readline()) for _ in range(count)]

    def complete(self) -> None:
        """All of them. Returns when they are."""
        print(file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "complete\n"

    def close(self) -> None:
        """Nobody may wait for one of them any longer."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main(count: int) -> None:
    call(driver.cuInit, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0)))
    page = TimelinePage.create()
    call(driver.cuMemHostRegister, page.address, page.nbytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    pointer = int(call(driver.cuMemHostGetDevicePointer, page.address, 0))
    stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    call(driver.cuStreamWaitValue64, stream, pointer, 1, at_least)
    flags = driver.CUevent_flags.CU_EVENT_INTERPROCESS | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    events = [call(driver.cuEventCreate, flags) for _ in range(count)]
    for event in events:
        call(driver.cuEventRecord, event, stream)
        print(handle_bytes(call(driver.cuIpcGetEventHandle, event)).hex(), flush=True)
    sys.stdin.readline()
    page.counter = 1
    call(driver.cuStreamSynchronize, stream)
    print("complete", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
