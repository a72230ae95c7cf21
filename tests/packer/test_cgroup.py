"""What memory cgroups allow, by files laid out as the kernel lays them out. A real one: tests/faults/test_memory_limit.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer_service.pool import cgroup
from packer_service.pool.cgroup import memory_left, memory_limit

MIB = 1 << 20
LIMIT = 700 * MIB
VERSIONS = ["2", "1"]


class Host:
    """/proc/self/cgroup and /sys/fs/cgroup of a process in the cgroup /service/packer."""

    def __init__(self, folder: Path, version: str) -> None:
        self.v2 = version == "2"
        self.root = folder / "cgroup"
        self.own = folder / "self-cgroup"
        self.own.write_text("0::/service/packer\n" if self.v2 else "4:memory:/service/packer\n3:cpu:/\n0::/\n")

    def put(self, path: str, *, limit: int | str = LIMIT, usage: int = 0, **stat: int) -> Path:
        """A cgroup; ``stat`` are lines of memory.stat, named as in version 2."""
        group = self.root / ("" if self.v2 else "memory") / path
        group.mkdir(parents=True, exist_ok=True)
        (group / ("memory.max" if self.v2 else "memory.limit_in_bytes")).write_text(f"{limit}\n")
        (group / ("memory.current" if self.v2 else "memory.usage_in_bytes")).write_text(f"{usage}\n")
        names = {"file_dirty": "dirty", "file_writeback": "writeback"}
        lines = [f"{name} {n}" if self.v2 else f"total_{names.get(name, name)} {n}" for name, n in stat.items()]
        if not self.v2:
            lines += [f"{names.get(name, name)} 0" for name in stat]  # of this one alone, without those below
        (group / "memory.stat").write_text("\n".join([f"anon {usage}", *lines, "slab_reclaimable 4096", ""]))
        return group


@pytest.fixture(params=VERSIONS)
def host(request, tmp_path, monkeypatch) -> Host:
    made = Host(tmp_path, request.param)
    monkeypatch.setattr(cgroup, "_ROOT", made.root)
    monkeypatch.setattr(cgroup, "_OWN", made.own)
    return made


def test_clean_pages_of_files_are_left_however_often_they_were_read(host):
    host.put("service/packer", usage=500 * MIB, inactive_file=10 * MIB, active_file=440 * MIB)
    assert memory_limit() == LIMIT
    assert memory_left() == 650 * MIB


def test_pages_of_files_that_are_not_written_yet_are_used(host):
    files = {"inactive_file": 200 * MIB, "active_file": 200 * MIB, "file_dirty": 100 * MIB, "file_writeback": 50 * MIB}
    host.put("service/packer", usage=500 * MIB, **files)
    assert memory_left() == LIMIT - 250 * MIB


def test_more_dirty_pages_than_pages_of_files_make_nothing_smaller(host):
    host.put("service/packer", usage=500 * MIB, inactive_file=MIB, active_file=MIB, file_dirty=100 * MIB)
    assert memory_left() == LIMIT - 500 * MIB


def test_of_nested_cgroups_the_one_that_leaves_least_counts(host):
    host.put("service/packer", usage=100 * MIB)
    host.put("service", usage=650 * MIB, active_file=20 * MIB)
    assert memory_left() == 70 * MIB
    host.put("service", limit=600 * MIB, usage=100 * MIB)
    assert (memory_limit(), memory_left()) == (600 * MIB, 500 * MIB)


@pytest.mark.parametrize("limit", ["max", "9223372036854771712"])
def test_without_a_limit_it_is_the_machines(host, limit):
    host.put("service/packer", limit=limit, usage=100 * MIB)
    assert memory_limit() > LIMIT
    assert memory_left() is None or memory_left() > 1 << 60


def test_what_cannot_be_read_stops_nobody(host):
    group = host.put("service/packer", usage=100 * MIB)
    for name, text in [("memory.stat", b"anon\n\xff"), ("memory.stat", b"inactive_file much\n"), ("memory.stat", b"")]:
        (group / name).write_bytes(text)
        assert memory_left() == LIMIT - 100 * MIB, text
    (group / "memory.stat").unlink()
    assert memory_left() == LIMIT - 100 * MIB
    for text in (b"", b"nonsense\n", b"0::/service/p\xe4cker\n", b"4:memory\n"):
        host.own.write_bytes(text)
        assert memory_left() is None, text
        assert memory_limit() > 0
    host.own.unlink()
    assert memory_left() is None


def test_a_name_that_is_not_utf_8_is_found(host):
    host.own.write_bytes(host.own.read_bytes().replace(b"/service/packer", b"/service/p\xe4cker"))
    host.put("service/p\udce4cker", usage=100 * MIB)
    assert memory_left() == LIMIT - 100 * MIB
