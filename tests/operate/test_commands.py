"""status, top, health, drain, pause and resume, as an operator types them, against live packers on the host device."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from command_line import packer_service
from packer_process import Packer, running_packer, session, stopped, transfer, wait_until

from packer_service import board
from packer_service.wire.protocol import Pause, Paused


def reaching(packer: Packer) -> list[str]:
    return ["--socket", packer.socket, "--key-file", str(Path(packer.socket).parent / "key")]


@pytest.fixture
def packer(tmp_path):
    with running_packer(tmp_path / "packer") as one:
        yield one


@pytest.fixture
def boardless(tmp_path):
    """A packer as in another container: nothing of it is in this /dev/shm."""
    with running_packer(tmp_path / "boardless", status_board="off") as one:
        yield one


def test_with_no_packer_status_says_so(tmp_path):
    """Its own /dev/shm is empty unless another test's packer still runs."""
    if board.find():
        pytest.skip("a packer of another test runs")
    done = packer_service("status", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (3, {"packers": []})
    done = packer_service("status")
    assert (done.returncode, done.stdout) == (3, "no packer of this user is running on this host\n")
    done = packer_service("health")
    assert done.returncode == 1
    assert "--socket" in done.stderr


def test_status_shows_what_a_packer_did(packer):
    with session(packer) as (engine, worker):
        for _ in range(3):
            transfer(engine, worker, 5000)
        wait_until(lambda: board.find()[0].status.published == 3, "the board counts them")
        done = packer_service("status", "--json")
        table = packer_service("status")
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(done.stdout)["packers"]
    assert (shown["state"], shown["pid"], shown["socket"]) == ("ready", packer.process.pid, packer.socket)
    status = shown["status"]
    assert (status["published"], status["published_bytes"], status["device"]) == (3, 15000, "host")
    assert (len(status["engines"]), status["workers"]) == (1, 1)
    assert status["handoff"]["p99_ms"] >= status["handoff"]["p50_ms"] > 0
    header, row = table.stdout.splitlines()[:2]
    assert "hand-off p50/p99 ms" in header
    assert row.split()[:3] == ["host", str(packer.process.pid), "ready"]


def test_status_asks_the_socket_of_a_packer_that_has_no_board_here(boardless):
    done = packer_service("status", "--json", *reaching(boardless))
    assert done.returncode == 0
    (shown,) = json.loads(done.stdout)["packers"]
    assert shown["status"]["pid"] == boardless.process.pid


def test_a_packer_that_is_shown_by_its_board_is_not_asked_again(packer):
    assert len(json.loads(packer_service("status", "--json", *reaching(packer)).stdout)["packers"]) == 1


def test_status_shows_a_dead_packer_once_and_fails(packer):
    packer.process.kill()
    packer.process.wait()
    done = packer_service("status")
    assert done.returncode == 1
    assert f"pid {packer.process.pid} died" in done.stdout
    assert packer_service("status").returncode == 3


def test_status_says_why_a_packer_cannot_be_reached(tmp_path):
    done = packer_service("status", "--json", "--socket", str(tmp_path / "none.sock"))
    assert done.returncode == 1
    (shown,) = json.loads(done.stdout)["packers"]
    assert shown["state"] == "unreachable"
    assert "is the packer running?" in shown["error"]


def test_top_shows_the_same_and_ends_after_its_count(packer):
    done = packer_service("top", "--count=2", "--interval-s=0.2", COLUMNS="220")
    assert done.returncode == 0, done.stderr
    assert str(packer.process.pid) in done.stdout


def test_health_is_for_probes(packer):
    done = packer_service("health")
    assert (done.returncode, done.stdout) == (0, f"host (pid {packer.process.pid}): ready\n")
    assert packer_service("health", *reaching(packer)).returncode == 0
    with stopped(packer.process.pid):
        done = packer_service("health", "--timeout-s=0.3")
    assert done.returncode == 1
    assert f"host (pid {packer.process.pid}): the peer stayed silent" in done.stderr


def test_health_needs_the_key_where_no_board_shows_it(boardless):
    assert packer_service("health", *reaching(boardless)).returncode == 0
    done = packer_service("health", "--socket", boardless.socket)
    assert done.returncode == 1
    assert "--key-file" in done.stderr
    done = packer_service("health", "--socket", boardless.socket, PACKER_KEY_FILE=reaching(boardless)[-1])
    assert done.returncode == 0


def test_of_several_packers_one_has_to_be_named(packer, tmp_path):
    with running_packer(tmp_path / "second") as second:
        done = packer_service("health")
        assert done.returncode == 1
        assert "name one" in done.stderr
        assert packer_service("health", str(second.process.pid)).returncode == 0
        assert packer_service("health", second.socket).returncode == 0
        done = packer_service("health", "cuda:7")
        assert done.returncode == 1
        assert "no packer here is 'cuda:7'" in done.stderr


def test_drain_ends_every_packer_it_is_told_to(packer, tmp_path):
    with running_packer(tmp_path / "second") as second:
        done = packer_service("drain", "--all", "--json")
        assert done.returncode == 0, done.stderr
        assert [each["drained"] for each in json.loads(done.stdout)["packers"]] == [True, True]
        assert (packer.wait(), second.wait()) == (0, 0)


def test_drain_says_what_is_in_flight_and_what_was_left(packer):
    with session(packer) as (_, worker):
        worker.export("waits", worker.write(b"data"), complete=False)
        wait_until(lambda: board.find()[0].status.in_flight == 1, "the board shows it")
        done = packer_service("drain", "--timeout-s=0.2")
    assert done.returncode == 1
    assert "1 outputs in flight" in done.stdout
    assert "drained, with 1 outputs unfinished: they take vllm-omni's own path" in done.stdout
    assert packer.wait() == 0


def test_health_with_ready_fails_for_a_packer_that_is_being_drained(packer):
    with session(packer) as (_, worker):
        worker.export("waits", worker.write(b"data"), complete=False)
        worker.skeleton("waits")
        wait_until(lambda: board.find()[0].status.in_flight == 1, "the board shows it")
        draining = subprocess.Popen([sys.executable, "-m", "packer_service", "drain", "--timeout-s=20"])
        wait_until(lambda: board.find()[0].status.state == "draining", "it is being drained")
        assert packer_service("health").returncode == 0
        done = packer_service("health", "--ready")
        assert (done.returncode, "is draining" in done.stderr) == (1, True)
        worker.reach(worker.value)
        assert draining.wait(30) == 0


def test_pause_and_resume_reach_the_workers_and_count_them(packer):
    with session(packer) as (_, worker):

        def answer() -> None:
            for paused in (True, False):
                assert worker.answer() == Pause(paused)
                worker.channel.send(Paused(paused))

        answering = threading.Thread(target=answer)
        answering.start()
        done = packer_service("pause")
        assert (done.returncode, "1 of 1 workers" in done.stdout) == (0, True)
        wait_until(lambda: [e.paused_workers for e in board.find()[0].status.engines] == [1], "the board shows it")
        assert "1 (1 paused)" in packer_service("status", COLUMNS="220").stdout
        done = packer_service("resume", "--json")
        answering.join()
    assert json.loads(done.stdout)["packers"][0]["answered"] == 1


def test_a_worker_that_does_not_answer_a_pause_is_told_of(packer):
    with session(packer):
        done = packer_service("pause", "--timeout-s=0.2")
    assert (done.returncode, "0 of 1 workers" in done.stdout) == (1, True)


@pytest.mark.parametrize("name", ["status", "top", "health", "drain", "pause", "resume"])
def test_the_help_of_each_has_examples_and_exit_codes(name):
    done = packer_service(name, "--help", COLUMNS="220")
    assert done.returncode == 0
    assert "packer-service " + name in done.stdout
    assert "Exit code" in done.stdout


def test_top_ends_quietly_when_it_is_interrupted(packer):
    terminal, end = pty.openpty()
    command_line = [sys.executable, "-m", "packer_service", "top", "--interval-s=0.2"]
    showing = subprocess.Popen(command_line, stdin=end, stdout=end, stderr=subprocess.PIPE, text=True)
    os.close(end)
    assert os.read(terminal, 1)
    showing.send_signal(signal.SIGINT)
    _, errors = showing.communicate(timeout=20)
    os.close(terminal)
    assert (showing.returncode, errors) == (0, "")
