"""The units under a real systemd, installed and removed by the very commands of docs/deploy-systemd.md.

The packer's device is the host: a GPU is not passed into that machine. Two commands of the page are left out: pip's, which
tests/operate/test_release.py tries, and doctor, which looks for that GPU.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from booted import COMMAND, Booted, refusal
from contained import Reached
from packer_process import session, stop, transfer, wait_until

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "deploy-systemd.md").read_text()
SERVICE, SOCKET = "packer-service@0.service", "packer-service@0.socket"
REACHING = ("--socket=/run/packer/gpu0.sock", "--key-file=/etc/packer/key", "--timeout-s=20")
GPU = "GPU-8f6c1d5a-3b0e-4f57-9b1c-d2a90c7e6f11"
FAULTS = "/dev/shm/faults"
ON_THE_HOST = f"PACKER_DEVICE=host\nPACKER_POOL_BYTES=2MiB\nPACKER_HANG_S=1\nPACKER_FAULTS={FAULTS}\n"


def commands(heading: str) -> str:
    """The first block of commands under ``heading`` of the page."""
    block = re.search(rf"^## {heading}\n.*?```sh\n(.*?)```", PAGE, re.M | re.S)
    assert block is not None, heading
    return block[1]


class Machine(Booted):
    def show(self, name: str, unit: str = SERVICE) -> str:
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def wait_shown(self, name: str, value: str, unit: str = SERVICE) -> None:
        wait_until(lambda: self.show(name, unit) == value, f"{name} of {unit} is {value}; {self.journal()}")

    def journal(self) -> str:
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={SERVICE}")

    @property
    def packer(self) -> int:
        """Its pid, as it is called out here."""
        return int((self.cgroup / self.show("ControlGroup").strip("/") / "cgroup.procs").read_text())

    def reached(self) -> Reached:
        """For engines and workers out here, whose uid is root's."""
        return Reached(f"/proc/{self.first}/root/run/packer/gpu0.sock", self.run("cat", "/etc/packer/key").encode())

    @contextlib.contextmanager
    def drop_in(self, text: str, unit: str = SERVICE) -> Iterator[None]:
        directory = f"/run/systemd/system/{unit}.d"
        self.write(f"{directory}/test.conf", text)
        self.run("systemctl", "daemon-reload")
        try:
            yield
        finally:
            self.run("rm", "-r", directory)
            self.run("systemctl", "daemon-reload")


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    install = "\n".join(
        line for line in commands("Install").splitlines() if not re.search("pip install| doctor ", line)
    )
    with contextlib.closing(Machine()) as one:
        one.write("/etc/packer/0.env", ON_THE_HOST)
        one.write(f"/etc/packer/{GPU}.env", ON_THE_HOST)
        one.run("useradd", "--system", "vllm")
        one.run("install", "-d", "-m", "777", FAULTS)
        one.run("sh", "-ec", install)
        yield one


@pytest.fixture
def running(machine) -> Machine:
    """With the units up, whatever an earlier test left."""
    machine.run("systemctl", "reset-failed")
    machine.run("systemctl", "start", SOCKET, SERVICE)
    return machine


def restarted(machine: Machine) -> int:
    return int(machine.show("NRestarts"))


def test_installed_as_the_page_says_it_is_ready_and_tells_systemctl(running):
    assert running.show("StatusText").startswith("ready on host memory: 0 engines")
    assert running.run("stat", "--format=%U:%G %a", "/run/packer/gpu0.sock") == "packer:packer 660"
    assert "ready" in running.run(COMMAND, "status")
    assert "ready" in running.run("runuser", "-u", "vllm", "--", COMMAND, "health", *REACHING)
    assert not running.run("runuser", "-u", "nobody", "--", COMMAND, "health", *REACHING, check=False)


def test_outputs_cross_within_the_units_confinement(running):
    status = Path(f"/proc/{running.packer}/status").read_text()
    for fact in (r"NoNewPrivs:\s1$", r"Seccomp:\s2$", r"CapBnd:\s0+$", r"CapEff:\s0+$"):
        assert re.search(fact, status, re.M), f"{fact} in {status}"
    with session(running.reached()) as (engine, worker):
        transfer(engine, worker, 1 << 20)


