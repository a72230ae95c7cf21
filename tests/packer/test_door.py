"""The packer's door: whose path it is, whatever others do to it meanwhile. Real sockets, and real packers where two meet."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packer_process import DEADLINE_S, Packer, full_table, running_packer, session, transfer, wait_until

from packer_service import door
from packer_service.config import Settings
from packer_service.door import Door, Listener
from packer_service.errors import PackerError, SettingError, SocketTaken
from packer_service.server import Server

AT_ONCE = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    return directory / "packer.sock"


def leave_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
        gone.bind(str(path))


def client(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.connect(str(path))
    return peer


@contextlib.contextmanager
def kept(path: Path) -> Iterator[Door]:
    """A door that somebody accepts at, and so looks after its path."""
    kept = Door(path, 4, lambda: None)
    accepter = threading.Thread(target=lambda: [None for _ in iter(kept.accept, None)], daemon=True)
    accepter.start()
    try:
        yield kept
    finally:
        kept.close(0.0)
        accepter.join(DEADLINE_S)
        assert not accepter.is_alive()


@pytest.fixture
def often(monkeypatch) -> None:
    monkeypatch.setattr(door, "_LOOK_S", 0.01)
    monkeypatch.setattr(door, "_PAUSE_S", 0.08)


@pytest.mark.parametrize("before", ["a stale socket is there", "nothing is there", "no directory is there"])
def test_of_packers_that_start_at_once_one_has_the_path_and_the_others_refuse(path, before):
    def start(_: int) -> Listener | str:
        barrier.wait()
        try:
            return Listener(path)
        except PackerError as error:
            return str(error)

    with ThreadPoolExecutor(AT_ONCE) as executor:
        for _ in range(30):
            barrier = threading.Barrier(AT_ONCE)
            if before == "a stale socket is there":
                leave_stale(path)
            elif before == "no directory is there":
                shutil.rmtree(path.parent)
            started = list(executor.map(start, range(AT_ONCE)))
            (owner,) = [listener for listener in started if isinstance(listener, Listener)]
            assert all("another packer listens at" in reason for reason in started if reason is not owner)
            with client(path), owner.socket.accept()[0]:
                pass
            owner.close()
            assert os.listdir(path.parent) == [], "something was left beside the socket"


def test_packers_that_start_at_once_in_one_directory_each_have_their_own_path(path):
    paths = [path.with_name(f"gpu{number}.sock") for number in range(AT_ONCE)]
    with ThreadPoolExecutor(AT_ONCE) as executor:
        for listener in list(executor.map(Listener, paths)):
            listener.close()


def test_a_process_that_died_holds_up_nobody(path):
    code = (
        "import os, sys; from packer_service import door; from pathlib import Path;"
        "door._lock(Path(sys.argv[1])); print(flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(path.parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with ThreadPoolExecutor(1) as executor:
            starting = executor.submit(Listener, path)
            holder.kill()
            starting.result(DEADLINE_S).close()


def test_a_stranger_who_holds_the_directorys_lock_stops_no_start(path, monkeypatch, caplog):
    monkeypatch.setattr(door, "_LOCK_S", 0.0)
    stranger = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(stranger, fcntl.LOCK_SH)
        leave_stale(path)
        Listener(path).close()
    finally:
        os.close(stranger)
    assert "cannot be locked" in caplog.text
    assert "give the socket a directory of its own" in caplog.text


def test_what_another_put_at_the_path_is_not_removed(path):
    listener = Listener(path)
    path.unlink()
    other = Listener(path)
    assert not listener.has_path
    listener.close()
    with client(path):
        pass
    other.close()
    path.write_text("precious")
    other.close()
    assert path.read_text() == "precious"


def test_a_door_whose_path_another_took_says_so_once_and_listens_again_when_that_is_gone(path, often, caplog):
    with kept(path) as first:
        path.unlink()
        other = Listener(path)
        wait_until(lambda: first.taken, "it notices")
        wait_until(lambda: first._pause_s == door._PAUSE_S, "it tried again and again")
        assert caplog.text.count("another packer listens at") == 1
        with client(path), other.socket.accept()[0]:  # nobody took it back
            pass
        other.socket.close()  # as if it were killed
        wait_until(lambda: not first.taken, "it listens again")
        assert "listening there again" in caplog.text
        with client(path):
            wait_until(lambda: first._connections, "who connects comes here again")


def test_a_path_at_which_nobody_can_listen_is_complained_of_once_and_tried_on(path, often, caplog):
    with kept(path) as first:
        file = path.with_name("file")
        file.write_text("precious")
        file.replace(path)
        wait_until(lambda: first._pause_s == door._PAUSE_S, "it tried again and again")
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert "which is there and is no socket" in caplog.text
        assert path.read_text() == "precious"
        path.unlink()
        wait_until(lambda: first._listener.has_path, "it listens again")


@pytest.mark.parametrize("where", ["somewhere else", "nowhere"])
def test_a_link_where_the_socket_should_be_is_left_alone(path, where):
    target = path.with_name("target")
    if where == "somewhere else":
        leave_stale(target)
    path.symlink_to(target)
    with pytest.raises(SettingError, match="is there and is no socket"):
        Listener(path)
    assert path.is_symlink()
    assert target.exists() == (where == "somewhere else")


def test_a_listener_whose_queue_is_full_is_not_waited_for(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy, contextlib.ExitStack() as stack:
        busy.bind(str(path))
        busy.listen(0)
        stack.enter_context(client(path))
        with pytest.raises(SocketTaken):
            Listener(path)


@pytest.mark.usefixtures("often")
def test_a_socket_that_goes_while_nothing_more_may_be_opened_is_there_again_when_it_may(path, caplog):
    with kept(path):
        with full_table(os.getpid()):
            path.unlink()
            wait_until(lambda: "nobody new can reach this packer" in caplog.text, "it says so")
        wait_until(path.exists, "it listens again")
        client(path).close()


def test_an_accepter_that_fails_ends_the_packer(path, monkeypatch):
    """In process: nothing that a peer can do makes it fail."""
    settings = Settings.load({"device": "host", "socket": str(path), "pool_bytes": "2MiB"}, {})
    with contextlib.closing(Server(settings, b"k" * 32)) as server, monkeypatch.context() as patch:
        reasons: list[str] = []
        patch.setattr(server, "_die", reasons.append)
        patch.setattr(server._door, "accept", lambda: 1 / 0)
        server._accept_all()
        assert "ZeroDivisionError" in reasons[0]


# -- two packers -------------------------------------------------------------------------------------------------------


def test_a_packer_whose_path_another_took_serves_its_engine_on_and_ends_with_it(path):
    with running_packer(path.parent) as first, session(first) as (engine, worker):
        path.unlink()
        with running_packer(path.parent) as second:
            first.wait_log("another packer listens at .*; it serves the engines that it has")
            transfer(engine, worker)
            with session(second) as (another, its_worker):
                transfer(another, its_worker)
                worker.close()
                engine.close()
                assert first.wait() == 0
                first.wait_log("packer stops: another packer listens at")
                with session(second) as (new, new_worker):
                    transfer(new, new_worker)
                transfer(another, its_worker)


def test_of_packers_that_are_started_at_once_at_a_stale_socket_one_serves(path):
    leave_stale(path)
    path.with_name("key").touch(mode=0o600)
    path.with_name("key").write_text(secrets.token_hex(32))
    with ThreadPoolExecutor(2) as executor:
        packers = list(executor.map(lambda _: Packer(path.parent), range(2)))
    try:
        (loser,) = [packer for packer in packers if "error" in packer.report]
        assert "another packer listens at" in loser.report["error"]
        assert loser.wait() == 1
        (owner,) = [packer for packer in packers if packer is not loser]
        with session(owner) as (engine, worker):
            transfer(engine, worker)
    finally:
        for packer in packers:
            packer.close()
