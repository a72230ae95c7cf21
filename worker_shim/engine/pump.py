"""vllm-omni's own functions, run with something of ours in place of a global of their module, which stays as it is.

The result pump above all, so that an output it cannot unpack harms nothing but itself.
"""

from __future__ import annotations

import types
from typing import Any

from vllm_omni.diffusion.executor import multiproc_executor

from worker_shim.log import get_logger

logger = get_logger(__name__)


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
