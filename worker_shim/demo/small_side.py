"""The demo where vllm-omni is not installed: a child process exports as a worker does, this one receives as an engine does."""

from __future__ import annotations

import multiprocessing
import os
import queue
import secrets
import time
from typing import Any

from packer_service.config import Settings
from packer_service.wire import handshake
from worker_shim.connection import Connection
from worker_shim.demo.cases import Case, Handoffs, equal
from worker_shim.engine.delivered import Delivered
from worker_shim.engine.receiver import Receiver
from worker_shim.engine.supervisor import Supervisor

_TIMEOUT_S = 120.0
_ACK_POLL_S = 0.0005


def _worker(connection: Any, settings: Settings, on_gpu: bool, where: tuple[str, bytes, str, bytes]) -> None:
    """The worker process: makes the output it is asked for, exports it, says when it entered the hand-off."""
    import torch

    from worker_shim.synthetic.content import content
    from worker_shim.worker.exporter import Exporter
    from worker_shim.worker.in_flight import InFlight
    from worker_shim.worker.open_device import open_export_device

    socket, key, session, mac_key = where
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    settled: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fell_back(staged: InFlight, reason: str) -> None:
        problems.put(f"output {staged.output_id} fell back: {reason}")
        settled.put(staged.output_id)

    exporter = Exporter(
        settings,
        open_export_device(device, events=settings.event == "ipc"),
        socket=socket,
        key=key,
        session=session,
        mac_key=mac_key,
        on_settled=settled.put,
        on_fallback=fell_back,
    )
    connection.send("ready")
    while (request := connection.recv()) is not None:
        shape, dtype, seed, output_id = request
        output = content(shape, dtype, seed, device)
        if on_gpu:
            torch.cuda.synchronize()
        entered = time.perf_counter()
        staged = exporter.stage({"output": output, "entered": entered}, output_id)
        if staged is None:
            raise SystemExit(f"output {output_id} found no room: see arena_max_bytes")
        exporter.submit(staged)
        while settled.empty():  # nobody is woken for its ack
            exporter.take_acks()
            time.sleep(_ACK_POLL_S)
        settled.get()
        if not problems.empty():
            raise SystemExit(problems.get())
    exporter.close()


class SmallSide:
    """The engine side, with its worker process and its managed packer; all three end with the ``with`` block."""

    def __init__(self, *, on_gpu: bool) -> None:
        self._settings = Settings.load()
        self._on_gpu = on_gpu

    def __enter__(self) -> SmallSide:
        self._supervisor = Supervisor(self._settings)
        try:
            self._connect()
        except BaseException:
            self._supervisor.stop()
            raise
        return self

    @property
    def packer_pids(self) -> list[int]:
        return [packer.process.pid for packer in self._supervisor.packers if packer.process is not None]

    def _connect(self) -> None:
        packer = self._supervisor.start("cuda:0" if self._on_gpu else "host")
        key, session, mac_key = self._supervisor.key, secrets.token_hex(16), secrets.token_bytes(32)
        channel, _ = handshake.connect(packer.socket, key, "engine", session)
        self._receiver = Receiver(Connection(channel, self._settings.hang_s), mac_key, Delivered())
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        where = (packer.socket, key, session, mac_key)
        self._process = context.Process(target=_worker, args=(theirs, self._settings, self._on_gpu, where), daemon=True)
        self._process.start()
        theirs.close()
        self._connection.recv()

    def __exit__(self, *_: Any) -> None:
        if self._process.is_alive():
            self._connection.send(None)
        self._process.join(10.0)
        self._process.kill()
        self._receiver.close()
        self._supervisor.stop()

    def run(self, case: Case, requests: int, advance: Any) -> Handoffs:
        import torch

        device = torch.device("cuda", 0) if self._on_gpu else torch.device("cpu")
        latencies, mismatches = [], 0
        self._one(case, 0)
        for seed in range(requests):
            output, arrived = self._one(case, seed)
            latencies.append(arrived - output["entered"])
            mismatches += not equal(output["output"], case, seed, device)
            advance()
        wall_s = 0.0
        for seed in range(requests):
            begin = time.perf_counter()
            output, _ = self._one(case, seed)
            wall_s += time.perf_counter() - begin
            mismatches += not equal(output["output"], case, seed, device)
            del output
        advance()
        return Handoffs(latencies, wall_s, mismatches)

    def _one(self, case: Case, seed: int) -> tuple[Any, float]:
        self._connection.send((case.shape, case.dtype, seed, os.urandom(8).hex()))
        received = self._receiver.receive(_TIMEOUT_S)
        arrived = time.perf_counter()
        if received is None or received.error:
            raise SystemExit(f"the demo's worker failed: {received.error if received else 'no output came'}")
        return received.output, arrived
