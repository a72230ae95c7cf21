"""Shared host memory that has no name: sealed memfds, created or attached, mapped, and pre-faulted.

Whoever holds a descriptor or a mapping keeps the pages; when the last process lets go, or dies, the kernel frees them.
There is nothing to unlink. What is in the memory is never looked at here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from packer_service.errors import ProtocolError

_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 32 << 20
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # not in every Python's mmap
_MAP_FAILED = ctypes.c_void_p(-1).value

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def create_memfd(name: str, nbytes: int) -> int:
    """A new memfd of ``nbytes``, sealed so that nobody who receives it can resize it (a resize would SIGBUS the other side)."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        raise OSError(
            error.errno,
            f"the system call memfd_create is denied ({error.strerror}), and outputs are handed over in what it makes:"
            " allow memfd_create in the seccomp profile of the container or unit",
        ) from error
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_memfd(fd: int, nbytes: int) -> None:
    """Raise ProtocolError unless ``fd``, received from a peer, is sealed against resizing and holds ``nbytes``."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"a peer's descriptor is not a memfd: {error}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("a peer's memfd is not sealed against shrinking")
    if os.fstat(fd).st_size < nbytes:
        raise ProtocolError(f"a peer's memfd holds {os.fstat(fd).st_size} bytes, not the {nbytes} it announced")


def map_pages(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int = 0) -> int:
    """mmap(2) at an address, which Python's own cannot; where the pages are. OSError where the kernel refuses."""
    mapped = libc.mmap(address, nbytes, protection, flags, fd, offset)
    if mapped == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


def map_memfd(fd: int, nbytes: int) -> mmap.mmap:
    """Map ``nbytes`` of ``fd``, which may be closed then. The mapping lives for as long as anything looks into it.

    ``mmap.mmap(fd, ...)`` would keep a duplicate of the descriptor for as long (before Python 3.13). So Python maps anonymous
    memory, of which it knows who looks into it, and then the memfd is mapped in the place of that memory.
    """
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    map_pages(address_of(mapping), nbytes, READ_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd)
    return mapping


def address_of(mapping: mmap.mmap) -> int:
    """Where ``mapping`` starts in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class SharedMemory:
    """One mapped memfd. Owns the mapping and, where it was created here, the descriptor to send; ``close()`` gives both back.

    ``address`` is where the mapping starts in this process. Views of ``buffer`` may outlive ``close()``: the mapping then
    goes when the last of them does.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.buffer = map_memfd(fd, nbytes)
        self.address = address_of(self.buffer)
        self._closed = False

    @classmethod
    def create(cls, name: str, nbytes: int) -> SharedMemory:
        fd = create_memfd(name, nbytes)
        try:
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, keep_fd: bool = False) -> SharedMemory:
        """Map a peer's memfd after checking it. Takes over ``fd``: closes it, at ``close()`` where ``keep_fd``, else now."""
        try:
            check_memfd(fd, nbytes)
            memory = cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        if not keep_fd:
            os.close(fd)
            memory.fd = -1
        return memory

    def populate(self, threads: int) -> None:
        """Fault every page in now, on ``threads`` threads, rather than one by one during a copy.

        Raises MemoryError where the kernel has no page to give (a cgroup limit); a kernel before 5.14 faults lazily.
        """

        def touch(offset: int) -> int:
            nbytes = min(_POPULATE_BYTES, self.nbytes - offset)
            return 0 if not libc.madvise(self.address + offset, nbytes, _MADV_POPULATE_WRITE) else ctypes.get_errno()

        offsets = range(0, self.nbytes, _POPULATE_BYTES)
        if len(offsets) == 1:
            errors = {touch(offset) for offset in offsets}
        else:
            try:
                with ThreadPoolExecutor(threads, thread_name_prefix="populate") as executor:
                    errors = set(executor.map(touch, offsets))
            except RuntimeError:  # no more threads for this process (a pids cgroup, RLIMIT_AS)
                errors = {touch(offset) for offset in offsets}
        errors -= {0, errno.EINVAL}  # the kernel does not know the advice
        if errors:
            raise MemoryError(f"the kernel has no page for {self.nbytes} bytes: {os.strerror(min(errors))}")

    def close(self) -> None:
        """Give back the descriptor, and the mapping as soon as nothing looks into it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.fd >= 0:
            os.close(self.fd)
        with contextlib.suppress(BufferError):  # a view of it lives on: the mapping goes with the last one
            self.buffer.close()
        del self.buffer
