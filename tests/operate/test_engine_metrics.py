"""What an executor counts, as vllm-omni's /metrics would show it: in prometheus_client's own registry, from real outputs."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from engine_checks import DEVICE, assert_same, outputs, packer_engine
from packer_process import running_packer, wait_until

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

from delivery import GIVEN, assert_delivered, kept, send  # noqa: E402
from prometheus_client import REGISTRY, CollectorRegistry  # noqa: E402
from prometheus_client.multiprocess import MultiProcessCollector  # noqa: E402
from sides import working  # noqa: E402

from packer_service.operator import Operator  # noqa: E402
from worker_shim.engine import metrics  # noqa: E402
from worker_shim.engine.counts import EngineCounts, ErrorKind  # noqa: E402
from worker_shim.engine.packers import Packers  # noqa: E402
from worker_shim.engine.placeholders import Unclaimed  # noqa: E402
from worker_shim.engine.receiver import Delivered  # noqa: E402
from worker_shim.outputs.own_path import OwnPathReason  # noqa: E402

IMAGE = {"height": 256, "width": 256}
NBYTES = 256 * 256 * 3 * 4


def value(name: str, **labels: str) -> float:
    found = REGISTRY.get_sample_value(f"packer_engine_{name}", labels)
    assert found is not None, name
    return found


def shown() -> bool:
    return REGISTRY.get_sample_value("packer_engine_executors") is not None


def own_path(reason: str) -> float:
    return value("own_path_outputs_total", reason=reason)


def test_what_an_engine_gets_and_why_something_does_not_come_through_its_packer_stands_in_the_registry(tmp_path):
    assert not shown()
    with contextlib.ExitStack() as stack:
        packer = stack.enter_context(running_packer(tmp_path / "run", device=DEVICE))
        operator = stack.enter_context(Operator(packer.socket, packer.key))
        settings = {"mode": "sidecar", "socket": packer.socket, "key_file": str(tmp_path / "run" / "key")}
        settings |= {"min_bytes": 64 << 10, "restart_wait_s": 0.0, "retry_s": 600.0}
        running = stack.enter_context(packer_engine(packer=settings))
        images = [{"seed": seed, **IMAGE} for seed in range(3)]
        before = value("outputs_total"), value("output_bytes_total"), own_path("small")
        errors = sum(value("errors_total", kind=kind.value) for kind in ErrorKind)

        received = outputs(running, *images)
        assert value("outputs_total") - before[0] == 3
        assert value("output_bytes_total") - before[1] == 3 * NBYTES
        assert (value("executors"), value("packers", state="connected"), value("fallback_active")) == (1, 1, 0)
        assert (value("leases"), value("leased_bytes")) == (3, 3 * NBYTES)
        assert value("lease_age_seconds_bucket", le="3600.0") == value("lease_age_seconds_gcount") == 3
        assert value("oldest_lease_age_seconds") > 0

        outputs(running, {"seed": 9, "height": 8, "width": 8})
        assert own_path("small") - before[2] == 1
        assert value("paused") == 0

        assert operator.set_paused(True).answered == 1
        paused = own_path("paused")
        assert_same(outputs(running, images[0]), received[:1])
        assert (own_path("paused") - paused, value("paused")) == (1, 1)
        assert operator.set_paused(False).answered == 1
        outputs(running, images[0])
        assert value("paused") == 0

        del received
        wait_until(lambda: gc.collect() >= 0 and value("leases") == 0, "the leases are back")

        list(operator.drain(20.0))
        packer.wait()
        wait_until(lambda: value("packers", state="given_up") == 1, "the engine knows")
        assert value("fallback_active") == 1
        gone = own_path("gone")
        outputs(running, images[0])
        assert own_path("gone") - gone == 1
        assert sum(value("errors_total", kind=kind.value) for kind in ErrorKind) == errors
    assert not shown()


def test_an_executor_with_no_packer_falls_back(request):
    packers = Packers(Delivered(), threading.Event())
    metrics.watch(packers)
    request.addfinalizer(lambda: metrics.unwatch(packers))
    assert (value("executors"), value("fallback_active")) == (1, 1)


def test_what_an_executor_that_ended_had_counted_stays_counted():
    first, second = (Packers(Delivered(), threading.Event()) for _ in range(2))
    metrics.watch(first)
    metrics.watch(second)
    counts = first.counts.new()
    before = value("outputs_total")
    counts.add_output(100)
    metrics.unwatch(first)
    metrics.unwatch(first)
    assert (value("executors"), value("outputs_total") - before) == (1, 1)
    metrics.unwatch(second)
    assert not shown()
    metrics.watch(second)
    assert value("outputs_total") - before == 1
    metrics.unwatch(second)


def test_an_executor_that_nobody_closed_is_not_kept_by_its_metrics():
    packers = Packers(Delivered(), threading.Event())
    metrics.watch(packers)
    del packers
    gc.collect()
    assert value("executors") == 0
    metrics.unwatch(Packers(Delivered(), threading.Event()))
    assert not shown()


def test_an_output_that_stays_in_the_reply_to_its_step_is_counted_and_one_that_failed_is_not():
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.utils import BatchRunnerOutput, RunnerOutput

    counts = EngineCounts().new()
    holder = SimpleNamespace()

    class Dropper:
        def drop(self, output_id: str) -> None:
            pass

    holder.dropper = Dropper()
    with contextlib.closing(Unclaimed(holder.dropper.drop, counts)) as unclaimed:
        results = [
            DiffusionOutput(output=1),
            DiffusionOutput(error="failed"),
            DiffusionOutput(async_output_id="a"),
            None,
        ]
        parts = [RunnerOutput(request_id=str(number), result=result) for number, result in enumerate(results)]
        unclaimed.watch_reply(BatchRunnerOutput(runner_outputs=parts))
        unclaimed.take("a")
    assert counts.own_path[OwnPathReason.IN_REPLY.value] == 1
    assert sum(counts.own_path.values()) == 1


def test_a_restart_of_the_packer_is_a_reconnect_and_no_fallback(tmp_path, request):
    packers = Packers(Delivered(), threading.Event())
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running_packer(tmp_path / "run"))
        engine = stack.enter_context(kept(first))
        packers.keepers.append(engine.keeper)
        metrics.watch(packers)
        request.addfinalizer(lambda: metrics.unwatch(packers))
        worker = stack.enter_context(working(engine, **GIVEN))
        before = value("reconnects_total")
        first.process.kill()
        wait_until(lambda: value("packers", state="waiting") == 1, "the engine knows")
        assert value("fallback_active") == 0
        first.wait()
        stack.enter_context(running_packer(tmp_path / "run"))
        wait_until(lambda: value("packers", state="connected") == 1, "the engine is connected again")
        assert value("reconnects_total") - before == 1
        assert_delivered(engine, worker, send(worker, "after"))


WRITER = """
import os, sys
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from worker_shim.engine.metrics_mirror import Mirror

