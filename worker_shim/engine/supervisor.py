"""Managed packers: started by the executor and ended with it.

Each runs the ``packer_service`` that this process imported, with the environment that this process had when its executor
started, and listens in the executor's run directory.

Note [A fork beside a start]
A process that another thread forks in the milliseconds of a start has copies of the pipes that are open then, Popen's own
included, until it ends or becomes another program (all are O_CLOEXEC). Such a start may take as long as that process lives.
Only a lock that is held while a process starts could keep forks out, and every fork of the engine would wait for it. So
nothing keeps them out, and ``stop`` waits for such a start no longer than for a packer that does not end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import spawn

import packer_service
from packer_service import board, run_directory
from packer_service.config import PACKER_SETTINGS, Settings
from packer_service.errors import PackerUnavailable
from packer_service.run_directory import RunDirectory
from worker_shim.log import get_logger

logger = get_logger(__name__)

_STOP_GRACE_S = 15.0
_KILL_S = 10.0
_SHUTTING_DOWN = "the executor is shutting down"
_MODULE_PATH = "MANAGED_PACKER_PATH"  # read by packer_service/__main__.py
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(packer_service.__file__)), "__main__.py")
_KEY_FILE = "/proc/self/fd/0"  # a packer's standard input is a pipe with the key: no file of it is left anywhere
# vLLM's CPU platform sets it for the engine's workers (torch's OpenMP, tcmalloc); a packer is not one of them.
_NOT_INHERITED = ("LD_PRELOAD",)


@dataclass
class ManagedPacker:
    """One packer: where it listens, and its process, which another replaces when it is started again."""

    device: str
    socket: str
    process: subprocess.Popen[bytes] | None = None
    device_uuid: str = ""  # of the first start
    restarts: int = 0


class Supervisor:
    """The packers of one executor: ``start`` each, ``restart`` those that died, ``stop`` all.

    One process is started at a time, and none after ``stop``: ``_changed`` guards ``_starting`` and ``_stopped``, and nothing
    is done under it but to look at them.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # As it is now: vllm-omni sets CUDA_VISIBLE_DEVICES only while a stage starts, and a packer may start again later.
        self._environ = {name: value for name, value in os.environ.items() if not _is_kept_from_packers(name)}
        self._environ[_MODULE_PATH] = "\n".join(_module_path())
        self._directory = RunDirectory.make(run_directory.bases())
        self.key = secrets.token_hex(32).encode()
        self.packers: list[ManagedPacker] = []
        self._changed = threading.Condition()
        self._starting = False
        self._stopped = False
        self._pid = os.getpid()

    def start(self, device: str) -> ManagedPacker:
        """Start a packer on ``device`` and wait until it is ready. PackerUnavailable carries the packer's own reason."""
        packer = ManagedPacker(device, f"{self._directory.path}/{device.replace(':', '')}.sock")
        self.packers.append(packer)
        self._run(packer)
        return packer

    def restart(self, packer: ManagedPacker) -> None:
        """The same for one that died or hangs; what is left of its process is killed first."""
        if packer.process is not None:
            _end(packer.process, 0.0)
        packer.restarts += 1
        self._run(packer)

    def _run(self, packer: ManagedPacker) -> None:
        reader, writer = os.pipe()
        try:
            with self._turn_to_start():
                process = packer.process = self._spawn(packer, writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        if self._stopped:  # ``stop`` came meanwhile, and does not wait for a start for ever
            os.close(reader)
            _end(process, 0.0)
            raise PackerUnavailable(_SHUTTING_DOWN)
        with os.fdopen(reader, "rb") as pipe:
            ready = select.poll()  # select() takes no descriptor above 1023
            ready.register(pipe, select.POLLIN)
            if not ready.poll(self._settings.start_timeout_s * 1000):
                raise PackerUnavailable(
                    f"the packer on {packer.device} was not ready within"
                    f" start_timeout_s = {self._settings.start_timeout_s:g}"
                )
            line = pipe.readline()
        report = json.loads(line) if line else {"error": f"it died with exit code {_end(process, _KILL_S)}"}
        if "error" in report:
            raise PackerUnavailable(f"the packer on {packer.device} did not start: {report['error']}")
        packer.device_uuid = packer.device_uuid or report["device_uuid"]
        if report["device_uuid"] != packer.device_uuid:
            _end(process, 0.0)
            raise PackerUnavailable(
                f"the packer on {packer.device} came up on {report['device_uuid']}, while this engine's worker runs on"
                f" {packer.device_uuid}: see which GPUs the driver still lists (nvidia-smi -L)"
            )

    @contextlib.contextmanager
    def _turn_to_start(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._starting)
            if self._stopped:
                raise PackerUnavailable(_SHUTTING_DOWN)
            self._starting = True
        try:
            yield
        finally:
            with self._changed:
                self._starting = False
                self._changed.notify_all()

    def _spawn(self, packer: ManagedPacker, ready_fd: int) -> subprocess.Popen[bytes]:
        given = {name: getattr(self._settings, name) for name in PACKER_SETTINGS}
        given |= {"socket": packer.socket, "key_file": _KEY_FILE, "device": packer.device}
        given |= {"ready_fd": ready_fd, "restarts": packer.restarts}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        try:
            self._directory.remake()
        except OSError as error:
            raise PackerUnavailable(
                f"the directory {self._directory.path} of the packers' sockets cannot be made again: {error.strerror}."
                " An engine that is started with another TMPDIR makes it there"
            ) from error
        key_reader, key_writer = os.pipe()
        try:
            os.write(key_writer, self.key)
            os.close(key_writer)
            return subprocess.Popen(
                [_python(), _PROGRAM, "serve", "--managed", *options],
                env=self._environ,
                pass_fds=[ready_fd],
                stdin=key_reader,
            )
        except OSError as error:
            raise PackerUnavailable(f"a packer process cannot be started: {error}") from error
        finally:
            os.close(key_reader)

    def stop(self) -> None:
        """End every packer, politely at first, and remove the directory. Idempotent; a start under way fails.

        A forked child's copy ends nothing: the packers are its parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._starting, _STOP_GRACE_S)
        processes = [packer.process for packer in self.packers if packer.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            _end(process, _STOP_GRACE_S)
        self.packers.clear()
        board.remove_dead()  # of one that was killed
        self._directory.release()


def _end(process: subprocess.Popen[bytes], grace_s: float) -> int | None:
    """Wait ``grace_s`` for it to end, then kill it. Its exit code; None for one that its driver holds a while longer."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(grace_s)
    if grace_s:
        logger.error("packer %d did not stop within %g s and is killed", process.pid, grace_s)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_KILL_S)
    logger.error("packer %d is killed, and does not end within %g s: its driver holds it", process.pid, _KILL_S)
    return None


