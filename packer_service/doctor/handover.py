"""The packer's part of the hand-off that the doctor tries: memory of another process is imported, waited for, copied, compared.

    python -m packer_service.doctor.handover DEVICE [events]

It goes the way of an output, with the packer's own device: import by handle, a stream that waits for the exporter's counter (or
its event), a copy into a registered memfd. It is a process of its own, because a driver may hang or crash. It prints one JSON
object a line: {"step"} before each step, so that the last one tells where it ended, then {"done"} or {"failed"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from packer_service.devices import open_device
from packer_service.doctor.child import command
from packer_service.doctor.exporter import PATIENCE_S, READY, contents
from packer_service.errors import DeviceBusy, DeviceError
from packer_service.memory.memfd import SharedMemory
from packer_service.memory.timeline import TimelinePage

NBYTES = 16 << 20
_POLL_S = 0.001


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


@contextlib.contextmanager
def _exporter(device: str, options: tuple[str, ...]) -> Iterator[socket.socket]:
    """A connection to an exporter that is a process of its own, and ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(PATIENCE_S)
        arguments = command("packer_service.doctor.exporter", device, str(theirs.fileno()), str(NBYTES), *options)
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _answer(exporter: socket.socket) -> tuple[dict[str, str], list[int]]:
    data, fds, _, _ = socket.recv_fds(exporter, 4096, 2)
    if not data:
        raise DeviceError("the exporter died")
    answer = json.loads(data)
    if "failed" in answer:
        raise DeviceError(f"the exporter: {answer['failed']}")
    return answer, fds


def try_handover(name: str, options: tuple[str, ...], opened: contextlib.ExitStack) -> float:
    """One hand-off on the device called ``name``; the seconds that the copy took. ``opened`` gives everything back."""
    events = "events" in options
    _say(step="to open the device")
    device = open_device(name)
    opened.callback(device.close)
    _say(step="to register a memfd with the driver")
    target = SharedMemory.create("packer-doctor-pool", NBYTES)
    opened.callback(target.close)
    target.populate(2)
    device.register(target.address, NBYTES)
    opened.callback(device.closer.drain)
    opened.callback(device.unregister, target.address, NBYTES)
    _say(step="to export memory from another process")
    exporter = opened.enter_context(_exporter(name, options))
    answer, fds = _answer(exporter)
    page = TimelinePage.attach(fds.pop(0))
    _say(step="to register the exporter's timeline")
    timeline = device.open_timeline(page)
    opened.callback(device.closer.drain)
    opened.callback(timeline.close)
    if not page.owner_lives():
        raise DeviceError("the exporter's record lock on its memfd is not seen by another process")
    _say(step="to import the exporter's memory by its handle")
    chunk = device.open_chunk(bytes.fromhex(answer["handle"]), fds, NBYTES)
    opened.callback(device.closer.drain)
    opened.callback(chunk.close)
    stream = device.open_stream()
    opened.callback(stream.close)
    seed = secrets.token_bytes(32)
    if events:
        exporter.send(seed)
        handle = bytes.fromhex(_answer(exporter)[0]["event"])
        _say(step="to wait for the exporter's event")
        _wait_event(stream.wait_event, handle)
        stream.copy_to_host(target.address, chunk, 0, NBYTES)
        marker = stream.record()
    else:
        _say(step="to wait on the device for the exporter's counter")
        stream.wait_timeline(timeline, READY)
        stream.copy_to_host(target.address, chunk, 0, NBYTES)
        marker = stream.record()
        exporter.send(seed)  # only now, so that the stream really waits
        _answer(exporter)
    marker.synchronize()
    took_s = time.perf_counter() - marker.began
    _say(step="to compare what was copied")
    if target.buffer[:] != contents(seed, NBYTES):
        raise DeviceError("the bytes that were copied are not those that the exporter wrote")
    return took_s


def _wait_event(wait_event: Callable[[bytes], None], handle: bytes) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return wait_event(handle)
        except DeviceBusy:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def main(device: str, *options: str) -> None:
    with contextlib.ExitStack() as opened:
        try:
            took_s = try_handover(device, options, opened)
        except Exception as error:
            _say(failed=f"{error} ({type(error).__name__})")
            # What was opened goes with the process: to give it back would wait for a counter that may never come.
            os._exit(1)
        _say(step="to give back what was opened")
    _say(done={"nbytes": NBYTES, "copy_s": took_s})
    os._exit(0)  # the driver's own end of a process tells nothing new, and could hang


if __name__ == "__main__":
    main(*sys.argv[1:])
