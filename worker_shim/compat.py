"""What of vllm-omni this package takes hold of, in one place, checked before anything is started.

An upgrade that moves one of these is a clear message and vllm-omni's own path, not a hang.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import types
from typing import Any

SUPPORTED = ("0.30",)  # vllm-omni's releases, major.minor

_EXECUTOR = "vllm_omni.diffusion.executor.multiproc_executor:MultiprocDiffusionExecutor"
_WORKER = "vllm_omni.diffusion.worker.diffusion_worker:WorkerProc"
_ENGINE = "vllm_omni.diffusion.diffusion_engine:DiffusionEngine"

# (where, the parameters it must take, the names its code must use: globals, attributes and methods)
HOOKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        f"{_EXECUTOR}._init_executor",
        ("self",),
        ("_launch_workers", "_init_result_queue", "_start_result_pump", "step_execution", "_failure_callbacks"),
    ),
    (f"{_EXECUTOR}._launch_workers", ("self", "broadcast_handle", "wake_events"), ("WorkerProc", "worker_main")),
    (f"{_EXECUTOR}._init_result_queue", ("self", "result_handle"), ()),
    (f"{_EXECUTOR}._start_result_pump", ("self",), ("_result_pump_threads", "_result_mqs")),
    (
        f"{_EXECUTOR}._result_pump",
        ("self", "result_mq"),
        ("dequeue", "_finish_output", "_batch_split_map", "_pump_stop", "_is_failed"),
    ),
    (
        f"{_EXECUTOR}._dequeue_one_with_failure_polling",
        ("self", "deadline", "method", "result_mq"),
        ("step_execution",),
    ),
    (f"{_EXECUTOR}.execute_batch", ("self", "scheduler_output"), ("execute_request", "async_output_id")),
    (f"{_EXECUTOR}.execute_request", ("self", "scheduler_output"), ("any_selected_component_uses_allgather",)),
    (f"{_EXECUTOR}.wait_output_ready", ("self", "async_output_id"), ("_completed_outputs", "_output_futures")),
    (f"{_EXECUTOR}.drop_output", ("self", "async_output_id"), ("_completed_outputs", "_output_futures")),
    (f"{_EXECUTOR}.describe_pending_state", ("self", "async_output_id"), ()),
    (
        f"{_EXECUTOR}._finish_output",
        ("self", "async_output_id", "result", "exc"),
        ("_output_futures", "_completed_outputs"),
    ),
    (f"{_EXECUTOR}._deliver_batch_split", ("self", "per_req_map", "batch_output", "error"), ("_finish_output",)),
    (f"{_EXECUTOR}.shutdown", ("self",), ("_result_pump_threads", "_pump_stop")),
    (
        f"{_WORKER}.__init__",
        ("self", "od_config", "gpu_id"),
        ("_create_worker", "_async_output_loop", "_async_output_queue", "_async_output_thread", "step_execution"),
    ),
    (f"{_WORKER}._create_worker", ("self", "gpu_id"), ()),
    ("vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.__init__", ("self",), ("init_snapshot",)),
    (
        "vllm_omni.diffusion.worker.diffusion_worker:DiffusionWorker.determine_available_kv_memory",
        ("self",),
        ("determine_local_memory", "init_snapshot"),
    ),
    ("vllm_omni.diffusion.worker.diffusion_worker:WorkerWrapperBase.__init__", ("self",), ("worker",)),
    (f"{_WORKER}._return_result", ("self", "output", "rpc_id"), ("_async_output_queue", "_async_output_pending")),
    (f"{_WORKER}._async_output_loop", ("self",), ("_async_output_pending", "_async_output_done")),
    (f"{_WORKER}._enqueue_result", ("self", "msg"), ("_result_mq_lock", "result_mq", "enqueue")),
    (f"{_WORKER}._generate_async_output_id", (), ()),
    (f"{_WORKER}.drain_async_outputs", ("self", "timeout"), ("_async_output_pending", "_async_output_done")),
    (f"{_WORKER}.shutdown", ("self",), ("_async_output_thread",)),
    (f"{_WORKER}.worker_main", (), ("WorkerProc",)),
    # The engine waits for whatever carries an async_output_id, and drops it for a request that was aborted.
    (f"{_ENGINE}.step_streaming", ("self", "request"), ("async_output_id", "wait_output_ready")),
    (f"{_ENGINE}.get_output_stream", ("self", "request_id"), ("finished",)),
    (
        f"{_ENGINE}._finalize_finished_request",
        ("self", "request_id", "runner_output"),
        ("async_output_id", "drop_output", "result"),
    ),
    ("vllm_omni.diffusion.offloader.config:any_selected_component_uses_allgather", ("config",), ()),
    ("vllm_omni.diffusion.media:DiffusionMediaOutput.validate", ("self",), ("prepared_for_transport",)),
    ("vllm_omni.diffusion.worker.utils:RunnerOutput", ("request_id", "finished", "result", "async_output_id"), ()),
    ("vllm_omni.diffusion.data:DiffusionOutput", ("async_output_id", "finished", "error", "aborted", "media"), ()),
    ("vllm_omni.diffusion.ipc:pack_diffusion_output_shm", ("output", "d2h_stream"), ()),
    ("vllm_omni.diffusion.ipc:_array_to_shm", ("array",), ("shared_memory", "SharedMemory")),
    ("vllm_omni.diffusion.ipc:_tensor_to_shm", ("tensor",), ("_array_to_shm",)),
    ("vllm_omni.diffusion.ipc:_ndarray_to_shm", ("array",), ("_array_to_shm",)),
    ("vllm_omni.diffusion.ipc:_pack_value_if_large", ("val",), ("_ndarray_to_shm",)),
    ("vllm_omni.diffusion.ipc:_pack_tensor_if_large", ("val",), ("_tensor_to_shm",)),
    ("vllm_omni.diffusion.ipc:unpack_diffusion_output_shm", ("output",), ()),
    (
        "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait",
        ("self", "timeout_ms"),
        ("last_read", "busy_loop_s"),
    ),
    (
        "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer.__init__",
        ("self", "max_chunk_bytes", "max_chunks"),
        ("data_offset", "shared_memory"),
    ),
    ("vllm_omni.diffusion.data:AsyncDiffusionOutput", ("kind", "rpc_id", "async_output_id", "output", "error"), ()),
)


def problems(hooks: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = HOOKS) -> list[str]:
    """Why this vllm-omni cannot be worked with; empty where it can. Never raises."""
    try:
        version = importlib.metadata.version("vllm-omni")
    except importlib.metadata.PackageNotFoundError:
        return ["vllm-omni is not installed: pip install 'packer-service[vllm]'"]
    found = []
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        found.append(f"vllm-omni is {version}; supported is {', '.join(f'{release}.*' for release in SUPPORTED)}")
    found.extend(problem for hook in hooks if (problem := _missing(*hook)))
    return found


def _missing(where: str, parameters: tuple[str, ...], names: tuple[str, ...]) -> str:
    module, _, path = where.partition(":")
    try:
        target: Any = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        takes = set(inspect.signature(target).parameters)
    except Exception as error:
        return f"{where} is not there ({type(error).__name__}: {error})"
    absent = [name for name in parameters if name not in takes]
    uses = _names(target.__code__) if hasattr(target, "__code__") else set()
    absent += [name for name in names if name not in uses]
    return f"{where} has no {', '.join(absent)}" if absent else ""


def _names(code: types.CodeType) -> set[str]:
    """The names that a function uses, those inside it (comprehensions before Python 3.12) too."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names, *code.co_freevars, *code.co_varnames}.union(*map(_names, inner))
