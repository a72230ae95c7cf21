"""The late messages of step mode: the queue they come through at the engine.

In step mode vllm-omni has no pump: the engine's thread reads a worker's queue itself, for the reply to each step, and must
find nothing else there. So what comes after its reply and not through the packer (an output that falls back, an
error) has a pipe of its own, and the steps keep vllm-omni's way, cost included.
"""

from __future__ import annotations

import pickle
import time
from multiprocessing.connection import Connection

from vllm_omni.diffusion.data import AsyncDiffusionOutput


class LateQueue:
    """The reading end of the workers' pipe, as vllm-omni's result pump reads a queue. One thread calls ``dequeue``."""

    def __init__(self, reader: Connection) -> None:
        self._reader = reader
        self._ended = False

    def dequeue(self, timeout: float | None = None) -> AsyncDiffusionOutput:
        """The next message. TimeoutError where none came in ``timeout`` seconds, or where none will come any more."""
        try:
            data = self._reader.recv_bytes() if not self._ended and self._reader.poll(timeout) else None
        except (EOFError, OSError):
            self._ended, data = True, None  # every worker is gone
        if data is not None:
            message: AsyncDiffusionOutput = pickle.loads(data)  # our own workers' pipe
            return message
        if self._ended and timeout is not None:
            time.sleep(timeout)  # do not spin
        raise TimeoutError

    def close(self) -> None:
        self._reader.close()