class Collected:
    number = 0
    def collect(self):
        self.number += 5
        counter = CounterMetricFamily("packer_engine_outputs", "text", labels=["reason"])
        counter.add_metric(["small"], self.number)
        yield counter
        yield GaugeMetricFamily("packer_engine_leases", "text", value=3)
        yield GaugeMetricFamily("packer_engine_oldest_lease_age_seconds", "text", value=int(sys.argv[1]))

mirror = Mirror(Collected())
mirror.close()
print("written", flush=True)
sys.stdin.read()
"""


def test_in_the_multi_process_mode_of_prometheus_client_the_numbers_of_all_processes_are_summed_up(tmp_path):
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        for age in (7, 4):
            command = [sys.executable, "-c", WRITER, str(age)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, env=environ, **pipes))
            stack.callback(process.stdin.close)
            assert process.stdout.readline() == b"written\n"
        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(tmp_path))
        # Written twice: when it began, and when it ended.
        assert registry.get_sample_value("packer_engine_outputs_total", {"reason": "small"}) == 20
        assert registry.get_sample_value("packer_engine_leases", {}) == 6
        assert registry.get_sample_value("packer_engine_oldest_lease_age_seconds", {}) == 7


def test_where_the_directory_was_named_too_late_a_warning_says_so_and_the_registry_has_the_metrics(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    packers = Packers(Delivered(), threading.Event())
    said: list[str] = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *given: said.append(text % given))
    metrics.watch(packers)
    try:
        assert value("executors") == 1
        assert "PROMETHEUS_MULTIPROC_DIR was set after" in said[0]
    finally:
        metrics.unwatch(packers)
