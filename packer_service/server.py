"""The packer's life: listen, accept, hand each peer to a session on a thread of its own, stop.

The server owns the socket, the device, the budget of host memory and one pool that is ready before its engine comes.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import resource
import secrets
import select
import socket
import stat
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from packer_service import transport
from packer_service.config import Settings
from packer_service.devices import open_device
from packer_service.engine_session import EngineSession
from packer_service.errors import DeviceError, HandshakeError, PackerError, SettingError
from packer_service.pool import Budget, Pool
from packer_service.protocol import Hello, Welcome
from packer_service.worker_session import WorkerSession

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_END_S = 5.0
_EXIT_HUNG = 70
_ENTRY_S = 1.0  # what a worker of an unknown session waits for that session's engine

# Connections that have not proven themselves yet. They take no place of a session: whoever may connect, but has no key,
# could hold them all.
MAX_UNPROVEN = 64


class Server:
    """One packer on one device: ``start`` makes it reachable, ``wait`` lasts until there is a reason to stop, ``close`` ends.

    ``_changed`` guards the sessions; every connection has one thread; ``MAX_UNPROVEN`` bounds them beyond the sessions.
    """

    def __init__(self, settings: Settings, key: bytes, *, managed: bool = False) -> None:
        self.settings = settings
        self._uids = settings.uids()
        self._path = Path(settings.socket)
        _make_way(self._path)  # a packer too many refuses before it takes memory of the device and of the host
        self.device = open_device(settings.device)
        self.refused = 0  # peers; written under _changed
        self._managed = managed
        self._key = key
        self._changed = threading.Condition()
        self._engines: dict[str, EngineSession] = {}
        self._workers: set[WorkerSession] = set()
        self._connections = 0  # threads that serve one
        self._unproven: dict[socket.socket, int] = {}  # to the peer's pid, oldest first
        self._proven: set[socket.socket] = set()
        self._unfinished = False  # a worker session still has copies under way; written as it ends
        self._stopping = ""
        self._leaving = threading.Event()
        self._idle_since = time.monotonic()
        self._budget = Budget(settings.pool_max_bytes)
        self._spare: Pool | None = self._new_pool()
        self._spare.grow(settings.pool_bytes)
        self._socket = _listen(self._path)
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
            self._path,
        )

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
                if self._engines or not limit:
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
        self._path.unlink(missing_ok=True)
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes the accepter
        self._socket.close()
        self._leaving.set()
        self.device.leave()
        with self._changed:
            self._stopping = self._stopping or "closed"  # whoever is still in its handshake is not entered any more
            for peer in (*self._unproven, *self._proven):
                _hang_up(peer)
            self._changed.wait_for(lambda: not self._connections, timeout=_END_S)
            left, spare, self._spare = self._connections or self._unfinished, self._spare, None
        if left or not self.device.drain():
            logger.info("worker outputs are still on their way; their workers export them again")
            return False
        if spare is not None:
            spare.close()
        self.device.close()
        return True

    # -- the watchdog --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """A copy that never ends cannot be given up in this process: it ends, and whoever runs it starts it again."""
        looks = max(int(self.settings.hang_s / _WATCH_S), 1)
        while not self._stopping:
            time.sleep(_WATCH_S)
            with self._changed:
                workers = list(self._workers)
            for worker in workers:
                if stuck := worker.stuck(looks):
                    self._die(f"{stuck} does not end (setting hang_s = {self.settings.hang_s:g})")
            self._keep_listening()

    def _die(self, reason: str) -> None:
        logger.critical("packer ends so that it is started again: %s", reason)
        logging.shutdown()
        os._exit(_EXIT_HUNG)

    def _keep_listening(self) -> None:
        """Whoever cleans up a run directory may remove the socket; nobody could reach the packer again."""
        if self._path.exists() or self._stopping:
            return
        logger.error("the socket %s was removed; listening there again", self._path)
        try:
            listener = _listen(self._path)
        except (PackerError, OSError) as error:
            logger.error("cannot listen at %s: %s", self._path, error)
            return
        old, self._socket = self._socket, listener
        old.shutdown(socket.SHUT_RDWR)  # the accepter takes the new one
        old.close()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _accept_all(self) -> None:
        said = ""
        while True:
            listener = self._socket
            try:
                peer, _ = listener.accept()
            except OSError as error:
                if listener is not self._socket:
                    continue
                if self._stopping or listener.fileno() < 0:
                    return
                # Out of descriptors, most likely, and for a while. The peer waits in the backlog until there is one again.
                if said != str(error):
                    said = str(error)
                    logger.error("cannot accept a connection: %s; see LimitNOFILE or ulimit -n", error)
                time.sleep(0.1)
                if _has_peer(listener):  # accept wants a descriptor before it looks whether anybody is there
                    with self._changed:
                        self._evict()
                continue
            said = ""
            if not self._enter(peer):
                peer.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(peer,), name="session", daemon=True).start()
            except RuntimeError as error:  # the process may start no more threads
                logger.error("a connection was closed: %s; see the pids limit of this process's cgroup", error)
                self._leave(peer)

    def _enter(self, peer: socket.socket) -> bool:
        """Make room for one more peer that has not proven itself; False where the packer stops meanwhile."""
        pid, _ = transport.peer_credentials(peer)
        bound = self.settings.max_sessions + MAX_UNPROVEN
        with self._changed:
            if len(self._unproven) >= MAX_UNPROVEN:
                self._evict()
            self._changed.wait_for(lambda: self._connections < bound or self._stopping)  # the evicted one's thread ends
            if self._stopping:
                return False
            self._unproven[peer] = pid
            self._connections += 1
            return True

    def _evict(self) -> None:
        """Close the oldest unproven connection of the process that has most of them: a flood washes away its own.

        ``_changed`` is held. Where pids are not told apart (0: another pid namespace), it is the oldest of all.
        """
        if self._unproven:
            pid, held = Counter(self._unproven.values()).most_common(1)[0]
            oldest = next(peer for peer, owner in self._unproven.items() if owner == pid)
            del self._unproven[oldest]
            _hang_up(oldest)
            logger.warning(
                "too many connections without a proof, %d of them of pid %d: its oldest is closed", held, pid
            )

    def _leave(self, peer: socket.socket) -> None:
        peer.close()
        with self._changed:
            self._unproven.pop(peer, None)
            self._proven.discard(peer)
            self._connections -= 1
            self._changed.notify_all()

    def _serve(self, peer: socket.socket) -> None:
        try:
            pid, uid = transport.peer_credentials(peer)
            try:
                channel, hello = transport.accept(
                    peer, self._key, self._uids, functools.partial(self._admit, peer), self.settings.handshake_timeout_s
                )
            except (PackerError, OSError) as error:
                logger.warning("a peer was refused: %s (pid %d, uid %d)", error, pid, uid)
                with self._changed:
                    self.refused += 1
                return
            self.device.bind_thread()
            if hello.role == "engine":
                self._serve_engine(channel, hello)
            else:
                self._serve_worker(channel, hello)
        except DeviceError as error:
            logger.error("a peer cannot be served: %s", error)
        except Exception:
            logger.exception("a session failed")
        finally:
            self._leave(peer)
            gc.collect()  # an idle packer collects nothing, and a mapping in a reference cycle would stay

    def _admit(self, peer: socket.socket, hello: Hello, proof: bytes) -> Welcome:
        with self._changed:
            if hello.role == "worker":  # its engine was welcomed, but the thread that enters it may not have got there
                self._changed.wait_for(lambda: hello.session in self._engines, _ENTRY_S)
            known = hello.session in self._engines
        if hello.role == "engine" and known:
            raise HandshakeError(f"session {hello.session} has an engine already")
        if hello.role == "worker" and not known:
            raise HandshakeError(f"session {hello.session} has no engine here: the engine connects before its workers")
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
        with self._changed:
            if len(self._proven) >= self.settings.max_sessions:
                raise HandshakeError(
                    f"max_sessions = {self.settings.max_sessions} are open: raise it, or end a session"
                )
            if self._unproven.pop(peer, None) is None:
                raise HandshakeError("this connection was closed: too many came that had not proven themselves")
            self._proven.add(peer)
        return Welcome(proof, self.device.kind, self.device.uuid, self.device.name, os.getpid())

    def _new_pool(self) -> Pool:
        return Pool(
            self.device,
            self._budget,
            keep_bytes=self.settings.pool_bytes,
            step_bytes=self.settings.pool_step_bytes,
            idle_s=self.settings.pool_idle_s,
        )

    def _serve_engine(self, channel: transport.Channel, hello: Hello) -> None:
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

    def _serve_worker(self, channel: transport.Channel, hello: Hello) -> None:
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


def _hang_up(peer: socket.socket) -> None:
    """End the stream: every thread blocked on it wakes up. The descriptor stays its thread's to close."""
    with suppress(OSError):  # it is closed already
        peer.shutdown(socket.SHUT_RDWR)


