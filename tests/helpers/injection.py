"""Faults of packers that a test switches on and off; tests/helpers/inject/faulty_packer.py is what happens in the packer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from packer_process import wait_until

_INJECT = Path(__file__).resolve().parent / "inject"


class Faults:
    """The faults of every packer that is started from now on, whoever starts it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        directory.mkdir()
        self._directory = directory
        monkeypatch.setenv("PACKER_FAULTS", str(directory))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_INJECT), os.environ.get("PYTHONPATH", "")]))

    def set(self, fault: str) -> None:
        (self._directory / f"{fault}.reached").unlink(missing_ok=True)
        (self._directory / fault).touch()

    def clear(self, fault: str) -> None:
        (self._directory / fault).unlink(missing_ok=True)

    def wait_reached(self, point: str) -> None:
        wait_until((self._directory / f"{point}.reached").exists, f"a packer reaches the point {point!r}")

    @contextlib.contextmanager
    def active(self, fault: str) -> Iterator[None]:
        self.set(fault)
        try:
            yield
        finally:
            self.clear(fault)
