"""An engine of vllm-omni whose event loop stays free while an output is post-processed (``engine_backend``).

vllm-omni awaits an output on its loop and post-processes it there: 17 ms for an image, 0.2-0.9 s for a video, in which no other
request, abort or health question of that engine moves. Here the same, unchanged function runs on a thread beside the loop.

Note [A request's view of the engine]
``DiffusionEngine.step_streaming`` is left as it is. It runs on a *view* of the engine: an object with the engine's own
attributes, whose ``get_output_stream`` yields an output only once it was post-processed, and whose ``postprocess_output``
passes on what came of that. What belongs to one request is the view's alone: nothing of it is left in the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_omni.diffusion import diffusion_engine
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

from packer_service.config import Settings
from worker_shim.log import get_logger

logger = get_logger(__name__)

_CARRIED = ("output", "media", "trajectory_latents", "trajectory_timesteps", "trajectory_log_probs")


class PackerDiffusionEngine(DiffusionEngine):
    """vllm-omni's engine, with post-processing on ``postprocess_threads`` threads of its own. It takes any executor."""

    def _init_runtime_state(self) -> None:
        super()._init_runtime_state()
        threads = Settings.of_engine(self.od_config.additional_config).postprocess_threads
        self._postprocess_pool = ThreadPoolExecutor(threads, thread_name_prefix="packer-postprocess")
        logger.info("post-processing runs beside the event loop, on %d threads (setting postprocess_threads)", threads)

    async def step_streaming(self, request: Any) -> AsyncGenerator[list[Any], None]:
        await self._check_and_start_background_loop()  # on the engine itself: its thread outlives this request
        view = _view_of(self)
        async with contextlib.aclosing(DiffusionEngine.step_streaming(view, request)) as results:
            async for formatted in results:
                view._request.correct_metrics(formatted)
                yield formatted

    def close(self) -> None:
        super().close()
        self._postprocess_pool.shutdown(wait=False)  # its threads end with what they have


class _Request:
    """One request on its way through a view, on the loop's thread alone. ``prepared`` is what the scheduler was given."""

    def __init__(self) -> None:
        self.prepared: Any = None
        self.finished: DiffusionOutput | None = None  # what ``results`` or ``error`` came of
        self.results: list[Any] = []
        self.error: BaseException | None = None
        self.waited_s = 0.0  # for the output to be on the host
        self.postprocessed_s = 0.0  # with the wait for a thread

    def take(self) -> list[Any]:
        """What the last output was made into; nothing is kept of it."""
        results, error = self.results, self.error
        self.finished, self.results, self.error = None, [], None
        if error is not None:
            raise error
        return results

    def correct_metrics(self, results: list[Any]) -> None:
        """vllm-omni measured the waits as a part of what its stream took, and nothing where it waits and post-processes."""
        for result in results:
            taken_ms = (self.waited_s + self.postprocessed_s) * 1000
            result.metrics["diffusion_engine_exec_time_ms"] -= taken_ms
            result.metrics["output_ready_wait_time_ms"] = self.waited_s * 1000
            if self.postprocessed_s:
                result.metrics["postprocess_time_ms"] = self.postprocessed_s * 1000
        self.waited_s = self.postprocessed_s = 0.0


_Base: Any = object  # for mypy, to whom a view is an engine of any class


class _View(_Base):
    """The methods of a view. See Note [A request's view of the engine]."""

    __slots__ = ()

    _request: _Request

    def _add_prepared_request(self, request: Any) -> str:
        self._request.prepared = request
        return super()._add_prepared_request(request)

    async def get_output_stream(self, request_id: str) -> AsyncGenerator[DiffusionOutput, None]:
        async with contextlib.aclosing(super().get_output_stream(request_id)) as outputs:
            async for output in outputs:
                yield await self._finish(output)

    def postprocess_output(self, request: Any, output: DiffusionOutput) -> list[Any]:
        if output is self._request.finished:
            return self._request.take()
        return super().postprocess_output(request, output)

    async def _finish(self, output: DiffusionOutput) -> DiffusionOutput:
        """``output``, on the host and post-processed; as it is where there is nothing to do."""
        request = self._request
        if output.async_output_id:
            begin = time.perf_counter()
            output = await self._wait_ready(output.async_output_id)
            request.waited_s = time.perf_counter() - begin
        if output.aborted or output.error or output.request_started or (output.output is None and output.media is None):
            return output
        begin = time.perf_counter()
        run = functools.partial(super().postprocess_output, request.prepared, output)  # the engine's own
        try:
            request.results = await asyncio.get_running_loop().run_in_executor(self._postprocess_pool, run)
        except Exception as error:
            request.error = error
        except BaseException:
            del output  # whoever keeps the cancellation keeps this frame
            raise
        finally:
            del run
        request.postprocessed_s = time.perf_counter() - begin
        request.finished = copy.copy(output)
        for name in _CARRIED:  # else its memory would be held until the next output, or the end of the request
            setattr(request.finished, name, None)
        return request.finished

    async def _wait_ready(self, output_id: str) -> DiffusionOutput:
        executor = self.executor
        timeout_s = diffusion_engine._async_output_timeout()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(executor.wait_output_ready(output_id)), timeout_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            state = getattr(executor, "describe_pending_state", lambda _: "unknown")(output_id)
            name = diffusion_engine._ASYNC_OUTPUT_TIMEOUT_ENV
            logger.error("output %s was not ready within %g s; set %s higher. %s", output_id, timeout_s, name, state)
            raise


def _view_of(engine: PackerDiffusionEngine) -> Any:
    engine_class: Any = type(engine)
    view: Any = object.__new__(_view_class(engine_class))
    view.__dict__ = engine.__dict__
    view._request = _Request()
    return view


@functools.cache
def _view_class(engine_class: Any) -> type:
    return type(f"{engine_class.__name__}View", (_View, engine_class), {"__slots__": ("_request",)})
