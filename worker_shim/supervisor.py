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
from dataclasses import dataclass
from pathlib import Path

from packer_service.config import PACKER_SETTINGS, Settings
from packer_service.errors import PackerUnavailable
from worker_shim.log import get_logger

logger = get_logger(__name__)

_PREFIX = "packer-"
_STOP_GRACE_S = 15.0
# vLLM's CPU platform sets it for the engine's workers (torch's OpenMP, tcmalloc); a packer is not one of them.
_NOT_INHERITED = ("LD_PRELOAD",)


@dataclass
class ManagedPacker:
    """One running packer process."""

    socket: str
    process: subprocess.Popen[bytes]


class Supervisor:
    """The packers of one executor. ``start`` each, then ``stop`` all; both on the executor's own threads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        remove_stale(base)
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        self.key = secrets.token_hex(32).encode()
        key_file = self.directory / "key"
        key_file.touch(mode=0o600)
        key_file.write_bytes(self.key)
        self.packers: list[ManagedPacker] = []

    def start(self, device: str) -> ManagedPacker:
        """Start a packer on ``device`` and wait until it is ready. PackerUnavailable carries the packer's own reason."""
        socket = str(self.directory / f"{device.replace(':', '')}.sock")
        given = {name: getattr(self._settings, name) for name in PACKER_SETTINGS}
        given |= {"socket": socket, "key_file": str(self.directory / "key"), "device": device}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "packer_service", "serve", "--managed", f"--ready-fd={writer}", *options],
                env={name: value for name, value in os.environ.items() if name not in _NOT_INHERITED},
                pass_fds=[writer],
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            os.close(reader)
            raise PackerUnavailable(f"a packer process cannot be started: {error}") from error
        finally:
            os.close(writer)
        packer = ManagedPacker(socket, process)
        self.packers.append(packer)
        with os.fdopen(reader, "rb") as pipe:
            if not select.select([pipe], [], [], self._settings.start_timeout_s)[0]:
                raise PackerUnavailable(
                    f"the packer on {device} was not ready within start_timeout_s = {self._settings.start_timeout_s:g}"
                )
            line = pipe.readline()
        report = json.loads(line) if line else {"error": f"it died with exit code {process.wait()}"}
        if "error" in report:
            raise PackerUnavailable(f"the packer on {device} did not start: {report['error']}")
        return packer

    def stop(self) -> None:
        """End every packer, politely at first, and remove the directory. Idempotent."""
        for packer in self.packers:
            packer.process.terminate()
        for packer in self.packers:
            try:
                packer.process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                logger.error("packer %d did not stop within %g s and is killed", packer.process.pid, _STOP_GRACE_S)
                packer.process.kill()
                packer.process.wait()
        self.packers.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


def remove_stale(base: Path) -> None:
    """Remove the directories of engines that are gone and whose packers are gone too (nobody listens in them)."""
    for directory in base.glob(f"{_PREFIX}*-*"):
        pid = directory.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            if not pid.isdecimal() or directory.stat().st_uid != os.geteuid() or Path(f"/proc/{pid}").exists():
                continue
        except OSError:  # it just went away
            continue
        if not any(_listens(path) for path in directory.glob("*.sock")):
            logger.info("removing %s, left by an engine that is gone", directory)
            shutil.rmtree(directory, ignore_errors=True)


def _listens(path: Path) -> bool:
    return any(line.endswith(str(path)) for line in Path("/proc/net/unix").read_text().splitlines())
