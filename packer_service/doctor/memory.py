"""Host memory: whether there is as much as the pool may take, and what of the cgroup's usage counts as free."""

from __future__ import annotations

import os
from pathlib import Path

from packer_service.config import Settings
from packer_service.doctor.finding import Finding, error, note, ok, shown_bytes, warning
from packer_service.pool.cgroup import memory_left, memory_limit, usages

_RAISE = "raise the memory limit (systemd MemoryMax=, docker run --memory, Kubernetes resources.limits.memory)"


def check_memory(settings: Settings, packer_runs: bool, proc: Path = Path("/proc")) -> Finding:
    """The pool against what is left. ``packer_runs``: one listens already, and what it has taken is used."""
    name = "memory"
    known = {"the memory cgroup": memory_left(), "this machine": available(proc)}
    lefts = {where: left for where, left in known.items() if left is not None}
    if not lefts:
        return note(name, "how much memory is left cannot be found out: /proc/meminfo is not readable")
    where, left = min(lefts.items(), key=lambda item: item[1])
    first, most = settings.pool_bytes, settings.pool_max_bytes
    text = (
        f"{where} has {shown_bytes(left)} left of {shown_bytes(memory_limit())}; the pool takes {shown_bytes(first)} at first"
        f" and {shown_bytes(most)} at most"
    )
    if packer_runs:
        return note(name, f"{text}; what a packer that runs has taken counts as used")
    if left < first:
        return error(name, text, f"lower pool_bytes (--pool-bytes, PACKER_POOL_BYTES), or {_RAISE}")
    if left < most:
        mend = f"lower pool_max_bytes (--pool-max-bytes, PACKER_POOL_MAX_BYTES), or {_RAISE}"
        return warning(name, f"{text}: it cannot grow to that, and outputs without room fall back", mend)
    return ok(name, text)


def check_page_cache() -> Finding:
    """Pages of files that fill a cgroup are no want of memory: see packer_service.pool.cgroup."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = [group for group in usages() if group.limit < machine]  # version 1 says no limit with a very high one
    if not groups:
        return ok("page cache", "this process's cgroups have no memory limit: pages of files are in nobody's way")
    tightest = min(groups, key=lambda group: group.limit - (group.usage - group.clean))
    return ok(
        "page cache",
        f"{shown_bytes(tightest.usage)} of {shown_bytes(tightest.limit)} in {tightest.folder} are used;"
        f" {shown_bytes(tightest.clean)} are clean pages of files, which the kernel drops for the pool: they count as free",
    )


def available(proc: Path) -> int | None:
    """What the kernel says may be taken on this machine without swapping."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        (found,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(found) << 10
    except (OSError, ValueError):
        return None
