"""What runs in a container with an engine: the engine's end with pid 1, and a worker that it starts, which has pid 2.

    python contained.py engine SOCKET KEY_FILE DEVICE SEED     says "connected", and on a line from stdin how it went, as JSON
    python contained.py worker SOCKET KEY_FILE DEVICE SEED
    python contained.py hello SOCKET KEY_FILE DEVICE_UUID SESSION     says who it is to the packer, and what that answers
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from container import namespaces
from packer_process import DEADLINE_S, MIB, Packer

from packer_service.errors import PackerError
from packer_service.wire import handshake

COUNT = 12
os.environ["TMPDIR"] = "/dev/shm"  # what torch imports wants a place for files; the packer wants none


class Reached:
    """A packer by its socket and key, as the tests' helpers want it."""

    connect = Packer.connect

    def __init__(self, socket: str, key: bytes) -> None:
        self.socket, self.key = socket, key


def outputs(seed: int, large_bytes: int) -> dict[str, Any]:
    """Of several dtypes and sizes, the last of them large. Only this seed makes these bytes."""
    import torch
    from any_output import content

    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
    small = {f"{seed}-{n}": content(dtypes[n % 4], (1000 + 10_000 * n,), seed * 1000 + n) for n in range(COUNT - 1)}
    return {**small, f"{seed}-large": content(torch.uint8, (large_bytes,), seed * 1000 + COUNT)}


def large_bytes(device: str) -> int:
    return 3 * MIB if device == "host" else 256 * MIB


def engine(packer: Reached, key_file: str, device: str, seed: int) -> None:
    command = [sys.executable, __file__, "worker", packer.socket, key_file, device, str(seed)]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # the first: pid 2
    assert worker.stdin is not None
    assert worker.stdout is not None
    from bit_for_bit import assert_same_tensor
    from sides import EngineSide

    with contextlib.closing(EngineSide(packer)) as side:  # type: ignore[arg-type]
        worker.stdin.write(f"{side.session}\n")
        worker.stdin.flush()
        print(worker.stdout.readline(), end="", flush=True)
        worker.stdin.write(sys.stdin.readline())
        worker.stdin.flush()
        expected = outputs(seed, large_bytes(device))
        for name, tensor in expected.items():
            assert_same_tensor(side.output(name), tensor)
        report = json.loads(worker.stdout.readline())
        print(json.dumps({**_who(), "received": len(expected), "worker": report}), flush=True)
        worker.stdin.close()
        assert worker.wait(DEADLINE_S) == 0


def worker(packer: Reached, device: str, seed: int) -> None:
    from sides import WorkerSide

    export_device = None
    if device != "host":
        from worker_shim.worker.device_cuda import CudaExportDevice

        export_device = CudaExportDevice(0)
    session = sys.stdin.readline().strip()
    room = {"arena_max_bytes": "1GiB", "wait_s": DEADLINE_S}
    side = WorkerSide(packer, session, device=export_device, **room)  # type: ignore[arg-type]
    with contextlib.closing(side.exporter):
        sent = outputs(seed, large_bytes(device))
        if device != "host":
            sent = {name: tensor.cuda() for name, tensor in sent.items()}
        print("connected", flush=True)
        sys.stdin.readline()
        for name, tensor in sent.items():
            side.send(tensor, name)
        side.wait_settled(*sent)
        assert side.arena_idle()
        nbytes = sum(tensor.nbytes for tensor in sent.values())
        fallen_back = [reason for _, reason in side.fallen_back]
        print(json.dumps({**_who(), "sent": len(sent), "bytes": nbytes, "fallen_back": fallen_back}), flush=True)
        sys.stdin.readline()  # its end: the engine has it all


def hello(packer: Reached, device_uuid: str, session: str) -> None:
    refused = ""
    try:
        handshake.connect(packer.socket, packer.key, "worker", session, device_uuid=device_uuid)[0].close()
    except PackerError as error:
        refused = str(error)
    print(json.dumps({"pid": os.getpid(), "refused": refused}))


def _who() -> dict[str, Any]:
    return {"pid": os.getpid(), "uid": os.getuid(), "namespaces": namespaces(), "shm": sorted(os.listdir("/dev/shm"))}


def main(role: str, socket: str, key_file: str, *rest: str) -> None:
    packer = Reached(socket, Path(key_file).read_bytes())
    if role == "hello":
        hello(packer, *rest)
        return
    given = SimpleNamespace(device=rest[0], seed=int(rest[1]))
    if role == "engine":
        engine(packer, key_file, given.device, given.seed)
    else:
        worker(packer, given.device, given.seed)


if __name__ == "__main__":
    main(*sys.argv[1:])
