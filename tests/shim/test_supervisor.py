"""Managed packers as the supervisor starts them: which code they run, with which environment, on which device."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from packer_process import wait_until

from packer_service.config import Settings
from packer_service.errors import PackerUnavailable
from packer_service.wire import handshake
from worker_shim.engine.supervisor import ManagedPacker, Supervisor

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"pool_bytes": "2MiB", "pool_max_bytes": "16MiB"}


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    return short_path


@contextlib.contextmanager
def supervising() -> Iterator[Supervisor]:
    supervisor = Supervisor(Settings.load(SETTINGS))
    try:
        yield supervisor
    finally:
        supervisor.stop()


def serves(supervisor: Supervisor, packer: ManagedPacker) -> bool:
    channel, welcome = handshake.connect(packer.socket, supervisor.key, "engine", "a session")
    channel.close()
    assert packer.process is not None
    return welcome.pid == packer.process.pid


def test_a_managed_packer_serves_whom_it_gave_the_key_and_its_end_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with supervising() as supervisor:
        packer = supervisor.start("host")
        assert serves(supervisor, packer)
        (directory,) = tmp_path.iterdir()
        assert Path(packer.socket).parent == directory
        assert directory.stat().st_mode & 0o777 == 0o700
        assert not [path for path in directory.iterdir() if path.is_file() and supervisor.key in path.read_bytes()]
    assert list(tmp_path.iterdir()) == []


# -- which code --------------------------------------------------------------------------------------------------------

START = """
import os, sys
sys.path[:0] = {path!r}
from packer_service.config import Settings
from worker_shim.engine.supervisor import Supervisor
if __name__ == "__main__":
    supervisor = Supervisor(Settings.load({settings!r}))
    try:
        supervisor.start("host")
    finally:
        supervisor.stop()
"""


def start_elsewhere(cwd: Path, *path: Path, module_path: str = "", script: Path | None = None) -> None:
    """Start and stop a packer in a process of its own, whose working directory is ``cwd``."""
    code = START.format(path=[str(each) for each in path], settings=SETTINGS)
    environ = {**os.environ, "PYTHONPATH": module_path}
    command = ["-c", code]
    if script is not None:
        script.write_text(code)
        command = [str(script)]
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def copy_packages(directory: Path, add: str = "") -> Path:
    """Both packages, the packer's ``server`` module with a line more."""
    for name in ("packer_service", "worker_shim"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (directory / "packer_service" / "server.py").open("a") as server:
        server.write(f"\n{add}\n")
    return directory


def saying_so(path: Path) -> str:
    return f"Path({str(path)!r}).touch()"


@pytest.mark.parametrize(
    "how", ["code", "a script there", "a script there and an empty entry in PYTHONPATH", "a script"]
)
def test_no_file_in_the_working_directory_is_the_packers_code(tmp_path, how):
    """Whichever way the engine was started. The names are of modules that a packer imports, and this engine did not there."""
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    names = ["typer", "rich", "shellingham"]
    names += ["queue", "logging", "sitecustomize", "packer_service"] if how == "a script" else []
    for name in names:
        (cwd / f"{name}.py").write_text("raise SystemExit('the working directory is code')")
    script = {"code": None, "a script": tmp_path / "serve.py"}.get(how, cwd / "serve.py")
    start_elsewhere(cwd, script=script, module_path=f"{ROOT}:" if "empty" in how else str(ROOT))


def test_a_packer_runs_the_package_that_the_engine_imported_wherever_that_is(tmp_path):
    """Only on the engine's own module path, with another copy in front on PYTHONPATH and a third in the working directory."""
    seen = tmp_path / "seen"
    ours = copy_packages(tmp_path / "ours", saying_so(seen))
    other = copy_packages(tmp_path / "other", "raise SystemExit('another copy')")
    here = copy_packages(tmp_path / "here", "raise SystemExit('a copy in the working directory')")
    start_elsewhere(here, ours, module_path=str(other))
    assert seen.exists()


def test_a_packer_finds_what_it_needs_where_the_engine_found_it(tmp_path):
    """A dependency that only the engine's own module path has."""
    seen = tmp_path / "seen"
    ours = copy_packages(tmp_path / "ours", "import only_here")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "only_here.py").write_text(f"from pathlib import Path\n{saying_so(seen)}\n")
    (tmp_path / "cwd").mkdir()
    start_elsewhere(tmp_path / "cwd", ours, tmp_path / "lib")
    assert seen.exists()


