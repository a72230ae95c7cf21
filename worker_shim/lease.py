"""Leases on the engine's side: the mapped segments, zero-copy arrays in them, and the way back.

Note [What keeps a lease]
Each array starts as a numpy array over exactly its own bytes of the mapping; the finalizer that gives the lease back sits
on that array. ``torch.from_numpy``, of it or of a view of it in another dtype and shape, and ``torch.frombuffer`` keep it
alive for as long as any tensor shares the storage: views, ``view(dtype)``, ``detach()``, ``.numpy()``. So the lease goes
back when the last of them dies, and since the array covers its own bytes and no more, pickling the smallest view never
pickles a segment. The mapping itself lives as long as any array over it, also after the engine was closed or the packer died.

An output that is coming has arrays before its leases are ours; the receiver holds them until OUTPUT_READY, so that no lease
goes back early.

A finalizer runs wherever the garbage collector happens to be, so it only puts a number into a queue; a thread does the rest.
It is a plain weak reference's callback: weakref.finalize is a page of Python, most of it for the end of the interpreter, where
nothing of ours has to be given back.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Iterable

import numpy as np

from packer_service.errors import PeerClosed, ProtocolError
from packer_service.memory import SharedMemory, check_memfd
from packer_service.protocol import MAX_PIECES, Lease, Release, Segment
from packer_service.transport import Channel
from worker_shim.log import get_logger

logger = get_logger(__name__)


class LeaseBook:
    """The segments of one packer and the leases that are out. The pump thread adds, a thread of its own returns."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._segments: dict[int, SharedMemory] = {}  # pump thread only
        self._deaths: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._uses: Counter[int] = Counter()  # lease -> arrays alive
        # id(reference) -> the reference, which calls only if it outlives its array, and the lease. On any thread: each access
        # is one operation of a dict.
        self._alive: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        self._thread = threading.Thread(target=self._return_all, name="packer-leases", daemon=True)
        self._thread.start()

    def add_segment(self, segment: Segment, fds: list[int]) -> None:
        """Map a segment. Takes over its descriptor."""
        if not fds or segment.segment in self._segments:
            raise ProtocolError(f"segment {segment.segment} came twice or without its memfd")
        self._segments[segment.segment] = SharedMemory.attach(fds.pop(), segment.nbytes)

    def forget_segment(self, number: int) -> None:
        """Unmap a segment the packer took out of its pool; nothing in it is leased."""
        memory = self._segments.pop(number, None)
        if memory is not None:
            memory.close()

    def grant(self, lease: Lease, uses: list[tuple[int, int]]) -> list[np.ndarray]:
        """One uint8 array for each ``(offset, nbytes)`` of the lease; it goes back when the last of them dies."""
        memory = self._segments.get(lease.segment)
        if memory is None or lease.offset + lease.nbytes > memory.nbytes:
            raise ProtocolError(f"lease {lease.lease} is not inside segment {lease.segment}")
        if any(offset < 0 or offset + nbytes > lease.nbytes for offset, nbytes in uses):
            raise ProtocolError(f"an array does not lie inside lease {lease.lease}")
        with self._lock:
            self._uses[lease.lease] += len(uses)
        arrays = []
        for offset, nbytes in uses:
            array = np.frombuffer(memory.buffer, np.uint8, nbytes, lease.offset + offset)
            reference = weakref.ref(array, self._died)
            self._alive[id(reference)] = reference, lease.lease
            arrays.append(array)
        return arrays

    def _died(self, reference: weakref.ref[np.ndarray]) -> None:
        self._deaths.put(self._alive.pop(id(reference))[1])

    def forget_leases(self, leases: Iterable[Lease]) -> None:
        """Leases that were coming and never became ours: their arrays give nothing back when they die."""
        with self._lock:
            for lease in leases:
                self._uses.pop(lease.lease, None)

    def give_back(self, lease: Lease) -> None:
        """Return a lease that no array ever used."""
        with self._lock:
            self._uses[lease.lease] += 1
        self._deaths.put(lease.lease)

    @property
    def outstanding(self) -> int:
        """Leases that are out, and those that are coming."""
        with self._lock:
            return len(self._uses)

    def _return_all(self) -> None:
        while (death := self._deaths.get()) is not None:
            deaths = [death]
            while len(deaths) < MAX_PIECES and not self._deaths.empty():
                following = self._deaths.get()
                if following is None:
                    self._deaths.put(None)
                    break
                deaths.append(following)
            finished = []
            with self._lock:
                for lease in deaths:
                    if lease not in self._uses:
                        continue  # forgotten
                    self._uses[lease] -= 1
                    if not self._uses[lease]:
                        del self._uses[lease]
                        finished.append(lease)
            if finished:
                try:
                    self._channel.send(Release(tuple(finished)))
                except PeerClosed:
                    return  # the packer is gone, and its leases with it

    def close(self) -> None:
        """Stop returning. Arrays that are out stay valid: they hold the mapping."""
        self._deaths.put(None)
        self._thread.join(timeout=5.0)
        for memory in self._segments.values():
            memory.close()
        self._segments.clear()


def map_host_arrays(fds: list[int], nbytes: int) -> mmap.mmap:
    """Map a worker's memfd of host arrays; it is unmapped when the last array in it dies. Takes over the descriptor."""
    if not fds:
        raise ProtocolError("host arrays came without their memfd")
    fd = fds.pop()
    try:
        check_memfd(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
