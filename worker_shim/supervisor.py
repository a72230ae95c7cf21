"""Managed packers: started by the executor, ended with it, cleaned up after whoever did not end well.

They live in a directory of their own, made here with mode 0700, that holds one key and one socket a GPU. The packers
outlive a killed engine for a moment and remove it; what both left behind is removed at the next start.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

from packer_service.config import PACKER_SETTINGS, Settings
from packer_service.errors import PackerUnavailable
from worker_shim.log import get_logger

logger = get_logger(__name__)

_PREFIX = "packer-"
_STOP_GRACE_S = 15.0
_CLOCK_SLACK_S = 2.0  # the kernel counts a process's start in ticks since boot
# vLLM's CPU platform sets it for the engine's workers (torch's OpenMP, tcmalloc); a packer is not one of them.
_NOT_INHERITED = ("LD_PRELOAD",)


@dataclass
class ManagedPacker:
    """One packer: where it listens, and its process, which another replaces when it is started again."""

    device: str
    socket: str
    process: subprocess.Popen[bytes] | None = None


class Supervisor:
    """The packers of one executor: ``start`` each, ``restart`` those that died, ``stop`` all.

    ``_lock`` guards the decision to start a process: after ``stop`` none is.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        remove_stale(base)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        self.key = secrets.token_hex(32).encode()
        self.packers: list[ManagedPacker] = []
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, device: str) -> ManagedPacker:
        """Start a packer on ``device`` and wait until it is ready. PackerUnavailable carries the packer's own reason."""
        packer = ManagedPacker(device, str(self.directory / f"{device.replace(':', '')}.sock"))
        self.packers.append(packer)
        self._run(packer)
        return packer

    def restart(self, packer: ManagedPacker) -> None:
        """The same for one that died or hangs; what is left of its process is killed first."""
        if packer.process is not None:
            packer.process.kill()
            packer.process.wait()
        self._run(packer)

    def _run(self, packer: ManagedPacker) -> None:
        reader, writer = os.pipe()
        try:
            with self._lock:
                if self._stopped:
                    raise PackerUnavailable("the executor is shutting down")
                process = packer.process = self._spawn(packer, writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            if not select.select([pipe], [], [], self._settings.start_timeout_s)[0]:
                raise PackerUnavailable(
                    f"the packer on {packer.device} was not ready within"
                    f" start_timeout_s = {self._settings.start_timeout_s:g}"
                )
            line = pipe.readline()
        report = json.loads(line) if line else {"error": f"it died with exit code {process.wait()}"}
        if "error" in report:
            raise PackerUnavailable(f"the packer on {packer.device} did not start: {report['error']}")

    def _spawn(self, packer: ManagedPacker, ready_fd: int) -> subprocess.Popen[bytes]:
        key_file = self._write_key()
        given = {name: getattr(self._settings, name) for name in PACKER_SETTINGS}
        given |= {"socket": packer.socket, "key_file": str(key_file), "device": packer.device}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "packer_service", "serve", "--managed", f"--ready-fd={ready_fd}", *options],
                env={name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
                pass_fds=[ready_fd],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise PackerUnavailable(f"a packer process cannot be started: {error}") from error

    def _write_key(self) -> Path:
        """Every packer that ends removes it, with the directory if that is empty then."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        key_file = self.directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(self.key)
        return key_file

    def stop(self) -> None:
        """End every packer, politely at first, and remove the directory. Idempotent; a start under way fails."""
        with self._lock:
            self._stopped = True
        processes = [packer.process for packer in self.packers if packer.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                logger.error("packer %d did not stop within %g s and is killed", process.pid, _STOP_GRACE_S)
                process.kill()
                process.wait()
        self.packers.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


def remove_stale(base: Path) -> None:
    """Remove the directories of engines that are gone and whose packers are gone too (nobody listens in them)."""
    for directory in base.glob(f"{_PREFIX}*-*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            status = directory.stat()
            if not pid.isdecimal() or status.st_uid != os.geteuid() or _made_by(int(pid), status.st_mtime):
                continue
        except OSError:  # it just went away
            continue
        if not any(_listens(path) for path in directory.glob("*.sock")):
            logger.info("removing %s, left by an engine that is gone", directory)
            shutil.rmtree(directory, ignore_errors=True)


def _made_by(pid: int, made_at: float) -> bool:
    """Whether the process of that pid may be the one that made something then: one that started later only got its number."""
    try:
        return psutil.Process(pid).create_time() <= made_at + _CLOCK_SLACK_S
    except psutil.NoSuchProcess:
        return False


def _listens(path: Path) -> bool:
    return any(line.endswith(str(path)) for line in Path("/proc/net/unix").read_text().splitlines())
