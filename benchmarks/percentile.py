"""The one statistic of the benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(samples: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile: always a value that was measured."""
    ordered = sorted(samples)
    return ordered[max(math.ceil(percent * len(ordered) / 100), 1) - 1]
