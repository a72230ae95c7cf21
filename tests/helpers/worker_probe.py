"""A vllm-omni worker extension that tells a test how the exporter in the worker's process is doing.

Named to the engine, and imported by the worker only: worker_extension_cls="worker_probe.WorkerProbe". It imports
vllm_omni.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from worker_shim.worker.proc import PackerWorkerProc


class WorkerProbe(CustomPipelineWorkerExtension):
    """Called with ``collective_rpc``, on the worker's main thread, between forwards."""

    @functools.cached_property
    def _proc(self) -> PackerWorkerProc | None:
        return next((thing for thing in gc.get_objects() if issubclass(type(thing), PackerWorkerProc)), None)

    def exporter_state(self) -> dict[str, Any]:
        """What is out and what it holds; empty where this worker has no exporter."""
        if self._proc is None or (exporter := self._proc.exporter) is None:
            return {}
        exporter.take_acks()
        return {
            "pending": len(exporter.exchange.pending),
            "arena_idle": exporter.placement.arena.idle,
            "arena_bytes": exporter.placement.arena.nbytes,
            "overflow_left": exporter.placement.overflow_left,
            "broken": exporter.broken,
        }
