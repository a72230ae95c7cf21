"""The engine's part of a packer's pool: the segments that it has mapped, the arrays over leases in them, and their way back.

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

A forked child keeps the leases that it inherits: see Note [What a forked child inherits] in worker_shim.engine.fork.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from packer_service.errors import ProtocolError
from packer_service.memory.extents import align
from packer_service.memory.memfd import SharedMemory
from packer_service.wire.protocol import MAX_PIECES, Lease, MapSegment, Release, SegmentLost
from worker_shim.connection import Connection
from worker_shim.engine import fork
from worker_shim.engine.fork import Child
from worker_shim.log import get_logger

logger = get_logger(__name__)

_CHILDREN_POLL_S = (0.05, 1.0)  # the first pause and the longest


class Segments(fork.Holder):
    """The segments of one packer's pool, and which could not be mapped. The thread that receives adds and removes them.

    No forked child inherits their memory or their descriptors. ``mapped`` changes under ``fork.lock``: a child could inherit
    what is not hidden yet, and keep the whole segment for it.
    """

    def __init__(self, connection: Connection) -> None:
        self.mapped: dict[int, SharedMemory] = {}
        self._connection = connection
        self._lost: dict[int, Exception] = {}  # why they could not be mapped
        self._asked: set[int] = set()  # for which of them again
        with fork.lock:
            fork.holders.add(self)

    def add(self, message: MapSegment, fds: list[int], lost: Exception | None) -> None:
        """Map a segment. Takes over its descriptor. ``lost``: why that is not here."""
        self._asked.discard(message.segment)
        if lost is None:
            try:
                self._map(message, fds)
                self._lost.pop(message.segment, None)
                return
            except OSError as error:
                lost = error
        logger.error("segment %d of the packer's pool cannot be mapped: %s", message.segment, lost)
        self._lost[message.segment] = lost

    def _map(self, message: MapSegment, fds: list[int]) -> None:
        if not fds or message.segment in self.mapped:
            raise ProtocolError(f"segment {message.segment} came twice or without its memfd")
        with fork.lock:
            memory = SharedMemory.attach(fds.pop(), message.nbytes, keep_fd=True)
            self.mapped[message.segment] = memory
            fork.hide(memory.address, memory.nbytes)

    def remove(self, number: int) -> None:
        """Unmap a segment that the packer took out of its pool; nothing in it is leased."""
        self._lost.pop(number, None)
        with fork.lock:
            if (memory := self.mapped.pop(number, None)) is not None:
                memory.close()

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise what kept a segment of these from being mapped, once it was asked for again."""
        if not self._lost:
            return
        for lost in self._lost.keys() & {lease.segment for lease in leases}:
            if lost not in self._asked:
                self._asked.add(lost)
                self._connection.post(SegmentLost(lost))
            raise self._lost[lost]

    def after_fork_in_child(self) -> None:
        self._close_all()

    def close(self) -> None:
        """Unmap all. Arrays that are out stay valid: they hold the mapping. Close the leases first. Idempotent."""
        with fork.lock:
            fork.holders.discard(self)
            self._close_all()

    def _close_all(self) -> None:
        for memory in self.mapped.values():
            memory.close()
        self.mapped.clear()


@dataclass
class _Out:
    """A lease that is out, or that is coming: where, how many arrays of this process look at it, and which children may."""

    lease: Lease
    memory: SharedMemory | None  # None where none of its arrays was ever made
    since: float  # time.monotonic()
    uses: int = 0
    children: list[Child] = field(default_factory=list)

    def make_private(self) -> None:
        if self.memory is not None:
            fork.make_private(*self._place(self.memory))

    def share_again(self) -> None:
        if self.children and self.memory is not None:
            fork.share(*self._place(self.memory))
            self.children = []

    def _place(self, memory: SharedMemory) -> tuple[int, int, int, int]:
        """Address, bytes, descriptor, offset: whole pages, of which a region shares none with another."""
        lease = self.lease
        return memory.address + lease.offset, align(max(lease.nbytes, 1)), memory.fd, lease.offset

    def inherit(self, child: Child) -> None:
        if not self.children:
            try:
                self.make_private()
            except OSError as error:
                message = "a forked child and its parent share an output, and see what the other writes: %s"
                fork.log_after_fork(logging.ERROR, message, error)
        self.children = [child, *(older for older in self.children if older.lives())]

    @property
    def inherited(self) -> bool:
        """Whether a child that may look at it lives."""
        return any(child.lives() for child in self.children)


