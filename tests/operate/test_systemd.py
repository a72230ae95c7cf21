"""The units, as systemd reads them, and a packer under what systemd does for one: its notify socket, its watchdog, its socket.

No systemd runs here: this file speaks its two protocols (sd_notify(3), sd_listen_fds(3)) to the real command, and so it sees
each word. A systemd runs in tests/operate/test_systemd_boots.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from contained import Reached
from injection import Faults
from packer_process import DEADLINE_S, running_packer, session, stopped, wait_until

from packer_service.config import PACKER_SETTINGS
from packer_service.errors import SettingError
from packer_service.operator import Operator
from packer_service.systemd import Notifier, take_listener

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "configs" / "systemd"
ACTIVATED = ROOT / "tests" / "helpers" / "activated.py"
MOST_EXPOSED = 2.5  # of systemd-analyze security, from 0 (safe) to 10; docs/deploy-systemd.md says what it is


class Systemd:
    """What systemd is to one service: ``notify_address`` hears it, and ``listener`` listens for it whether it runs or not."""

    def __init__(self, directory: Path, abstract: bool = False) -> None:
        self.directory = directory
        self.path = str(directory / "packer.sock")
        self.key_file = directory / "key"
        self.key_file.touch(0o600)
        self.key_file.write_text("0123456789abcdef" * 2)
        self._heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._heard.settimeout(DEADLINE_S)
        self.notify_address = f"@packer-test-{os.getpid()}" if abstract else str(directory / "notify")
        self._heard.bind(f"\0{self.notify_address[1:]}" if abstract else self.notify_address)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen(16)
        self.log = directory / "log"

    def start(self, *options: str, activated: bool = True, watchdog_us: int = 0) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "NOTIFY_SOCKET": self.notify_address}
        if watchdog_us:
            environ["WATCHDOG_USEC"] = str(watchdog_us)
        fd = self.listener.fileno() if activated else -1
        settings = [f"--socket={self.path}", f"--key-file={self.key_file}", "--device=host", "--exit-after-s=0"]
        settings += ["--pool-bytes=2MiB", "--metrics-address=off"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(ACTIVATED), str(fd), *settings, *options],
                env=environ,
                pass_fds=[fd] if activated else [],
                stdin=subprocess.DEVNULL,
                stderr=log,
            )

    def hear(self) -> dict[str, str]:
        """The next notification."""
        data = self._heard.recv(4096).decode()
        return dict(line.partition("=")[::2] for line in data.splitlines())

    def hear_nothing(self, seconds: float) -> bool:
        return not select.select([self._heard], [], [], seconds)[0]

    def ask(self) -> str:
        """What a packer at the path says it is."""
        with Operator(self.path, self.key_file.read_bytes()) as operator:
            return operator.status().state

    def close(self) -> None:
        self._heard.close()
        self.listener.close()


@pytest.fixture
def systemd(tmp_path) -> Iterator[Systemd]:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    with contextlib.closing(Systemd(directory)) as one:
        yield one


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()


def test_it_says_when_it_is_ready_how_it_is_and_why_it_stops(systemd):
    with running(systemd.start()) as packer:
        ready = systemd.hear()
        assert ready["READY"] == "1"
        assert ready["STATUS"] == "ready on host memory: 0 engines, 0 workers, 0 in flight, 0 outputs, 0.0 GB"
        assert systemd.ask() == "ready"
        packer.terminate()
        assert systemd.hear() == {"STOPPING": "1", "STATUS": "SIGTERM"}
        assert packer.wait(DEADLINE_S) == 0


def test_it_is_told_at_an_abstract_address_too(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    with contextlib.closing(Systemd(directory, abstract=True)) as systemd, running(systemd.start()):
        assert "READY" in systemd.hear()


def test_one_that_cannot_start_is_never_ready_and_says_why_on_standard_error(systemd):
    systemd.key_file.chmod(0o644)
    with running(systemd.start()) as packer:
        assert packer.wait(DEADLINE_S) == 1
    assert systemd.hear_nothing(0.0)
    assert "chmod 640" in systemd.log.read_text()


def test_the_watchdogs_beat_goes_on_and_stops_when_the_packer_does(systemd):
    with running(systemd.start(watchdog_us=3_000_000)) as packer:
        assert "READY" in systemd.hear()
        for _ in range(2):
            assert systemd.hear() == {"WATCHDOG": "1"}
        with stopped(packer.pid):
            while not systemd.hear_nothing(0.0):
                systemd.hear()
            assert systemd.hear_nothing(1.5)


def test_a_packer_whose_device_hangs_never_says_that_it_stops_and_ends_with_exit_code_70(
    systemd, tmp_path, monkeypatch
):
    faults = Faults(tmp_path / "faults", monkeypatch)
    with running(systemd.start("--hang-s=1", watchdog_us=3_000_000)) as packer:
        assert "READY" in systemd.hear()
        with session(Reached(systemd.path, systemd.key_file.read_bytes())) as (_, worker), faults.active("copy"):
            worker.export("stuck", worker.write(b"x"))
            worker.skeleton("stuck")
            assert packer.wait(DEADLINE_S) == 70
        while not systemd.hear_nothing(0.0):
            assert "STOPPING" not in systemd.hear()


def test_a_watchdog_that_wants_more_than_the_beat_is_refused(systemd):
    with running(systemd.start(watchdog_us=1_000_000)) as packer:
        assert packer.wait(DEADLINE_S) == 1
    assert "set WatchdogSec= to at least 2" in systemd.log.read_text()


def test_a_managed_packer_says_nothing_to_the_systemd_of_its_engine(systemd, tmp_path, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.notify_address)
    with running_packer(tmp_path / "managed", "--managed"):
        pass
    assert systemd.hear_nothing(0.0)


def test_with_no_watchdog_there_is_no_beat(systemd):
    with running(systemd.start()):
        assert "READY" in systemd.hear()
        assert systemd.hear_nothing(1.5)


def test_whoever_connects_before_the_packer_runs_waits_for_it_and_the_socket_outlives_it(systemd):
    health = ["health", f"--socket={systemd.path}", f"--key-file={systemd.key_file}", "--timeout-s=20"]
    waiting = subprocess.Popen([sys.executable, "-m", "packer_service", *health])
    for _ in range(2):  # the second time on the same socket
        with running(systemd.start()) as packer:
            assert "READY" in systemd.hear()
            assert systemd.ask() == "ready"
            packer.terminate()
            assert "STOPPING" in systemd.hear()
            assert packer.wait(DEADLINE_S) == 0
        assert Path(systemd.path).is_socket()
    assert waiting.wait(DEADLINE_S) == 0


def test_a_killed_packers_successor_serves_the_same_socket(systemd):
    with running(systemd.start()) as packer:
        systemd.hear()
        packer.kill()
        packer.wait()
    with running(systemd.start()):
        assert "READY" in systemd.hear()
        assert systemd.ask() == "ready"


def test_a_drained_packer_ends_with_exit_code_0_so_that_it_is_not_restarted(systemd):
    with running(systemd.start()) as packer:
        systemd.hear()
        drain = ["drain", f"--socket={systemd.path}", f"--key-file={systemd.key_file}"]
        done = subprocess.run(
            [sys.executable, "-m", "packer_service", *drain], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert systemd.hear()["STATUS"] == "drained"
        assert packer.wait(DEADLINE_S) == 0


def test_a_socket_at_another_path_or_of_another_kind_is_refused_with_what_mends_it(systemd):
    with running(systemd.start(f"--socket={systemd.path}.other")) as packer:
        assert packer.wait(DEADLINE_S) == 1
    assert "make them the same" in systemd.log.read_text()
    systemd.listener.close()
    os.unlink(systemd.path)
    for kind, path, mends in (
        (socket.SOCK_STREAM, systemd.path, "ListenSequentialPacket="),
        (socket.SOCK_SEQPACKET, f"\0packer-test-{os.getpid()}", "make them the same"),
    ):
        systemd.listener = socket.socket(socket.AF_UNIX, kind)
        systemd.listener.bind(path)
        systemd.listener.listen(1)
        systemd.log.unlink()
        with running(systemd.start()) as packer:
            assert packer.wait(DEADLINE_S) == 1
        assert mends in systemd.log.read_text()
        systemd.listener.close()


def test_what_systemd_said_to_another_process_is_not_for_this_one(monkeypatch):
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDS", "1")
    assert take_listener("/anywhere") is None
    assert "LISTEN_FDS" not in os.environ
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    notifier = Notifier()
    assert (notifier.wanted, notifier.watched) == (True, False)
    notifier.ready("nobody hears it")
    assert "NOTIFY_SOCKET" not in os.environ
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", "2")
    with pytest.raises(SettingError, match="2 sockets"):
        take_listener("/anywhere")


# -- the units ---------------------------------------------------------------------------------------------------------

ANALYZE = shutil.which("systemd-analyze")
analyzes = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze (Debian: apt-get install systemd)")


@pytest.fixture
def units(tmp_path) -> Path:
    """The units of GPU 0, with a command that exists here."""
    for unit in UNITS.glob("*.s[eo]*"):
        text = (
            unit.read_text()
            .replace("/opt/packer/bin/packer-service", "/bin/true")
            .replace("/opt/vllm/bin/vllm", "/bin/true")
        )
        (tmp_path / unit.name.replace("@", "@0")).write_text(text)
    return tmp_path


@analyzes
def test_systemd_accepts_the_units(units):
    files = [str(path) for path in units.iterdir()]
    done = subprocess.run([ANALYZE, "verify", "--man=no", *files], capture_output=True, text=True, timeout=60)
    complaints = [line for line in done.stderr.splitlines() if str(units) in line or "packer-service@0" in line]
    assert (done.returncode, complaints) == (0, [])


@analyzes
def test_the_packers_unit_is_hardened_as_the_docs_say(units):
    command = [ANALYZE, "security", "--offline=true", "--no-pager", str(units / "packer-service@0.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    if found is None:
        pytest.skip(f"this systemd-analyze checks no file: {done.stderr.strip()}")
    assert float(found[1]) <= MOST_EXPOSED
    if "252" in subprocess.run([ANALYZE, "--version"], capture_output=True, text=True).stdout.split()[1]:
        assert f"**{found[1]}**" in (ROOT / "docs" / "deploy-systemd.md").read_text()


def test_the_units_set_settings_that_there_are():
    names = re.findall(r"\bPACKER_([A-Z_]+)=", "".join(unit.read_text() for unit in UNITS.iterdir()))
    assert {name.lower() for name in names} - {"allowed_uids", "mode"} <= set(PACKER_SETTINGS)


def test_both_sides_and_the_socket_unit_name_the_same_path():
    service, listening, engine = (
        (UNITS / name).read_text()
        for name in ("packer-service@.service", "packer-service@.socket", "vllm-omni.service")
    )
    assert "PACKER_SOCKET=/run/packer/gpu%i.sock" in service
    assert "ListenSequentialPacket=/run/packer/gpu%i.sock" in listening
    assert "PACKER_SOCKET=/run/packer/gpu0.sock" in engine


def test_the_status_is_told_again_while_it_runs(systemd, monkeypatch):
    with running(systemd.start()):
        systemd.hear()
        wait_until(lambda: "STATUS" in systemd.hear(), "the status is told again")
