"""What the pools of one packer may take together: ``pool_max_bytes``, and what its memory cgroups leave.

It counts bytes and hands out permission. It allocates nothing itself.
"""

from __future__ import annotations

import math
import threading
from typing import Protocol

from packer_service.pool.cgroup import memory_left

LEFT_TO_OTHERS = 64 << 20  # of a cgroup's memory: beyond its limit the kernel kills a process of it, and any of them


class Taker(Protocol):
    """A pool, as its budget sees it."""

    keep_bytes: int

    def describe(self) -> str:
        """Who holds how much of it, and since when. It takes the pool's lock."""


class Budget:
    """Bytes that all pools of a packer may take together. Each is promised its ``keep_bytes``, or an equal part of all where
    these are more: no other may take the rest of that from the moment it is there. What is taken already stays taken.

    Any thread may call. ``_lock`` guards the numbers, and is held for nothing else.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._taken: dict[Taker, int] = {}
        self._leaving = (
            0  # bytes of pools that were removed, until their segments are closed; in no entry of ``_taken``
        )
        self._returning = 0  # bytes in ``_taken`` whose segments are being closed
        self._coming = 0  # bytes in ``_taken`` whose pages the kernel has not given yet
        self._lock = threading.Lock()

    def add(self, pool: Taker) -> None:
        """A pool more. ``remove`` undoes it."""
        with self._lock:
            self._taken[pool] = 0

    def remove(self, pool: Taker) -> None:
        """Segments of it may be closed later."""
        with self._lock:
            self._leaving += self._taken.pop(pool)

    def describe_pools(self) -> str:
        """Who holds how much of each pool. The caller must hold no pool's lock."""
        with self._lock:
            pools = list(self._taken)
        return "; ".join(pool.describe() for pool in pools)

    def take(self, pool: Taker, nbytes: int) -> bool:
        with self._lock:
            if nbytes > self._left_for(pool):
                return False
            self._taken[pool] += nbytes
            self._coming += nbytes
            return True

    def populated(self, nbytes: int) -> None:
        """The kernel gave every page of ``nbytes`` that were taken: it counts them itself."""
        with self._lock:
            self._coming -= nbytes

    def give_back(self, pool: Taker, nbytes: int) -> None:
        """``nbytes`` that were taken come to nothing."""
        with self._lock:
            self._untake(pool, nbytes)
            self._coming -= nbytes

    def returning(self, nbytes: int) -> None:
        """``nbytes`` of a segment that is being closed: they stay taken until they are ``returned``."""
        with self._lock:
            self._returning += nbytes

    def returned(self, pool: Taker, nbytes: int) -> None:
        with self._lock:
            self._returning -= nbytes
            self._untake(pool, nbytes)

    def _untake(self, pool: Taker, nbytes: int) -> None:
        if pool in self._taken:
            self._taken[pool] -= nbytes
        else:
            self._leaving -= nbytes

    @property
    def left(self) -> int:
        """What nobody has taken."""
        with self._lock:
            return self._left()

    def _left(self) -> int:
        return self.max_bytes - sum(self._taken.values()) - self._leaving

    def left_for(self, pool: Taker) -> int:
        """What this pool may take now: what is left, less what others are promised."""
        with self._lock:
            return self._left_for(pool)

    def _left_for(self, pool: Taker) -> int:
        part = self.max_bytes // len(self._taken)
        others = ((other, taken) for other, taken in self._taken.items() if other is not pool)
        promised = sum(max(min(other.keep_bytes, part) - taken, 0) for other, taken in others)
        # A pool below its own promise is not held up by those of others, which may be more than there is.
        own = min(pool.keep_bytes, part) - self._taken[pool]
        return min(self._left(), max(self._left() - promised, own))

    @property
    def left_of_cgroup(self) -> float:
        """Bytes that the memory cgroups of this process allow beside all that is taken, less what is left to others.

        It reads files: no lock may be held.
        """
        left = memory_left()
        with self._lock:
            return math.inf if left is None else left - LEFT_TO_OTHERS - self._coming

    def describe(self) -> str:
        """The limit, and how much of it is on its way back."""
        with self._lock:
            returning = f" ({self._returning} bytes of it are being given back)" if self._returning else ""
        return f"pool_max_bytes = {self.max_bytes}{returning}"