def _is_kept_from_packers(variable: str) -> bool:
    """Those named above, and Python's own where this process was started with ``python -E``, which ignores them."""
    ignored = sys.flags.ignore_environment and variable.startswith("PYTHON")
    return ignored or variable in _NOT_INHERITED


def _module_path() -> list[str]:
    """Where this process looks for modules, whatever it did to ``sys.path``, as in a spawned worker.

    But the folders of the user's own program, the script's and the current one, come last: no file there stands in for a
    module that only a packer needs.
    """
    try:
        here = os.getcwd()
    except OSError:  # it is gone
        here = ""
    script = getattr(sys.modules["__main__"], "__file__", None) or "."
    own = {here, os.path.normpath(os.path.join(here, os.path.dirname(script)))}
    found = [os.path.normpath(os.path.join(here, entry)) for entry in sys.path if isinstance(entry, str)]
    return sorted((path for path in found if os.path.isabs(path) and "\n" not in path), key=own.__contains__)


def _python() -> str:
    """What workers are spawned with: ``sys.executable``, unless ``multiprocessing.set_executable`` says otherwise."""
    executable = os.fsdecode(spawn.get_executable() or "")
    if not executable:
        raise PackerUnavailable(
            "a packer process cannot be started: sys.executable is not set; name a Python with multiprocessing.set_executable"
        )
    return executable
