"""vLLM's message queue, read without keeping the GIL busy.

Note [A result pump that does not spin]
For a second after each message vLLM's reader looks at the shared memory again and again, with a ``sched_yield`` between two
looks. The pump of a worker's queue thereby polls all the time that an engine works, and every other thread, the pump of the
packer first, has to win the GIL back from it after each call that let go (see Note [Waiting for the GIL] in
worker_shim.outputs.arrays). Here it sleeps between two looks instead, for about 0.1 ms, so the GIL is nearly always free.

Not looking at all, and waiting for the writer's notification, would lose messages until the next timeout: its socket has room
for one (SNDHWM 1), the writer learns only now and then that the reader took the last one, and drops what finds no room. A
second message within some milliseconds is such a one. vLLM's second of looking is what makes up for it, and it stays.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_LOOK_S = 50e-6  # and the kernel's timer slack, which is as much again


class SleepingCondition(SpinCondition):
    """How a reader waits: as vLLM's does, except for what it does between two looks."""

    def wait(self, timeout_ms: int | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(_LOOK_S)
        else:
            super().wait(timeout_ms)


def sleep_between_looks(result_mq: Any) -> None:
    """Have the reader of ``result_mq`` sleep from now on. One that is not in shared memory stays as it is."""
    condition = getattr(result_mq, "_spin_condition", None)
    if type(condition) is SpinCondition:
        condition.__class__ = SleepingCondition  # not a method of the instance: that would be a reference cycle
