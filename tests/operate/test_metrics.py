"""What Prometheus gets of a packer: over HTTP, from the real command, and what configs/ makes of the names."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml
from packer_process import Packer, running_packer, session, transfer, wait_until
from prometheus_client.parser import text_string_to_metric_families

from packer_service.config import METRICS_ADDRESS, Settings
from packer_service.errors import SettingError
from packer_service.operator import Operator
from packer_service.stats import BOUNDS_S, Cause
from packer_service.wire.protocol import Export

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "configs/grafana/packer.json"
RULES = ROOT / "configs/prometheus/rules.yml"
SCRAPE = ROOT / "configs/prometheus/scrape.yml"
ANYWHERE = "127.0.0.1:0"
NAME = re.compile(r"\bpacker_[a-z_]+")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def url(packer: Packer) -> str:
    packer.wait_log("metrics at http")
    return re.findall(r"metrics at (\S+)", packer.log)[0]


def scraped(packer: Packer) -> str:
    with urllib.request.urlopen(url(packer), timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def samples(text: str) -> Samples:
    """The values, by name and by the labels beside those of the packer."""
    return {
        (sample.name, frozenset(sample.labels.items() - {("device", "host"), ("gpu_uuid", "host")})): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, frozenset(labels.items())]


def names(text: str) -> set[str]:
    """Whatever may be asked for: names of samples, and of counters that have none so far."""
    families = list(text_string_to_metric_families(text))
    counters = {f"{family.name}_total" for family in families if family.type == "counter"}
    return counters | {family.name for family in families} | {s.name for family in families for s in family.samples}


@pytest.fixture(scope="module")
def packer(tmp_path_factory):
    with running_packer(tmp_path_factory.mktemp("packer"), metrics_address=ANYWHERE) as one:
        yield one


def test_outputs_their_bytes_and_their_times_are_counted(packer):
    before = scraped(packer)
    with session(packer) as (engine, worker):
        for _ in range(3):
            transfer(engine, worker, 5000)
        text = scraped(packer)
    assert value(text, "packer_outputs_total") - value(before, "packer_outputs_total") == 3
    assert value(text, "packer_output_bytes_total") - value(before, "packer_output_bytes_total") == 15000
    for name in ("wait", "copy", "handoff"):
        name = f"packer_output_{name}_seconds"
        assert value(text, f"{name}_count") - value(before, f"{name}_count") == 3
        assert value(text, f"{name}_sum") > value(before, f"{name}_sum")
        counts = [value(text, f"{name}_bucket", le=str(bound)) for bound in BOUNDS_S]
        assert counts == sorted(counts)
        assert value(text, f"{name}_bucket", le="+Inf") == value(text, f"{name}_count") >= counts[-1]


def test_an_output_that_is_held_or_in_flight_is_in_the_gauges(packer):
    with session(packer) as (engine, worker):
        worker.export("held", worker.write(bytes(8192)))
        worker.skeleton("held")
        (lease,) = engine.next().leases
        worker.export("waits", worker.write(b"data"), complete=False)
        wait_until(lambda: value(scraped(packer), "packer_outputs_in_flight") == 1, "one is in flight")
        text = scraped(packer)
        assert (value(text, "packer_leases"), value(text, "packer_leased_bytes")) == (1, 8192)
        assert value(text, "packer_oldest_lease_age_seconds") > 0
        assert 8192 <= value(text, "packer_pool_used_bytes") <= value(text, "packer_pool_size_bytes")
        assert value(text, "packer_pool_max_bytes") == 16 << 20
        assert value(text, "packer_sessions", role="engine") == value(text, "packer_sessions", role="worker") == 1
        engine.release(lease.lease)
        wait_until(lambda: value(scraped(packer), "packer_leases") == 0, "the lease is back")


def test_what_is_declined_is_counted_by_its_cause(packer):
    before = value(scraped(packer), "packer_outputs_declined_total", cause="device")
    with session(packer) as (_, worker):
        worker.channel.send(Export("event", 1, (worker.write(b"data"),), bytes(64)))  # the host device has no events
        worker.skeleton("event")
        worker.answer()
    assert value(scraped(packer), "packer_outputs_declined_total", cause="device") == before + 1
    assert value(scraped(packer), "packer_outputs_declined_total", cause="no_room") == 0


def test_every_series_says_whose_it_is_and_there_is_nothing_else(packer):
    for family in text_string_to_metric_families(scraped(packer)):
        assert family.name.startswith("packer_")
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.items() >= {("device", "host"), ("gpu_uuid", "host")}


def test_a_draining_packer_says_so(tmp_path):
    with running_packer(tmp_path / "run", metrics_address=ANYWHERE) as packer, session(packer) as (_, worker):
        assert value(scraped(packer), "packer_draining") == 0
        worker.export("waits", worker.write(b"data"), complete=False)
        with Operator(packer.socket, packer.key) as operator:
            wait_until(lambda: operator.status().in_flight == 1, "the output is in flight")
            assert next(operator.drain(20.0)).in_flight == 1
            assert value(scraped(packer), "packer_draining") == 1


def test_a_port_that_is_taken_is_a_warning_and_the_packer_serves(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with running_packer(tmp_path / "run", metrics_address=address) as packer, session(packer) as (engine, worker):
            transfer(engine, worker)
            (line,) = re.findall(r".*no metrics are served.*", packer.log)
            assert "WARNING" in line
            assert address in line
            assert "metrics_address" in line


def test_a_managed_packer_serves_none_unless_it_is_told_to(tmp_path):
    with running_packer(tmp_path / "run", "--managed", metrics_address="auto") as packer:
        assert "metrics at" not in packer.log
        assert psutil.Process(packer.process.pid).net_connections("inet") == []
    with running_packer(tmp_path / "told", "--managed", "--restarts=4", metrics_address=ANYWHERE) as packer:
        assert value(scraped(packer), "packer_restarts_total") == 4


def test_a_packer_whose_metrics_are_off_imports_nothing_for_them():
    code = (
        "import sys, tempfile; from packer_service.config import Settings; from packer_service.server import Server\n"
        "path = tempfile.mkdtemp() + '/p.sock'\n"
        "server = Server(Settings(device='host', socket=path, pool_bytes=2 << 20), bytes(32), managed=True)\n"
        "server.start(); assert 'prometheus_client' not in sys.modules; server.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("address", "device", "managed", "endpoint"),
    [
        ("auto", "host", False, ("127.0.0.1", 9470)),
        ("auto", "cuda:0", False, ("127.0.0.1", 9470)),
        ("auto", "cuda:3", False, ("127.0.0.1", 9473)),
        ("auto", "cuda:3", True, None),
        ("off", "cuda:0", False, None),
        ("0.0.0.0:80", "cuda:3", False, ("0.0.0.0", 80)),
        ("0.0.0.0:80", "cuda:3", True, ("0.0.0.0", 83)),
        ("[::1]:9000", "host", False, ("::1", 9000)),
    ],
)
def test_the_setting_says_where(address, device, managed, endpoint):
    settings = Settings.load({"metrics_address": address, "device": device}, {})
    assert settings.metrics_endpoint(managed=managed) == endpoint


@pytest.mark.parametrize("address", ["", "on", "9470", ":9470", "localhost", "localhost:", "localhost:web", "h:65536"])
def test_an_address_that_means_nothing_is_refused_with_what_is_allowed(tmp_path, address):
    with pytest.raises(SettingError, match="auto, off or HOST:PORT"):
        Settings.load({"metrics_address": address, "device": "host"}, {}).metrics_endpoint(managed=False)


def test_a_packer_with_such_an_address_does_not_start(tmp_path):
    packer = Packer(tmp_path / "run", metrics_address="everywhere")
    assert packer.report == {
        "error": "metrics_address is 'everywhere'; allowed is auto, off or HOST:PORT, such as 0.0.0.0:9470"
    }
    assert packer.wait() == 1


# -- what is made of the names -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(packer) -> set[str]:
    """Every name that a packer and an executor serve."""
    pytest.importorskip("vllm_omni")
    from prometheus_client import CollectorRegistry, generate_latest

    from worker_shim.engine.metrics import ExecutorCollector

    registry = CollectorRegistry()
    registry.register(ExecutorCollector())
    return names(scraped(packer)) | names(generate_latest(registry).decode())


def dashboard_queries() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    return variables + [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def rule_queries() -> list[str]:
    return [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.mark.engine
@pytest.mark.parametrize("queries", [dashboard_queries, rule_queries])
def test_every_name_that_dashboard_and_alerts_use_is_served(live, queries):
    used = {name for query in queries() for name in NAME.findall(query)}
    assert used
    assert used - live == set()


@pytest.mark.engine
def test_the_page_has_every_metric_and_no_other(live, packer):
    listed = set(re.findall(r"^\| `(packer_\w+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    suffixes = ("_bucket", "_count", "_sum", "_gcount", "_gsum", "_created")
    histograms = {name for name in live if f"{name}_bucket" in live}
    counters = {name.removesuffix("_total") for name in live if name.endswith("_total")}
    parts = {f"{name}{suffix}" for name in histograms for suffix in suffixes}
    assert listed == live - parts - counters


@pytest.mark.engine
def test_the_page_has_every_cause_kind_and_reason():
    from worker_shim.engine.counts import ErrorKind
    from worker_shim.outputs.own_path import OwnPathReason

    page = (ROOT / "docs/metrics.md").read_text()
    assert {each.value for each in (*Cause, *ErrorKind, *OwnPathReason)} <= set(re.findall(r"`(\w+)`", page))


def test_every_panel_has_a_place_of_its_own_and_a_query_or_is_a_row():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert all(x < 24 for x, _ in cells)
        taken |= cells
        assert panel["type"] == "row" or panel["targets"], panel["title"]


def test_every_alert_says_what_it_is_and_how_grave():
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}


def test_the_alerts_name_the_jobs_and_the_example_scrapes_where_a_packer_serves():
    jobs = {job["job_name"]: job for job in yaml.safe_load(SCRAPE.read_text())["scrape_configs"]}
    assert set(re.findall(r'job="([\w-]+)"', RULES.read_text())) <= jobs.keys()
    assert METRICS_ADDRESS in jobs["packer"]["static_configs"][0]["targets"]


@pytest.mark.parametrize(
    "check",
    [("check", "rules", RULES), ("check", "config", SCRAPE), ("test", "rules", ROOT / "tests/operate/alerts.yml")],
)
def test_promtool_finds_nothing_to_object_to(check):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (the Debian package prometheus has it)")
    done = subprocess.run([promtool, *map(str, check)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
