"""What runs inside vllm-omni: the executor in the engine's process, the exporter in the worker's.

    distributed_executor_backend="worker_shim.PackerDiffusionExecutor"

is the whole switch. Nothing here edits vllm-omni; what is relied on is listed and checked in ``compat``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker_shim.engine.executor import PackerDiffusionExecutor
    from worker_shim.engine.postprocessing import PackerDiffusionEngine

__all__ = ["PackerDiffusionEngine", "PackerDiffusionExecutor"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Looked up when asked for: it needs vllm-omni, and most of this package does not.
    from worker_shim import compat

    if name == "PackerDiffusionEngine":
        from worker_shim.engine.own_engine import engine_class

        return engine_class(compat.check(compat.ENGINE_HOOKS))
    found = compat.check()
    if found.missing or found.changed:
        from worker_shim.engine.own_executor import OwnExecutor

        return OwnExecutor
    from worker_shim.engine.executor import PackerDiffusionExecutor

    return PackerDiffusionExecutor
