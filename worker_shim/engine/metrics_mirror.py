"""A collector's numbers, written every few seconds to where prometheus_client's multi-process mode looks for them.

In that mode (PROMETHEUS_MULTIPROC_DIR) a process keeps its values in files of that directory, and another serves the sum of
all. See Note [Which process serves /metrics] in worker_shim.engine.metrics.
"""

from __future__ import annotations

import threading
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, values
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from worker_shim.log import get_logger

logger = get_logger(__name__)

_PERIOD_S = 2.0
_LARGEST = frozenset(
    {"packer_engine_oldest_lease_age_seconds", "packer_engine_build_info"}
)  # of these a sum says nothing


class Mirror:
    """One collector's, on a thread of its own until ``close``. Counters and gauges: a histogram cannot be set.

    RuntimeError where prometheus_client was imported before the directory was named: it has settled for one process then.
    """

    def __init__(self, collector: Collector) -> None:
        if not getattr(values.ValueClass, "_multiprocess", False):
            raise RuntimeError(
                "PROMETHEUS_MULTIPROC_DIR was set after prometheus_client was imported: set it at the start"
            )
        self._collector = collector
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="packer-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._write()
        while not self._closing.wait(_PERIOD_S):
            self._write()
        self._write()

    def _write(self) -> None:
        try:
            for family in self._collector.collect():
                if family.type in ("counter", "gauge"):
                    write(family)
        except Exception:
            logger.exception("packer: the executor's metrics cannot be written to PROMETHEUS_MULTIPROC_DIR")

    def close(self) -> None:
        """Write what is left to say, and end."""
        self._closing.set()
        self._thread.join(timeout=5.0)


_metrics: dict[str, Counter | Gauge] = {}  # by name; their files live as long as this process
_written: dict[tuple[str, ...], float] = {}  # what counters were raised to


def write(family: Metric) -> None:
    """Have this process's files say what ``family`` says."""
    for sample in family.samples:
        names, labels = tuple(sample.labels), tuple(sample.labels.values())
        metric = _metrics.get(family.name)
        if metric is None:
            metric = _metrics[family.name] = _new(family, names)
        one = metric.labels(*labels) if names else metric
        if isinstance(one, Counter):
            key = (family.name, *labels)
            one.inc(max(sample.value - _written.get(key, 0.0), 0.0))
            _written[key] = sample.value
        else:
            one.set(sample.value)


def _new(family: Metric, labels: tuple[str, ...]) -> Counter | Gauge:
    registry = CollectorRegistry()  # nobody's: REGISTRY has the collector itself
    if family.type == "counter":
        return Counter(family.name, family.documentation, labels, registry=registry)
    mode: Literal["livemax", "livesum"] = "livemax" if family.name in _LARGEST else "livesum"
    return Gauge(family.name, family.documentation, labels, registry=registry, multiprocess_mode=mode)
