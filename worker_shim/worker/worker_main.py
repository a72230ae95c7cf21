"""The worker process's entry point: vllm-omni's own, with its WorkerProc replaced by ours in this process only."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection
from typing import Any

from vllm_omni.diffusion.worker import diffusion_worker

from packer_service.descriptors import open_standard_descriptors
from packer_service.errors import PackerUnavailable
from worker_shim.worker.proc import PackerWorkerProc
from worker_shim.worker_config import Refuses, WorkerConfig


def worker_main(*args: Any, worker_config: WorkerConfig, reports: Connection, late: Connection, **kwargs: Any) -> None:
    """vllm-omni's executor only learns that a worker is ready or ended; what ours should know goes through ``reports``."""
    open_standard_descriptors()
    # Only modules are there yet. vllm-omni's shutdown collects garbage five times, and each would walk all of them.
    gc.freeze()
    main = diffusion_worker.WorkerProc.worker_main
    ours = {"worker_config": worker_config, "late": late, "reports": reports}
    diffusion_worker.WorkerProc = type("PackerWorkerProc", (PackerWorkerProc,), ours)
    try:
        main(*args, **kwargs)
    except PackerUnavailable as error:
        reports.send(Refuses(str(error)))
        raise
