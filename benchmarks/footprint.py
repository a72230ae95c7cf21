"""What a packer takes beside its pool: start, memory, GPU memory, threads and idle CPU, beside a process that uses torch.

    python -m benchmarks.footprint --json FILE

``packer``: the real ``python -m packer_service serve --managed --ready-fd``, with an engine and a worker connected (this
process is both) and one output delivered. ``torch``: a process that imports torch, makes a CUDA context and a pinned
buffer of the same size, and waits.

``rss_mb``: resident memory (10^6 bytes) without shared memory, which is the pool; torch's is read before it takes its
buffer. ``gpu_mb``: what the whole GPU's used memory grew by (2^20 bytes, as nvidia-smi counts). ``idle_cpu_percent`` and
``waiting_cpu_percent``: of one core, from the threads' own run time; while it waits, an output was exported whose forward
does not end. ``pool_bytes`` is smaller without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.harness import MIB, arguments, device, is_quick, say, table
from benchmarks.percentile import percentile

SECONDS = 30.0
_WAITING_S = 6.0
_SETTLE_S = 1.0
_TIMEOUT_S = 60.0
_TORCH_MAIN = "--torch-process"


class Status(NamedTuple):
    """A process as /proc shows it."""

    rss_bytes: int
    shmem_bytes: int
    threads: int


def status(pid: int | str) -> Status:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Status(
        int(fields["VmRSS"].split()[0]) << 10, int(fields["RssShmem"].split()[0]) << 10, int(fields["Threads"])
    )


def cpu_s(pid: int) -> float:
    """Seconds its threads have run, to the nanosecond: /proc/PID/stat counts ticks of 10 ms, which is too coarse here."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def cpu_percent(pid: int, seconds: float) -> float:
    """Of one core, over the next ``seconds``."""
    before, begin = cpu_s(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.perf_counter() - begin) * 100


