"""Workers of the tests' engines by fork: what each would import, torch and vllm-omni, is imported once, in a zygote.

multiprocessing starts a spawned process by running a command. While `forked_workers` lasts, that command is run in a fork of
the zygote: a process that has imported a worker's modules and done nothing else. Everything after that is multiprocessing's
own: the process gets what spawn gives it (environment, directory, module path, descriptors; the rest through spawn's pipe),
and is a child of this process like any other. Where a variable differs that a module or a library may have read while the
zygote imported it, there is another zygote. Beside a GPU every worker is spawned after all.

A zygote is a child of this process, starts with the first worker, and ends when this process does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import re
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing import popen_spawn_posix, spawn, util
from typing import Any

from worker_shim.synthetic.engine import nvidia_gpus

GPUS = nvidia_gpus()
PRELOADED = ("worker_shim.worker.worker_main", "vllm_omni.diffusion.diffusion_engine")
_READ_LATER = re.compile(
    "PACKER_|PIPELINE_|PYTEST_|PYTHONPATH$|TMPDIR$|XDG_RUNTIME_DIR$|MASTER_(ADDR|PORT)$|(LOCAL_)?(RANK|WORLD_SIZE)$"
)
"""Variables that no module reads when it is imported, and the module path, which spawn sends: they may differ."""
_MOST_ZYGOTES = 2  # before and after a worker in the test's own process (`uni`), which leaves variables of vllm's there
_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 1 << 20


class _Zygote:
    """The test process's end. One thread at a time."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *PRELOADED]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(self.end)

    def end(self) -> None:
        self._socket.close()
        self.process.wait()
        atexit.unregister(self.end)

    def start(self, command: list[str], fds: tuple[int, ...]) -> int:
        """The pid of a new child of this process, in which ``command``, a spawned process's, runs with these descriptors."""
        asked = {"command": command, "fds": [0, 1, 2, *fds], "environment": dict(os.environ), "directory": os.getcwd()}
        _set_subreaper(True)  # what the zygote's child leaves behind becomes ours
        try:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], asked["fds"])
            answer = self._socket.recv(_MOST_BYTES)
        finally:
            _set_subreaper(False)
        if not answer:
            raise RuntimeError(f"the zygote ended: {self.process.wait()}")
        return int(answer)


def _set_subreaper(on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


_zygotes: dict[frozenset[tuple[str, str]], _Zygote] = {}  # by what they found in their environment, the latest last


def _zygote() -> _Zygote:
    """One that imported in the environment of now."""
    found = frozenset(item for item in os.environ.items() if not _READ_LATER.match(item[0]))
    _zygotes[found] = _zygotes.pop(found, None) or _Zygote()
    if len(_zygotes) > _MOST_ZYGOTES:
        _zygotes.pop(next(iter(_zygotes))).end()
    return _zygotes[found]


def pids() -> set[int]:
    """The zygotes', which are no engine's."""
    return {each.process.pid for each in _zygotes.values()}


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Until the end of the block, processes that multiprocessing spawns are forks of the zygote."""
    spawned = util.spawnv_passfds

    def start(path: Any, command: list[Any], fds: Any) -> int:
        words = [os.fsdecode(word) for word in command]
        if "--multiprocessing-fork" in words and not GPUS:
            return _zygote().start(words, tuple(sorted(map(int, fds))))
        return spawned(path, command, fds)

    assert popen_spawn_posix.util is util
    util.spawnv_passfds = start
    try:
        yield
    finally:
        util.spawnv_passfds = spawned


# -- the zygote's process ----------------------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for each command until nobody is left to ask. Returns in the forks only, with what to run."""
    parent = os.getppid()
    while True:
        data, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 64)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        if (between := os.fork()) == 0:
            # The process between ends at once, so that the fork's parent is who asked.
            if (pid := os.fork()) != 0:
                os.write(writer, str(pid).encode())
                os._exit(0)
            while os.getppid() != parent:
                time.sleep(0.0005)
            asked = json.loads(data)
            _place(fds, asked["fds"])
            return asked
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            pid = answer.read()
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)
        connection.send(pid)


def _place(fds: list[int], numbers: list[int]) -> None:
    """Have ``fds`` at these numbers, and no other descriptor."""
    above = max([*fds, *numbers]) + 1
    moved = [os.dup2(fd, above + index, inheritable=False) for index, fd in enumerate(fds)]
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            with contextlib.suppress(OSError):  # listdir's own is gone
                os.close(int(name))


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    for module in sys.argv[2:]:
        __import__(module)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.collect()
    gc.freeze()
    opened = {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, connection.fileno()}
    assert len(opened) == 1, f"a module opened descriptors, which would not survive a fork: {opened}"  # listdir's own
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")  # the threads are OpenBLAS's, which can
    asked = _serve(connection)
    connection.detach()
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.environ.update(set_by_imports)
    os.chdir(asked["directory"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    given = re.search(r"spawn_main\((.*)\)", asked["command"][-2])
    try:
        spawn.spawn_main(**{name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", given[1])})
    except SystemExit as end:
        # As at any end, but for the modules: to take torch and vllm-omni apart would first copy all of the zygote's memory.
        atexit._run_exitfuncs()
        gc.collect()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)


if __name__ == "__main__":
    _main()
