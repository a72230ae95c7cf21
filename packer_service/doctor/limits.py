"""What the kernel and this process's limits allow: descriptors, memfds, threads, addresses, the settings in /proc/sys."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from packer_service.config import Settings
from packer_service.doctor.finding import Finding, error, note, ok, warning
from packer_service.door import MAX_OPERATORS, MAX_UNPROVEN
from packer_service.memory.memfd import SharedMemory

_OWN_FILES = 64  # those that a packer has before anybody connects: 5 on the host, and those of the driver
_FILES_OF_SESSION = 2  # a connection, and a worker's timeline
_TRIED_BYTES = 2 << 20
_LEAST_MAPPINGS = 65530  # the kernel's default
_OWN_THREADS = 7  # of a packer before anybody connects
_THREADS_OF_SESSION = 2


def check_descriptors(settings: Settings) -> Finding:
    """A packer raises its soft limit to the hard one itself."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    segments = -(-settings.pool_max_bytes // settings.pool_step_bytes)
    wanted = _OWN_FILES + settings.max_sessions * _FILES_OF_SESSION + MAX_UNPROVEN + MAX_OPERATORS + segments
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        shown = "no limit" if hard == resource.RLIM_INFINITY else f"the hard limit is {hard}"
        return ok("descriptors", f"{shown}; a packer with max_sessions = {settings.max_sessions} may need {wanted}")
    text = f"the hard limit of open files is {hard}, and a packer with max_sessions = {settings.max_sessions} may need {wanted}"
    mend = (
        f"systemd LimitNOFILE={wanted}, docker run --ulimit nofile={wanted}, ulimit -n {wanted}; or lower max_sessions"
    )
    return warning("descriptors", text, mend)


def check_memfd() -> Finding:
    """Make one, as the pool does, and touch its pages."""
    name = "memfd"
    try:
        memory = SharedMemory.create("packer-doctor", _TRIED_BYTES)
    except OSError as failure:
        mend = "allow memfd_create in the seccomp profile of the container or unit"
        if failure.errno == errno.EFBIG:
            mend = "systemd LimitFSIZE=infinity, ulimit -f unlimited: a memfd is a file"
        elif failure.errno == errno.EACCES:
            mend = "sysctl vm.memfd_noexec=1 (at 2 the kernel refuses them)"
        elif failure.errno in (errno.EMFILE, errno.ENFILE):
            mend = "systemd LimitNOFILE=4096, ulimit -n 4096"
        return error(name, f"no shared memory can be made: {failure.strerror}", mend)
    try:
        memory.populate(1)
    except MemoryError as failure:
        return error(name, str(failure), "raise the memory limit (systemd MemoryMax, container memory limit)")
    finally:
        memory.close()
    return ok(name, "sealed shared memory can be made and its pages be had")


def check_limits(settings: Settings) -> list[Finding]:
    """The other limits of a process, where one is set that a packer may meet."""
    found = []
    _, files = resource.getrlimit(resource.RLIMIT_FSIZE)
    if files != resource.RLIM_INFINITY and files < settings.pool_max_bytes:
        text = (
            f"a file may have {files} bytes at most, and so may a segment of the pool (up to {settings.pool_max_bytes})"
        )
        found.append(warning("file size", text, "systemd LimitFSIZE=infinity, ulimit -f unlimited"))
    _, addresses = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        text = f"a process may map {addresses} bytes at most; CUDA reserves more addresses than it uses memory"
        found.append(warning("address space", text, "systemd LimitAS=infinity, ulimit -v unlimited"))
    return found or [ok("limits", "neither the size of a file nor the address space is limited")]


def check_system(
    settings: Settings, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> list[Finding]:
    """What /proc/sys and the pids cgroup allow."""
    found = []
    mappings = _number(proc / "sys/vm/max_map_count")
    if mappings is not None and mappings < _LEAST_MAPPINGS:
        text = f"vm.max_map_count is {mappings}; a driver and its registrations take many mappings"
        found.append(warning("mappings", text, f"sysctl vm.max_map_count={_LEAST_MAPPINGS}"))
    if _number(proc / "sys/vm/overcommit_memory") == 2:
        text = "vm.overcommit_memory is 2: the kernel refuses what CUDA reserves and does not use"
        found.append(warning("overcommit", text, "sysctl vm.overcommit_memory=0"))
    if _number(proc / "sys/vm/memfd_noexec") == 2:
        found.append(
            error("memfd_noexec", "vm.memfd_noexec is 2: the kernel refuses memfds", "sysctl vm.memfd_noexec=1")
        )
    pids = _pids_limit(proc, cgroups)
    wanted = _OWN_THREADS + settings.max_sessions * _THREADS_OF_SESSION + MAX_UNPROVEN + MAX_OPERATORS
    if pids is not None and pids < wanted:
        text = f"this cgroup may have {pids} threads, and max_sessions = {settings.max_sessions} may take {wanted}"
        found.append(
            warning(
                "threads", text, f"systemd TasksMax={wanted}, docker run --pids-limit {wanted}; or lower max_sessions"
            )
        )
    shown = [
        f"{name} = {value}"
        for name in ("vm.max_map_count", "vm.overcommit_memory", "fs.nr_open")
        if (value := _number(proc / "sys" / name.replace(".", "/"))) is not None
    ]
    return found or [
        ok("kernel settings", f"{', '.join(shown)}; {f'{pids} threads' if pids else 'no limit of threads'}")
    ]


def check_shm(path: str = "/dev/shm") -> Finding:
    """vllm-omni's own path goes through named shared memory there; a packer's memory does not."""
    name = "/dev/shm"
    try:
        status = os.statvfs(path)
    except OSError as failure:
        text = f"it cannot be looked at ({failure.strerror}): vllm-omni needs it, a packer does not"
        return note(name, text, f"mount a tmpfs at {path} where vllm-omni runs")
    size = status.f_blocks * status.f_frsize
    if 0 < size < 1 << 30:
        text = f"it holds {size >> 20} MiB: outputs that fall back to vllm-omni's own path need more; a packer's do not"
        return note(name, text, "docker run --shm-size 8g; Kubernetes: an emptyDir of medium Memory mounted there")
    return ok(
        name, f"it holds {size >> 20} MiB, for outputs that take vllm-omni's own path" if size else "it has no limit"
    )


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _pids_limit(proc: Path, cgroups: Path) -> int | None:
    """The lowest limit of tasks of the cgroups that this process is in; None where there is none."""
    try:
        lines = (proc / "self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            folder = Path(f"{cgroups}{path}")
        elif "pids" in controllers.split(","):
            folder = Path(f"{cgroups}/pids{path}")
        else:
            continue
        limits += [limit for each in (folder, *folder.parents) if (limit := _number(each / "pids.max")) is not None]
    return min(limits, default=None)
