"""What a process that Python forks inherits of the pool: outputs as memory of its own, and nothing else.

Note [What a forked child inherits]
Memory that fork copies is each side's own from then on, and an output is to be no different. But the pool is shared memory,
which fork shares. So no child inherits it (MADV_DONTFORK), except for the leases that are out: before a fork their pages are
mapped privately instead, in this process too. The bytes stay the same and nothing is copied; whoever writes to a page, here
or in a child, gets a copy of it, which the kernel makes. That leaves the packer, which writes to the memory itself once a
lease is back: a lease waits for every process that inherited it, and its pages are shared again before it goes back.

Whether such a process lives is asked of the kernel, too: each fork has a page of its own, mapped for the child alone, whose
open file holds a lock. A mapping keeps an open file, so the lock is there until the child, and each child that it forks, has
ended or become another program. Neither a pid that is somebody else's by now nor a child that closes every descriptor can
be mistaken.

What was considered instead. A copy in the child: the parent has to wait for it, or what it writes meanwhile is in the copy
(0.2-0.3 s a GB), and every child pays for every output that is out, whether it looks at it or not. A private mapping of
everything from the start: the engine, which forks hardly ever, would fault its pages in again for every output, and copy
each page that it writes to.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from typing import Protocol

from worker_shim.log import get_logger

logger = get_logger(__name__)

# not in every Python's mmap
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if mapped == _FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(mapped)


def share(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map ``fd`` here in place of what is here: what anybody writes, all see. A forked child has nothing here."""
    _map(address, nbytes, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
    hide(address, nbytes)


def make_private(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map ``fd`` here in place of what is here: what this process or a child writes from now on, it alone sees."""
    _map(address, nbytes, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE | _MAP_FIXED, fd, offset)


def hide(address: int, nbytes: int) -> None:
    """No forked child has anything here."""
    if _libc.madvise(address, nbytes, _MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), f"cannot keep memory from forked children: {os.strerror(ctypes.get_errno())}")


class Child:
    """One forked child, and whatever it forks. Made before the fork; the parent calls ``forked`` afterwards.

    Where no descriptor or page is to be had for it, it is taken to live for ever.
    """

    def __init__(self) -> None:
        self._probe = fd = -1
        self._page = 0
        self._gone = False
        try:
            fd = os.memfd_create("packer-child", os.MFD_CLOEXEC)
            os.ftruncate(fd, _PAGE)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._page = _map(None, _PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            self._probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # another open file, with no lock
        except OSError as error:
            logger.warning(
                "a forked child cannot be followed: %s. The outputs that it inherits stay in the packer's pool until the"
                " engine ends (is /proc mounted? LimitNOFILE, ulimit -n)",
                error,
            )
        finally:
            if fd >= 0:
                os.close(fd)

    def forked(self) -> None:
        """From here on the child alone has the page."""
        if self._page:
            _libc.munmap(self._page, _PAGE)

    def lives(self) -> bool:
        if self._probe >= 0:
            try:
                fcntl.flock(self._probe, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            self.close()
        return not self._gone

    def close(self) -> None:
        """It is gone, or nobody asks any more."""
        self._gone = True
        if self._probe >= 0:
            os.close(self._probe)
            self._probe = -1


class Holder(Protocol):
    """Who has memory that a forked child may inherit."""

    def before_fork(self, make_child: Callable[[], Child]) -> None:
        """Called with ``lock`` held. ``make_child`` gives the child to be, where anything is inherited."""
        ...

    def after_fork_in_child(self) -> None:
        """Only memory is inherited: no thread, no connection."""
        ...


lock = threading.Lock()
"""Guards what holders know of their memory; held from before a fork until after it, so that no fork sees half of a change."""

holders: set[Holder] = set()
_forking = False  # this and the next under ``lock``
_child: Child | None = None


def _make_child() -> Child:
    global _child
    _child = _child or Child()
    return _child


def _before() -> None:
    global _forking
    lock.acquire()
    _forking = True
    for holder in list(holders):
        holder.before_fork(_make_child)


def _after() -> None:
    global _forking, _child
    if not _forking:  # the wait for the lock was interrupted
        return
    if _child is not None:
        _child.forked()
    _child, _forking = None, False
    lock.release()


def _after_in_child() -> None:
    global _forking, _child
    inherited = list(holders)
    holders.clear()
    if _forking:
        _child, _forking = None, False
        lock.release()
    for holder in inherited:
        holder.after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
