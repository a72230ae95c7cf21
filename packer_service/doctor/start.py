"""A packer is started as it would be later, with a small pool and a socket of its own, asked how it is, and stopped."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import time

from packer_service import run_directory
from packer_service.config import PACKER_SETTINGS, Settings
from packer_service.doctor.child import command
from packer_service.doctor.finding import Finding, error, ok
from packer_service.doctor.gpu import mend_of
from packer_service.errors import PackerError
from packer_service.operator import Operator
from packer_service.run_directory import RunDirectory

_KEY_FILE = "/proc/self/fd/0"  # its standard input is a pipe with the key
_SMALL = "2MiB"
_STOP_S = 15.0
_OTHERWISE = "packer-service serve with the same options says more"


class Trial:
    """One packer, from ``__init__`` (which does not wait for it) to ``end``."""

    def __init__(self, settings: Settings) -> None:
        self._patience_s = settings.start_timeout_s
        self._key = secrets.token_hex(32).encode()
        self._directory = RunDirectory.make(run_directory.bases())
        self._socket = f"{self._directory.path}/{settings.device.replace(':', '')}.sock"
        given = {name: getattr(settings, name) for name in PACKER_SETTINGS}
        given |= {"socket": self._socket, "key_file": _KEY_FILE, "exit_after_s": self._patience_s, "allowed_uids": ""}
        given |= {"pool_bytes": _SMALL, "pool_max_bytes": _SMALL, "pool_step_bytes": _SMALL}
        self._ready, writer = os.pipe()
        key_reader, key_writer = os.pipe()
        try:
            os.write(key_writer, self._key)
            os.close(key_writer)
            options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
            self._began = time.monotonic()
            self._process = subprocess.Popen(
                command("packer_service", "serve", f"--ready-fd={writer}", *options),
                stdin=key_reader,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[writer],
                start_new_session=True,
            )
        except BaseException:
            os.close(self._ready)
            self._directory.release()
            raise
        finally:
            os.close(writer)
            os.close(key_reader)

    def end(self) -> Finding:
        """Wait until it is ready, ask it, and stop it."""
        try:
            return self._judge()
        finally:
            self.stop()

    def _judge(self) -> Finding:
        name = "start"
        with os.fdopen(self._ready, "rb") as pipe:
            ready = select.poll()
            ready.register(pipe, select.POLLIN)
            if not ready.poll(self._patience_s * 1000):
                text = f"a packer was not ready within start_timeout_s = {self._patience_s:g}"
                return error(name, text, f"raise PACKER_START_TIMEOUT_S; {_OTHERWISE}")
            line = pipe.readline()
        took_s = time.monotonic() - self._began
        report = json.loads(line) if line else {"error": f"it died with exit code {self._process.wait(_STOP_S)}"}
        if "error" in report:
            text = str(report["error"])
            return error(name, f"a packer does not start: {text}", mend_of(text, _OTHERWISE))
        try:
            with Operator(self._socket, self._key) as operator:
                status = operator.status()
        except (PackerError, OSError) as failure:
            return error(name, f"a packer started and does not answer: {failure}", _OTHERWISE)
        text = f"a packer with a pool of {_SMALL} was ready on {status.device_name} after {took_s:.2f} s, and answered"
        return ok(name, text)

    def stop(self) -> None:
        """End it and remove its directory. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._directory.release()
