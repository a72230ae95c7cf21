"""What the memory cgroups of this process allow: version 2, version 1, or both at once, as /proc/self/cgroup names them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Names of a cgroup's files, and the line of memory.stat that is file cache which the kernel can take back."""

    limit: str
    usage: str
    cache: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class _Group(NamedTuple):
    folder: Path
    files: _Files
    limit: int


def memory_limit() -> int:
    """Bytes this process may use: the lowest limit of its cgroups, else the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(group.limit for group in _limited())])


def memory_left() -> int | None:
    """Bytes that may be taken before the kernel kills a process of a cgroup of this one's, any of them; None: no limit."""
    return min((group.limit - _used(group) for group in _limited()), default=None)


def _limited() -> Iterator[_Group]:
    """The cgroups that this process is in, and those above them, which have a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, files = Path(f"{_ROOT}{path}"), _V2
        elif "memory" in controllers.split(","):
            folder, files = Path(f"{_ROOT}/memory{path}"), _V1
        else:
            continue
        for each in (folder, *folder.parents):
            try:
                text = (each / files.limit).read_text().strip()
            except OSError:  # no cgroup, or another mount of them than ours
                continue
            if text.isdecimal():
                yield _Group(each, files, int(text))


def _used(group: _Group) -> int:
    try:
        usage = int((group.folder / group.files.usage).read_text())
        stat = (group.folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return 0
    cache = [int(line.split()[1]) for line in stat.splitlines() if line.startswith(f"{group.files.cache} ")]
    return usage - sum(cache)
