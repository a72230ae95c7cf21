"""The environment every test runs in, set before any test module is imported, and so before anything imports vllm."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import pytest

from worker_shim.demo.engine import nvidia_gpus, prepare

GPUS = nvidia_gpus()
MOST_PROCESSES = 4
LONGEST_FIRST = (
    "test_chaos.py",
    "test_fuzz.py",
    "test_session.py",
    "test_engine_abort.py",
    "test_engine_step.py",
    "test_contract.py",
    "test_soak.py",
    "test_engine_faults.py",
    "test_engine_modes.py",
)
"""The files that take longest, of those that `make test` gives to its processes, one after the other."""

# The same examples in every run: a commit that changes nothing fails nowhere. HYPOTHESIS_PROFILE=search tries new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.register_profile("search", database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    # The many processes of the tests would compile this project anew each, where the variable says to keep no bytecode.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    prepare(Path(__file__).resolve().parent)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes `make test` runs tests in: as many as there are cores, but one beside a GPU, which is shared."""
    return 0 if GPUS else min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


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