def gpu_used_mib() -> int:
    """The first GPU's; 0 where there is none."""
    if not machine.gpus():
        return 0
    query = ["nvidia-smi", "-i", "0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout)


class Plan(NamedTuple):
    """How long, how often and how large."""

    idle_s: float
    waiting_s: float
    starts: int
    pool_bytes: int
    output_bytes: int


def plan(seconds: float, quick: bool) -> Plan:
    if quick:
        return Plan(min(seconds, 5.0), 2.0, 1, 64 * MIB, 3 * MIB)
    return Plan(seconds, _WAITING_S, 3, 1024 * MIB, 48 * MIB)


def measure(plan: Plan) -> Iterator[dict[str, Any]]:
    """Both rows, one process at a time."""
    yield _packer(plan)
    yield _torch(plan)


# -- the packer --------------------------------------------------------------------------------------------------------


def _packer(plan: Plan) -> dict[str, Any]:
    import torch

    from packer_service.config import Settings
    from worker_shim.engine.supervisor import Supervisor

    on_gpu = bool(machine.gpus())
    if on_gpu:
        torch.zeros(1, device=device())  # this process's own context, before GPU memory is looked at
        torch.cuda.synchronize()
    settings = Settings.load({"pool_bytes": plan.pool_bytes})
    ready_s = []
    for number in range(plan.starts):
        used_before = gpu_used_mib()
        supervisor = Supervisor(settings)
        try:
            begin = time.perf_counter()
            packer = supervisor.start("cuda:0" if on_gpu else "host")
            ready_s.append(time.perf_counter() - begin)
            say(f"footprint: packer {number + 1} of {plan.starts} was ready after {ready_s[-1]:.2f} s")
            if number + 1 < plan.starts:
                continue
            gpu_mib = gpu_used_mib() - used_before
            with _connected(settings, packer.socket, supervisor.key) as worker:
                worker.hand_over(plan.output_bytes)
                time.sleep(_SETTLE_S)
                pid = packer.process.pid
                say(f"footprint: the packer idles for {plan.idle_s:g} s")
                idle = cpu_percent(pid, plan.idle_s)
                say(f"footprint: the packer waits for a forward for {plan.waiting_s:g} s")
                with worker.withheld(plan.output_bytes, plan.waiting_s + 4 * _SETTLE_S):
                    time.sleep(_SETTLE_S)
                    waiting = cpu_percent(pid, plan.waiting_s)
                found = status(pid)
        finally:
            supervisor.stop()
    return {
        "impl": "packer",
        "rss_mb": round((found.rss_bytes - found.shmem_bytes) / 1e6, 1),
        "gpu_mb": gpu_mib,
        "ready_s": round(percentile(ready_s, 50), 3),
        "idle_cpu_percent": round(idle, 4),
        "waiting_cpu_percent": round(waiting, 4),
        "threads": found.threads,
        "pool_bytes": plan.pool_bytes,
        "ready_max_s": round(max(ready_s), 3),
        "starts": len(ready_s),
        "idle_s": plan.idle_s,
    }


class Worker:
    """A worker's exporter and its engine's receiver, both in this process."""

    def __init__(self, exporter: Any, receiver: Any, problems: queue.SimpleQueue[str]) -> None:
        self._exporter = exporter
        self._receiver = receiver
        self._problems = problems

    def hand_over(self, nbytes: int) -> None:
        """One output, the whole way; its lease goes back."""
        self._export(nbytes)
        self._receive()

    @contextlib.contextmanager
    def withheld(self, nbytes: int, seconds: float) -> Iterator[None]:
        """An output whose forward lasts ``seconds`` (on the host: the block), longer than the block; then it arrives."""
        on_device = self._exporter.device
        if on_device.kind == "cuda":
            import torch

            torch.cuda._sleep(int(seconds * _cycles_per_second()))
            self._export(nbytes)
            yield
            if self._receiver.receive(0.0) is not None:
                raise SystemExit("footprint: the forward that the packer should wait for ended early")
        else:
            write, on_device.signal = on_device.signal, _unwritten(on_device)
            self._export(nbytes)
            on_device.signal = write
            yield
            on_device.timeline.counter = on_device._value
        self._receive()

    def _export(self, nbytes: int) -> None:
        import torch

        output = torch.ones(nbytes, dtype=torch.uint8, device=device())
        staged = self._exporter.stage({"output": output}, secrets.token_hex(8))
        if staged is None:
            raise SystemExit("footprint: the output found no room")
        self._exporter.submit(staged)

    def _receive(self) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while (received := self._receiver.receive(0.5)) is None:
            if not self._problems.empty():
                raise SystemExit(f"footprint: the output came back: {self._problems.get()}")
            if time.monotonic() > deadline:
                raise SystemExit("footprint: no output came")
        if received.error or not received.output["output"].all():
            raise SystemExit(f"footprint: the output is wrong: {received.error}")


def _unwritten(on_device: Any) -> Callable[[], Any]:
    """A host device's ``signal`` that gives the next value and leaves it unreached."""
    from worker_shim.worker.device import Signal

    def signal() -> Any:
        on_device._value += 1
        return Signal(on_device._value)

    return signal


def _cycles_per_second() -> float:
    """Of ``torch.cuda._sleep``: its clock, as it runs now."""
    import torch

    cycles = 100_000_000
    for _ in range(2):  # the first wakes the clock up
        begin = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
    return cycles / elapsed


@contextlib.contextmanager
def _connected(settings: Any, socket: str, key: bytes) -> Iterator[Worker]:
    from packer_service.wire import handshake
    from worker_shim.connection import Connection
    from worker_shim.engine.receiver import Delivered, Receiver
    from worker_shim.worker.exporter import Exporter
    from worker_shim.worker.open_device import open_export_device

    session, mac_key = secrets.token_hex(16), secrets.token_bytes(32)
    channel, _ = handshake.connect(socket, key, "engine", session)
    receiver = Receiver(Connection(channel, settings.hang_s), mac_key, Delivered())
    problems: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        exporter = Exporter(
            settings,
            open_export_device(device(), events=False),
            socket=socket,
            key=key,
            session=session,
            mac_key=mac_key,
            on_settled=lambda output_id: None,
            on_fallback=lambda staged, reason: problems.put(reason),
        )
        try:
            yield Worker(exporter, receiver, problems)
        finally:
            exporter.close()
    finally:
        receiver.close()


# -- torch -------------------------------------------------------------------------------------------------------------


def _torch(plan: Plan) -> dict[str, Any]:
    used_before = gpu_used_mib()
    begin = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.footprint", _TORCH_MAIN, str(plan.pool_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        ready_s = time.perf_counter() - begin
        if not line:
            raise SystemExit(f"footprint: the torch process died with exit code {process.wait()}")
        say(f"footprint: torch was ready after {ready_s:.2f} s and idles for {plan.idle_s:g} s")
        gpu_mib = gpu_used_mib() - used_before
        time.sleep(_SETTLE_S)
        idle = cpu_percent(process.pid, plan.idle_s)
        threads = status(process.pid).threads
        process.stdin.close()
    return {
        "impl": "torch",
        "rss_mb": round(json.loads(line)["rss_bytes"] / 1e6, 1),
        "gpu_mb": gpu_mib,
        "ready_s": round(ready_s, 3),
        "idle_cpu_percent": round(idle, 4),
        "threads": threads,
        "pool_bytes": plan.pool_bytes,
        "starts": 1,
        "idle_s": plan.idle_s,
    }


def _torch_process(nbytes: int) -> None:
    """The whole life of the process that does the same through torch."""
    import torch

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    found = status("self")
    buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
    print(json.dumps({"rss_bytes": found.rss_bytes - found.shmem_bytes}), flush=True)
    sys.stdin.read()
    del buffer


def facts(quick: bool) -> dict[str, Any]:
    """What a result of this benchmark says beside its rows."""
    return {"notes": ["CI sizes: shorter waits and a smaller pool."] if quick else []}


def main() -> None:
    parser = arguments(__doc__, SECONDS, "--json")
    parser.add_argument(_TORCH_MAIN, type=int, metavar="NBYTES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_process is not None:
        _torch_process(options.torch_process)
        return
    quick = is_quick(options)
    recorder = machine.Recorder(options.json, "footprint", **facts(quick))
    for row in measure(plan(options.seconds, quick)):
        recorder.add(row)
    print(table("footprint", recorder.rows), flush=True)


if __name__ == "__main__":
    main()
