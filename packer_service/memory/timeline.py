"""The timeline page: one page of shared memory between a worker and its packer, with no lock and one writer for each word.

    byte 0    counter      written by the worker's device (export n is complete), by a CPU only in the device's stead
    byte 64   generation   written by the worker: the number of its present connection
    byte 128  last         written by a packer, once the worker is dead: 1 + the counter as it was then; 0 before

Note [A worker that hung up is not a dead worker]
A connection also ends when the packer hung, or was told to stop, and then the worker lives: it exports the same outputs
again elsewhere, or takes their memory back, while copies of the first attempt may still be on their way here. So the packer
publishes a copy only while the page still carries the generation it was exported under: it looks after the copy, and the
worker writes before it touches the memory, so a copy that was overwritten is never published. And it may write the counter
only when the worker is dead, which a record lock on the page says: the kernel drops it with the process, whatever pid
namespace that lived in, and a pid that was given to somebody else cannot be mistaken for it.

Note [What a dead worker completed]
A stream that waits for a value which will not come can only be released by that value, so the packer forces the counter. The
device of a killed process goes on for some milliseconds after the record lock is gone (14 ms on an H200:
benchmarks/dead_worker.py), and what it writes lowers the counter again: it is forced until the stream has passed. Whoever
asks what is complete must not take the forced counter for an answer, and several connections of one worker share its page.
So what the counter was is noted on the page before it is forced, and ``completed`` says what is.
"""

from __future__ import annotations

import ctypes
import fcntl

from packer_service.memory.memfd import SharedMemory

TIMELINE_BYTES = 4096
_GENERATION_AT = 64  # a cache line of its own, as the next
_LAST_AT = 128


class TimelinePage:
    """Either side's mapping of the page. ``create`` in the worker, ``attach`` in the packer; ``close()`` gives it back."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.address = memory.address
        self.nbytes = TIMELINE_BYTES
        # These are whole words, each read and written by one instruction. The counter is signed, as the device compares it.
        self._counter = ctypes.c_int64.from_buffer(memory.buffer, 0)
        self._generation = ctypes.c_uint64.from_buffer(memory.buffer, _GENERATION_AT)
        self._last = ctypes.c_int64.from_buffer(memory.buffer, _LAST_AT)

    @classmethod
    def create(cls) -> TimelinePage:
        """A new page; this process holds its lock until it ends or closes the page."""
        memory = SharedMemory.create("packer-timeline", TIMELINE_BYTES)
        fcntl.lockf(memory.fd, fcntl.LOCK_EX)
        return cls(memory)

    @classmethod
    def attach(cls, fd: int) -> TimelinePage:
        """Map a worker's page. Takes over ``fd``. ProtocolError where it is none."""
        return cls(SharedMemory.attach(fd, TIMELINE_BYTES, keep_fd=True))

    @property
    def fd(self) -> int:
        return self._memory.fd

    def let_go(self) -> None:
        """Give up the lock: this process will complete nothing more, and what is complete may be delivered."""
        fcntl.lockf(self.fd, fcntl.LOCK_UN)

    def owner_lives(self) -> bool:
        """Whether the process that made the page still holds it. Asked in another process than that."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self.fd, fcntl.LOCK_UN)
        return False

    @property
    def counter(self) -> int:
        return self._counter.value

    @counter.setter
    def counter(self, value: int) -> None:
        self._counter.value = value

    @property
    def completed(self) -> int:
        """The last export that the owner's device completed. See Note [What a dead worker completed]."""
        counter = self.counter  # before it is asked whether that may be forced
        return self._last.value - 1 if self._last.value else counter

    def end_at(self, value: int) -> None:
        """Release every wait for up to ``value``, again and again if need be. The owner is dead."""
        counter = self.counter  # before it is asked whether another session forced it
        if not self._last.value:
            self._last.value = counter + 1
        if self.counter < value:
            self.counter = value

    @property
    def generation(self) -> int:
        return self._generation.value

    @generation.setter
    def generation(self, value: int) -> None:
        self._generation.value = value

    def close(self) -> None:
        self._memory.close()
