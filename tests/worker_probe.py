"""A vllm-omni worker extension that tells a test how the exporter in the worker's process is doing.

Named to the engine, and imported by the worker only: worker_extension_cls="worker_probe.WorkerProbe". It imports
vllm_omni.
"""

from __future__ import annotations

import gc
from typing import Any

from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from worker_shim.worker import PackerWorkerProc


class WorkerProbe(CustomPipelineWorkerExtension):
    """Called with ``collective_rpc``, on the worker's main thread, between forwards."""

    def exporter_state(self) -> dict[str, Any]:
        """What is out and what it holds; empty where this worker has no exporter."""
        for thing in gc.get_objects():
            if issubclass(type(thing), PackerWorkerProc) and (exporter := thing.exporter) is not None:
                exporter.take_acks()
                return {
                    "pending": len(exporter._pending),
                    "arena_idle": exporter._arena.idle,
                    "arena_bytes": exporter._arena.nbytes,
                    "overflow_left": exporter._overflow_left,
                    "broken": exporter.broken,
                }
        return {}
