"""Times calls in a process and writes them to a file whenever that process has been quiet. See benchmarks.steps."""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

DIRECTORY = "BENCHMARK_STEPS"
"""The environment variable that names where the files go. inject/sitecustomize.py asks for it too."""

ENTERED = "_return_result"
"""The worker's step with which each output begins."""

_QUIET_S = 0.3

Call = tuple[str, float, float]
"""(step, begin, end); seconds of CLOCK_MONOTONIC, which all processes of a machine share."""


class Stopwatch:
    """One process's calls, in ``<directory>/<process>.json``."""

    def __init__(self, process: str) -> None:
        self.calls: list[Call] = []
        self._path = Path(os.environ[DIRECTORY]) / f"{process}.json"
        threading.Thread(target=self._write_when_quiet, name="stopwatch", daemon=True).start()

    def time(self, owner: Any, name: str, step: str) -> None:
        """Record every call of ``owner.name`` as ``step`` from now on."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls.append((step, begin, time.perf_counter()))

        setattr(owner, name, timed)

    def _write_when_quiet(self) -> None:
        seen = written = 0
        while True:
            time.sleep(_QUIET_S)
            if len(self.calls) == seen and seen != written:
                part = self._path.with_suffix(".part")
                part.write_text(json.dumps(self.calls))
                part.replace(self._path)
                written = seen
            seen = len(self.calls)


def read(process: str) -> list[Call]:
    """What that process has written: its calls up to when it was last quiet for ``_QUIET_S``."""
    return [tuple(call) for call in json.loads((Path(os.environ[DIRECTORY]) / f"{process}.json").read_text())]
