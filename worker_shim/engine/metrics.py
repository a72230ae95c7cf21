"""The executors' metrics, in the registry that vllm-omni's API server serves at /metrics (prometheus_client's own, REGISTRY).

Everything is read when somebody scrapes; what is counted, the threads of the executors count (worker_shim.engine.counts).
docs/metrics.md has a table of all.

Note [Which process serves /metrics]
vllm-omni makes the executor in the process of its API server where a model is diffusion alone: then REGISTRY is what is served.
Beside an LLM stage, with several replicas or several API servers it is in another process, and nobody reads REGISTRY there.
With PROMETHEUS_MULTIPROC_DIR in the environment (several API servers set it themselves) the API server serves what all
processes keep in files of that directory. A collector keeps nothing there, so ``Mirror`` writes its numbers now and then.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
import weakref
from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeHistogramMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

import packer_service
from packer_service.wire import protocol
from worker_shim.engine.counts import Counts, EngineCounts
from worker_shim.engine.metrics_mirror import Mirror
from worker_shim.engine.packers import Packers
from worker_shim.link import LinkState
from worker_shim.log import get_logger

logger = get_logger(__name__)

_AGES_S = (1.0, 10.0, 60.0, 300.0, 3600.0)


class _Totals:
    """What only ever grows."""

    def __init__(self) -> None:
        self.counts = Counts(EngineCounts())
        self.reconnects = 0
        self.restarts = 0

    def add(self, packers: Packers) -> None:
        packers.counts.add_to(self.counts)
        self.reconnects += sum(keeper.reconnects for keeper in packers.keepers)
        self.restarts += packers.restarts

    def copy(self) -> _Totals:
        other = _Totals()
        other.counts.add(self.counts)
        other.reconnects, other.restarts = self.reconnects, self.restarts
        return other


class ExecutorCollector(Collector):
    """The executors of this process together. ``_lock`` guards which these are, and what those that ended had counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Packers] = weakref.WeakSet()
        self._ended = _Totals()

    def add(self, packers: Packers) -> None:
        with self._lock:
            self._watched.add(packers)

    def remove(self, packers: Packers) -> bool:
        """Whether that was the last one. Its counts stay: a counter never goes down. Idempotent."""
        with self._lock:
            if packers in self._watched:
                self._watched.discard(packers)
                self._ended.add(packers)
            return not self._watched

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            watched = list(self._watched)
            totals = self._ended.copy()
        for packers in watched:
            totals.add(packers)
        yield from _of_outputs(totals.counts)
        yield from _of_packers(watched, totals)
        yield from _of_leases([lease for packers in watched for queue in packers.queues for lease in queue.leases()])


def _of_outputs(counts: Counts) -> Iterator[Metric]:
    yield _counter("outputs", "Outputs that came through packers.", {"": counts.outputs})
    yield _counter("output_bytes", "Bytes of device arrays in them.", {"": counts.nbytes})
    yield _counter("errors", "Outputs that failed between worker and engine.", counts.errors, "kind")
    yield _counter("own_path_outputs", "Outputs that took vllm-omni's own path.", counts.own_path, "reason")


def _of_packers(watched: list[Packers], totals: _Totals) -> Iterator[Metric]:
    states = dict.fromkeys((state.value.replace(" ", "_") for state in LinkState if state is not LinkState.CLOSED), 0)
    fallback = False
    for packers in watched:
        keepers = list(packers.keepers)
        fallback = fallback or not keepers or any(keeper.avoided for keeper in keepers)
        for keeper in keepers:
            state = keeper.state.value.replace(" ", "_")
            states[state] = states.get(state, 0) + 1
    build = GaugeMetricFamily(
        "packer_engine_build_info",
        "Always 1; which releases run.",
        labels=("version", "protocol", "vllm_omni"),
    )
    build.add_metric((packer_service.__version__, str(protocol.VERSION), importlib.metadata.version("vllm-omni")), 1)
    yield build
    yield _gauge("executors", "Executors in this process.", {"": len(watched)})
    yield _gauge("packers", "Packers of these executors, by the state of the link.", states, "state")
    text = (
        "1 where some executor's outputs take vllm-omni's own path at present: with no packer, or one that is given up."
    )
    yield _gauge("fallback_active", text, {"": int(fallback)})
    text = "1 where the last output of some executor took vllm-omni's own path because an operator paused its worker."
    yield _gauge("paused", text, {"": int(any(packers.counts.paused for packers in watched))})
    text = "Connections to a packer after the first."
    yield _counter("reconnects", text, {"": totals.reconnects})
    text = "How often managed packers were started again."
    yield _counter("packer_restarts", text, {"": totals.restarts})


def _of_leases(leases: list[tuple[int, float]]) -> Iterator[Metric]:
    ages_s = [age_s for _, age_s in leases]
    yield _gauge("leases", "Leases that are held, or coming.", {"": len(leases)})
    yield _gauge("leased_bytes", "Bytes of these leases.", {"": sum(nbytes for nbytes, _ in leases)})
    text = "How long the oldest of these leases has been held; 0 where there is none."
    yield _gauge("oldest_lease_age_seconds", text, {"": max(ages_s, default=0.0)})
    text = "How long the leases that are held at present have been."
    buckets = [(floatToGoString(bound_s), sum(age_s <= bound_s for age_s in ages_s)) for bound_s in _AGES_S]
    family = GaugeHistogramMetricFamily("packer_engine_lease_age_seconds", text)
    family.add_metric((), [*buckets, ("+Inf", len(ages_s))], sum(ages_s))
    yield family


def _counter(name: str, text: str, values: Mapping[str, float], label: str = "") -> CounterMetricFamily:
    family = CounterMetricFamily(f"packer_engine_{name}", text, labels=[label] if label else ())
    _fill(family, values, label)
    return family


def _gauge(name: str, text: str, values: Mapping[str, float], label: str = "") -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"packer_engine_{name}", text, labels=[label] if label else ())
    _fill(family, values, label)
    return family


def _fill(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float], label: str) -> None:
    for value_of_label, value in values.items():
        family.add_metric([value_of_label] if label else (), value)


_registering = threading.Lock()
_collector = ExecutorCollector()  # of this process, as is the registry
_registered = False
_mirror: Mirror | None = None


def watch(packers: Packers) -> None:
    """Show these packers' executor in the registry, until ``unwatch``. What goes wrong is a warning: outputs do without."""
    global _registered, _mirror
    with _registering:
        _collector.add(packers)
        try:
            if not _registered:
                REGISTRY.register(_collector)
                _registered = True
            if _mirror is None and "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                _mirror = Mirror(_collector)
        except (ValueError, OSError, RuntimeError) as error:
            logger.warning("packer: the executor's metrics are not served: %s", error)


def unwatch(packers: Packers) -> None:
    """Idempotent."""
    global _registered, _mirror
    with _registering:
        if _collector.remove(packers):
            if _mirror is not None:
                _mirror.close()
                _mirror = None
            if _registered:
                REGISTRY.unregister(_collector)
                _registered = False
