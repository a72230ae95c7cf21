"""The status board: what a packer shows of itself, and what becomes of the board when it ends, dies or hangs."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from packer_process import Packer, running_packer, session, stopped, transfer, wait_until

from packer_service import board
from packer_service.operator import Operator

SHM = Path("/dev/shm")


def path_of(packer: Packer) -> Path | None:
    return next(SHM.glob(f"sm_packer-{packer.process.pid}-*"), None)


def shown_of(packer: Packer) -> board.Shown | None:
    return next((each for each in board.find() if each.pid == packer.process.pid), None)


def kill(packer: Packer) -> None:
    packer.process.kill()
    packer.process.wait()


@pytest.fixture
def packer(tmp_path):
    with running_packer(tmp_path / "packer") as one:
        yield one


def test_a_packer_that_is_ready_has_one_board_that_only_its_user_can_read(packer):
    (path,) = SHM.glob(f"sm_packer-{packer.process.pid}-*")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_uid == os.geteuid()
    shown = shown_of(packer)
    assert (shown.alive, shown.silent, shown.socket) == (True, False, packer.socket)
    assert (shown.status.pid, shown.status.state) == (packer.process.pid, "ready")


def test_it_is_written_again_every_second(packer):
    with session(packer) as (engine, worker):
        transfer(engine, worker, 5000)
        wait_until(lambda: shown_of(packer).status.published == 1, "the board counts the output")
        assert len(shown_of(packer).status.engines) == 1


def test_its_key_lets_an_operator_in(packer):
    shown = shown_of(packer)
    with Operator(shown.socket, shown.operator_key) as operator:
        assert operator.status().pid == packer.process.pid


def test_a_packer_that_ends_removes_its_board_and_starts_no_other_process(tmp_path):
    with running_packer(tmp_path / "packer") as packer:
        path = path_of(packer)
        assert subprocess.run(["pgrep", "-P", str(packer.process.pid)], capture_output=True).stdout == b""
        packer.signal(signal.SIGTERM)
        assert packer.wait() == 0
    assert not path.exists()


def test_a_dead_packer_is_shown_as_dead_once_and_its_board_removed(tmp_path):
    with running_packer(tmp_path / "packer") as packer:
        path = path_of(packer)
        kill(packer)
        shown = shown_of(packer)
        assert (shown.alive, shown.status.pid) == (False, packer.process.pid)
        assert not path.exists()
        assert shown_of(packer) is None


def test_the_next_packer_removes_the_board_of_a_dead_one(tmp_path):
    with running_packer(tmp_path / "packer") as first:
        path = path_of(first)
        kill(first)
        assert path.exists()
        with running_packer(tmp_path / "next"):
            assert not path.exists()


def test_a_process_that_has_the_pid_of_a_dead_packer_is_not_taken_for_it(packer, monkeypatch):
    started_s = board._started_s
    monkeypatch.setattr(board, "_started_s", lambda pid: started_s(pid) + 60)
    assert shown_of(packer).alive is False
    assert path_of(packer) is None


def test_a_packer_of_another_pid_namespace_is_never_called_dead(packer, monkeypatch):
    monkeypatch.setattr(board, "_pid_namespace", lambda: 1)
    assert shown_of(packer).alive is None
    assert path_of(packer).exists()


def test_a_stopped_packer_becomes_silent_and_keeps_its_board(packer, monkeypatch):
    monkeypatch.setattr(board, "STALE_S", 0.2)
    with stopped(packer.process.pid):
        wait_until(lambda: shown_of(packer).silent, "its board grows old")
        assert path_of(packer).exists()


def test_a_board_that_is_torn_is_not_believed(packer):
    path = path_of(packer)
    with stopped(packer.process.pid):
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b'"state": "ready"', b'"state": "readx"'))
        assert shown_of(packer) is None
        path.write_bytes(whole)
        assert shown_of(packer).status.state == "ready"


def test_a_torn_board_of_a_dead_packer_is_removed(tmp_path):
    with running_packer(tmp_path / "packer") as packer:
        path = path_of(packer)
        kill(packer)
        path.write_bytes(path.read_bytes()[:100])
        shown = shown_of(packer)
        assert (shown.alive, shown.status) == (False, None)
        assert not path.exists()


def test_a_link_under_a_boards_name_is_left_alone(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    link = SHM / "sm_packer-4194303-00000000"
    link.symlink_to(secret)
    try:
        assert all(each.pid != 4194303 for each in board.find())
        assert link.is_symlink()
    finally:
        link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_another_user_sees_nothing_of_it(packer):
    code = "import os; from packer_service import board; os.setuid(65534); print(len(board.find()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr


def test_a_packer_without_a_board_serves_all_the_same(tmp_path):
    with running_packer(tmp_path / "packer", status_board="off") as packer:
        assert path_of(packer) is None
        with session(packer) as (engine, worker):
            transfer(engine, worker)


def with_small_shm(size: str) -> list[str]:
    mount = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*with_small_shm("1m"), "true"], capture_output=True).returncode != 0,
    reason="needs to mount a /dev/shm of its own",
)
def test_where_shared_memory_has_no_room_a_packer_does_without_a_board_and_says_so(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("0123456789abcdef")
    serve = [
        sys.executable,
        "-m",
        "packer_service",
        "serve",
        "--device=host",
        "--exit-after-s=0.1",
        f"--key-file={key}",
    ]
    socket = f"--socket={tmp_path / 'run' / 'packer.sock'}"
    done = subprocess.run(
        [*with_small_shm("64k"), *serve, socket, "--pool-bytes=2MiB"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "packer ready" in done.stderr
    assert "no status board ([Errno 28] No space left on device)" in done.stderr
    assert "setting status_board" in done.stderr
