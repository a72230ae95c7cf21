"""A descriptor that is held for nothing but its place in this process's table."""

from __future__ import annotations

import os


class SpareDescriptor:
    """See Note [A full descriptor table] in worker_shim.engine.receiver. One thread's."""

    def __init__(self) -> None:
        self._fd = -1
        self.take()

    def take(self) -> bool:
        """Have one, if it may be had. Whether there is one now."""
        if self._fd < 0:
            try:
                self._fd = os.eventfd(0)
            except OSError:
                return False
        return True

    def give(self) -> bool:
        """Give its place to whatever comes next. False where it was given already."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        return fd >= 0
