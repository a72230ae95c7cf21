"""Processes that try what may hang, crash or change the process that tries it. Each is another run of this very Python.

A child looks for modules where this process does, so that both have the same packages, and the current directory is not code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from typing import NamedTuple

_BOOT = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); import runpy;"
    " runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
_KILLED_S = 5.0  # for a process that was killed: one that its driver holds may never end


class Ended(NamedTuple):
    """``code`` is None where the child had not ended in time, and was killed."""

    code: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """Why there is no answer, in words."""
        last = self.errors.strip().splitlines()[-1:]
        how = "it did not end in time" if self.code is None else f"it ended with exit code {self.code}"
        return f"{how} ({last[0]})" if last else how


def command(module: str, *arguments: str) -> list[str]:
    """What starts ``python -m module``."""
    here = os.getcwd() if "" in sys.path else ""
    return [sys.executable, "-c", _BOOT, "\n".join(path or here for path in sys.path), module, *arguments]


class Child:
    """One process, whose output is collected. ``end`` waits for it; with its own children it is one process group."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            command(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def end(self, timeout_s: float) -> Ended:
        """Wait until it has ended, and kill it and its children after ``timeout_s``."""
        code: int | None
        try:
            output, errors = self._process.communicate(timeout=timeout_s)
            code = self._process.returncode
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                output, errors = self._process.communicate(timeout=_KILLED_S)
            except subprocess.TimeoutExpired as stuck:
                output, errors = (_text(stuck.stdout), _text(stuck.stderr))
            code = None
        return Ended(code, output, errors)

    def kill(self) -> None:
        """End it and its children at once, unless it has ended."""
        if self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _text(data: str | bytes | None) -> str:
    return data.decode(errors="replace") if isinstance(data, bytes) else data or ""
