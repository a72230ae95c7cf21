"""What the memory cgroups of this process allow: version 2, version 1, or both at once, as /proc/self/cgroup names them.

It only reads. Each question reads files of the kernel anew, so it is never asked under a lock.

Note [What counts as used]
A cgroup's usage holds the pages of every file that one of its processes read, such as a model's weights. The kernel drops
clean ones before it kills anybody, also those that it calls active because they were read twice; so they count as free. What
is dirty or being written back has to reach the disk first, and counts as used. So do shared memory and tmpfs, which are not
on the lists of file pages, and the slab: not all of that comes back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """Names of a cgroup's files, and the lines of memory.stat (of it and those below it) that count pages of files."""

    limit: str
    usage: str
    pages: tuple[str, ...]
    unclean: tuple[str, ...]  # of those


_V2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"), ("file_dirty", "file_writeback"))
_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
)


class _Group(NamedTuple):
    folder: Path
    files: _Files
    limit: int


def memory_limit() -> int:
    """Bytes this process may use: the lowest limit of its cgroups, else the machine's memory."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(group.limit for group in _limited())])


def memory_left() -> int | None:
    """Bytes that may be taken before the kernel kills some process of one of our cgroups. None where there is no limit."""
    return min((group.limit - _used(group) for group in _limited()), default=None)


class Usage(NamedTuple):
    """One cgroup that has a limit: how many bytes it allows and uses, and how many of these are pages that count as free."""

    folder: Path
    limit: int
    usage: int
    clean: int


def usages() -> list[Usage]:
    """Of each cgroup of ours that has a limit."""
    return [Usage(group.folder, group.limit, usage, usage - _used(group)) for group, usage in _with_usage()]


def _with_usage() -> Iterator[tuple[_Group, int]]:
    for group in _limited():
        text = _read(group.folder / group.files.usage).strip()
        if text.isdecimal():
            yield group, int(text)


def _limited() -> Iterator[_Group]:
    """The cgroups that this process is in, and those above them, which have a limit."""
    for line in _read(_OWN).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            folder, files = Path(f"{_ROOT}{path}"), _V2
        elif "memory" in controllers.split(","):
            folder, files = Path(f"{_ROOT}/memory{path}"), _V1
        else:
            continue
        for each in (folder, *folder.parents):
            text = _read(each / files.limit).strip()  # empty where there is no cgroup, or they are mounted elsewhere
            if text.isdecimal():
                yield _Group(each, files, int(text))


def _used(group: _Group) -> int:
    """See Note [What counts as used]."""
    files = group.files
    usage = _read(group.folder / files.usage).strip()
    if not usage.isdecimal():
        return 0
    counts = dict.fromkeys((*files.pages, *files.unclean), 0)
    for line in _read(group.folder / "memory.stat").splitlines():
        name, _, count = line.partition(" ")
        if name in counts and count.isdecimal():
            counts[name] = int(count)
    clean = sum(counts[name] for name in files.pages) - sum(counts[name] for name in files.unclean)
    return int(usage) - max(clean, 0)


def _read(path: Path) -> str:
    """The text of a file of the kernel, whatever bytes the names in it have; empty where there is no such file."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
