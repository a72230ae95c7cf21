"""What a process that Python forks inherits of the pool: outputs as memory of its own, and nothing else.

Note [What a forked child inherits]
Memory that fork copies is each side's own from then on, and an output is to be no different. But the pool is shared memory,
which fork shares. So no child inherits it (MADV_DONTFORK), except for the leases that are out: before a fork their pages are
mapped privately instead, in this process too. The bytes stay the same and nothing is copied; whoever writes to a page, here
or in a child, gets a copy of it, which the kernel makes. The packer alone is left, which writes to the memory itself once
a lease is back: a lease waits for every process that inherited it, and its pages are shared again before it goes back.

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
import logging
import mmap
import os
import threading
from collections.abc import Callable
from typing import Protocol

from packer_service.memory.memfd import MAP_FIXED, MAP_NORESERVE, READ_WRITE, create_memfd, libc, map_pages
from worker_shim.log import get_logger

logger = get_logger(__name__)

_MADV_DONTFORK = 10  # not in every Python's mmap
_PAGE = mmap.PAGESIZE


def share(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map ``fd`` here in place of what is here: what anybody writes, all see. A forked child has nothing here."""
    map_pages(address, nbytes, READ_WRITE, mmap.MAP_SHARED | MAP_FIXED, fd, offset)
    hide(address, nbytes)


def make_private(address: int, nbytes: int, fd: int, offset: int) -> None:
    """Map ``fd`` here in place of what is here: what this process or a child writes from now on, it alone sees."""
    map_pages(address, nbytes, READ_WRITE, mmap.MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, fd, offset)


def hide(address: int, nbytes: int) -> None:
    """No forked child has anything here."""
    if libc.madvise(address, nbytes, _MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), f"cannot keep memory from forked children: {os.strerror(ctypes.get_errno())}")


class Child:
    """One forked child, and whatever it forks. Made before the fork; the parent calls ``forked`` afterwards.

    Where no descriptor or page is to be had for it, it is taken to live for ever.
    """

    def __init__(self) -> None:
        self._probe = fd = -1
        self._page = 0  # its address; 0: there is none
        self._gone = False
        try:
            fd = create_memfd("packer-child", _PAGE)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._page = map_pages(None, _PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd)
            self._probe = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)  # another open file, with no lock
        except OSError as error:
            log_after_fork(
                logging.WARNING,
                "a forked child cannot be followed: %s. The outputs that it inherits stay in the packer's pool until the"
                " engine ends (is /proc mounted? LimitNOFILE, ulimit -n)",
                error,
            )
        finally:
            if fd >= 0:
                os.close(fd)

    def forked(self) -> None:
        """Unmap the page in this process: from here on the child alone has it."""
        if self._page:
            libc.munmap(self._page, _PAGE)

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
        return

    def after_fork_in_child(self) -> None:
        """Only memory is inherited: no thread, no connection."""
        ...


lock = threading.Lock()
"""Guards what holders know of their memory; held from before a fork until after it, so that no fork sees half of a change."""

holders: set[Holder] = set()
_forking = False  # this and the next two under ``lock``
_child: Child | None = None
_unlogged: list[tuple[int, str, OSError]] = []


def log_after_fork(level: int, message: str, error: OSError) -> None:
    """Log what went wrong before a fork once that is over. A handler may wait, and all that use the pool wait for ``lock``."""
    _unlogged.append((level, message, error))


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
    global _forking, _child, _unlogged
    if not _forking:  # the wait for the lock was interrupted
        return
    if _child is not None:
        _child.forked()
    _child, _forking = None, False
    unlogged, _unlogged = _unlogged, []
    lock.release()
    for level, message, error in unlogged:
        logger.log(level, message, error)


def _after_in_child() -> None:
    global _forking, _child
    inherited = list(holders)
    holders.clear()
    _unlogged.clear()  # its parent says it
    if _forking:
        _child, _forking = None, False
        lock.release()
    for holder in inherited:
        holder.after_fork_in_child()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