def test_a_packer_starts_in_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with supervising() as supervisor:
        assert serves(supervisor, supervisor.start("host"))


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python"])
def test_without_a_python_to_run_there_is_no_packer_and_it_is_said_so(executable, monkeypatch):
    monkeypatch.setattr("multiprocessing.spawn._python_exe", executable)
    with supervising() as supervisor, pytest.raises(PackerUnavailable, match="a packer process cannot be started"):
        supervisor.start("host")


# -- which environment, and which device -------------------------------------------------------------------------------


def environment_of(packer: ManagedPacker) -> dict[str, str]:
    assert packer.process is not None
    content = Path(f"/proc/{packer.process.pid}/environ").read_bytes().rstrip(b"\0").split(b"\0")
    return dict(os.fsdecode(entry).split("=", 1) for entry in content)


def test_a_packer_that_is_started_again_has_the_environment_of_the_first_start(monkeypatch):
    """vllm-omni sets CUDA_VISIBLE_DEVICES only while a stage starts."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with supervising() as supervisor:
        packer = supervisor.start("host")
        first = environment_of(packer)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("PYTHONPATH", "/nowhere")
        monkeypatch.setattr(sys, "path", ["/nowhere", *sys.path])
        supervisor.restart(packer)
        assert serves(supervisor, packer)
        assert environment_of(packer) == first
        assert first["CUDA_VISIBLE_DEVICES"] == "7"


def test_a_packer_starts_where_the_engine_has_more_files_open_than_select_can_take(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    fds: list[int] = []
    try:
        while not fds or fds[-1] < 1100:
            fds.append(os.open("/dev/null", os.O_RDONLY))
        with supervising() as supervisor:
            packer = supervisor.start("host")
            assert serves(supervisor, packer)
    finally:
        for fd in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- an end while one starts -------------------------------------------------------------------------------------------


def test_a_process_that_was_being_started_when_its_supervisor_stopped_is_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    supervisor = Supervisor(Settings.load(SETTINGS))
    started: list[subprocess.Popen[bytes]] = []
    stopping = threading.Thread(target=supervisor.stop)
    start_process = subprocess.Popen

    def stop_meanwhile(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(start_process(*args, **kwargs))
        stopping.start()
        wait_until(lambda: supervisor._stopped, "it is told to stop, and waits for no lock")
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", stop_meanwhile)
    with pytest.raises(PackerUnavailable, match="shutting down"):
        supervisor.start("host")
    stopping.join()
    assert started[0].returncode is not None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PackerUnavailable, match="shutting down"):
        supervisor.start("host")


# -- after the directory went ------------------------------------------------------------------------------------------


def test_a_packer_that_died_returns_although_its_directory_and_the_one_above_are_gone(tmp_path, monkeypatch):
    """As after a logout, and after whoever cleans up temporary files."""
    base = tmp_path / "base"
    base.mkdir()
    monkeypatch.setenv("TMPDIR", str(base))
    with supervising() as supervisor:
        packer = supervisor.start("host")
        assert packer.process is not None
        packer.process.send_signal(signal.SIGKILL)
        packer.process.wait()
        shutil.rmtree(base)
        supervisor.restart(packer)
        assert serves(supervisor, packer)
    assert list(base.iterdir()) == []


def test_a_login_that_ends_takes_nothing_of_a_packer_with_it(tmp_path, monkeypatch):
    """XDG_RUNTIME_DIR goes with the login; what is in it could not be made again."""
    login = tmp_path / "login"
    login.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    with supervising() as supervisor:
        packer = supervisor.start("host")
        shutil.rmtree(login)
        login.touch()  # as good as a place where this user may make nothing
        supervisor.restart(packer)
        wait_until(lambda: os.path.exists(packer.socket), "it listens")
        assert serves(supervisor, packer)  # with that engine it ends, and removes its socket
