"""The settings of an engine, with a warning for each that was meant and is none."""

from __future__ import annotations

import os
from typing import Any

from packer_service.config import Settings, near_misses
from worker_shim.log import get_logger

logger = get_logger(__name__)


def engine_settings(*args: Any, **kwargs: Any) -> Settings:
    """From the environment and ``additional_config`` of what an executor is made with, vllm-omni's OmniDiffusionConfig."""
    given = [each.additional_config for each in (*args, *kwargs.values()) if hasattr(each, "additional_config")]
    additional_config = given[0] if given else None
    settings = Settings.of_engine(additional_config)
    for sentence in near_misses(os.environ, additional_config):
        logger.warning("packer: %s", sentence)
    return settings
