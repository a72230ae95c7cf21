"""What the pools of one packer may take together: ``pool_max_bytes``, and what its memory cgroups leave.

It counts bytes and hands out permission. It allocates nothing itself.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from packer_service.pool.cgroup import memory_left

LEFT_TO_OTHERS = 64 << 20  # of a cgroup's memory: beyond its limit the kernel kills a process of it, and any of them


class Budget:
    """Bytes that all pools of a packer may take together. It knows what each pool says of itself, so that any can name all.

    Any thread may call. ``_lock`` guards the numbers, and is held for nothing else.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._returning = 0  # of those that are taken: of segments that are being closed
        self._coming = 0  # of those that are taken: of segments whose pages the kernel is giving
        self._pools: list[Callable[[], str]] = []  # what tells who holds how much of each pool
        self._lock = threading.Lock()

    def add(self, describe: Callable[[], str]) -> None:
        """A pool more, which ``describe`` tells of. ``remove`` undoes it."""
        with self._lock:
            self._pools.append(describe)

    def remove(self, describe: Callable[[], str]) -> None:
        with self._lock:
            self._pools.remove(describe)

    def describe_pools(self) -> str:
        """Who holds how much of each pool. Each pool takes its own lock for it: the caller must not hold one."""
        with self._lock:
            pools = list(self._pools)
        return "; ".join(describe() for describe in pools)

    def take(self, nbytes: int) -> bool:
        with self._lock:
            if self._taken + nbytes > self.max_bytes:
                return False
            self._taken += nbytes
            self._coming += nbytes
            return True

    def populated(self, nbytes: int) -> None:
        """The kernel gave every page of ``nbytes`` that were taken: it counts them itself."""
        with self._lock:
            self._coming -= nbytes

    def give_back(self, nbytes: int) -> None:
        """``nbytes`` that were taken come to nothing."""
        with self._lock:
            self._taken -= nbytes
            self._coming -= nbytes

    def returning(self, nbytes: int) -> None:
        """``nbytes`` of a segment that is being closed: they stay taken until they are ``returned``."""
        with self._lock:
            self._returning += nbytes

    def returned(self, nbytes: int) -> None:
        with self._lock:
            self._returning -= nbytes
            self._taken -= nbytes

    @property
    def left(self) -> int:
        with self._lock:
            return self.max_bytes - self._taken

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
