"""Which byte ranges of one block of memory are taken. It knows offsets only, never the memory itself.

It is used twice: by the pool (regions of a host segment) and by the worker's arena (slots of a device chunk).
"""

from __future__ import annotations

import bisect
import mmap

ALIGNMENT = max(4096, mmap.PAGESIZE)  # so that no two ranges share a page


def align(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to a multiple of ``alignment`` (a power of two)."""
    return (nbytes + alignment - 1) & -alignment


class Extents:
    """First-fit ranges of ``[0, nbytes)``; neighbours coalesce when released. Not thread-safe: its owner locks.

    Invariant: the free ranges and the taken ones add up to ``nbytes``, and no two free ranges touch.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % ALIGNMENT:
            raise ValueError(f"extents cover a positive multiple of {ALIGNMENT} bytes, not {nbytes}")
        self.nbytes = nbytes
        self._free: list[tuple[int, int]] = [(0, nbytes)]  # (offset, nbytes), sorted by offset
        self._taken: dict[int, int] = {}  # offset -> nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Take ``nbytes`` (rounded up to whole pages); the offset, or None where no free range is large enough."""
        wanted = align(max(nbytes, 1))
        for index, (offset, available) in enumerate(self._free):
            if available >= wanted:
                if available == wanted:
                    del self._free[index]
                else:
                    self._free[index] = (offset + wanted, available - wanted)
                self._taken[offset] = wanted
                return offset
        return None

    def release(self, offset: int) -> None:
        """Give back the range that ``allocate`` returned. KeyError if it is not taken."""
        nbytes = self._taken.pop(offset)
        index = bisect.bisect(self._free, (offset, 0))
        end = offset + nbytes
        if index < len(self._free) and self._free[index][0] == end:
            end += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (offset, end - offset))

    @property
    def largest_free(self) -> int:
        """Bytes of the largest request that ``allocate`` would grant now."""
        return max((nbytes for _, nbytes in self._free), default=0)

    @property
    def idle(self) -> bool:
        """True while nothing is taken."""
        return not self._taken