class LeaseBook(fork.Holder):
    """The leases of one packer that are out. The pump thread adds, a thread of its own returns.

    ``fork.lock`` guards ``_out``.
    """

    def __init__(self, connection: Connection, segments: Segments) -> None:
        self._connection = connection
        self._segments = segments
        self._deaths: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._end_use: Callable[[int], None] = self._deaths.put
        self._out: dict[int, _Out] = {}
        # id(reference) -> the weak reference, and the lease. A weak reference calls back only if it is alive when its array
        # dies. Any thread uses this without a lock: each access is one operation of a dict.
        self._alive: dict[int, tuple[weakref.ref[np.ndarray], int]] = {}
        self._thread = threading.Thread(target=self._return_all, name="packer-leases", daemon=True)
        with fork.lock:
            fork.holders.add(self)
        self._thread.start()

    def grant(self, lease: Lease, uses: list[tuple[int, int]]) -> list[np.ndarray]:
        """One uint8 array for each ``(offset, nbytes)`` of the lease; it goes back when the last of them dies."""
        memory = self._segments.mapped.get(lease.segment)
        if memory is None or lease.offset + lease.nbytes > memory.nbytes:
            raise ProtocolError(f"lease {lease.lease} is not inside segment {lease.segment}")
        if any(offset < 0 or offset + nbytes > lease.nbytes for offset, nbytes in uses):
            raise ProtocolError(f"an array does not lie inside lease {lease.lease}")
        with fork.lock:
            self._use(lease, memory, len(uses))
        arrays = []
        for offset, nbytes in uses:
            array = np.frombuffer(memory.buffer, np.uint8, nbytes, lease.offset + offset)
            reference = weakref.ref(array, self._died)
            self._alive[id(reference)] = reference, lease.lease
            arrays.append(array)
        return arrays

    def _use(self, lease: Lease, memory: SharedMemory | None, uses: int) -> None:
        self._out.setdefault(lease.lease, _Out(lease, memory, time.monotonic())).uses += uses

    def _died(self, reference: weakref.ref[np.ndarray]) -> None:
        self._end_use(self._alive.pop(id(reference))[1])

    def forget_leases(self, leases: Iterable[Lease]) -> None:
        """Leases that were coming and never became ours: their arrays give nothing back when they die."""
        with fork.lock:
            for lease in leases:
                if (out := self._out.pop(lease.lease, None)) is not None:
                    out.share_again()

    def give_back(self, lease: Lease) -> None:
        """Return a lease that no array ever used."""
        with fork.lock:
            self._use(lease, None, 1)
        self._deaths.put(lease.lease)

    @property
    def outstanding(self) -> int:
        """Leases that are out, and those that are coming."""
        with fork.lock:
            return len(self._out)

    def usage(self) -> list[tuple[int, float]]:
        """Of each of these its bytes, and for how many seconds it has been there."""
        with fork.lock:
            out = list(self._out.values())
        now = time.monotonic()
        return [(each.lease.nbytes, now - each.since) for each in out]

    def _return_all(self) -> None:
        unused: dict[int, _Out] = {}  # in this process; a forked child may look at them
        pause_s, longest_s = _CHILDREN_POLL_S
        closing = False
        while not closing:
            deaths = self._next_deaths(pause_s if unused else None)
            pause_s = _CHILDREN_POLL_S[0] if deaths else min(2 * pause_s, longest_s)
            closing = None in deaths
            try:
                with fork.lock:
                    for lease in deaths:
                        if lease is None or (out := self._out.get(lease)) is None:
                            continue  # forgotten
                        out.uses -= 1
                        if not out.uses:
                            unused[lease] = out
                    finished = [lease for lease, out in unused.items() if not out.inherited]
                    for lease in finished:
                        unused.pop(lease).share_again()
                        del self._out[lease]
            except OSError as error:
                logger.error("leases cannot be returned, so their connection is given up: %s", error)
                self._connection.shutdown()  # they go back with it
                return
            for first in range(0, len(finished), MAX_PIECES):
                self._connection.post(Release(tuple(finished[first : first + MAX_PIECES])))

    def _next_deaths(self, timeout_s: float | None) -> list[int | None]:
        """At least one, unless none comes in time."""
        try:
            deaths = [self._deaths.get(timeout=timeout_s)]
        except queue.Empty:
            return []
        while len(deaths) < MAX_PIECES and not self._deaths.empty():
            deaths.append(self._deaths.get())
        return deaths

    def before_fork(self, make_child: Callable[[], Child]) -> None:
        for out in self._out.values():
            if out.uses and out.memory is not None:
                out.inherit(make_child())

    def after_fork_in_child(self) -> None:
        self._end_use = _forget
        for out in self._out.values():
            for child in out.children:
                child.close()

    def close(self) -> None:
        """Stop returning. Arrays that are out stay valid, and their memory is this process's own from then on."""
        self._deaths.put(None)
        self._thread.join(timeout=5.0)
        with fork.lock:
            if self not in fork.holders:
                return
            fork.holders.discard(self)
            for out in self._out.values():
                if out.uses and not out.children:
                    out.make_private()  # nobody else writes to it any more, and a later fork needs nothing of us
                out.children = []


def _forget(lease: int) -> None:
    """A forked child's array died, which says nothing about its parent's."""
