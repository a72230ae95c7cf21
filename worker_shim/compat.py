"""What of vllm-omni this package takes hold of, in one place, checked before any of it is imported or overridden.

``worker_shim`` asks ``check`` when vllm-omni asks it for the executor. Where a name is gone, or the release is another, that is
vllm-omni's own executor (``worker_shim.engine.own_executor``). Names alone do not say that a function still does what we rely
on: so the source of each is known by its digest (``worker_shim.digests``), and one that differs is left alone too, unless the
setting ``compatibility`` says otherwise.

    python -m worker_shim.compat      # writes worker_shim/digests.py anew, of the vllm-omni that is installed: after reading
                                      # what changed in the functions it names, and after the tests have passed
    python -m worker_shim.compat --check      # prints what was found, as one line of JSON (`packer-service doctor` reads it)
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from worker_shim.digests import DIGESTS, TESTED

SUPPORTED = ("0.30",)  # vllm-omni's releases, major.minor

_EXECUTOR = "vllm_omni.diffusion.executor.multiproc_executor:MultiprocDiffusionExecutor"
_WORKERS = "vllm_omni.diffusion.worker.diffusion_worker"
_WORKER = f"{_WORKERS}:WorkerProc"
_ENGINE = "vllm_omni.diffusion.diffusion_engine:DiffusionEngine"
_DATA = "vllm_omni.diffusion.data"
_IPC = "vllm_omni.diffusion.ipc"
_SHM = "vllm.distributed.device_communicators.shm_broadcast"

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
    (f"{_WORKERS}:DiffusionWorker.__init__", ("self",), ("init_snapshot",)),
    (
        f"{_WORKERS}:DiffusionWorker.determine_available_kv_memory",
        ("self",),
        ("determine_local_memory", "init_snapshot"),
    ),
    (f"{_WORKERS}:WorkerWrapperBase.__init__", ("self",), ("worker",)),
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
    (f"{_DATA}:DiffusionOutput", ("async_output_id", "finished", "error", "aborted", "media"), ()),
    (f"{_IPC}:pack_diffusion_output_shm", ("output", "d2h_stream"), ()),
    (f"{_IPC}:_array_to_shm", ("array",), ("shared_memory", "SharedMemory")),
    (f"{_IPC}:_tensor_to_shm", ("tensor",), ("_array_to_shm",)),
    (f"{_IPC}:_ndarray_to_shm", ("array",), ("_array_to_shm",)),
    (f"{_IPC}:_pack_value_if_large", ("val",), ("_ndarray_to_shm",)),
    (f"{_IPC}:_pack_tensor_if_large", ("val",), ("_tensor_to_shm",)),
    (f"{_IPC}:unpack_diffusion_output_shm", ("output",), ()),
    (f"{_SHM}:SpinCondition.wait", ("self", "timeout_ms"), ("last_read", "busy_loop_s")),
    (f"{_SHM}:ShmRingBuffer.__init__", ("self", "max_chunk_bytes", "max_chunks"), ("data_offset", "shared_memory")),
    ("vllm_omni.diffusion.executor.multiproc_executor:WorkerProc", (), ()),
    ("vllm_omni.diffusion.worker.utils:BatchRunnerOutput", ("runner_outputs",), ()),
    (f"{_DATA}:OmniDiffusionConfig", ("additional_config", "step_execution", "parallel_config"), ()),
    (f"{_DATA}:AsyncOutputKind.COMPUTE_DONE", (), ()),
    (f"{_DATA}:AsyncOutputKind.OUTPUT_READY", (), ()),
    ("vllm_omni.platforms:current_omni_platform", (), ()),
    (f"{_DATA}:AsyncDiffusionOutput", ("kind", "rpc_id", "async_output_id", "output", "error"), ()),
)

# What ``PackerDiffusionEngine`` relies on, which may be selected with any executor.
ENGINE_HOOKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        f"{_ENGINE}.step_streaming",
        ("self", "request"),
        (
            *("async_output_id", "_check_and_start_background_loop", "_add_prepared_request", "get_output_stream"),
            *("postprocess_output", "update"),
        ),
    ),
    (f"{_ENGINE}.get_output_stream", ("self", "request_id"), ("finished",)),
    (f"{_ENGINE}.postprocess_output", ("self", "request", "output"), ("aborted", "error", "request_started", "media")),
    (f"{_ENGINE}._add_prepared_request", ("self", "request"), ()),
    (f"{_ENGINE}._check_and_start_background_loop", ("self",), ("_busy_loop",)),
    (f"{_ENGINE}._init_runtime_state", ("self",), ()),
    (f"{_ENGINE}.close", ("self",), ()),
    ("vllm_omni.diffusion.diffusion_engine:_async_output_timeout", (), ()),
    ("vllm_omni.diffusion.diffusion_engine:_ASYNC_OUTPUT_TIMEOUT_ENV", (), ()),
    (f"{_DATA}:DiffusionOutput", ("async_output_id", "error", "aborted", "media", "output", "request_started"), ()),
)


@dataclass(frozen=True)
class Found:
    """``missing``: why nothing of ours may be in force. ``changed``: functions that are there, and are not those we know."""

    version: str
    missing: Sequence[str]
    changed: Sequence[str]


def check(hooks: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = HOOKS) -> Found:
    """Compare the installed vllm-omni with what we rely on. Whatever it is like, this raises nothing of its."""
    try:
        version = str(importlib.metadata.version("vllm-omni"))  # None where what was installed does not say
    except Exception as error:
        why = (
            "is not installed"
            if isinstance(error, importlib.metadata.PackageNotFoundError)
            else f"is broken ({error!r})"
        )
        return Found("", [f"vllm-omni {why}: pip install 'packer-service[vllm]'"], [])
    missing, changed = [], []
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        missing.append(f"vllm-omni is {version}; supported is {', '.join(f'{release}.*' for release in SUPPORTED)}")
    for where, parameters, names in hooks:
        try:
            target = _find(where)
            absent = _absent(target, parameters, names)
        except (Exception, SystemExit) as error:  # whatever an import of another release meets
            missing.append(f"{where} is not there ({type(error).__name__}: {error})")
            continue
        if absent:
            missing.append(f"{where} has no {', '.join(absent)}")
        elif inspect.isfunction(target) and digest(target) != DIGESTS.get(_short(where)):
            changed.append(where)
    return Found(version, missing, changed)


def _find(where: str) -> Any:
    module, _, path = where.partition(":")
    target: Any = importlib.import_module(module)
    for part in path.split("."):
        target = getattr(target, part)
    return target


def _absent(target: Any, parameters: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    takes = inspect.signature(target).parameters if parameters else {}
    uses = _names(target.__code__) if names and hasattr(target, "__code__") else set()
    return [name for name in parameters if name not in takes] + [name for name in names if name not in uses]


def digest(function: types.FunctionType) -> str:
    """Of its source without indentation, blank lines and whole-line comments, on any Python; "" where that is not to be had."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except Exception:  # there is none, or it was changed under the running process, and is no Python from that line on
        return ""
    lines = [line.rstrip() for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _short(where: str) -> str:
    """With the last part of the module alone, as ``DIGESTS`` has it."""
    module, _, path = where.partition(":")
    return f"{module.rpartition('.')[2]}:{path}"


def installed_digests() -> dict[str, str]:
    """The digest of each function in ``HOOKS`` and ``ENGINE_HOOKS``, of the vllm-omni that is installed."""
    found = {where: _find(where) for where, _, _ in sorted({*HOOKS, *ENGINE_HOOKS})}
    return {_short(where): digest(target) for where, target in found.items() if inspect.isfunction(target)}


def _names(code: types.CodeType) -> set[str]:
    """The names that a function uses, those inside it (comprehensions before Python 3.12) too."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names, *code.co_freevars, *code.co_varnames}.union(*map(_names, inner))


def _write() -> None:
    path, changed = Path(__file__).with_name("digests.py"), check((*HOOKS, *ENGINE_HOOKS)).changed
    lines = ['"""Written by ``python -m worker_shim.compat``: see there."""', ""]
    lines += [f'TESTED = "{importlib.metadata.version("vllm-omni")}"  # vllm-omni', "DIGESTS = {"]
    lines += [f'    "{where}": "{found}",' for where, found in installed_digests().items()]
    path.write_text("\n".join([*lines, "}"]) + "\n")
    print(*changed, f"{path} is written", sep="\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        print(json.dumps({**asdict(check()), "tested": TESTED}))
    else:
        _write()
