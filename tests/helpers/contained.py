"""What runs in a container with an engine: the engine's end with pid 1, and a worker that it forks, which has WORKER_PID.

python contained.py engine SOCKET KEY_FILE DEVICE SEED     says "connected", and on a line from stdin how it went, as JSON
python contained.py hello SOCKET KEY_FILE DEVICE_UUID SESSION     says that it is a worker, and then what the packer answers
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from container import namespaces
from packer_process import DEADLINE_S, MIB, Packer

from packer_service.errors import PackerError
from packer_service.wire import handshake

COUNT = 12
WORKER_PID = 100


class Reached:
    """A packer by its socket and key, as the tests' helpers want it."""

    connect = Packer.connect

    def __init__(self, socket: str, key: bytes) -> None:
        self.socket, self.key = socket, key


def outputs(seed: int, device: str) -> dict[str, Any]:
    """Random bytes of several dtypes and sizes, the last of them large. Only this seed makes these."""
    import numpy as np
    import torch

    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
    sizes = [8000 + 80_000 * n for n in range(COUNT - 1)] + [3 * MIB if device == "host" else 256 * MIB]
    generator = np.random.default_rng(seed)
    return {
        f"{seed}-{n}": torch.from_numpy(generator.integers(0, 256, nbytes, np.uint8)).view(dtypes[n % 4])
        for n, nbytes in enumerate(sizes)
    }


def engine(packer: Reached, device: str, seed: int) -> None:
    import torch  # noqa: F401 -- once for both: it takes longer than all the rest

    processes = multiprocessing.get_context("fork")
    ours, its = processes.Pipe()
    process = processes.Process(target=worker, args=(its, packer, device, seed))
    with contextlib.suppress(
        OSError
    ):  # a kernel that lets nobody choose: then it is the one after what torch's import used
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(WORKER_PID - 1))
    process.start()  # before there is any thread
    from bit_for_bit import assert_same_tensor
    from sides import EngineSide

    with contextlib.closing(EngineSide(packer)) as side:  # type: ignore[arg-type]
        ours.send(side.session)
        print(ours.recv(), flush=True)
        ours.send(sys.stdin.readline())
        expected = outputs(seed, device)
        for name, tensor in expected.items():
            assert_same_tensor(side.output(name), tensor)
        print(json.dumps({**_who(), "received": len(expected), "worker": ours.recv()}), flush=True)
        ours.send("received")
        process.join(DEADLINE_S)
        assert process.exitcode == 0


def worker(pipe: Connection, packer: Reached, device: str, seed: int) -> None:
    from sides import WorkerSide

    export_device = None
    if device != "host":
        from worker_shim.worker.device_cuda import CudaExportDevice

        export_device = CudaExportDevice(0)
    room = {"arena_max_bytes": "1GiB", "wait_s": DEADLINE_S}
    side = WorkerSide(packer, pipe.recv(), device=export_device, **room)  # type: ignore[arg-type]
    with contextlib.closing(side.exporter):
        sent = outputs(seed, device)
        if device != "host":
            sent = {name: tensor.cuda() for name, tensor in sent.items()}
        pipe.send("connected")
        pipe.recv()
        for name, tensor in sent.items():
            side.send(tensor, name)
        side.wait_settled(*sent)
        assert side.arena_idle()
        nbytes = sum(tensor.nbytes for tensor in sent.values())
        fallen_back = [reason for _, reason in side.fallen_back]
        pipe.send({**_who(), "sent": len(sent), "bytes": nbytes, "fallen_back": fallen_back})
        pipe.recv()


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
    os.environ["TMPDIR"] = "/dev/shm"  # what torch imports wants a place for files; the packer wants none
    packer = Reached(socket, Path(key_file).read_bytes())
    if role == "engine":
        engine(packer, rest[0], int(rest[1]))
    else:
        hello(packer, *rest)


if __name__ == "__main__":
    main(*sys.argv[1:])
