"""The engine of ``worker_shim.demo.engine`` with the pipelines of tests/pipelines.py, named by class."""

from __future__ import annotations

import functools
import gc
from contextlib import AbstractContextManager
from typing import Any

from worker_shim.demo.engine import BATCH, STEP, STREAM, Result, RunningEngine
from worker_shim.demo.engine import engine as _engine

__all__ = ["BATCH", "STEP", "STREAM", "Result", "RunningEngine", "engine"]


def engine(backend: str, pipeline: str, **config: Any) -> AbstractContextManager[RunningEngine]:
    """A running engine, closed at the end of the block; ``pipeline`` is a class of tests/pipelines.py."""
    _freeze_modules()
    return _engine(backend, f"pipelines.{pipeline}", **config)


@functools.cache
def _freeze_modules() -> None:
    """The tests collect garbage often, and each time it would walk all that torch and vllm are made of: about 0.4 s."""
    import vllm_omni.diffusion.diffusion_engine  # noqa: F401

    gc.collect()
    gc.freeze()
