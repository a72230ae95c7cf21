"""Run directories: where they are made, who removes them, and what is never touched."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packer_process import wait_until

from packer_service.config import Settings
from packer_service.errors import PackerUnavailable
from worker_shim.engine.supervisor import Supervisor

MARK = ".packer-service"


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    return short_path


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """Where engines make theirs, and look for what others left."""
    base = tmp_path / "T"
    base.mkdir()
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    return base


@contextlib.contextmanager
def engine_side() -> Iterator[Supervisor]:
    supervisor = Supervisor(Settings.load({"pool_bytes": "2MiB", "pool_max_bytes": "16MiB"}))
    try:
        yield supervisor
    finally:
        supervisor.stop()


def tree(base: Path) -> set[str]:
    return {str(path.relative_to(base)) for path in base.rglob("*")}


def gone_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def bind(path: Path) -> None:
    """A socket that nobody listens at any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(path))


KILLED = """
import os, signal
from packer_service.run_directory import RunDirectory, bases
directory = RunDirectory.make(bases())
print(directory.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def left_behind() -> Path:
    """The directory of an engine that was killed, with the socket of a packer that was."""
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    directory = Path(done.stdout.strip())
    bind(directory / "cuda0.sock")
    return directory


def test_what_is_not_ours_stays_whatever_its_name_is(base, tmp_path):
    pid = gone_pid()
    for name in ("packer-2024-images/disk", f"packer-{pid}-tree/a/b/precious", f"packer-{pid}-key/key"):
        (base / name).parent.mkdir(parents=True)
        (base / name).write_text("precious")
    (base / "packer-2024-empty").mkdir()
    (base / f"packer-{pid}-socket").mkdir()
    bind(base / f"packer-{pid}-socket" / "host.sock")
    (base / f"packer-{pid}-link").symlink_to(tmp_path)
    (base / f"packer-{pid}-file").write_text("precious")
    before = tree(base)
    with engine_side():
        pass
    assert tree(base) == before


def test_what_a_killed_engine_and_its_packers_left_is_removed_and_what_is_in_use_is_not(base):
    left = left_behind()
    with engine_side() as living:
        assert not left.exists()
        packer = living.start("host")
        with engine_side():
            assert os.path.exists(packer.socket)
            assert len(list(base.iterdir())) == 2
    assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    "add",
    [
        lambda left: (left / "notes.txt").write_text("precious"),
        lambda left: (left / "folder").mkdir(),
        lambda left: bind(left / "mine.sock"),
        lambda left: (left / "host.sock").write_text("no socket"),
        lambda left: (left / "host.sock").symlink_to("/dev/null"),
        lambda left: (left / MARK).write_text("something else"),
        lambda left: ((left / MARK).rename(left.parent / "mark"), (left / MARK).symlink_to(left.parent / "mark")),
        lambda left: ((left / MARK).unlink(), os.mkfifo(left / MARK)),
        lambda left: ((left / MARK).unlink(), (left / MARK).mkdir()),
        pytest.param(
            lambda left: os.chown(left / MARK, 65534, 65534),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away"),
        ),
    ],
    ids=[
        "file",
        "folder",
        "socket",
        "no-socket",
        "link",
        "mark",
        "linked-mark",
        "fifo-mark",
        "folder-mark",
        "foreign-mark",
    ],
)
def test_a_directory_that_holds_anything_else_or_another_mark_stays_as_it_is(base, add: Callable[[Path], object]):
    left = left_behind()
    add(left)
    before = tree(base)
    with engine_side():
        pass
    assert tree(base) == before


def test_a_start_does_not_depend_on_what_it_only_tidies(base):
    """Sockets whose names are no text, in leftovers and in the kernel's list; a leftover of somebody else's process."""
    for name in (b"packer-1-x", b"packer-1-\xff\xfe"):
        directory = os.path.join(os.fsencode(base), name)
        os.mkdir(directory)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
            left.bind(os.path.join(directory, b"host.sock"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as somebody:
        somebody.bind(b"\0\xff\xfe packer-service test " + str(os.getpid()).encode())
        with engine_side() as supervisor:
            supervisor.start("host")


def test_a_child_that_was_forked_does_not_keep_a_directory_from_its_engine(base):
    with engine_side():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)  # until the other end is closed
            os._exit(0)
        os.close(reader)
    try:
        assert list(base.iterdir()) == []
    finally:
        os.close(writer)
        os.waitpid(child, 0)


ENGINE = """
import signal
from packer_service.wire import handshake
from packer_service.config import Settings
from worker_shim.engine.supervisor import Supervisor
supervisor = Supervisor(Settings.load({"pool_bytes": "2MiB", "pool_max_bytes": "16MiB"}))
channel, _ = handshake.connect(supervisor.start("host").socket, supervisor.key, "engine", "a session")
print("ready", flush=True)
signal.pause()
"""


def test_the_packer_of_a_killed_engine_removes_the_directory(base):
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        assert len(list(base.iterdir())) == 1
        engine.kill()
    wait_until(lambda: not list(base.iterdir()), "the run directory goes")


def test_of_two_packers_the_last_to_leave_removes_the_directory(base):
    from packer_service.run_directory import RunDirectory, bases, hold

    engine = RunDirectory.make(bases())
    first, second = hold(engine.path), hold(engine.path)
    for one in (first, engine):
        one.release()
        assert os.path.exists(engine.path)
    second.release()
    assert list(base.iterdir()) == []


# -- where -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variables",
    [
        {"XDG_RUNTIME_DIR": "{tmp}/gone"},
        {"TMPDIR": "{tmp}/gone", "XDG_RUNTIME_DIR": "{tmp}/gone"},
        {"TMPDIR": "{tmp}/a file"},
        {"TMPDIR": "{tmp}/" + "long/" * 30},
        {"TMPDIR": "."},
        {"TMPDIR": "", "XDG_RUNTIME_DIR": ""},
    ],
    ids=["login-gone", "both-gone", "file", "long", "relative", "empty"],
)
def test_a_packer_starts_wherever_the_variables_point(base, tmp_path, monkeypatch, variables):
    (tmp_path / "a file").touch()
    os.makedirs(tmp_path / ("long/" * 30))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    with engine_side() as supervisor:
        supervisor.start("host")


def test_where_no_directory_can_be_made_every_reason_is_said_with_its_variable(tmp_path):
    from packer_service.run_directory import RunDirectory

    (tmp_path / "file").touch()
    long = tmp_path / ("x" * 100)
    long.mkdir()
    bases = {"TMPDIR=/gone": str(tmp_path / "gone"), "/tmp": str(tmp_path / "file"), "XDG_RUNTIME_DIR=/l": str(long)}
    with pytest.raises(
        PackerUnavailable,
        match="TMPDIR=/gone: No such file or directory; /tmp: Not a directory; XDG_RUNTIME_DIR=/l: a socket there would have"
        r" a path of \d+ bytes, more than 107. Set TMPDIR to a directory",
    ):
        RunDirectory.make(bases)
    assert list(long.iterdir()) == []
