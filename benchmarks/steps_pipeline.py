"""The pipeline of benchmarks.steps: it times what the worker does with an output."""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.worker import diffusion_worker

from benchmarks.pipelines import BenchmarkPipeline
from benchmarks.stopwatch import ENTERED, Stopwatch
from worker_shim import link
from worker_shim.outputs import survey
from worker_shim.worker.arena import Arena
from worker_shim.worker.exporter import Exporter


class SteppedPipeline(BenchmarkPipeline):
    """Its outputs are BenchmarkPipeline's."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        stopwatch, proc = Stopwatch("worker"), diffusion_worker.WorkerProc
        stopwatch.time(survey, "survey", "find the tensors")
        stopwatch.time(Arena, "allocate", "allocate slots")
        stopwatch.time(link.Link, "post", "send a message to the packer")
        stopwatch.time(Exporter, "stage", "stage: tell the packer, copy, signal")
        stopwatch.time(proc, "_enqueue_result", "send COMPUTE_DONE (vLLM's queue)")
        stopwatch.time(Exporter, "submit_now", "pickle the skeleton, send it")
        stopwatch.time(proc, "_return_result", ENTERED)
