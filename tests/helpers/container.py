"""A process as a container runs it: in mount, IPC, network and PID namespaces of its own, where it has pid 1.

It has its own /dev/shm, and of the file system it may write to one directory only, which it shares with other containers.
With a ``uid`` it has no rights beside that uid's. Run as a program, this file is what turns the new namespaces into that, and
then becomes the container's first process. It needs root, or whatever ``unshare`` wants.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from packer_process import DEADLINE_S, wait_until

KINDS = ("mnt", "ipc", "net", "pid")
ROOT = Path(__file__).resolve().parents[2]
_UNSHARE = ("unshare", "--mount", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_KERNELS_OWN = ("/proc", "/sys", "/dev")  # nothing there is a file of the image's

_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC = 0x1, 0x20, 0x1000, 0x4000
_SAME_FLAGS = {"nosuid": 0x2, "nodev": 0x4, "noexec": 0x8, "noatime": 0x400, "nodiratime": 0x800, "relatime": 0x200000}
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


@functools.cache
def refusal() -> str:
    """Why there can be no such container here; empty where there can."""
    try:
        done = subprocess.run(
            [*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces: {error}"
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


def namespaces() -> dict[str, str]:
    """Which ones this process is in."""
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}


class Container:
    """A running one. ``close`` ends whatever runs in it.

    ``command``: what its first process is, by arguments of Python. ``stdout`` is a pipe, and so is ``stdin``. With
    ``read_only`` it may write to ``shared`` neither.
    """

    def __init__(
        self,
        shared: Path,
        *command: object,
        uid: int = 0,
        read_only: bool = False,
        pass_fds: Sequence[int] = (),
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.uid = uid
        mode = "ro" if read_only else "rw"
        within = [sys.executable, __file__, str(shared), mode, str(uid), sys.executable, *map(str, command)]
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [*_UNSHARE, *within],
            pass_fds=pass_fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    @property
    def first(self) -> int:
        """The pid of its first process, as it is called out here."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(wait_until(children.read_text, "the container's first process").split()[0])

    def enter(self, *command: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run another Python in it, as ``docker exec`` and a probe do."""
        user = ["--setuid", str(self.uid), "--setgid", str(self.uid)] if self.uid else []
        enter = ["nsenter", "--target", str(self.first), "--mount", "--ipc", "--net", "--pid", *user]
        return subprocess.run(
            [*enter, sys.executable, *map(str, command)], capture_output=True, text=True, timeout=60, **options
        )

    def wait(self) -> int:
        """The exit code of its first process."""
        return self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM to its first process, as ``docker stop`` does; its exit code."""
        os.kill(self.first, signal.SIGTERM)
        return self.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(*arguments, ctypes.c_ulong(flags), None if data is None else data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def _open_to_everybody(paths: list[Path]) -> None:
    """Have every uid reach ``paths``, as that of an image reaches what is installed there: /root may be in the way here."""
    for path in paths:
        closed = next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
        if closed is None:
            continue
        kept = {each: os.open(each, os.O_PATH) for each in paths if each.is_relative_to(closed)}
        _mount("tmpfs", str(closed), "tmpfs", 0, "mode=755")
        for each, fd in kept.items():
            each.mkdir(parents=True, exist_ok=True)
            _mount(f"/proc/self/fd/{fd}", str(each), None, _MS_BIND | _MS_REC)
            os.close(fd)


def _make_read_only(but: Path | None) -> None:
    """Every mounted file system but ``but`` and the kernel's own."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target, options = line.split()[4:6]
        if Path(target) == but or target.startswith(_KERNELS_OWN):
            continue
        same = functools.reduce(lambda flags, name: flags | _SAME_FLAGS.get(name, 0), options.split(","), 0)
        try:
            _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | same)
        except OSError as error:
            print(f"{target} stays as it is: {error}", file=sys.stderr)


def _become(uid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # EINVAL past the kernel's last one
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # unshare's --kill-child, which another uid takes away


def _start_loopback() -> None:
    """A container has it also where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def main(shared: Path, mode: str, uid: int, command: list[str]) -> None:
    _start_loopback()
    _mount("tmpfs", "/dev/shm", "tmpfs", 0, "mode=1777,size=64m")
    _mount(str(shared), str(shared), None, _MS_BIND)
    if uid:
        prefixes = {Path(prefix).resolve() for prefix in (sys.base_prefix, sys.prefix, str(ROOT))}
        _open_to_everybody(sorted(prefixes))
    _make_read_only(but=shared if mode == "rw" else None)
    if uid:
        _become(uid)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
