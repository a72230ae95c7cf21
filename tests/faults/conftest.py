"""What the fault tests share: faults to switch on, a managed packer, a sidecar."""

from __future__ import annotations

import pytest
from injection import Faults


@pytest.fixture(scope="module")
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield monkeypatch


@pytest.fixture
def faults(tmp_path, monkeypatch) -> Faults:
    return Faults(tmp_path / "faults", monkeypatch)


@pytest.fixture(scope="module")
def module_faults(tmp_path_factory, module_monkeypatch) -> Faults:
    """For a packer that several tests share."""
    return Faults(tmp_path_factory.mktemp("module") / "faults", module_monkeypatch)
