"""What a GPU still does for a worker that was SIGKILLed: late writes of its timeline, and events that never complete.

    python -m benchmarks.dead_worker --json FILE        (one GPU; about a minute)

This process is the packer, and a child the worker, which is killed in mid-forward.

``timeline``: the worker has queued thousands of kernels of a millisecond each, with a write of the counter behind each. When
its record lock is gone the packer forces the counter, and a stream of the packer waits for the value that it forced.
``late_writes``: how many values the dead worker's device wrote after that; ``last_late_write_ms`` since the kill;
``one_force_passed``: whether the stream passed without being forced again; ``passed_when_forced_again``: whether it did then.

``event``: two interprocess events of the worker, one complete and one behind a kernel that runs for seconds. What
``cuEventQuery`` says of each, and whether a stream that waits for it has passed, ``WATCH_S`` after the kill.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks import machine
from benchmarks.harness import say
from packer_service.devices.cuda import CudaDevice
from packer_service.devices.driver import call, handle_bytes, handle_from
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TIMELINE_BYTES, TimelinePage

FORCED = 1 << 40
KERNELS = 4000
QUEUED = 200  # kernels in the queue when the packer hears of it: the queue is finite, and the worker then waits in it
WATCH_S = 2.0
_CYCLES = int(2e8)


# -- the worker --------------------------------------------------------------------------------------------------------


def worker(kind: str) -> None:
    """Make work for the device, say so in a line of JSON, and wait to be killed."""
    import torch
    from cuda.bindings import driver

    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(_CYCLES)
    torch.cuda.synchronize()
    cycles_per_s = _CYCLES / (time.perf_counter() - begin)
    stream = torch.cuda.current_stream().cuda_stream
    if kind == "timeline":
        page = TimelinePage.create()
        print(json.dumps({"pid": os.getpid(), "fd": page.fd}), flush=True)
        sys.stdin.readline()  # the packer has opened the page
        call(driver.cuMemHostRegister, page.address, page.nbytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
        pointer = int(call(driver.cuMemHostGetDevicePointer, page.address, 0))
        for number in range(1, KERNELS + 1):
            torch.cuda._sleep(int(cycles_per_s * 0.001))
            call(driver.cuStreamWriteValue64, stream, pointer, number, 0)
            if number == QUEUED:
                print("{}", flush=True)
    else:
        flags = driver.CUevent_flags.CU_EVENT_INTERPROCESS | driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
        events = {name: call(driver.cuEventCreate, flags) for name in ("complete", "incomplete")}
        call(driver.cuEventRecord, events["complete"], stream)
        torch.cuda.synchronize()
        for _ in range(60):
            torch.cuda._sleep(int(cycles_per_s))
        call(driver.cuEventRecord, events["incomplete"], stream)
        handles = {name: handle_bytes(call(driver.cuIpcGetEventHandle, event)) for name, event in events.items()}
        print(json.dumps({name: handle.hex() for name, handle in handles.items()}), flush=True)
    time.sleep(60)


def start(kind: str) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.dead_worker", "--worker", kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return process, _answer(process)


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the worker ended with {process.wait()}")
    return dict(json.loads(line))


# -- the packer --------------------------------------------------------------------------------------------------------


def passed(stream: Any) -> bool:
    from cuda.bindings import driver

    return driver.cuStreamQuery(stream)[0] == driver.CUresult.CUDA_SUCCESS


def timeline_round(number: int) -> dict[str, Any]:
    from cuda.bindings import driver

    process, said = start("timeline")
    fd = os.open(f"/proc/{said['pid']}/fd/{said['fd']}", os.O_RDWR)
    page = TimelinePage(SharedMemory.attach(fd, TIMELINE_BYTES, keep_fd=True))
    call(driver.cuMemHostRegister, page.address, page.nbytes, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
    pointer = int(call(driver.cuMemHostGetDevicePointer, page.address, 0))
    stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    geq = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    call(driver.cuStreamWaitValue64, stream, pointer, FORCED, geq)
    print(file=process.stdin, flush=True)
    _answer(process)
    time.sleep(0.03 * (1 + number % 4))
    begin = time.perf_counter()
    process.send_signal(signal.SIGKILL)
    while page.owner_lives():
        pass
    lock_gone_s = time.perf_counter() - begin
    page.counter = last = FORCED
    writes, last_write_s, gone_s = 0, None, None
    while (now := time.perf_counter() - begin) < WATCH_S:
        if (value := page.counter) != last:
            last, last_write_s, writes = value, now, writes + 1
        if gone_s is None and process.poll() is not None:
            gone_s = now
    once = passed(stream)
    page.counter = FORCED
    time.sleep(0.1)
    again = passed(stream)
    call(driver.cuStreamDestroy, stream)
    call(driver.cuMemHostUnregister, page.address)
    page.close()
    return {
        "what": "timeline",
        "round": number,
        "lock_gone_ms": _ms(lock_gone_s),
        "process_gone_ms": _ms(gone_s),
        "late_writes": writes,
        "last_late_write_ms": _ms(last_write_s),
        "one_force_passed": once,
        "passed_when_forced_again": again,
    }


def event_rows() -> list[dict[str, Any]]:
    """A stream behind the incomplete event waits for ever: whoever calls this has to leave by ``os._exit``."""
    from cuda.bindings import driver

    process, handles = start("event")
    events, streams = {}, {}
    for name, handle in handles.items():
        kind = handle_from(driver.CUipcEventHandle, bytes.fromhex(handle))
        events[name] = call(driver.cuIpcOpenEventHandle, kind)
        streams[name] = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for name, event in events.items():
        call(driver.cuStreamWaitEvent, streams[name], event, 0)
    time.sleep(WATCH_S)
    return [
        {
            "what": "event",
            "event_at_the_kill": name,
            "query": driver.cuEventQuery(event)[0].name,
            "stream_passed": passed(streams[name]),
        }
        for name, event in events.items()
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the result here")
    parser.add_argument("--rounds", type=int, default=6, help="workers to kill (default %(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    if not machine.gpus():
        raise SystemExit("benchmarks.dead_worker needs an NVIDIA GPU: without one nothing is written late")
    CudaDevice("0")  # the context, with blocking synchronization, as the packer has it
    found = machine.Recorder(options.json, "dead_worker")
    for number in range(options.rounds):
        found.add(timeline_round(number))
        say(json.dumps(found.rows[-1]))
    found.add(*event_rows())
    for row in found.rows[-2:]:
        say(json.dumps(row))
    os._exit(0)


if __name__ == "__main__":
    main()
