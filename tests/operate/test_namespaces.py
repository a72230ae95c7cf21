"""Packer and engines as containers have them: each in mount, IPC, network and PID namespaces of its own, one directory shared.

Real namespaces and no container runtime. PACKER_NAMESPACE_LOG names a file that is told who ran where.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import secrets
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contained import COUNT, Reached
from container import KINDS, Container, namespaces, refusal
from packer_process import DEADLINE_S, Engine, session, transfer

from packer_service.operator import Operator

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

CONTAINED = Path(__file__).resolve().parents[1] / "helpers" / "contained.py"
DEVICES = pytest.mark.parametrize("device", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
UID = 10001
# Nothing of two containers' meets on the host device, so the packer there says that it is a GPU.
HOST_AS_CUDA = (
    "from packer_service.devices.host import HostDevice; HostDevice.kind = 'cuda';"
    " from packer_service.cli import main; main()"
)


class ContainedPacker(Reached):
    """A packer that is a container's first process, and its log."""

    def __init__(self, shared: Path, device: str, *command: str, uid: int = 0, **settings: str) -> None:
        self.key_file = shared / "key"
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(secrets.token_hex(32))
        os.chown(self.key_file, uid, uid)
        super().__init__(str(shared / "sockets" / "gpu0.sock"), self.key_file.read_bytes())
        small = {"pool_bytes": "2MiB", "pool_max_bytes": "64MiB", "pool_step_bytes": "2MiB"}
        pool = small if device == "host" else {"pool_bytes": "512MiB", "pool_max_bytes": "2GiB"}
        given = {"device": device, "socket": self.socket, "key_file": self.key_file, "exit_after_s": "0", **pool}
        given |= {"metrics_address": "off", "log_level": "debug", **settings}
        options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        self._log = shared / "log"
        reader, writer = os.pipe()
        with self._log.open("wb") as log:
            serve = [*(command or ("-m", "packer_service")), "serve", f"--ready-fd={writer}", *options]
            self.container = Container(shared, *serve, uid=uid, pass_fds=[writer], stderr=log)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            ready = select.poll()
            ready.register(pipe, select.POLLIN)
            assert ready.poll(DEADLINE_S * 1000), self.log
            self.report = json.loads(pipe.readline() or "{}")

    @property
    def log(self) -> str:
        return self._log.read_text()

    def reaching(self) -> list[str]:
        return ["--socket", self.socket, "--key-file", str(self.key_file)]


@contextlib.contextmanager
def contained_packer(shared: Path, device: str, *command: str, **options: Any) -> Iterator[ContainedPacker]:
    packer = ContainedPacker(shared, device, *command, **options)
    with contextlib.closing(packer.container):
        assert packer.report.get("pid") == 1, packer.log
        yield packer


@pytest.fixture
def shared(short_path: Path) -> Path:
    """A directory like a pod's volume: everybody may write to it, so the packer makes one of its own in it."""
    short_path.chmod(0o2777)
    return short_path


def in_packer(packer: ContainedPacker, script: str) -> Any:
    done = packer.container.enter("-c", f"import json, os; print(json.dumps({script}))")
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def say(container: Container, line: str) -> None:
    assert container.process.stdin is not None
    container.process.stdin.write(f"{line}\n")
    container.process.stdin.flush()


def heard(container: Container) -> str:
    assert container.process.stdout is not None
    return container.process.stdout.readline()


@DEVICES
def test_outputs_of_two_workers_with_one_pid_cross_to_their_engines_with_only_the_sockets_directory_shared(
    device, shared
):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    with contextlib.ExitStack() as stack:
        packer = stack.enter_context(contained_packer(shared, device))
        arguments = ["engine", packer.socket, packer.key_file, device]
        engines = [
            stack.enter_context(contextlib.closing(Container(shared, CONTAINED, *arguments, seed, read_only=True)))
            for seed in (1, 2)
        ]
        assert [heard(each) for each in engines] == ["connected\n", "connected\n"]
        with Operator(packer.socket, packer.key) as operator:
            assert operator.status().workers == 2
        for each in engines:
            say(each, "go")
        reports = [json.loads(heard(each)) for each in engines]
        assert [each.wait() for each in engines] == [0, 0]
        first = in_packer(packer, "{'shm': sorted(os.listdir('/dev/shm'))}")
        first["namespaces"] = {kind: os.readlink(f"/proc/{packer.container.first}/ns/{kind}") for kind in KINDS}
        assert packer.container.stop() == 0

    packers = {"pid": packer.report["pid"], "device_uuid": packer.report["device_uuid"], **first}
    _log({"device": device, "outside": namespaces(), "packer": packers, "engines": reports})
    assert [each["pid"] for each in reports] == [1, 1]
    assert len({each["worker"]["pid"] for each in reports}) == 1
    assert [each["received"] for each in reports] == [COUNT, COUNT]
    assert [each["worker"]["fallen_back"] for each in reports] == [[], []]
    assert all(each["namespaces"] == each["worker"]["namespaces"] for each in reports)
    for kind in KINDS:
        inside = [each["namespaces"][kind] for each in (*reports, first)]
        assert len({*inside, namespaces()[kind]}) == 4, kind
    # /dev/shm holds the packer's status board where the packer is, and nothing of it elsewhere.
    assert [name for name in first["shm"] if name.startswith("sm_packer-1-")] == first["shm"] != []
    assert not [name for each in reports for name in each["shm"] if "packer" in name]