def _has_peer(listener: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    poll = select.poll()
    try:
        poll.register(listener, select.POLLIN)
    except ValueError:  # closed meanwhile
        return False
    return bool(poll.poll(0))


def raise_descriptor_limit() -> None:
    """Have as many descriptors as the system lets this process have; the usual soft limit of 1024 is for select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(path: Path) -> socket.socket:
    """Listen at ``path``, see ``_make_way``."""
    _make_way(path)
    sock = _new_socket()
    try:
        mask = os.umask(0o117)  # group may connect; the directory and the uids say who
        try:
            sock.bind(str(path))
        finally:
            os.umask(mask)
        sock.listen(64)
    except BaseException:
        sock.close()
        raise
    return sock


def _new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _make_way(path: Path) -> None:
    """Have a directory for ``path`` that is ours alone (or a group's). A stale socket is removed, for a live one we refuse."""
    directory = path.parent
    if path == Path():
        raise SettingError("socket is not set: it names the path at which engine and workers reach this packer")
    if "," in str(path):
        raise SettingError(f"socket is {str(path)!r}; a packer listens at one path: start one packer for each GPU")
    if len(os.fsencode(path)) > 107:
        raise SettingError(f"socket is {str(path)!r}; allowed is a path of at most 107 bytes")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise SettingError(f"the directory of socket {str(path)!r} cannot be made: {error.strerror}") from error
    if status.st_mode & stat.S_IWOTH or status.st_uid not in (os.geteuid(), 0):
        raise SettingError(
            f"the directory {str(directory)!r} of the socket must be ours and not writable by everybody:"
            " give the socket a directory of its own, such as /run/packer"
        )
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise SettingError(f"socket is {str(path)!r}, which is there and is no socket")
        with _new_socket() as probe:
            probe.settimeout(5.0)  # one that is stopped and whose queue is full would never answer
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                logger.info("a stale socket is replaced: %s", path)
            except OSError as error:
                raise SettingError(f"socket is {str(path)!r}, which somebody else uses: {error}") from error
            else:
                raise SettingError(f"another packer listens at {str(path)!r}: give each its own socket")
        with suppress(FileNotFoundError):
            path.unlink()
