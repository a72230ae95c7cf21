"""A real systemd, as the first process of namespaces of its own: what is done to its machine is gone with it.

Its root is this machine's, with every change kept in memory. It has its own processes, users, network, cgroup, /run, /tmp and
/dev/shm, no device but the likes of /dev/null, and none of the units that a machine starts at boot. It may load no kernel
module and set no clock. It needs root, overlayfs, and cgroup v2, mounted anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from packer_process import DEADLINE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SYSTEMD = Path("/lib/systemd/systemd")
COMMAND = Path("/opt/packer/bin/packer-service")
_UNSHARE = "unshare --mount --pid --fork --kill-child --ipc --uts --net --cgroup --propagation private"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NOT_FOR_IT = "-sys_module,-sys_time,-sys_boot,-sys_rawio,-syslog,-wake_alarm,-audit_control"

_PREPARE = r"""
set -e
mount -t tmpfs tmpfs "$BASE"; cd "$BASE"; mkdir upper work root
mount -t overlay overlay -o "lowerdir=/,upperdir=$BASE/upper,workdir=$BASE/work" root; cd root
mount -t proc proc proc; mount --bind proc/sys proc/sys; mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys; mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs dev; mkdir dev/shm dev/pts
for each in null zero full random urandom tty; do touch "dev/$each"; mount --bind "/dev/$each" "dev/$each"; done
ln -s /proc/self/fd dev/fd; mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts; ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=755 tmpfs run; mount -t tmpfs -o mode=1777 tmpfs tmp
"""
# Python is mounted where everybody may read it: here it may be in /root, which units with ProtectHome= do not see either.
_BOOT = r"""
rm -rf lib/systemd/system/*.target.wants etc/systemd/system/*.wants
wanted="systemd-journald.service systemd-tmpfiles-setup.service"
printf "[Unit]\nDefaultDependencies=no\nWants=$wanted\n" > etc/systemd/system/sysinit.target
printf "[Unit]\nRequires=basic.target\nAfter=basic.target\n" > etc/systemd/system/multi-user.target
: > etc/machine-id

mkdir -p opt/packer/bin opt/packer/share/packer-service opt/python opt/site opt/source old
mount --bind "$PYTHON" opt/python; mount --bind "$SITE" opt/site; mount --bind "$SOURCE" opt/source
cp -r opt/source/configs/systemd opt/packer/share/packer-service
cat > opt/packer/bin/packer-service <<END
#!/bin/sh
export LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/site:/opt/source/tests/helpers/inject
exec /opt/python/bin/$NAME -m packer_service "\$@"
END
chmod 755 opt/packer/bin/packer-service

pivot_root . old; umount -l /old; rmdir /old
exec env -i container=packer-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set "$NOT_FOR_IT" /lib/systemd/systemd --system --unit=multi-user.target
"""


def _cgroups() -> Path | None:
    """Where cgroup v2 is mounted."""
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)


@functools.cache
def refusal() -> str:
    """Why no systemd can be booted here; empty where one can."""
    if not SYSTEMD.exists():
        return f"needs {SYSTEMD} (Debian: apt-get install systemd)"
    cgroups = _cgroups()
    if cgroups is None or not os.access(cgroups, os.W_OK):
        return "needs root, and cgroup v2 to write to"
    with tempfile.TemporaryDirectory() as base:
        try:
            command = [*_UNSHARE.split(), "sh", "-c", _PREPARE]
            done = subprocess.run(command, env={**os.environ, "BASE": base}, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no namespaces: {error}"
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class Booted:
    """One that is up from ``__init__`` to ``close``. What ``COMMAND`` names there is this checkout's, which faults can break.

    ``first`` is the pid of its first process, and ``cgroup`` its cgroup, as they are called out here.
    """

    def __init__(self) -> None:
        cgroups = _cgroups()
        assert cgroups is not None
        self.cgroup = cgroups / f"packer-test-{secrets.token_hex(4)}"
        self.cgroup.mkdir()
        self._base = tempfile.TemporaryDirectory(prefix="booted-")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 -- for what goes wrong before there is a journal
        environ = {
            "BASE": self._base.name,
            "PYTHON": sys.base_prefix,
            "NAME": "python{}.{}".format(*sys.version_info),
            "SITE": sysconfig.get_path("purelib"),
            "SOURCE": str(ROOT),
            "NOT_FOR_IT": _NOT_FOR_IT,
        }
        enter = f'echo $$ >{self.cgroup}/cgroup.procs; exec setpriv --pdeathsig KILL {_UNSHARE} sh -c "$0"'
        self._process = subprocess.Popen(
            ["sh", "-c", enter, _PREPARE + _BOOT],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
            self.first = int(wait_until(children.read_text, "there is a first process").split()[0])
            wait_until(lambda: self._is_up, "it is up")
        except BaseException as error:
            self._log.seek(0)
            log = self._log.read()
            self.close()
            raise AssertionError(f"no systemd came up: {log}") from error

    @property
    def _is_up(self) -> bool:
        return self.run("systemctl", "is-active", "multi-user.target", check=False) == "active"

    def run(self, *command: object, check: bool = True) -> str:
        """What a command of root says in there. AssertionError where it fails, unless ``check`` is false."""
        done = subprocess.run(
            ["nsenter", "--target", str(self.first), "--all", f"--wd=/proc/{self.first}/root", *map(str, command)],
            env={"PATH": _PATH, "LC_ALL": "C.UTF-8"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or not done.returncode, (command, done.returncode, done.stdout, done.stderr)
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        within = Path(f"/proc/{self.first}/root{path}")
        within.parent.mkdir(parents=True, exist_ok=True)
        within.write_text(text)

    def close(self) -> None:
        self._process.kill()  # its first process goes with it, and with that all the others
        self._process.wait(DEADLINE_S)
        self._log.close()
        wait_until(self._remove_cgroup, "the last process in its cgroup has ended")
        self._base.cleanup()

    def _remove_cgroup(self) -> bool:
        for directory, _, _ in os.walk(self.cgroup, topdown=False):
            with contextlib.suppress(OSError):  # something in there has not quite ended
                os.rmdir(directory)
        return not self.cgroup.exists()
