"""What stands for PackerDiffusionExecutor where vllm-omni is not the one we know: vllm-omni's own, with nothing overridden.

Which it is can only be said when there is an engine, whose ``additional_config`` may hold the settings ``fallback`` and
``compatibility``: so that is decided as the executor is made.
"""

from __future__ import annotations

import types
from typing import Any

from packer_service.errors import PackerUnavailable
from worker_shim import compat
from worker_shim.digests import TESTED
from worker_shim.log import get_logger
from worker_shim.settings import engine_settings

logger = get_logger(__name__)


try:
    from vllm_omni.diffusion.executor.abstract import DiffusionExecutor

    # What vllm-omni itself takes for "mp", wherever that is.
    _Own: Any = DiffusionExecutor.get_class(types.SimpleNamespace(distributed_executor_backend="mp", num_gpus=1))
except Exception as error:  # whatever another release does there
    raise ImportError(
        f"there is neither a vllm-omni that the packer works with ({'; '.join(compat.check().missing)}) nor vllm-omni's own"
        f" executor 'mp' ({type(error).__name__}: {error}): do not name worker_shim as distributed_executor_backend"
    ) from error


class OwnExecutor(_Own):
    """vllm-omni's own executor. It says why in one warning; PackerUnavailable where ``fallback="fail"``.

    With ``compatibility="lenient"``, where functions only differ from those we know, it gives a PackerDiffusionExecutor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        found = compat.check()
        settings = engine_settings(*args, **kwargs)
        changed = (
            f"of vllm-omni {found.version} these differ from {TESTED}, with which this release was tested:"
            f" {', '.join(found.changed)}"
        )
        if not found.missing and settings.compatibility == "lenient":
            logger.warning("packer: serving all the same (compatibility='lenient'): %s", changed)
            from worker_shim.engine.executor import PackerDiffusionExecutor

            return PackerDiffusionExecutor(*args, **kwargs)
        why = "; ".join(found.missing) or f"{changed}. The setting compatibility='lenient' uses the packer all the same"
        if settings.fallback == "fail":
            raise PackerUnavailable(why)
        logger.warning(
            "packer: serving through vllm-omni's own executor: %s. The setting fallback='fail' refuses instead", why
        )
        return super().__new__(cls)
