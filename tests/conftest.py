"""The environment every test runs in, set before any test module is imported, and so before anything imports vllm."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import hypothesis
import pytest

from worker_shim.demo.engine import nvidia_gpus, prepare

GPUS = nvidia_gpus()

# The same examples in every run: a commit that changes nothing fails nowhere. HYPOTHESIS_PROFILE=search tries new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None)
hypothesis.settings.register_profile("search", database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_configure(config: pytest.Config) -> None:
    prepare(Path(__file__).resolve().parent)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU")
    no_engine = pytest.mark.skip(reason="needs vllm-omni: pip install '.[vllm]', or make test")
    has_engine = importlib.util.find_spec("vllm_omni") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not GPUS:
            item.add_marker(no_gpu)
        if item.get_closest_marker("engine") and not has_engine:
            item.add_marker(no_engine)