def test_a_killed_packer_is_started_again_and_whoever_connects_meanwhile_waits_for_it(running):
    before = restarted(running)
    running.run("systemctl", "kill", "--signal=KILL", SERVICE)
    running.run(COMMAND, "health", *REACHING)
    assert restarted(running) == before + 1
    with session(running.reached()) as (engine, worker):
        transfer(engine, worker)


def test_a_restart_refuses_nobody(running):
    restarting = threading.Thread(target=running.run, args=("systemctl", "restart", SERVICE))
    restarting.start()
    while restarting.is_alive():
        running.run(COMMAND, "health", *REACHING)
    restarting.join()


def test_a_drained_packer_stays_down_until_somebody_connects(running):
    before = restarted(running)
    running.run(COMMAND, "drain", "host")
    running.wait_shown("ActiveState", "inactive")
    assert (running.show("Result"), restarted(running)) == ("success", before)
    assert running.show("SubState", SOCKET) == "listening"
    running.run(COMMAND, "health", *REACHING)
    running.wait_shown("ActiveState", "active")


def test_a_packer_that_is_stuck_as_a_whole_is_ended_by_the_watchdog_and_started_again(running):
    with running.drop_in("[Service]\nWatchdogSec=3\n"):
        running.run("systemctl", "restart", SERVICE)
        before = restarted(running)
        stop(running.packer)
        wait_until(lambda: restarted(running) > before, "it is started again")
        running.run(COMMAND, "health", *REACHING)
    assert "Failed with result 'watchdog'" in running.journal()


def test_a_packer_whose_device_hangs_ends_itself_and_is_started_again(running):
    before = restarted(running)
    with session(running.reached()) as (_, worker):
        running.write(f"{FAULTS}/copy", "")
        worker.export("stuck", worker.write(b"x"))
        worker.skeleton("stuck")
        wait_until(lambda: restarted(running) > before, "it is started again")
        running.run("rm", f"{FAULTS}/copy")
    assert "status=70" in running.journal()
    running.run(COMMAND, "health", *REACHING)


def test_a_packer_that_cannot_start_is_given_up_and_started_again_as_the_page_says(running):
    mend = commands("Given up")
    running.write("/etc/packer/packer.env", "PACKER_WAIT_S=never\n")
    try:
        with running.drop_in("[Unit]\nStartLimitBurst=2\n[Service]\nRestartSec=0\n"):
            running.run("systemctl", "restart", SERVICE, check=False)
            running.wait_shown("ActiveState", "failed")
            running.wait_shown("ActiveState", "failed", SOCKET)
            assert "PACKER_WAIT_S is 'never'" in running.journal()
            running.write("/etc/packer/packer.env", "")
            running.run("sh", "-ec", mend)
            running.run(COMMAND, "health", *REACHING)
    finally:
        running.write("/etc/packer/packer.env", "")


def test_an_instance_may_be_the_uuid_of_a_gpu(machine):
    units = f"packer-service@{GPU}.socket", f"packer-service@{GPU}.service"
    machine.run("systemctl", "start", *units)
    try:
        assert f"PACKER_DEVICE=cuda:{GPU}" in machine.show("Environment", units[1]).split()
        machine.run(COMMAND, "health", f"--socket=/run/packer/gpu{GPU}.sock", *REACHING[1:])
    finally:
        machine.run("systemctl", "stop", *units)


def test_uninstalled_as_the_page_says_nothing_is_left(running):
    """The last, and the end of the machine that the others share."""
    uninstall = commands("Uninstall")
    assert "/opt/packer " in uninstall
    running.run("rm", "-r", FAULTS)
    running.run("sh", "-ec", uninstall)
    places = ("/etc", "/run", "/usr/lib/sysusers.d", "/usr/lib/tmpfiles.d", "/var", "/tmp", "/dev/shm")
    assert running.run("find", *places, "-iname", "*packer*") == ""
    running.run("test", "!", "-e", "/opt/packer")
    assert not re.search("packer", running.run("getent", "passwd") + running.run("getent", "group"))
    assert "packer" not in running.run("systemctl", "list-units", "--all", "--no-legend", "--type=service,socket")
