"""The worker's own path in a /dev/shm of a few MiB: run by tests/test_shm_room.py in a mount namespace of its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm
from vllm_omni.diffusion.worker import diffusion_worker

from worker_shim.worker import own_path, proc
from worker_shim.worker.jobs import OwnPath
from worker_shim.worker.own_path import OwnPathSender

MIB = 1 << 20
SHM = Path("/dev/shm")


class Config:
    step_execution = False


def queue() -> MessageQueue:
    return MessageQueue(1, 1, max_chunk_bytes=MIB, max_chunks=4)


class Worker(proc.PackerWorkerProc):
    """A worker's own path with its real queues, and no device."""

    od_config = Config()
    worker_config = type("NoPacker", (), {"ranks": frozenset()})()

    def __init__(self) -> None:
        self.mq, self.result_mq = queue(), queue()
        self._result_mq_lock = threading.Lock()
        self.reader = MessageQueue.create_from_handle(self.result_mq.export_handle(), 0)
        created = diffusion_worker.WorkerProc._create_worker
        diffusion_worker.WorkerProc._create_worker = lambda self, *args: Worker.made
        self._create_worker(0)
        diffusion_worker.WorkerProc._create_worker = created

    made = type("Made", (), {"worker": type("Inner", (), {"init_snapshot": None})()})()

    def sends(self, output: DiffusionOutput) -> str:
        """How it went: by name, in the message, or why not."""
        sender = OwnPathSender(torch.device("cpu"), self._send_ready)
        try:
            sender.send(OwnPath("id", output))
        except Exception as error:
            sender.send_error("id", error)
        message = self.reader.dequeue(timeout=20)
        if message.error:
            return message.error
        by_name = isinstance(message.output.output, dict)
        self.received = unpack_diffusion_output_shm(message.output).output
        return "by name" if by_name else "in the message"


def image(nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(nbytes // dtype.itemsize).to(dtype)


def main() -> None:
    running = Worker()
    for nbytes, dtype, way in (
        (3 * MIB, torch.float32, "by name"),
        (30 * MIB, torch.float32, "in the message"),
        (7 * MIB, torch.bfloat16, "in the message"),  # 14 MiB as vllm-omni packs it
        (5 * MIB, torch.float32, "by name"),
    ):
        assert running.sends(DiffusionOutput(output=image(nbytes, dtype))) == way, (nbytes, way)
        assert running.received.dtype == dtype
        assert torch.equal(running.received, image(nbytes, dtype))
    view = image(30 * MIB)[5:100]
    assert running.sends(DiffusionOutput(output=view)) == "by name"

    # Two workers fill it at once.
    ways: list[object] = []

    def pack() -> None:
        for _ in range(20):
            output = DiffusionOutput(output=[image(3 * MIB)])
            own_path.pack_diffusion_output_shm(output)
            ways.append(type(output.output[0]))
            unpack_diffusion_output_shm(output)
            assert torch.equal(output.output[0], image(3 * MIB))

    threads = [threading.Thread(target=pack) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ways) == 80
    names = set(os.listdir(SHM))

    # Somebody else fills it to the brim.
    with (SHM / "ballast").open("wb", buffering=0) as ballast:
        block = bytes(4096)
        try:
            while True:
                ballast.write(block)
        except OSError:
            pass
    for _ in range(8):  # every part of the ring, twice
        said = running.sends(DiffusionOutput(output=image(600_000)))
        assert "/dev/shm holds 16 MiB, of which 0 are free" in said, said
        assert "--shm-size" in said
        assert running.sends(DiffusionOutput(output=image(20_000))) == "in the message"
        assert running.sends(DiffusionOutput(output=image(2 * MIB))) == "in the message"  # through the socket
        assert torch.equal(running.received, image(2 * MIB))
    (SHM / "ballast").unlink()
    assert running.sends(DiffusionOutput(output=image(600_000))) == "in the message"
    assert set(os.listdir(SHM)) == names
    print("alive to the end")


main()
