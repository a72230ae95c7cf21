"""A function of vllm-omni's run with other globals than its module's, which stays as it is."""

from __future__ import annotations

import types
from typing import Any


def rebound(function: Any, **names: Any) -> types.FunctionType:
    """``function``, which finds ``names`` instead of its module's own."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
