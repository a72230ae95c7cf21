"""A packer's metrics for Prometheus: what ``Stats`` counted and what the status says, served over HTTP on threads of its own.

Everything is read when somebody scrapes, and nothing is counted here: no output waits for a metric. The registry is its own, so
that nothing else is served than docs/metrics.md has in its table.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from packer_service.stats import BOUNDS_S, Cause, Histogram, Stats
from packer_service.status import Status

logger = logging.getLogger(__name__)

_LABELS = ("device", "gpu_uuid")


class PackerCollector(Collector):
    """Reads one packer at each scrape. ``status`` takes locks for bookkeeping alone, as for an operator who asks."""

    def __init__(self, status: Callable[[], Status], stats: Stats) -> None:
        self._status, self._stats = status, stats

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        place = (status.device, status.device_uuid)
        build: _Values = {(status.version, str(status.protocol)): 1}
        yield _gauge("build_info", "Always 1; which release runs.", place, build, ("version", "protocol"))
        yield from self._outputs(status, place)
        for name, histogram in self._stats.histograms().items():
            yield _histogram(f"output_{name}_seconds", _HISTOGRAMS[name], place, histogram)
        yield from self._pool(status, place)
        yield from self._life(status, place)

    def _outputs(self, status: Status, place: Sequence[str]) -> Iterator[Metric]:
        yield _counter("outputs", "Outputs that the engine was given.", place, {(): status.published})
        yield _counter("output_bytes", "Bytes of device arrays in them.", place, {(): status.published_bytes})
        declined: _Values = {(cause.value,): status.declined.get(cause.value, 0) for cause in Cause}
        text = "Outputs that were declined, so that they took vllm-omni's own path."
        yield _counter("outputs_declined", text, place, declined, ("cause",))
        failed: _Values = {(cause.value,): status.failed.get(cause.value, 0) for cause in Cause}
        yield _counter("outputs_failed", "Outputs whose requests failed.", place, failed, ("cause",))
        yield _counter("outputs_withdrawn", "Outputs that their worker took back.", place, {(): status.withdrawn})
        text = "Outputs that were exported and have not ended."
        yield _gauge("outputs_in_flight", text, place, {(): status.in_flight})
        text = "Bytes a second that were published in the last five seconds."
        yield _gauge("bandwidth_bytes_per_second", text, place, {(): status.bytes_per_s})

    def _pool(self, status: Status, place: Sequence[str]) -> Iterator[Metric]:
        engines = status.engines
        for name, text, value in (
            ("pool_size_bytes", "Pinned host memory that all pools have.", status.pool_bytes),
            ("pool_used_bytes", "Of it, what outputs take up: being copied, or leased.", status.pool_used_bytes),
            ("pool_max_bytes", "What all pools may have (setting pool_max_bytes).", status.pool_max_bytes),
            ("leases", "Leases that engines have.", sum(each.leases for each in engines)),
            ("leased_bytes", "Bytes of these leases.", sum(each.leased_bytes for each in engines)),
            (
                "oldest_lease_age_seconds",
                "Since the oldest of these leases was granted; 0 where there is none.",
                max((each.oldest_lease_s for each in engines), default=0.0),
            ),
        ):
            yield _gauge(name, text, place, {(): value})
        text = "How often an output waited for room in the pool."
        yield _counter("pool_waits", text, place, {(): status.pool_waits})

    def _life(self, status: Status, place: Sequence[str]) -> Iterator[Metric]:
        engines = status.engines
        sessions: _Values = {("engine",): len(engines), ("worker",): status.workers}
        yield _gauge("sessions", "Engines and workers that are connected.", place, sessions, ("role",))
        paused = sum(each.paused_workers for each in engines)
        yield _gauge("paused_workers", "Workers that an operator paused.", place, {(): paused})
        draining = int(status.state != "ready")
        yield _gauge("draining", "1 where this packer lets nobody in and ends soon.", place, {(): draining})
        text = "When this packer started, in seconds since the epoch."
        yield _gauge("start_time_seconds", text, place, {(): status.started_at})
        error: _Values = {} if status.last_error is None else {(): status.last_error.at}
        text = "When it last logged an error, in seconds since the epoch; nothing where it never did."
        yield _gauge("last_error_time_seconds", text, place, error)
        restarts: _Values = {} if status.restarts is None else {(): status.restarts}
        text = "How often its engine had started it again; nothing where nobody counts (a service)."
        yield _counter("restarts", text, place, restarts)


_HISTOGRAMS = {
    "wait": "From the export to the begin of the copy: for the worker's forward, and for room in the pool.",
    "copy": "From the begin of the copy to its end.",
    "handoff": "From the export until the engine was told.",
}

_Values = dict[tuple[str, ...], float]
"""A value for each tuple of values of the labels that a metric has beside those of its packer."""


def _counter(
    name: str, text: str, place: Sequence[str], values: _Values, labels: Sequence[str] = ()
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"packer_{name}", text, labels=[*_LABELS, *labels])
    for more, value in values.items():
        family.add_metric([*place, *more], value)
    return family


def _gauge(
    name: str, text: str, place: Sequence[str], values: _Values, labels: Sequence[str] = ()
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"packer_{name}", text, labels=[*_LABELS, *labels])
    for more, value in values.items():
        family.add_metric([*place, *more], value)
    return family


def _histogram(name: str, text: str, place: Sequence[str], histogram: Histogram) -> HistogramMetricFamily:
    """Prometheus wants to know how many were at most as long as each bound; ``Histogram`` has those between two bounds."""
    family = HistogramMetricFamily(f"packer_{name}", text, labels=_LABELS)
    bounds = [*map(floatToGoString, BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, map(float, itertools.accumulate(histogram.counts)), strict=True))
    family.add_metric(place, buckets, histogram.sum_s)
    return family


class Endpoint:
    """Serves metrics over HTTP until ``close``. OSError where its address cannot be had, RuntimeError where no thread can."""

    def __init__(self, collector: Collector, host: str, port: int) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._server, self._thread = start_http_server(port, host, registry)
        self._thread.name = "metrics"
        self.address: str = "{}:{}".format(*self._server.server_address[:2])

    def close(self) -> None:
        self._server.socket.shutdown(socket.SHUT_RDWR)  # it wakes the thread, which else looks up every half second
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(status: Callable[[], Status], stats: Stats, host: str, port: int) -> Endpoint | None:
    """The endpoint of a packer. None, and a warning, where the address cannot be had: the packer does without."""
    try:
        endpoint = Endpoint(PackerCollector(status, stats), host, port)
    except (OSError, RuntimeError) as error:
        logger.warning(
            "no metrics are served at %s:%d: %s. Set metrics_address to a HOST:PORT that is free, or to 'off'",
            host,
            port,
            error,
        )
        return None
    logger.info("metrics at http://%s/metrics", endpoint.address)
    return endpoint
