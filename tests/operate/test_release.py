"""What a release consists of: built as the workflow builds it, installed where there is no torch, and run there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from packer_service import __version__

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "packer.lock"
SOURCES = ("packer_service", "worker_shim", "requirements", "configs")
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
SECRET = "configs/container/secrets/packer-key"
UNREACHED = r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ProxyError"  # pip's words
pytestmark = pytest.mark.timeout(180)


def own_environment() -> dict[str, str]:
    """Without what would have a command find the checkout, or settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PACKER_"))}


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=own_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
    )
    if done.returncode and re.search(UNREACHED, done.stdout) and "CI" not in os.environ:
        pytest.skip("no package registry can be reached from this machine")
    assert done.returncode == 0, done.stdout
    return done.stdout


class Release(NamedTuple):
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The sdist of a copy of the checkout, and the wheel that pip builds from that sdist."""
    base = tmp_path_factory.mktemp("release")
    source, dist = base / "source", base / "dist"
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    (source / SECRET).parent.mkdir(exist_ok=True)  # as whoever followed docs/deploy.md has it there
    (source / SECRET).write_text("k" * 32)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, dist, cwd=source)
    (sdist,) = dist.iterdir()
    run(sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", base, sdist, cwd=base)
    (wheel,) = base.glob("*.whl")
    return Release(sdist, wheel)


@pytest.fixture(scope="module")
def installed(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment that holds the wheel and what the lock file names, checked by its hashes."""
    base = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", base / "venv", cwd=base)
    digest = hashlib.sha256(release.wheel.read_bytes()).hexdigest()
    (base / "all.txt").write_text(f"-r {LOCK}\n{release.wheel} --hash=sha256:{digest}\n")
    pip = (sys.executable, "-m", "pip", "--python", base / "venv" / "bin" / "python")
    run(*pip, "install", "--no-compile", "--retries=1", "-r", base / "all.txt", cwd=base)
    return base / "venv" / "bin"


def test_sdist_and_wheel_hold_every_module_and_no_test(release):
    modules = {str(path.relative_to(ROOT)) for name in SOURCES[:2] for path in (ROOT / name).rglob("*.py")}
    with zipfile.ZipFile(release.wheel) as wheel:
        assert {name for name in wheel.namelist() if name.endswith(".py")} == modules
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    with tarfile.open(release.sdist) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert held >= modules | {"LICENSE", "CHANGELOG.md", "requirements/packer.lock"}
    assert not [name for name in held if name.startswith(("tests/", "benchmarks/"))]
    assert SECRET not in held


def test_the_wheel_runs_on_what_the_lock_file_names_and_brings_no_torch(installed):
    script = (
        "import importlib.metadata, json;"
        "found = {d.name.lower().replace('_', '-'): d.version for d in importlib.metadata.distributions()};"
        "print(json.dumps(found))"
    )
    found = json.loads(run(installed / "python", "-c", script, cwd=installed))
    assert found.pop("packer-service") == __version__
    locked = re.findall(r"^([\w.-]+)==([\w.]+)", LOCK.read_text(), re.MULTILINE)
    assert found.items() <= set(locked)
    assert not found.keys() & {"torch", "vllm", "vllm-omni", "numpy"}


def test_units_rules_and_dashboard_come_with_it(installed):
    shared = installed.parent / "share" / "packer-service"
    for name in ("systemd", "prometheus", "grafana"):
        assert {path.name for path in (shared / name).iterdir()} == {
            path.name for path in (ROOT / "configs" / name).iterdir()
        }


def test_the_installed_command_says_its_version_and_its_settings(installed, tmp_path):
    assert run(installed / "packer-service", "--version", cwd=tmp_path) == f"{__version__}\n"
    settings = json.loads(run(installed / "packer-service", "config", "--json", cwd=tmp_path))["settings"]
    assert settings["device"] == {"value": "cuda:0", "source": "default", "where": None}


def test_the_installed_packer_serves_and_ends_when_it_is_told_to(installed, tmp_path):
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("k" * 32)
    (tmp_path / "run").mkdir(mode=0o700)
    socket = tmp_path / "run" / "packer.sock"
    reader, writer = os.pipe()
    options = [f"--socket={socket}", f"--key-file={key}", "--pool-bytes=2MiB", f"--ready-fd={writer}"]
    packer = subprocess.Popen(
        [installed / "packer-service", "serve", "--device=host", *options],
        cwd=tmp_path,
        env=own_environment(),
        pass_fds=[writer],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        os.close(writer)
        with os.fdopen(reader) as pipe:
            report = json.loads(pipe.readline())  # or the end of the pipe, where the packer ended
        assert report["pid"] == packer.pid, report
        assert socket.is_socket()
        packer.send_signal(signal.SIGTERM)
        log = packer.communicate(timeout=30)[1]
        assert (packer.returncode, "packer stops: SIGTERM" in log) == (0, True), log
        assert not socket.exists()
    finally:
        packer.kill()
        packer.wait()


def test_the_workflow_publishes_only_a_tag_and_only_what_it_tested():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["publish"]["needs"] == ["build", "test"]
    assert jobs["publish"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert workflow["permissions"] == {"contents": "read"}
    rights = {name: job.get("permissions", {}) for name, job in jobs.items()}
    assert [name for name, given in rights.items() if given.get("id-token") == "write"] == ["build", "publish"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert not [step for step in steps if "password" in step.get("with", {})]
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text()
