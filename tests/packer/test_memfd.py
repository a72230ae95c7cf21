"""Mapped memfds: what they keep, and for how long."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
from pathlib import Path

import pytest

from packer_service.errors import ProtocolError
from packer_service.memory import memfd
from packer_service.memory.memfd import SharedMemory, create_memfd, map_memfd

NBYTES = 3 * 4096


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapped(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


def test_memory_has_one_descriptor_where_it_was_made_and_none_where_it_was_attached():
    before = descriptors()
    with contextlib.closing(SharedMemory.create("one-descriptor", NBYTES)) as made:
        assert descriptors() == before + 1
        with contextlib.closing(SharedMemory.attach(os.dup(made.fd), NBYTES)) as attached:
            assert descriptors() == before + 1
            made.buffer[:5] = b"image"
            assert attached.buffer[:5] == b"image"
        with contextlib.closing(SharedMemory.attach(os.dup(made.fd), NBYTES, keep_fd=True)):
            assert descriptors() == before + 2
    assert descriptors() == before
    assert not mapped("one-descriptor")


def test_the_mapping_outlives_its_owner_for_as_long_as_anything_looks_into_it():
    owner = SharedMemory.create("looked-into", NBYTES)
    view = memoryview(owner.buffer)[4096:8192]
    word = ctypes.c_uint64.from_buffer(owner.buffer, 8)
    owner.close()
    view[0], word.value = 7, 8
    del view
    gc.collect()
    assert mapped("looked-into") == 1
    assert word.value == 8
    del word
    gc.collect()
    assert not mapped("looked-into")


def test_address_is_where_the_bytes_are():
    with contextlib.closing(SharedMemory.create("address", NBYTES)) as made:
        made.buffer[4096:4101] = b"image"
        assert ctypes.string_at(made.address + 4096, 5) == b"image"


def test_memory_that_cannot_be_mapped_leaves_nothing_behind(monkeypatch):
    before = descriptors()

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return ctypes.c_void_p(-1).value or 0

    monkeypatch.setattr(memfd.libc, "mmap", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        SharedMemory.create("refused", NBYTES)
    assert descriptors() == before
    assert not mapped("refused")


def test_a_mapping_takes_no_more_than_its_memfd_has():
    fd = create_memfd("short", 4096)
    try:
        with pytest.raises(ProtocolError, match="holds 4096 bytes"):
            SharedMemory.attach(os.dup(fd), NBYTES)
        assert map_memfd(fd, 4096)[:1] == b"\0"
    finally:
        os.close(fd)
