"""The packer's life: listen, accept, hand each peer to a session on a thread of its own, stop.

The server owns the door, the device, the budget of host memory and one pool that is ready before its engine comes.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import os
import secrets
import socket
import threading
import time
from pathlib import Path

from packer_service import log
from packer_service.config import Settings
from packer_service.devices import open_device
from packer_service.devices.calls import DeviceCall, Watch
from packer_service.door import Door, check_path
from packer_service.errors import HandshakeError, NotNow, PackerError
from packer_service.pool.budget import Budget
from packer_service.pool.pool import Pool
from packer_service.sessions.engine import EngineSession
from packer_service.sessions.worker import WorkerSession
from packer_service.wire import handshake
from packer_service.wire.channel import Channel, peer_credentials
from packer_service.wire.protocol import Hello, Welcome

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_END_S = 5.0
_EXIT_HUNG = 70
_dying = threading.Lock()  # of the first thread that ends the process, for good
_ENTRY_S = 1.0  # what a worker of an unknown session waits for that session's engine


class Server:
    """One packer on one device: ``start`` makes it reachable, ``wait`` lasts until there is a reason to stop, ``close`` ends.

    ``_changed`` guards the sessions; every connection has one thread, and the door bounds their number.
    """

    def __init__(self, settings: Settings, key: bytes, *, managed: bool = False) -> None:
        self.settings = settings
        self._uids = settings.uids()
        path = Path(settings.socket)
        check_path(path)  # a packer too many refuses before it takes memory of the device and of the host
        self.device = open_device(settings.device)
        self.refused = 0  # peers; written under _changed
        self._managed = managed
        self._key = key
        self._changed = threading.Condition()
        self._engines: dict[str, EngineSession] = {}
        self._workers: set[WorkerSession] = set()
        self._unfinished = False  # a worker session still has copies under way; written as it ends
        self._stopping = ""
        self._leaving = threading.Event()
        self._idle_since = time.monotonic()
        self._budget = Budget(settings.pool_max_bytes)
        self._spare: Pool | None = self._new_pool()
        self._spare.grow(settings.pool_bytes)
        self._door = Door(path, settings.max_sessions, self._notify)
        self._accepter = threading.Thread(target=self._accept_all, name="accepter", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._idle_since = time.monotonic()  # until now nobody could connect
        gc.freeze()  # so that collecting what a session leaves takes no time
        self._accepter.start()
        self._watchdog.start()
        logger.info(
            "packer ready on %s (%s), pool %d MiB, at most %d MiB, socket %s",
            self.device.name,
            self.device.uuid,
            self.settings.pool_bytes >> 20,
            self.settings.pool_max_bytes >> 20,
            self.settings.socket,
        )

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Have ``wait`` return. Safe on any thread, any number of times."""
        with self._changed:
            self._stopping = self._stopping or reason
            self._changed.notify_all()

    def wait(self) -> str:
        """Block until there is a reason to stop; the reason. No timer runs while an engine is connected."""
        limit = self.settings.exit_after_s
        with self._changed:
            while not self._stopping:
                if not self._engines and self._door.taken:
                    self._stopping = f"another packer listens at {self.settings.socket}"
                elif self._engines or not limit:
                    self._changed.wait()
                elif (remaining := self._idle_since + limit - time.monotonic()) > 0:
                    self._changed.wait(remaining)
                else:
                    self._stopping = f"no engine for {limit:g} s (setting exit_after_s)"
            return self._stopping

    def close(self) -> bool:
        """Stop listening, end every session, give back all memory. The outputs that were delivered stay readable.

        False where a session could not end, because a worker's forward still runs: then the process must exit at once,
        which gives everything back too.
        """
        self._leaving.set()
        self.device.hurry()
        self.stop("closed")  # whoever is still in its handshake is not entered any more
        all_left = self._door.close(_END_S)
        with self._changed:
            finished, spare, self._spare = all_left and not self._unfinished, self._spare, None
        if not finished or not self.device.drain():
            logger.info("worker outputs are still on their way; their workers export them again")
            return False
        if spare is not None:
            spare.close()
        self.device.close()
        return True

    # -- the watchdog --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """A call to the device that never returns cannot be given up in this process: it ends, to be started again.

        Also one that the end of this packer waits for. This thread touches no file and takes no lock but those of the log,
        under which nothing waits: whatever else hangs, it does not.
        """
        watch, looks = Watch(), math.ceil(self.settings.hang_s / _WATCH_S)
        while True:
            time.sleep(_WATCH_S)
            try:
                stuck = watch.stuck(looks)
            except Exception as error:
                logger.error("the watchdog could not look: %r", error)
            else:
                if stuck is not None:
                    self._die(f"{stuck} does not end (setting hang_s = {self.settings.hang_s:g})")

    def _die(self, reason: str) -> None:
        """End the process at once, whether or not anybody reads why."""
        try:
            if _dying.acquire(blocking=False):
                logger.critical("packer ends so that it is started again: %s", reason)
                log.flush()
            else:
                time.sleep(log.FLUSH_S)  # another thread says why
        finally:
            os._exit(_EXIT_HUNG)

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        try:
            while (peer := self._door.accept()) is not None:
                try:
                    threading.Thread(target=self._serve, args=(peer,), name="session", daemon=True).start()
                except RuntimeError as error:  # the process may start no more threads
                    logger.error("a connection was closed: %s; see the pids limit of this process's cgroup", error)
                    self._door.leave(peer)
        except Exception as error:
            logger.exception("nobody would be let in any more")
            self._die(f"its accepter failed: {error!r}")

    def _serve(self, peer: socket.socket) -> None:
        try:
            pid, uid = peer_credentials(peer)
            try:
                channel, hello = handshake.accept(
                    peer, self._key, self._uids, functools.partial(self._admit, peer), self.settings.handshake_timeout_s
                )
            except (PackerError, OSError) as error:
                logger.warning("a peer was refused: %s (pid %d, uid %d)", error, pid, uid)
                with self._changed:
                    self.refused += 1
                return
            with DeviceCall("a call that lets the session of a new %s use the device", hello.role):
                self.device.bind_thread()
            if hello.role == "engine":
                self._serve_engine(channel, hello)
            else:
                self._serve_worker(channel, hello)
        except PackerError as error:
            logger.error("a peer cannot be served: %s", error)
        except Exception:
            logger.exception("a session failed")
        finally:
            self._door.leave(peer)
            gc.collect()  # an idle packer collects nothing, and a mapping in a reference cycle would stay

    def _admit(self, peer: socket.socket, hello: Hello, proof: bytes) -> Welcome:
        with self._changed:
            if hello.role == "worker":  # its engine was welcomed, but the thread that enters it may not have got there
                self._changed.wait_for(lambda: hello.session in self._engines, _ENTRY_S)
            known = hello.session in self._engines
        if hello.role == "engine" and known:
            raise HandshakeError(f"session {hello.session} has an engine already")
        if hello.role == "worker" and not known:
            raise NotNow(f"session {hello.session} has no engine here: the engine connects before its workers")
        if hello.role == "worker" and hello.device_uuid != self.device.uuid:
            raise HandshakeError(
                f"the worker runs on {hello.device_uuid} and this packer on {self.device.uuid}:"
                " give every GPU its own packer, and the settings all their sockets"
            )
        if hello.role == "worker" and self.device.kind == "cuda" and hello.pid == os.getpid():
            raise HandshakeError(
                f"the worker and this packer both have pid {hello.pid}, each in a pid namespace of its own, and CUDA takes them"
                " for one process: share the pid namespace (docker run --pid, Kubernetes shareProcessNamespace), or start"
                " one of them under an init process"
            )
        self._door.admit(peer)
        return Welcome(proof, self.device.kind, self.device.uuid, self.device.name, os.getpid())

    def _new_pool(self) -> Pool:
        return Pool(
            self.device,
            self._budget,
            keep_bytes=self.settings.pool_bytes,
            step_bytes=self.settings.pool_step_bytes,
            idle_s=self.settings.pool_idle_s,
        )

    def _serve_engine(self, channel: Channel, hello: Hello) -> None:
        with self._changed:
            if self._stopping:
                return
            if hello.session in self._engines:  # two came at once, and _admit saw neither
                logger.warning("a second engine of session %s is closed", hello.session)
                return
            pool, self._spare = self._spare or self._new_pool(), None
            engine = EngineSession(hello.session, channel, pool, functools.partial(self._describe, hello.session))
            self._engines[hello.session] = engine
            self._changed.notify_all()
        logger.info("engine %s connected", engine.name)
        try:
            engine.serve()
        finally:
            pool.refuse()
            if self._managed:
                self.stop("the engine that started this packer is gone")
            engine.disconnect()  # one that broke the protocol may live, not read, and hold its workers in a send
            with self._changed:
                del self._engines[engine.name]
                self._idle_since = time.monotonic()
                self._changed.notify_all()
                workers = [worker for worker in self._workers if worker.engine is engine]
            for worker in workers:
                worker.disconnect()
            with self._changed:
                self._changed.wait_for(lambda: not any(worker.engine is engine for worker in self._workers))
            if not self._unfinished:
                engine.close()

    def _describe(self, session: str, output: str) -> str:
        """How far an output of one engine's workers is, in words."""
        with self._changed:
            workers = [worker for worker in self._workers if worker.engine.name == session]
        states = [state for worker in workers if (state := worker.describe(output))]
        return states[0] if states else f"not here: never exported, or published; {len(workers)} workers are connected"

    def _serve_worker(self, channel: Channel, hello: Hello) -> None:
        with self._changed:
            engine = self._engines.get(hello.session)
            if engine is None or self._stopping:
                return
            worker = WorkerSession(
                f"{hello.session}/{secrets.token_hex(2)}",
                channel,
                engine,
                self.device,
                self.settings,
                self._leaving,
                self._die,
            )
            self._workers.add(worker)
        logger.info("worker %s connected", worker.name)
        finished = True
        try:
            finished = worker.serve()
        finally:
            with self._changed:
                self._unfinished |= not finished
                self._workers.discard(worker)
                self._changed.notify_all()
