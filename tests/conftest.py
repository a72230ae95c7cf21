"""The environment every test runs in, set before any test module is imported, and so before anything imports vllm."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from worker_shim.synthetic.engine import nvidia_gpus, prepare

GPUS = nvidia_gpus()
TESTS = Path(__file__).resolve().parent
MOST_PROCESSES = 4
LONGEST_FIRST = (
    "test_chaos.py",
    "test_fuzz.py",
    "test_sessions.py",
    "test_abort.py",
    "test_step.py",
    "test_contract.py",
    "test_soak.py",
    "test_engine_faults.py",
    "test_modes.py",
)
"""The test files that take longest. `make test` starts them first, so that no process is left with a long one at the end."""

_CLONE_NEWNS = 0x20000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000

# The same examples in every run: a commit that changes nothing fails nowhere. HYPOTHESIS_PROFILE=search tries new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.register_profile("search", database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def take_own_shared_memory() -> None:
    """Give this process, and all that it starts, a /dev/shm of its own: tests look there for names that were left behind.

    Only root may do that. Anybody else runs the tests in one process, and they may fail for names that other programs make.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.unshare(_CLONE_NEWNS) and not libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def may_have_own_shared_memory() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_configure(config: pytest.Config) -> None:
    take_own_shared_memory()
    # The many processes of the tests would compile this project anew each, where the variable says to keep no bytecode.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    prepare(TESTS, TESTS / "helpers")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes `make test` runs tests in: as many as there are cores, but one where they would share a GPU or a
    /dev/shm."""
    if GPUS or not may_have_own_shared_memory():
        return 0
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    no_engine = pytest.mark.skip(reason="needs vllm-omni: pip install '.[vllm]', or make test")
    has_engine = importlib.util.find_spec("vllm_omni") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not GPUS:
            item.add_marker(no_gpu)
        if item.get_closest_marker("engine") and not has_engine:
            item.add_marker(no_engine)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory like tmp_path with a short path: the path of a socket may have about 100 characters, and pytest's is long."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)
