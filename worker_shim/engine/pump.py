"""vllm-omni's result pumps as they run here: an output that one cannot unpack harms nothing else, and none keeps the GIL busy.

vllm-omni's functions run with something of ours in place of a global of their module, which stays as it is.

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
import types
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm_omni.diffusion.executor import multiproc_executor

from worker_shim.log import get_logger

logger = get_logger(__name__)

_LOOK_S = 50e-6  # between two looks, and the kernel's timer slack, which is as much again


def rebound(function: Any, **names: Any) -> types.FunctionType:
    """``function``, which finds ``names`` instead of its module's own."""
    return types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def run_pump(executor: Any, result_mq: Any) -> None:
    """Read ``result_mq`` until the pump ends, for whatever reason: it raises nothing."""
    raised: list[Exception] = []  # the last, which the pump keeps in a variable

    def unpack_noting(output: object) -> object:
        try:
            return unpack(output)
        except Exception as error:
            raised[:] = [error]
            raise

    own = multiproc_executor.MultiprocDiffusionExecutor._result_pump
    try:
        rebound(own, unpack_diffusion_output_shm=unpack_noting)(executor, result_mq)
    except BaseException:  # SystemExit, too: somebody's class may raise it where it is unpickled
        logger.exception("the thread that takes outputs from %s failed", result_mq)
    for error in raised:
        without_frames(error)


def unpack(output: object) -> object:
    """vllm-omni's own, but an output that contains itself stays as it came, as where vllm-omni reads the reply to a step.

    Its walk over such an output does not end, so that nothing in it was packed either. Elsewhere its pump makes that an error.
    """
    try:
        return multiproc_executor.unpack_diffusion_output_shm(output)
    except RecursionError:
        logger.debug("an output contains itself: nothing in it is unpacked")
        return output


def without_frames(error: BaseException) -> BaseException:
    """``error``, which may be kept now: a traceback keeps frames, and a pump's keeps the executor, and the error itself.

    An executor in such a cycle is taken apart by the garbage collector, in any order, and the end of its queues' zmq contexts
    then waits for ever for their sockets.
    """
    each: BaseException | None = error
    while each is not None and each.__traceback__ is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


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