def _log(entry: dict[str, Any]) -> None:
    if path := os.environ.get("PACKER_NAMESPACE_LOG"):
        file = Path(path)
        entries = json.loads(file.read_text()) if file.exists() else []
        file.write_text(json.dumps([*entries, entry], indent=2) + "\n")


@DEVICES
def test_a_worker_with_the_packers_pid_in_a_namespace_of_its_own_is_refused_and_told_what_mends_it(device, shared):
    """And both of what it is told mend it: a pid namespace in common, and an init before the worker."""
    command = ["-c", HOST_AS_CUDA] if device == "host" else []
    with contained_packer(shared, device, *command) as packer, contextlib.closing(Engine(packer)) as engine:  # type: ignore[arg-type]
        hello = [CONTAINED, "hello", packer.socket, packer.key_file, packer.report["device_uuid"], engine.session]
        with contextlib.closing(Container(shared, *hello)) as container:
            alone = json.loads(heard(container))
        assert alone["pid"] == packer.report["pid"] == 1
        assert "both have pid 1" in alone["refused"]
        assert "shareProcessNamespace" in alone["refused"]
        assert "init process" in alone["refused"]

        in_common = packer.container.enter(*hello)
        assert json.loads(in_common.stdout)["refused"] == "", in_common.stderr
        init = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, *{list(map(str, hello))!r}]))"
        with contextlib.closing(Container(shared, "-c", init)) as container:
            assert json.loads(heard(container)) == {"pid": 2, "refused": ""}


def test_a_packer_with_a_nameless_uid_no_capabilities_and_a_read_only_root_serves_is_probed_and_is_drained(shared):
    uids = {"allowed_uids": str(os.getuid())}
    with contained_packer(shared, "host", uid=UID, **uids) as packer:
        rights = in_packer(packer, "[os.getuid(), open('/proc/1/status').read()]")
        assert rights[0] == UID
        for name, value in {"Uid": f"{UID}\t" * 4, "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}.items():
            assert re.search(rf"^{name}:\t{value.strip()}$", rights[1], re.MULTILINE), rights[1]
        places = ["/", "/tmp", "/var/tmp", "/run", str(shared)]
        assert in_packer(packer, f"[path for path in {places} if os.access(path, os.W_OK)]") == [str(shared)]
        with session(packer) as (engine, worker):  # type: ignore[arg-type]
            transfer(engine, worker)
        for probe in (["health", *packer.reaching()], ["health", "--ready", *packer.reaching()], ["health"]):
            done = packer.container.enter("-m", "packer_service", *probe)
            assert (done.returncode, ": ready" in done.stdout) == (0, True), done.stderr
        # With pid 1 everything in its namespace ends, so the hook's own end may come before it can say how it went.
        drain = packer.container.enter("-m", "packer_service", "drain", *packer.reaching(), "--timeout-s", "20")
        assert drain.returncode in (0, -9), drain.stderr
        assert packer.container.wait() == 0, packer.log
        assert "packer stops: drained" in packer.log
        assert not Path(packer.socket).exists()


def test_a_probe_of_a_packer_that_hangs_fails(shared):
    with contained_packer(shared, "host") as packer:
        os.kill(packer.container.first, signal.SIGSTOP)
        done = packer.container.enter("-m", "packer_service", "health", *packer.reaching(), "--timeout-s", "0.5")
        assert done.returncode == 1
        assert packer.socket in done.stderr
