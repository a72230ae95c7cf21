"""Which class ``worker_shim.PackerDiffusionEngine`` is: ours, or vllm-omni's own engine where that is not the one we know."""

from __future__ import annotations

from typing import Any

from worker_shim.compat import Found
from worker_shim.digests import TESTED
from worker_shim.log import get_logger

logger = get_logger(__name__)


def engine_class(found: Found) -> Any:
    """Ours; or vllm-omni's own, with one warning that says why, where a function that ours relies on is missing or differs."""
    if found.missing or found.changed:
        changed = [f"{name} differs from that of vllm-omni {TESTED}" for name in found.changed]
        why = "; ".join([*found.missing, *changed])
        logger.warning("packer: this is vllm-omni's own engine, which post-processes on its event loop: %s", why)
        from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

        return DiffusionEngine
    from worker_shim.engine.postprocessing import PackerDiffusionEngine

    return PackerDiffusionEngine
