"""The engines and workers that are connected: whom a packer serves, whose worker is whose, and how far an output is.

It opens no socket and decides nothing about the packer's life. Each connection is served on the thread that calls ``serve``.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from packer_service.config import Settings
from packer_service.devices.base import Device
from packer_service.errors import HandshakeError, NotNow
from packer_service.pool.budget import Budget
from packer_service.pool.pool import Pool
from packer_service.sessions.engine import EngineSession
from packer_service.sessions.worker import WorkerSession
from packer_service.stats import Stats
from packer_service.status import EngineStatus
from packer_service.wire.channel import Channel
from packer_service.wire.protocol import Hello, Leaving, Pause, PauseIs

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_ENTRY_S = 1.0  # what a worker of an unknown session waits for that session's engine


class Peers:
    """Who is connected, and one pool that is ready before its engine comes.

    ``changed`` is the server's condition and guards all that is here. It is notified when an engine or a worker comes or goes,
    and held for bookkeeping alone. ``on_engine_gone`` is called without it, as soon as an engine is gone and before its workers
    are sent away.
    """

    def __init__(
        self,
        device: Device,
        settings: Settings,
        changed: threading.Condition,
        stopping: threading.Event,
        on_engine_gone: Callable[[], None],
        on_device_failure: Callable[[str], None],
    ) -> None:
        self.refusing = False  # whoever is still in its handshake is not entered any more
        self.draining = ""  # why whoever comes now is sent away
        self.stats = Stats()
        self.unfinished = False  # a worker session ended with copies under way
        self.idle_since = time.monotonic()  # if there is no engine
        self._device, self._settings = device, settings
        self._changed, self._stopping = changed, stopping
        self._on_engine_gone = on_engine_gone
        self._on_device_failure = on_device_failure
        self._engines: dict[str, EngineSession] = {}
        self._workers: set[WorkerSession] = set()
        self._budget = Budget(settings.pool_max_bytes)
        self._spare: Pool | None = self._new_pool()
        self._spare.grow(settings.pool_bytes)

    @property
    def has_engine(self) -> bool:
        return bool(self._engines)

    def check(self, hello: Hello) -> None:
        """HandshakeError where a peer that has proven itself cannot be served all the same; NotNow where that may pass."""
        if self.draining:
            raise NotNow(self.draining)
        with self._changed:
            if hello.role == "worker":  # its engine was welcomed, but the thread that enters it may not have got there
                self._changed.wait_for(lambda: hello.session in self._engines, _ENTRY_S)
            known = hello.session in self._engines
        if hello.role == "engine" and known:
            raise HandshakeError(f"session {hello.session} has an engine already")
        if hello.role == "worker" and not known:
            raise NotNow(f"session {hello.session} has no engine here: the engine connects before its workers")
        if hello.role == "worker" and hello.device_uuid != self._device.uuid:
            raise HandshakeError(
                f"the worker runs on {hello.device_uuid} and this packer on {self._device.uuid}:"
                " give every GPU its own packer, and the settings all their sockets"
            )
        if hello.role == "worker" and self._device.kind == "cuda" and hello.pid == os.getpid():
            raise HandshakeError(
                f"the worker and this packer both have pid {hello.pid}, each in a pid namespace of its own, and CUDA takes them"
                " for one process: share the pid namespace (docker run --pid, Kubernetes shareProcessNamespace), or start"
                " one of them under an init process"
            )

    def serve(self, channel: Channel, hello: Hello) -> None:
        """Serve the engine or the worker that said ``hello`` until it is gone."""
        if hello.role == "engine":
            self._serve_engine(channel, hello)
        else:
            self._serve_worker(channel, hello)

    def status(self) -> list[EngineStatus]:
        """Of each engine that is connected."""
        with self._changed:
            engines = [
                (engine, [worker for worker in self._workers if worker.engine is engine])
                for engine in self._engines.values()
            ]
        return [_engine_status(engine, workers) for engine, workers in engines]

    @property
    def workers(self) -> int:
        """How many are connected, those included whose engine has left and whose last outputs are under way."""
        with self._changed:
            return len(self._workers)

    @property
    def in_flight(self) -> int:
        """Outputs of all workers that have not ended."""
        with self._changed:
            workers = list(self._workers)
        return sum(worker.in_flight for worker in workers)

    @property
    def pool_bytes(self) -> int:
        """Host memory of all pools, those included that are being given back."""
        return self._settings.pool_max_bytes - self._budget.left

    def set_paused(self, paused: bool, session: str, timeout_s: float) -> PauseIs:
        """Have the workers of the engines whose session begins with ``session`` export nothing more, or export again."""
        with self._changed:
            workers = [worker for worker in self._workers if worker.engine.name.startswith(session)]
        asked = [(worker, worker.pauses_said) for worker in workers]
        for worker in workers:
            worker.tell(Pause(paused))
        deadline = time.monotonic() + timeout_s
        while True:
            answered = sum(worker.pauses_said > before and worker.paused == paused for worker, before in asked)
            if answered == len(asked) or time.monotonic() > deadline:
                return PauseIs(len(asked), answered)
            time.sleep(_POLL_S)

    def leave(self, reason: str) -> None:
        """Let nobody new in, and tell all who are here that this packer ends soon."""
        self.draining = reason
        with self._changed:
            engines, workers = list(self._engines.values()), list(self._workers)
        for engine in engines:
            engine.tell(Leaving(reason))
        for worker in workers:
            worker.tell(Leaving(reason))

    def close(self) -> None:
        """Give the spare pool back. Nobody is connected any more."""
        with self._changed:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _new_pool(self) -> Pool:
        keep_bytes, step_bytes = self._settings.pool_bytes, self._settings.pool_step_bytes
        idle_s = self._settings.pool_idle_s
        pool = Pool(self._device, self._budget, keep_bytes=keep_bytes, step_bytes=step_bytes, idle_s=idle_s)
        pool.on_wait = self.stats.add_wait_for_room
        return pool

    def _serve_engine(self, channel: Channel, hello: Hello) -> None:
        engine = self._enter_engine(channel, hello)
        if engine is None:
            return
        logger.info("engine %s connected", engine.name)
        try:
            engine.serve()
        finally:
            engine.pool.refuse()
            self._on_engine_gone()
            engine.disconnect()  # one that broke the protocol may live, not read, and hold its workers in a send
            with self._changed:
                del self._engines[engine.name]
                self.idle_since = time.monotonic()
                self._changed.notify_all()
                workers = [worker for worker in self._workers if worker.engine is engine]
            for worker in workers:
                worker.disconnect()
            with self._changed:
                self._changed.wait_for(lambda: not any(worker.engine is engine for worker in self._workers))
                unfinished = self.unfinished
            if not unfinished:
                engine.close()

    def _enter_engine(self, channel: Channel, hello: Hello) -> EngineSession | None:
        """The session of a new engine, with the spare pool if there is one; None where it is not served after all."""
        with self._changed:
            pool, self._spare = self._spare, None
        if pool is None:
            pool = self._new_pool()  # it starts a thread
        engine = EngineSession(hello.session, channel, pool, functools.partial(self._describe, hello.session))
        with self._changed:
            second = hello.session in self._engines  # two came at once, and ``check`` saw neither
            entered = not self.refusing and not second
            if entered:
                self._engines[hello.session] = engine
                self._changed.notify_all()
        if entered:
            return engine
        if second:
            logger.warning("a second engine of session %s is closed", hello.session)
        engine.disconnect()  # before its pool is closed, which may wait for a forward
        pool.close()
        return None

    def _describe(self, session: str, output: str) -> str:
        """How far an output of one engine's workers is, in words."""
        with self._changed:
            workers = [worker for worker in self._workers if worker.engine.name == session]
        states = [state for worker in workers if (state := worker.describe(output))]
        return states[0] if states else f"not here: never exported, or published; {len(workers)} workers are connected"

    def _serve_worker(self, channel: Channel, hello: Hello) -> None:
        with self._changed:
            engine = self._engines.get(hello.session)
            if engine is None or self.refusing:
                return
            name = f"{hello.session}/{secrets.token_hex(2)}"
            packers = self._device, self._settings, self._stopping, self.stats, self._on_device_failure
            worker = WorkerSession(name, channel, engine, *packers)
            self._workers.add(worker)
        logger.info("worker %s connected", worker.name)
        finished = True
        try:
            finished = worker.serve()
        finally:
            with self._changed:
                self.unfinished |= not finished
                self._workers.discard(worker)
                self._changed.notify_all()


def _engine_status(engine: EngineSession, workers: list[WorkerSession]) -> EngineStatus:
    usage = engine.pool.usage()
    return EngineStatus(
        session=engine.name,
        pid=engine.pid,
        workers=len(workers),
        paused_workers=sum(worker.paused for worker in workers),
        pool_bytes=usage.pool_bytes,
        used_bytes=usage.used_bytes,
        leases=len(usage.lease_ages_s),
        leased_bytes=usage.leased_bytes,
        oldest_lease_s=max(usage.lease_ages_s, default=0.0),
    )
