"""How engine and workers reach a packer: the socket and its directory, the key, the pids, and who listens already."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

from packer_service import run_directory
from packer_service.config import Settings
from packer_service.doctor.finding import Finding, error, note, ok, warning
from packer_service.door import check_path
from packer_service.errors import HandshakeError, NotNow, PackerError, SettingError
from packer_service.operator import Operator
from packer_service.run_directory import MAX_SOCKET_BYTES, RunDirectory
from packer_service.wire.channel import peer_credentials

_FIRST_NAMESPACE = "pid:[4026531836]"  # the inode of the machine's own, in every kernel
_ANSWER_S = 3.0
_DIRECTORY = "install -d -m 750 -o USER DIRECTORY, or systemd RuntimeDirectory=packer"
_MAKE_KEY = "(umask 077; head -c 32 /dev/urandom | base64 > KEY), and --key-file KEY (PACKER_KEY_FILE)"
_SHARE_PIDS = (
    "share the pid namespace (docker run --pid, Kubernetes shareProcessNamespace), or start one of them under an init"
    " process (docker run --init)"
)


class Listening(NamedTuple):
    """A packer that listens at ``path``, as the kernel names it to this process: pid 0 is one of another pid namespace."""

    path: str
    pid: int
    uid: int


def find_listening(paths: list[str]) -> list[Listening]:
    """Who listens at which of ``paths``. It is connected to for a moment, and asked nothing."""
    found = []
    for path in paths:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(_ANSWER_S)
            try:
                peer.connect(path)
                found.append(Listening(path, *peer_credentials(peer)))
            except OSError:
                pass  # nobody: ``check_socket`` says why
    return found


def check_socket(settings: Settings, listening: list[Listening]) -> list[Finding]:
    """The path that a packer would listen at; in sidecar mode, the paths at which an engine looks for its packers."""
    if settings.mode == "sidecar":
        return _check_sidecars(settings, listening)
    if not settings.socket:
        return [_check_run_directory()]
    if listening:
        return [ok("socket", f"{settings.socket} is in use by a packer")]
    return [_check_new_socket(Path(settings.socket))]


def _check_run_directory() -> Finding:
    """Make one, as an engine does that starts its own packers, and remove it."""
    try:
        directory = RunDirectory.make(run_directory.bases())
    except PackerError as failure:
        return error("socket", str(failure), "set TMPDIR to a directory with a short path that this user may write to")
    directory.release()
    base = os.path.dirname(directory.path)
    return ok(
        "socket", f"an engine that starts its own packers makes their sockets in {base}; none was named (--socket)"
    )


def _check_new_socket(path: Path) -> Finding:
    name = "socket"
    there = next((parent for parent in path.parents if parent.exists()), Path("/"))
    if there == path.parent or len(os.fsencode(path)) > MAX_SOCKET_BYTES or "," in str(path):
        try:
            check_path(path)
        except SettingError as failure:
            return error(name, str(failure), _mend_of(path, str(failure)))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            text = f"this user (uid {os.geteuid()}) may not make {path.name} in {path.parent}"
            return error(name, text, _DIRECTORY)
        return ok(name, f"a packer of this user may listen at {path}: {_describe(path.parent)}")
    if not os.access(there, os.W_OK | os.X_OK):
        text = f"{path.parent} is not there, and this user (uid {os.geteuid()}) may not make it in {there}"
        return error(name, text, _DIRECTORY)
    return ok(name, f"a packer makes {path.parent}, for its own user alone, and listens there")


def _mend_of(path: Path, failure: str) -> str:
    if "writable by everybody" in failure:
        return (
            f"chmod o-w {path.parent} and chown it to this user, or give --socket a directory of its own: {_DIRECTORY}"
        )
    if "is no socket" in failure:
        return f"remove {path}, or name another --socket (PACKER_SOCKET)"
    if "bytes" in failure:
        return "name a shorter --socket (PACKER_SOCKET), such as /run/packer/gpu0.sock"
    return "name another --socket (PACKER_SOCKET), such as /run/packer/gpu0.sock"


def _describe(directory: Path) -> str:
    status = directory.stat()
    return f"its directory is uid {status.st_uid}'s, with mode {status.st_mode & 0o7777:o}"


def _check_sidecars(settings: Settings, listening: list[Listening]) -> list[Finding]:
    name = "socket"
    if not settings.socket:
        text = "mode is sidecar, and no socket of a packer is named"
        return [
            error(name, text, "--socket PATH (PACKER_SOCKET), one for each GPU, separated by commas; or mode = managed")
        ]
    reached = {each.path for each in listening}
    found = [ok(name, f"a packer listens at {path}") for path in settings.sockets() if path in reached]
    for path in settings.sockets():
        if path in reached:
            continue
        if os.path.exists(path) and not os.access(path, os.R_OK | os.W_OK):
            mend = (
                "share the directory and the socket through a group, and name this uid in the packer's --allowed-uids"
            )
            found.append(error(name, f"this user (uid {os.geteuid()}) may not connect to {path}", mend))
        else:
            mend = f"packer-service serve --socket {path} --key-file KEY, or systemctl start packer-service@GPU"
            found.append(warning(name, f"nobody listens at {path} now; an engine waits start_timeout_s for it", mend))
    return found


def check_key(settings: Settings) -> Finding:
    """The file of the key, where there has to be one."""
    if not settings.key_file and not settings.socket and settings.mode == "managed":
        return ok("key", "not needed: an engine that starts its own packers makes one for them")
    try:
        settings.read_key()
    except SettingError as failure:
        mend = f"chmod 640 {settings.key_file}" if "open to everybody" in str(failure) else _MAKE_KEY
        if "cannot be read" in str(failure):
            mend = f"{_MAKE_KEY}; where others own it, share it through a group: chgrp GROUP, chmod 640"
        return error("key", str(failure), mend)
    return ok("key", f"{settings.key_file} can be read, and others may not")


def check_uids(settings: Settings) -> Finding:
    try:
        allowed = ", ".join(map(str, sorted(settings.uids())))
    except SettingError as failure:
        return error("uids", str(failure), "--allowed-uids 1000,1001 (PACKER_ALLOWED_UIDS)")
    return ok("uids", f"may connect: {allowed}")


def check_running(settings: Settings, listening: list[Listening]) -> list[Finding]:
    """What the packers that listen say, asked as an operator asks. Only with the key, and nothing is changed."""
    found = []
    for each in listening:
        name = "running packer"
        try:
            key = settings.read_key()
        except SettingError:
            found.append(note(name, f"one listens at {each.path}, and cannot be asked without its key", _MAKE_KEY))
            continue
        try:
            begin = time.monotonic()
            with Operator(each.path, key, timeout_s=_ANSWER_S) as operator:
                status = operator.status()
            took_ms = (time.monotonic() - begin) * 1e3
        except NotNow as failure:
            found.append(warning(name, f"the one at {each.path} did not answer: {failure}", "try again, or restart it"))
        except HandshakeError as failure:
            mend = "give both the same key file, and name this uid in the packer's --allowed-uids"
            found.append(error(name, f"the one at {each.path} refused: {failure}", mend))
        except (PackerError, OSError) as failure:
            mend = "see its log; restart it (systemctl restart packer-service@GPU)"
            found.append(error(name, f"the one at {each.path} does not answer: {failure}", mend))
        else:
            text = (
                f"pid {status.pid} at {each.path} is {status.state} on {status.device_name}, version {status.version},"
                f" with {len(status.engines)} engines and {status.workers} workers; it answered in {took_ms:.1f} ms"
            )
            found.append(ok(name, text))
            if each.pid != status.pid:
                found.append(_other_namespace(each, status.pid))
    return found


def _other_namespace(each: Listening, pid: int) -> Finding:
    text = (
        f"the packer at {each.path} is in another pid namespace, where its pid is {pid}: a worker that has that pid here is"
        " refused"
    )
    return note("pids", text, _SHARE_PIDS)


def check_pids(device: str, namespace: str | None = None) -> Finding:
    """CUDA takes two processes with the same pid for one, whatever namespaces they are in."""
    if namespace is None:
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = ""
    if device == "host" or namespace == _FIRST_NAMESPACE:
        why = "the host device does not mind" if device == "host" else "this is the machine's own pid namespace"
        return ok("pids", f"packer and worker cannot be taken for each other: {why}")
    text = (
        "this process is in a pid namespace of its own. A packer alone in a container is pid 1 there; a worker in another"
        " container that has the same pid is refused"
    )
    return note("pids", text, _SHARE_PIDS)
