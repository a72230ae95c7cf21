"""The worker's Exporter and the engine's Receiver as a test holds them: it is main thread, export thread and pump at once."""

from __future__ import annotations

import contextlib
import functools
import gc
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

from packer_process import DEADLINE_S, MIB, Packer, wait_until

from packer_service.config import Settings
from worker_shim.connection import Connection
from worker_shim.engine.assembly import Received
from worker_shim.engine.receiver import Delivered, Receiver
from worker_shim.worker.device_host import HostExportDevice
from worker_shim.worker.exporter import Exporter
from worker_shim.worker.in_flight import InFlight

MAC_KEY = b"m" * 32
FLOATS = MIB // 4  # in a MiB
SETTINGS = {
    "arena_max_bytes": "8MiB",
    "arena_step_bytes": "2MiB",
    "overflow_max_bytes": "4MiB",
    "wait_s": 5.0,
    "start_timeout_s": DEADLINE_S,
}


class WorkerSide:
    """An exporter, and what it calls back."""

    def __init__(
        self, packer: Packer | Kept, session: str, *, device: HostExportDevice | None = None, **given: Any
    ) -> None:
        self.settled: list[str] = []
        self.fallen_back: list[tuple[InFlight, str]] = []
        self.exporter = Exporter(
            Settings.load({**SETTINGS, **given}, {}),
            device or HostExportDevice(),
            socket=packer.socket,
            key=packer.key,
            session=session,
            mac_key=MAC_KEY,
            on_settled=self.settled.append,
            on_fallback=lambda staged, reason: self.fallen_back.append((staged, reason)),
        )

    def send(self, output: object, output_id: str) -> InFlight:
        """Both halves at once, as the worker does it."""
        staged = self.exporter.stage(output, output_id)
        assert staged is not None
        if not self.exporter.submit_now(staged):
            self.exporter.submit(staged)
        return staged

    def wait_settled(self, *output_ids: str) -> None:
        def acknowledged() -> bool:
            self.exporter.take_acks()
            return set(output_ids) <= set(self.settled)

        wait_until(acknowledged, f"acks of {output_ids}, not only {self.settled}")

    def wait_fallen_back(self, number: int) -> dict[str, str]:
        """Why, by output; everything they held is released, as the worker does after it went another way."""
        wait_until(lambda: len(self.fallen_back) >= number, f"{number} outputs fell back")
        return {staged.output_id: reason for staged, reason in self.fallen_back}

    def arena_idle(self) -> bool:
        self.exporter.take_acks()
        return self.exporter.placement.arena.idle


class EngineSide(Receiver):
    """A receiver, and how many leases are out."""

    def __init__(self, packer: Packer, mac_key: bytes = MAC_KEY) -> None:
        self.session = secrets.token_hex(8)
        super().__init__(Connection(packer.connect("engine", self.session), DEADLINE_S), mac_key, Delivered())

    def next(self) -> Received:
        received = self.receive(DEADLINE_S)
        assert received is not None, self.broken or "no output came"
        return received

    def output(self, output_id: str) -> Any:
        received = self.next()
        assert (received.output_id, received.error) == (output_id, "")
        return received.output

    def wait_no_lease(self) -> None:
        gc.collect()
        wait_until(lambda: self.leases.outstanding == 0, f"{self.leases.outstanding} leases return")


class Kept:
    """An engine's end across restarts: vllm-omni's pump over a PackerKeeper, which collects what it is given."""

    def __init__(
        self, socket: str, key: bytes, restart: Callable[[], None] | None = None, *, reads: bool = True, **given: Any
    ) -> None:
        from worker_shim.engine.packers import PackerKeeper  # needs vllm-omni

        self.socket, self.key = socket, key
        self.session = secrets.token_hex(8)
        self.delivered = Delivered()
        self.keeper = PackerKeeper(
            socket, key, self.session, MAC_KEY, self.delivered, Settings.load({**SETTINGS, **given}, {}), restart
        )
        self.got: dict[str, list[Any]] = {}  # what came for each output: the output, or its error as a string
        self.reading = threading.Event()  # cleared: what the packer sends stays in the connection
        if reads:
            self.reading.set()
        self._stopping = False
        self._thread = threading.Thread(target=self._pump, name="test-pump", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        while not self._stopping:
            self.reading.wait()
            try:
                message = self.keeper.queue.dequeue(0.1)
            except TimeoutError:
                continue
            if message.async_output_id is not None:
                self.got.setdefault(message.async_output_id, []).append(message.error or message.output)
            del message

    def wait(self, *output_ids: str) -> list[Any]:
        """What came for these outputs, each exactly once so far."""
        wait_until(lambda: set(output_ids) <= set(self.got), f"{output_ids}, not only {list(self.got)}")
        assert all(len(self.got[output_id]) == 1 for output_id in output_ids)
        return [self.got[output_id][0] for output_id in output_ids]

    @property
    def packer_pid(self) -> int | None:
        return self.keeper.queue.packer_pid

    def close(self) -> None:
        self._stopping = True
        self.reading.set()
        self.keeper.stop()
        self.keeper.close()
        self._thread.join()


@contextlib.contextmanager
def managed(device: str = "host", **given: Any) -> Iterator[Kept]:
    """A packer that a supervisor keeps on ``device``, and its engine's end."""
    from worker_shim.engine.supervisor import Supervisor

    settings = {"pool_bytes": "2MiB", "pool_step_bytes": "2MiB", "pool_max_bytes": "64MiB", **given}
    supervisor = Supervisor(Settings.load({**SETTINGS, **settings}, {}))
    try:
        packer = supervisor.start(device)
        kept = Kept(packer.socket, supervisor.key, functools.partial(supervisor.restart, packer), **settings)
        try:
            yield kept
        finally:
            kept.keeper.stop()
            supervisor.stop()
            kept.close()
    finally:
        supervisor.stop()


@contextlib.contextmanager
def working(engine: EngineSide | Kept, packer: Any = None, **options: Any) -> Iterator[WorkerSide]:
    """A worker of ``engine``'s session, for an EngineSide at ``packer``."""
    side = WorkerSide(packer or engine, engine.session, **options)
    with contextlib.closing(side.exporter):
        yield side
