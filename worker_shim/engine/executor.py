"""PackerDiffusionExecutor: the drop-in. vllm-omni's multi-process executor, whose worker outputs come from packers.

Here is what of vllm-omni is overridden, and why. What the executor has besides (packers, placeholders, the late queue) is
elsewhere and knows nothing of it.

Note [What starts when, and what ends it]
start   packers (managed) or connections (sidecar, waited for) -> engine sessions -> workers, which
        join the session and probe -> pumps. Whatever fails before the workers means vllm-omni's own path, or a refusal.
end     vllm-omni's own shutdown (workers, then pumps) -> packers -> engine sessions. If the engine is killed instead, its
        workers get vllm-omni's death signal and a managed packer sees its session end.
between a packer that dies is brought back by its keeper; a worker that dies ends everything, as vllm-omni has it, but not
        before the packer has delivered what that worker had finished.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.executor import multiproc_executor

from packer_service.descriptors import open_standard_descriptors
from packer_service.errors import PackerUnavailable
from worker_shim.engine import metrics
from worker_shim.engine.packers import Packers
from worker_shim.engine.placeholders import Unclaimed
from worker_shim.engine.pump import rebound, run_pump, sleep_between_looks, without_frames
from worker_shim.engine.receiver import Delivered
from worker_shim.engine.result_queue import LateQueue, OnceQueue
from worker_shim.log import get_logger
from worker_shim.outputs.replies import check_media, reply_ranks
from worker_shim.settings import engine_settings
from worker_shim.worker.worker_main import worker_main
from worker_shim.worker_config import Exports, Refuses, WorkerConfig

logger = get_logger(__name__)

_LAST_OUTPUTS_S = 5.0
_ANSWERS_S = 0.05


def _in_process(pid: int, call: Callable[[], object]) -> None:
    """Do it in that process, and not in one that it forked."""
    if os.getpid() == pid:
        call()


def _reports(reader: Connection) -> Iterator[Exports | Refuses]:
    """What workers have said so far."""
    while reader.poll():
        report: Exports | Refuses = reader.recv()  # our own workers' pipe
        yield report


def _has_ended(process: BaseProcess) -> bool:
    """Also where it is ending: a killed process closes its files, which its sentinel tells and vllm-omni acts on, before it can
    be waited for. What the driver has to do in between takes it a while where it used a GPU."""
    return not process.is_alive() or bool(wait([process.sentinel], 0))


class PackerDiffusionExecutor(multiproc_executor.MultiprocDiffusionExecutor):
    """Select it with ``distributed_executor_backend="worker_shim.PackerDiffusionExecutor"``.

    Settings come from ``PACKER_*`` and ``additional_config={"packer": {...}}`` (see ``packer_service.config``); a bad one
    raises SettingError. With no packer to be had it serves through vllm-omni's own path after one warning, or raises
    PackerUnavailable where ``fallback="fail"``.
    """

    _finalizer: weakref.finalize[..., Any]
    _worker_config: WorkerConfig  # made before anything of vllm-omni's is started

    def _init_executor(self) -> None:
        open_standard_descriptors()  # for the workers and packers it starts too, which inherit them
        self._pid = os.getpid()
        self._closing = threading.Event()
        # Whoever ends the executor has it, and others wait for that end. It guards no state.
        self._ending = threading.RLock()
        self._delivered = Delivered()
        self._packers = Packers(self._delivered, self._closing)
        self._late: LateQueue | None = None
        settings = engine_settings(self.od_config)
        self._unclaimed = Unclaimed(self.drop_output, self._packers.counts.new())
        try:
            self._worker_config = self._packers.open(settings, reply_ranks(self.od_config))
            metrics.watch(self._packers)
            self._check_closing()
            super()._init_executor()
            if self._finalizer.detach() is not None:  # a forked child must not end its parent's workers
                self._finalizer = weakref.finalize(self, _in_process, self._pid, self._shutdown_cleaner)
            if self._closing.is_set():  # whoever said so meanwhile may have found nothing to end
                self.shutdown()
                self._check_closing()
            if self.od_config.step_execution:
                self._start_late_pumps()
        except BaseException:
            self._close_all()
            raise

    def _check_closing(self) -> None:
        if self._closing.is_set():
            raise PackerUnavailable("the executor is shutting down")

    @property
    def packer_pids(self) -> list[int]:
        """The packers that serve this executor; none where outputs take vllm-omni's own path."""
        return [pid for queue in self._packers.queues if (pid := queue.packer_pid) is not None]

    @property
    def packer_outputs(self) -> int:
        """Outputs that came through packers so far, those that failed there included. A batch's is one."""
        return sum(queue.outputs for queue in self._packers.queues)

    def _launch_workers(self, *args: Any, **kwargs: Any) -> Any:
        """vllm-omni's own, run with a WorkerProc whose entry point is ours. Its module stays as it is."""
        reader, writer = multiprocessing.Pipe(duplex=False)
        late_reader, late_writer = multiprocessing.Pipe(duplex=False)
        self._late = LateQueue(late_reader)
        entry = functools.partial(worker_main, worker_config=self._worker_config, reports=writer, late=late_writer)
        own = multiproc_executor.MultiprocDiffusionExecutor._launch_workers
        launch = rebound(own, WorkerProc=types.SimpleNamespace(worker_main=entry))
        with reader, writer, late_writer:
            try:
                launched = launch(self, *args, **kwargs)
            except Exception as error:
                for report in _reports(reader):
                    if isinstance(report, Refuses):
                        raise PackerUnavailable(report.reason) from error
                raise
            self._packers.keep_only({report.device_uuid for report in _reports(reader) if isinstance(report, Exports)})
            return launched

    def _init_result_queue(self, result_handle: Any) -> Any:
        own = super()._init_result_queue(result_handle)
        sleep_between_looks(own)
        if self.od_config.step_execution:  # only replies come this way
            return own
        return OnceQueue(own, self._delivered, self._packers.counts.new())

    # -- pumps ---------------------------------------------------------------------------------------------------------

    def _start_result_pump(self) -> None:
        super()._start_result_pump()
        self._start_packer_pumps()

    def _start_late_pumps(self) -> None:
        """The pumps of step mode, where vllm-omni starts none; see ``LateQueue``."""
        with self._ending:
            self._result_pump_threads: list[threading.Thread] = []
            if self._late is None or self._closed:
                return
            self._start_packer_pumps()
            self._start_pump(OnceQueue(self._late, self._delivered, self._packers.counts.new()), "PackerLatePump")

    def _start_packer_pumps(self) -> None:
        for number, queue in enumerate(self._packers.queues):
            self._start_pump(queue, f"PackerResultPump-{number}")

    def _start_pump(self, result_queue: Any, name: str) -> None:
        thread = threading.Thread(target=self._result_pump, args=(result_queue,), daemon=True, name=name)
        self._result_pump_threads.append(thread)
        thread.start()

    def _result_pump(self, result_mq: Any = None) -> None:
        """vllm-omni's own; if it ends before it is told to, the executor fails as it does when a worker dies.

        vllm-omni's would end silently, and every request wait for its timeout.
        """
        run_pump(self, result_mq)
        if not self._pump_stop.is_set() and not self._is_failed:
            self._fail(f"{threading.current_thread().name} ended")

    def _fail(self, why: str) -> None:
        """As vllm-omni's worker monitor does for a dead worker."""
        logger.error("packer: the executor fails: %s", why)
        self._is_failed = True
        self.shutdown()
        for callback in self._failure_callbacks:
            try:
                callback()
            except Exception:
                logger.exception("failure_callback raised")

    # -- placeholders --------------------------------------------------------------------------------------------------

    def _dequeue_one_with_failure_polling(self, *args: Any, **kwargs: Any) -> Any:
        """vllm-omni's own: the next synchronous reply. Whatever becomes of it, its placeholders are watched from here on."""
        return self._unclaimed.watch_reply(super()._dequeue_one_with_failure_polling(*args, **kwargs))

    def execute_batch(self, scheduler_output: Any) -> Any:
        """vllm-omni's own, with placeholders of ours that are watched."""
        output: Any = super().execute_batch(scheduler_output)
        self._unclaimed.watch_parts(output.runner_outputs)
        return output

    def wait_output_ready(self, async_output_id: str) -> Any:
        self._unclaimed.take(async_output_id)
        return super().wait_output_ready(async_output_id)

    def drop_output(self, async_output_id: str) -> None:
        self._unclaimed.take(async_output_id)
        super().drop_output(async_output_id)

    def _finish_output(self, async_output_id: str, result: Any, exc: BaseException | None) -> None:
        """vllm-omni's own, called under its lock; and it splits a batch whose map came while the pump unpacked its output.

        The pump looks for the map before it unpacks and ``execute_batch`` for the output before it registers the map: each
        can miss the other, and vllm-omni would then keep the whole batch for ever, with its requests waiting.
        """
        per_request = self._batch_split_map.pop(async_output_id, None)
        if per_request is None:
            if isinstance(result, DiffusionOutput) and result.media is not None:
                try:
                    check_media(result)
                except (TypeError, ValueError) as error:
                    result, exc = None, error
            super()._finish_output(async_output_id, result, exc and without_frames(exc))
        else:
            self._deliver_batch_split(per_request, result, None if exc is None else str(exc))

    def describe_pending_state(self, async_output_id: str | None = None) -> str:
        """vllm-omni's own, and how far the packers are with that output. It runs on the event loop, and waits little."""
        own = f"{super().describe_pending_state(async_output_id)} unclaimed={len(self._unclaimed)}"
        exported = (async_output_id or "").partition("/")[0]  # a member of a batch is named batch/member
        if not exported or not self._packers.keepers:
            return own
        if exported in self._delivered:
            return f"{own} packer=['delivered to the engine']"
        return f"{own} packer={self._packers.states(exported, _ANSWERS_S)}"

    def shutdown(self) -> None:
        """End workers, pumps, packers and sessions, in that order. Idempotent; concurrent callers wait for the first.

        While the executor still looks for packers this only ends that search: the thread that starts it closes what it opened.
        A forked child's copy ends nothing: all of that is its parent's.
        """
        if os.getpid() != self._pid:
            return
        self._closing.set()
        if not hasattr(self, "_closed"):  # vllm-omni's own start makes it
            return
        # These run from the last to the first, and each also where the one before it failed.
        with self._ending, contextlib.ExitStack() as ends:
            ends.callback(self._close_all)
            ends.callback(super().shutdown)
            self._packers.stop()
            if not self._closed:
                self._await_dead_workers()

    def _close_all(self) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self._unclaimed.close)
            if self._late is not None:
                ends.callback(self._late.close)
                self._late = None
            ends.callback(self._packers.close)
            metrics.unwatch(self._packers)  # first: it reads them a last time

    def _await_dead_workers(self) -> None:
        """What a worker had finished before it died is delivered before anybody is told that it died."""
        if any(
            rank in self._worker_config.ranks and _has_ended(process) for rank, process in enumerate(self._processes)
        ):
            self._packers.await_last_outputs(_LAST_OUTPUTS_S)
