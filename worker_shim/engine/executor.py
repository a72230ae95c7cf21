"""PackerDiffusionExecutor: the drop-in. vllm-omni's multi-process executor, whose worker outputs come from packers.

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
import dataclasses
import functools
import multiprocessing
import os
import secrets
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.executor import multiproc_executor
from vllm_omni.platforms import current_omni_platform

from packer_service.config import Settings
from packer_service.descriptors import open_standard_descriptors
from packer_service.errors import PackerError, PackerUnavailable
from worker_shim.engine.keeper import PackerKeeper
from worker_shim.engine.late_queue import LateQueue
from worker_shim.engine.placeholders import Unclaimed, in_reply
from worker_shim.engine.receiver import Delivered
from worker_shim.engine.result_queue import OnceQueue
from worker_shim.engine.supervisor import Supervisor
from worker_shim.log import get_logger
from worker_shim.retries import Arrival
from worker_shim.settings import engine_settings
from worker_shim.worker.proc import worker_main
from worker_shim.worker_config import Exports, Refuses, WorkerConfig

logger = get_logger(__name__)

_LAST_OUTPUTS_S = 5.0
_ANSWERS_S = 0.05


def reply_ranks(od_config: OmniDiffusionConfig) -> frozenset[int]:
    """The workers that reply with outputs: the first of each DP replica where vllm-omni runs DP waves, else the first.

    Waves are what its ``execute_request`` sends to all replicas where an offloaded component gathers its weights from
    them; the other ranks (TP, SP, CFG, PP; DP without such offload) compute and send nothing.
    """
    from vllm_omni.diffusion.offloader.config import any_selected_component_uses_allgather

    if od_config.step_execution:
        return frozenset({0})
    parallel = od_config.parallel_config
    replicas = parallel.data_parallel_size
    if replicas <= 1 or not any_selected_component_uses_allgather(od_config):
        return frozenset({0})
    replica_size = (
        parallel.tensor_parallel_size
        * parallel.sequence_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.cfg_parallel_size
    )
    return frozenset(replica * replica_size for replica in range(replicas))


def check_media(output: DiffusionOutput) -> None:
    """What vllm-omni checks when it packs and unpacks typed media. TypeError or ValueError says what is wrong."""
    from vllm_omni.diffusion.media import DiffusionMediaOutput

    if output.output is not None:
        raise ValueError("DiffusionOutput cannot contain both media and legacy output")
    media = output.media
    if not isinstance(media, DiffusionMediaOutput):
        raise TypeError(f"DiffusionOutput.media must be DiffusionMediaOutput, got {type(media).__name__}")
    media.validate()
    if not media.prepared_for_transport:
        raise ValueError("Diffusion media must be prepared before it leaves the worker")


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


def _in_process(pid: int, call: Callable[[], object]) -> None:
    """Do it in that process, and not in one that it forked."""
    if os.getpid() == pid:
        call()


def _reports(reader: Connection) -> Iterator[Exports | Refuses]:
    """What workers have said so far."""
    while reader.poll():
        report: Exports | Refuses = reader.recv()  # our own workers' pipe
        yield report


class PackerDiffusionExecutor(multiproc_executor.MultiprocDiffusionExecutor):
    """Select it with ``distributed_executor_backend="worker_shim.PackerDiffusionExecutor"``.

    Settings come from ``PACKER_*`` and ``additional_config={"packer": {...}}`` (see ``packer_service.config``); a bad one
    raises SettingError. With no packer to be had it serves through vllm-omni's own path after one warning, or raises
    PackerUnavailable where ``fallback="fail"``.
    """

    _reply_ranks: frozenset[int] = frozenset()
    _finalizer: weakref.finalize[..., Any]
    _worker_config: WorkerConfig  # made before anything of vllm-omni's is started

    def _init_executor(self) -> None:
        open_standard_descriptors()  # for the workers and packers it starts too, which inherit them
        self._pid = os.getpid()
        self._shutdown_lock = threading.RLock()
        self._closing = threading.Event()
        self._supervisor: Supervisor | None = None
        self._keepers: list[PackerKeeper] = []
        self._delivered = Delivered()
        self._late: LateQueue | None = None
        settings = engine_settings(self.od_config)
        self._unclaimed = Unclaimed(self.drop_output)
        try:
            self._worker_config = self._open_packers(settings)
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

    def _open_packers(self, settings: Settings) -> WorkerConfig:
        """Have a packer for every GPU whose worker replies, and a session with each.

        With none to be had, no rank exports: our worker packs outputs the way vllm-omni does, on any device.
        """
        try:
            self._reply_ranks = reply_ranks(self.od_config)
            packers, key = self._start_or_find(settings)
            session, mac_key = secrets.token_hex(16), secrets.token_bytes(32)
            arrival = Arrival(settings, self._closing) if settings.mode == "sidecar" else None
            for socket, restart in packers.items():
                keeper = PackerKeeper(socket, key, session, mac_key, self._delivered, settings, restart, arrival)
                self._keepers.append(keeper)
                device = keeper.welcome
                logger.info(
                    "outputs of %s (%s) go through packer %d", device.device_name, device.device_uuid, device.pid
                )
        except (PackerError, OSError) as error:
            self._close_packers()
            if settings.fallback == "fail" or self._closing.is_set():
                raise
            logger.warning(
                "packer: serving through vllm-omni's own output path: %s. The setting fallback='fail' refuses instead",
                error,
            )
            return WorkerConfig(settings, "", {}, frozenset(), b"", b"")
        by_device = {keeper.welcome.device_uuid: keeper.socket for keeper in self._keepers}
        return WorkerConfig(settings, session, by_device, self._reply_ranks, key, mac_key)

    def _start_or_find(self, settings: Settings) -> tuple[dict[str, Callable[[], None] | None], bytes]:
        """The sockets of the packers, one a GPU, with what starts each again where that is ours to do, and their key."""
        if settings.mode == "sidecar":
            if not settings.sockets():
                raise PackerUnavailable(
                    "mode is 'sidecar' and the setting socket names no packer's socket (PACKER_SOCKET=/run/packer/gpu0.sock;"
                    " of several GPUs, separated by commas)"
                )
            return dict.fromkeys(settings.sockets()), settings.read_key()
        kind = current_omni_platform.device_type
        if kind not in ("cuda", "cpu") or (kind == "cuda" and not current_omni_platform.is_cuda()):
            raise PackerUnavailable(f"the packer copies from NVIDIA GPUs, and this platform is {kind!r}")
        self._supervisor = supervisor = Supervisor(settings)
        for device in [f"cuda:{rank}" for rank in sorted(self._reply_ranks)] if kind == "cuda" else ["host"]:
            supervisor.start(device)
        restarts = {packer.socket: functools.partial(supervisor.restart, packer) for packer in supervisor.packers}
        return {**restarts}, supervisor.key

    @property
    def packer_pids(self) -> list[int]:
        """The packers that serve this executor; none where outputs take vllm-omni's own path."""
        return [pid for keeper in self._keepers if (pid := keeper.queue.packer_pid) is not None]

    @property
    def packer_outputs(self) -> int:
        """Outputs that came through packers so far, those that failed there included. A batch's is one."""
        return sum(keeper.queue.outputs for keeper in self._keepers)

    def _launch_workers(self, *args: Any, **kwargs: Any) -> Any:
        """vllm-omni's own, run with a WorkerProc whose entry point is ours. Its module stays as it is."""
        launch = multiproc_executor.MultiprocDiffusionExecutor._launch_workers
        reader, writer = multiprocessing.Pipe(duplex=False)
        late_reader, late_writer = multiprocessing.Pipe(duplex=False)
        self._late = LateQueue(late_reader)
        entry = functools.partial(worker_main, worker_config=self._worker_config, reports=writer, late=late_writer)
        ours = types.SimpleNamespace(worker_main=entry)
        namespace = {**launch.__globals__, "WorkerProc": ours}
        rebound = types.FunctionType(
            launch.__code__, namespace, launch.__name__, launch.__defaults__, launch.__closure__
        )
        with reader, writer, late_writer:
            try:
                launched = rebound(self, *args, **kwargs)
            except Exception as error:
                for report in _reports(reader):
                    if isinstance(report, Refuses):
                        raise PackerUnavailable(report.reason) from error
                raise
            self._keep_only({report.device_uuid for report in _reports(reader) if isinstance(report, Exports)})
            return launched

    def _keep_only(self, device_uuids: set[str]) -> None:
        """End the session with every packer of another device: no worker uses it. A managed one exits with that."""
        unused = [keeper for keeper in self._keepers if keeper.welcome.device_uuid not in device_uuids]
        self._keepers = [keeper for keeper in self._keepers if keeper not in unused]
        for keeper in unused:
            logger.warning("packer: no worker uses the packer at %s, which is left", keeper.socket)
            keeper.stop()
            keeper.close()

    def _init_result_queue(self, result_handle: Any) -> Any:
        own = super()._init_result_queue(result_handle)
        from worker_shim.engine.sleeping_reader import read_patiently  # imports what compat.py had to find first

        read_patiently(own)
        if self.od_config.step_execution:  # only replies come this way
            return own
        return OnceQueue(own, self._delivered)

    # -- pumps ---------------------------------------------------------------------------------------------------------

    def _start_result_pump(self) -> None:
        super()._start_result_pump()
        self._start_packer_pumps()

    def _start_late_pumps(self) -> None:
        """The pumps of step mode, where vllm-omni starts none; see ``worker_shim.engine.late_queue``."""
        with self._shutdown_lock:
            self._result_pump_threads: list[threading.Thread] = []
            if self._late is None or self._closed:
                return
            self._start_packer_pumps()
            self._start_pump(OnceQueue(self._late, self._delivered), "PackerLatePump")

    def _start_packer_pumps(self) -> None:
        for number, keeper in enumerate(self._keepers):
            self._start_pump(keeper.queue, f"PackerResultPump-{number}")

    def _start_pump(self, result_queue: Any, name: str) -> None:
        thread = threading.Thread(target=self._result_pump, args=(result_queue,), daemon=True, name=name)
        self._result_pump_threads.append(thread)
        thread.start()

    def _result_pump(self, result_mq: Any = None) -> None:
        """vllm-omni's own; if it ends before it is told to, the executor fails as it does when a worker dies.

        vllm-omni's would end silently, and every request wait for its timeout.
        """
        raised: list[Exception] = []  # the last, which the pump keeps in a variable

        def unpack_noting(output: object) -> object:
            try:
                return unpack(output)
            except Exception as error:
                raised[:] = [error]
                raise

        pump = super()._result_pump.__func__
        namespace = {**pump.__globals__, "unpack_diffusion_output_shm": unpack_noting}
        rebound = types.FunctionType(pump.__code__, namespace, pump.__name__, pump.__defaults__, pump.__closure__)
        try:
            rebound(self, result_mq)
        except BaseException:  # SystemExit, too: somebody's class may raise it where it is unpickled
            logger.exception("the thread that takes outputs from %s failed", result_mq)
        for error in raised:
            without_frames(error)
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
        reply = super()._dequeue_one_with_failure_polling(*args, **kwargs)
        if isinstance(reply, dict) and any(output.async_output_id is not None for output in in_reply(reply)):
            # a copy: the pump that read a wave's reply keeps its message until the next one comes
            reply = {**reply, "output": dataclasses.replace(reply["output"])}
        for output in in_reply(reply):
            if output.async_output_id is not None:
                self._unclaimed.watch(output)
        return reply

    def execute_batch(self, scheduler_output: Any) -> Any:
        """vllm-omni's own, with a placeholder of ours where vllm-omni would make one later that nobody watches.

        An output without its id beside it (a DP wave's) gets that: vllm-omni drops it by that id after an abort.
        """
        output: Any = super().execute_batch(scheduler_output)
        for part in output.runner_outputs:
            if part.result is None and part.async_output_id is not None:
                part.result = DiffusionOutput(async_output_id=part.async_output_id)
                self._unclaimed.watch(part.result)
            elif part.result is not None:
                part.async_output_id = part.result.async_output_id
        return output

    def wait_output_ready(self, async_output_id: str) -> Any:
        self._unclaimed.take(async_output_id)
        return super().wait_output_ready(async_output_id)

    def drop_output(self, async_output_id: str) -> None:
        self._unclaimed.take(async_output_id)
        super().drop_output(async_output_id)

    def _finish_output(self, async_output_id: str, result: Any, exc: BaseException | None) -> None:
        """vllm-omni's own, under its lock, plus a batch whose split map came while the pump unpacked its output.

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
        if not exported or not self._keepers:
            return own
        if exported in self._delivered:
            return f"{own} packer=['delivered to the engine']"
        answers = [keeper.queue.ask(exported) for keeper in self._keepers]
        deadline = time.monotonic() + _ANSWERS_S
        return f"{own} packer={[answer(deadline) for answer in answers]}"

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
        # Each end comes whatever became of the one before, the last first.
        with self._shutdown_lock, contextlib.ExitStack() as ends:
            ends.callback(self._close_all)
            ends.callback(super().shutdown)
            for keeper in self._keepers:
                keeper.stop()
            if not self._closed:
                self._await_dead_workers()

    def _close_all(self) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self._unclaimed.close)
            if self._late is not None:
                ends.callback(self._late.close)
                self._late = None
            self._close_packers()

    def _await_dead_workers(self) -> None:
        """What a worker had finished before it died is delivered before anybody is told that it died."""
        if any(
            rank in self._worker_config.ranks and not process.is_alive() for rank, process in enumerate(self._processes)
        ):
            for keeper in self._keepers:
                keeper.queue.await_last_outputs(_LAST_OUTPUTS_S)

    def _close_packers(self) -> None:
        keepers, self._keepers = self._keepers, []
        with contextlib.ExitStack() as ends:
            for keeper in keepers:
                keeper.stop()
                ends.callback(keeper.close)
            if self._supervisor is not None:
                ends.callback(self._supervisor.stop)
                self._supervisor = None
