"""The packer's life: it opens its device, listens, gives each peer a thread, watches over itself, and stops.

``Peers`` knows who is connected, and ``Door`` who may come in. Nothing here touches an output.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from packer_service import __version__, log, status
from packer_service.board import Board
from packer_service.config import Settings
from packer_service.devices import open_device
from packer_service.devices.calls import DeviceCall, Watch
from packer_service.door import Door, check_path
from packer_service.errors import PackerError
from packer_service.peers import Peers
from packer_service.sessions.operator import OperatorSession
from packer_service.status import LastError, Status, Times
from packer_service.wire import handshake, protocol
from packer_service.wire.channel import Channel, bound_sends, peer_credentials
from packer_service.wire.protocol import DrainIs, Hello, PauseIs, Welcome

if TYPE_CHECKING:
    from packer_service.metrics import Endpoint

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_END_S = 5.0
_DRAIN_POLL_S = 0.02
_DRAIN_REPORT_S = 0.5
_OPERATOR_SEND_S = 5.0  # one that reads no answers holds up nobody but its own thread
_EXIT_HUNG = 70
_dying = threading.Lock()  # of the first thread that ends the process, for good


class Server:
    """One packer on one device: ``start`` makes it reachable, ``wait`` lasts until there is a reason to stop, ``close`` ends.

    ``_changed`` guards the reason to stop, and who is connected (``Peers``). It is held for bookkeeping alone. Every connection
    has one thread, and the door bounds their number.
    """

    def __init__(
        self,
        settings: Settings,
        key: bytes,
        *,
        managed: bool = False,
        restarts: int | None = None,
        listener: socket.socket | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """``listener``: a socket that already listens at the setting ``socket``. ``beat`` is called about once a second, as
        long as no call to the device hangs."""
        self.settings = settings
        self._beat = beat
        self.operator_key = secrets.token_bytes(32)
        """Proves an operator, beside the key. Whoever may read this packer's status board finds it there."""
        self._restarts = restarts
        self._started_at = time.time()
        self._uids = settings.uids()
        self._metrics_at = settings.metrics_endpoint(managed=managed)
        self._metrics: Endpoint | None = None
        path = Path(settings.socket)
        if listener is None:
            check_path(path)  # a packer too many refuses before it takes memory of the device and of the host
        self.device = open_device(settings.device)
        self._managed = managed
        self._key = key
        self._changed = threading.Condition()
        self._stop_reason = ""
        self._stopping = threading.Event()
        self._peers = Peers(self.device, settings, self._changed, self._stopping, self._engine_gone, self._die)
        self._board: Board | None = None
        self._door = Door(path, settings.max_sessions, self._notify, listener)
        self._accepter = threading.Thread(target=self._accept_all, name="accepter", daemon=True)
        self._watchdog = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        if self._metrics_at is not None:
            from packer_service import (
                metrics,
            )  # prometheus_client takes a while, which a packer without metrics does not spend

            self._metrics = metrics.serve(self.status, self._peers.stats, *self._metrics_at)
        self._peers.idle_since = time.monotonic()  # until here nobody could connect
        gc.freeze()  # so that collecting what a session leaves takes no time
        self._accepter.start()
        self._watchdog.start()
        self._board = self._open_board()
        text = "packer ready on %s (%s), pool %d MiB, at most %d MiB, socket %s"
        pool_mib = self.settings.pool_bytes >> 20, self.settings.pool_max_bytes >> 20
        logger.info(text, self.device.name, self.device.uuid, *pool_mib, self.settings.socket)

    def _open_board(self) -> Board | None:
        if self.settings.status_board == "off":
            return None
        try:
            return Board.open(self.settings.socket, self.operator_key, self.encoded_status)
        except OSError as error:
            text = "this packer has no status board (%s): `packer-service status` asks its socket; see setting status_board"
            logger.warning(text, error)
            return None

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _engine_gone(self) -> None:
        if self._managed:
            self.stop("the engine that started this packer is gone")

    @property
    def running(self) -> bool:
        return not self._stop_reason

    def stop(self, reason: str) -> None:
        """Have ``wait`` return. Safe on any thread, any number of times."""
        with self._changed:
            self._decide(reason)
            self._changed.notify_all()

    def _decide(self, reason: str) -> None:
        """``_changed`` is held. The first reason is the one that is told."""
        self._stop_reason = self._stop_reason or reason
        self._peers.refusing = True

    def wait(self) -> str:
        """Block until there is a reason to stop; the reason. No timer runs while an engine is connected."""
        limit = self.settings.exit_after_s
        with self._changed:
            while not self._stop_reason:
                if not self._peers.has_engine and self._door.taken:
                    self._decide(f"another packer listens at {self.settings.socket}")
                elif self._peers.has_engine or not limit:
                    self._changed.wait()
                elif (remaining := self._peers.idle_since + limit - time.monotonic()) > 0:
                    self._changed.wait(remaining)
                else:
                    self._decide(f"no engine for {limit:g} s (setting exit_after_s)")
            return self._stop_reason

    def close(self) -> bool:
        """Stop listening, end every session, give back all memory. The outputs that were delivered stay readable.

        False where a session could not end, because a worker's forward still runs: then the process must exit at once,
        which gives everything back too.
        """
        self._stopping.set()
        if self._metrics is not None:
            self._metrics.close()
        self.device.closer.hurry()
        self.stop("closed")
        if self._board is not None:
            self._board.close()
        all_left = self._door.close(_END_S)
        if not all_left or self._peers.unfinished or not self.device.closer.drain():
            logger.info("worker outputs are still on their way; their workers export them again")
            return False
        self._peers.close()
        self.device.close()
        return True

    # -- what an operator asks -----------------------------------------------------------------------------------------

    def status(self) -> Status:
        peers, stats, settings, device = self._peers, self._peers.stats, self.settings, self.device
        engines = peers.status()
        times = {name: Times(p50 * 1e3, p99 * 1e3) for name, (p50, p99) in stats.percentiles_s().items()}
        error = log.last_error.record
        return Status(
            pid=os.getpid(),
            started_at=self._started_at,
            version=__version__,
            protocol=protocol.VERSION,
            mode="managed" if self._managed else "sidecar",
            state="stopping" if self._stop_reason else "draining" if peers.draining else "ready",
            device=settings.device,
            device_kind=device.kind,
            device_uuid=device.uuid,
            device_name=device.name,
            socket=settings.socket,
            engines=engines,
            workers=peers.workers,
            in_flight=peers.in_flight,
            published=stats.published,
            published_bytes=stats.published_bytes,
            withdrawn=stats.withdrawn,
            declined={cause.value: count for cause, count in stats.declined.items()},
            failed={cause.value: count for cause, count in stats.failed.items()},
            bytes_per_s=stats.bytes_per_s(),
            wait=times.get("wait"),
            copy=times.get("copy"),
            handoff=times.get("handoff"),
            pool_bytes=peers.pool_bytes,
            pool_used_bytes=sum(engine.used_bytes for engine in engines),
            pool_max_bytes=settings.pool_max_bytes,
            pool_waits=stats.waits_for_room,
            restarts=self._restarts,
            last_error=None if error is None else LastError(*error),
        )

    def encoded_status(self) -> bytes:
        return status.encode(self.status(), protocol.MAX_STATUS_BYTES)

    def set_paused(self, paused: bool, session: str, timeout_s: float) -> PauseIs:
        """See ``Peers.set_paused``."""
        answer = self._peers.set_paused(paused, session, timeout_s)
        what = "no longer exports" if paused else "exports again"
        logger.info("an operator asked: %d of %d workers said that it %s", answer.answered, answer.asked, what)
        return answer

    def drain(self, timeout_s: float) -> Iterator[DrainIs]:
        """Take no more, wait until nothing is in flight, and stop: with the last report ``wait`` returns."""
        logger.info("an operator asked this packer to take no more and to end, within %g s", timeout_s)
        self._peers.leave("this packer is being drained: it takes nobody in and ends soon")
        deadline = time.monotonic() + timeout_s
        report_at = 0.0
        while (in_flight := self._peers.in_flight) and (now := time.monotonic()) < deadline:
            if now >= report_at:
                report_at = now + _DRAIN_REPORT_S
                yield DrainIs(in_flight)
            time.sleep(_DRAIN_POLL_S)
        yield DrainIs(in_flight, ended=True)
        self.stop("drained" if not in_flight else f"drained, with {in_flight} outputs unfinished after {timeout_s:g} s")

    def _watch(self) -> None:
        """A call to the device that never returns cannot be given up in this process: it ends, to be started again.

        So it does for a call that the end of this packer waits for. This thread touches no file and takes no lock but those of
        the log, under which nothing waits: whatever else hangs, it does not.
        """
        watch, looks = Watch(), math.ceil(self.settings.hang_s / _WATCH_S)
        while True:
            time.sleep(_WATCH_S)
            try:
                stuck = watch.stuck(looks)
            except Exception as error:
                logger.error("the watchdog could not look: %r", error)
            else:
                if stuck is None:
                    self._beat()
                else:
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

    def _accept_all(self) -> None:
        try:
            while (peer := self._door.accept()) is not None:
                try:
                    threading.Thread(target=self._serve, args=(peer,), name="session", daemon=True).start()
                except RuntimeError as error:  # the process may start no more threads
                    logger.error("a connection was closed: %s; see the pids limit of this process's cgroup", error)
                    self._door.forget(peer)
        except Exception as error:
            logger.exception("nobody would be let in any more")
            self._die(f"its accepter failed: {error!r}")

    def _serve(self, peer: socket.socket) -> None:
        try:
            pid, uid = peer_credentials(peer)
            try:
                channel, hello = handshake.accept(
                    peer,
                    self._key,
                    self._uids,
                    functools.partial(self._admit, peer),
                    self.settings.handshake_timeout_s,
                    operator_key=self.operator_key,
                )
            except (PackerError, OSError) as error:
                logger.warning("a peer was refused: %s (pid %d, uid %d)", error, pid, uid)
                return
            if hello.role == "operator":
                self._serve_operator(peer, channel)
                return
            with DeviceCall("a call that lets the session of a new %s use the device", hello.role):
                self.device.bind_thread()
            self._peers.serve(channel, hello)
        except PackerError as error:
            logger.error("a peer cannot be served: %s", error)
        except Exception:
            logger.exception("a session failed")
        finally:
            self._door.forget(peer)
            gc.collect()  # an idle packer collects nothing, and a mapping in a reference cycle would stay

    def _serve_operator(self, peer: socket.socket, channel: Channel) -> None:
        bound_sends(peer, _OPERATOR_SEND_S)
        OperatorSession(channel, self).serve()

    def _admit(self, peer: socket.socket, hello: Hello, proof: bytes) -> Welcome:
        operator = hello.role == "operator"
        if not operator:
            self._peers.check(hello)
        self._door.admit(peer, operator=operator)
        return Welcome(proof, self.device.kind, self.device.uuid, self.device.name, os.getpid())
