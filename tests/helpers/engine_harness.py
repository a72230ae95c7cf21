"""The engine of ``worker_shim.synthetic.engine`` with the pipelines of tests/helpers/pipelines.py, named by class.

In a test process its workers start by fork (see zygote.py). What does not come through here, as the soak, the chaos and the
benchmarks, and whatever runs in a process of its own, has its workers spawned as users do.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from zygote import forked_workers

from worker_shim.synthetic.engine import BATCH, STEP, STREAM, Result, RunningEngine
from worker_shim.synthetic.engine import engine as _engine

__all__ = ["BATCH", "STEP", "STREAM", "Result", "RunningEngine", "engine"]


@contextmanager
def engine(backend: str, pipeline: str, **config: Any) -> Iterator[RunningEngine]:
    """A running engine, closed at the end of the block; ``pipeline`` is a class of tests/helpers/pipelines.py."""
    _freeze_modules()
    with ExitStack() as stack:
        stack.enter_context(_undecorated_streams())
        with forked_workers():
            running = stack.enter_context(_engine(backend, f"pipelines.{pipeline}", **config))
        yield running


@contextmanager
def _undecorated_streams() -> Iterator[None]:
    """A worker in this process (`uni`) puts its name before every line of stdout and stderr: undo that at the end."""
    streams = [sys.stdout, sys.stderr]
    before = [dict(vars(stream)) for stream in streams]
    try:
        yield
    finally:
        for stream, attributes in zip(streams, before, strict=True):
            for name in vars(stream).keys() - attributes.keys():
                delattr(stream, name)


@functools.cache
def _freeze_modules() -> None:
    """The tests collect garbage often, and each time it would walk all that torch and vllm are made of: about 0.4 s."""
    import vllm_omni.diffusion.diffusion_engine  # noqa: F401

    gc.collect()
    gc.freeze()
