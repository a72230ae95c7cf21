"""PackerWorkerProc: vllm-omni's worker process, with its outputs leaving through the exporter.

Note [Nothing may raise after COMPUTE_DONE]
The busy loop would answer an rpc_id that is gone, and the request would wait for its timeout. So what can fail early is
done before, and what fails later is caught, sent as OUTPUT_READY with an error, and counted as done.
"""

from __future__ import annotations

import functools
import gc
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind, DiffusionOutput
from vllm_omni.diffusion.ipc import pack_diffusion_output_shm, unpack_diffusion_output_shm
from vllm_omni.diffusion.worker import diffusion_worker
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput
from vllm_omni.platforms import current_omni_platform

from packer_service.descriptors import open_standard_descriptors
from packer_service.errors import DeviceError, PackerError, PackerUnavailable
from packer_service.wire.protocol import Withdraw
from worker_shim.log import get_logger
from worker_shim.outputs.replies import replace_in_reply
from worker_shim.outputs.survey import tensors_nbytes
from worker_shim.worker.exporter import Exporter, Staged
from worker_shim.worker.open_device import open_export_device
from worker_shim.worker.shm_room import NoRoom, Rings, pack_into_what_is_free, reserve_message
from worker_shim.worker_config import Exports, Refuses, WorkerConfig

logger = get_logger(__name__)

_ACK_POLL_S = 0.005


class _OwnPath(NamedTuple):
    """An output that goes vllm-omni's own way: packed into named SHM here, sent through the worker's own result queue."""

    output_id: str
    output: object
    event: Any = None  # after which it is complete on the device


class _Fallback(NamedTuple):
    staged: Staged
    reason: str

    @property
    def output_id(self) -> str:
        return self.staged.output_id


class _Unsent(NamedTuple):
    """An output that the engine was not promised: the message that names it could not be sent."""

    job: Staged | _OwnPath

    @property
    def output_id(self) -> str:
        return self.job.output_id


class _Foreign:
    """A job that vllm-omni itself queued, as other versions do: a tuple, of which only their own loop knows what it is."""

    def __init__(self, job: Any) -> None:
        self.jobs: queue.Queue[Any] = queue.Queue()  # for that loop, which ends at None
        self.jobs.put(job)
        self.jobs.put(None)
        parts = job if isinstance(job, tuple) else ()
        self.output_id = next((part for part in parts if isinstance(part, str)), f"of an unknown {type(job).__name__}")

    @property
    def taken(self) -> bool:
        return self.jobs.qsize() < 2


_Job = Staged | _OwnPath | _Fallback | _Unsent | _Foreign


class PackerWorkerProc(diffusion_worker.WorkerProc):
    """Overrides what happens to an output after the forward, and nothing else.

    ``worker_main`` sets ``worker_config``, ``late`` and ``reports``. ``late`` is the way of what comes after its reply in step
    mode, where the engine reads the worker's own queue for replies only; the export thread alone writes to it.
    """

    worker_config: WorkerConfig
    late: Connection
    reports: Connection
    exporter: Exporter | None = None
    _async_output_queue: Any
    _async_output_pending: int
    _async_output_thread: threading.Thread | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exporter is not None and self._async_output_thread is None:  # in step mode vllm-omni starts none
            self._async_output_queue = queue.Queue()
            self._async_output_thread = threading.Thread(
                target=self._async_output_loop, daemon=True, name="DiffusionAsyncOutput"
            )
            self._async_output_thread.start()

    def _create_worker(self, gpu_id: int, *args: Any, **kwargs: Any) -> Any:
        """The worker as vllm-omni makes it, then the connection: the device exists now, and the export thread not yet."""
        rings = Rings([self.mq, self.result_mq])
        rings.reserve_small()
        pack_into_what_is_free(rings)
        worker = super()._create_worker(gpu_id, *args, **kwargs)
        if gpu_id in self.worker_config.ranks:
            try:
                self.exporter = self._open_exporter(gpu_id)
            except (PackerError, OSError) as error:
                if self.worker_config.settings.fallback == "fail":
                    worker.shutdown()
                    raise PackerUnavailable(f"worker {gpu_id}: {error}") from error
                logger.warning(
                    "packer: worker %d serves through vllm-omni's own output path: %s."
                    " The setting fallback='fail' refuses instead",
                    gpu_id,
                    error,
                )
        if self.exporter is not None:
            self.reports.send(Exports(self.exporter.device.uuid))
        if self.exporter is not None and worker.worker.init_snapshot is not None:
            # vllm-omni gives its KV cache whatever it does not find taken since that snapshot.
            self.exporter.reserve_arena()
        return worker

    def _open_exporter(self, gpu_id: int) -> Exporter:
        worker_config = self.worker_config
        device = open_export_device(self._torch_device, events=worker_config.settings.event == "ipc")
        try:
            socket = worker_config.sockets.get(device.uuid)
            if socket is None:
                raise PackerUnavailable(
                    f"no packer serves {device.uuid}, where worker {gpu_id} runs; there are packers for"
                    f" {', '.join(worker_config.sockets)}: see the setting socket"
                )
            exporter = Exporter(
                worker_config.settings,
                device,
                socket=socket,
                key=worker_config.key,
                session=worker_config.session,
                mac_key=worker_config.mac_key,
                on_settled=self._settled,
                on_fallback=lambda staged, reason: self._async_output_queue.put(_Fallback(staged, reason)),
            )
        except BaseException:
            device.close()
            raise
        logger.info("worker %d exports its outputs to the packer at %s", gpu_id, socket)
        return exporter

    # -- main thread ---------------------------------------------------------------------------------------------------

    def _return_result(self, output: Any, rpc_id: str | None = None) -> None:
        if self.result_mq is None:
            return
        if self.od_config.step_execution or not isinstance(output, (DiffusionOutput, BatchRunnerOutput)):
            self._reply(output, rpc_id)
            return
        output_id = self._generate_async_output_id()
        job: Staged | _OwnPath | None = self._stage(output, output_id)
        if job is None:
            job = _OwnPath(output_id, output, current_omni_platform.record_device_event())
        with self._async_output_done:
            self._async_output_pending += 1
        # Note [Nothing may raise after COMPUTE_DONE]. The rest of the output comes second: it takes time.
        sent = False
        try:
            self._enqueue_result(
                AsyncDiffusionOutput(kind=AsyncOutputKind.COMPUTE_DONE, rpc_id=rpc_id, async_output_id=output_id)
            )
            sent = True
        finally:
            self._pass_on(job, sent)

    def _pass_on(self, job: Staged | _OwnPath, sent: bool) -> None:
        """Send what is left of an output, or have the export thread do it. ``sent``: the engine was promised it."""
        if sent and isinstance(job, Staged):
            assert self.exporter is not None
            if self.exporter.submit_now(job):
                return
        self._async_output_queue.put(job if sent else _Unsent(job))

    def _reply(self, reply: Any, rpc_id: str | None) -> None:
        """A reply that vllm-omni packs right here, on this thread: a step's, or a DP wave's.

        Its outputs leave through the exporter, and placeholders in the reply stand for them. One that cannot leave that way
        now stays in the reply. Nothing more is sent of them before the reply is out: with no placeholder at the engine nobody
        would ask for them.
        """
        staged: list[Staged] = []
        sent = False
        try:
            if self.exporter is not None:
                replace_in_reply(reply, functools.partial(self._replace, staged))
            super()._return_result(reply, rpc_id)
            sent = True
        except NoRoom:
            unpack_diffusion_output_shm(reply)  # nobody else removes its named SHM
            raise
        finally:
            for one in staged:
                self._pass_on(one, sent)

    def _replace(self, staged: list[Staged], output: DiffusionOutput) -> DiffusionOutput:
        """The placeholder of ``output``, which is staged; or itself, where it stays as it is; or its error."""
        if output.error is not None or output.aborted or output.request_started:
            return output
        output_id = self._generate_async_output_id()
        try:
            one = self._stage(output, output_id)
        except Exception as error:
            logger.exception("output %s cannot be staged", output_id)
            return DiffusionOutput(error=_not_handed_over(error), finished=output.finished)
        if one is None:
            return output
        with self._async_output_done:
            self._async_output_pending += 1
        staged.append(one)
        return DiffusionOutput(async_output_id=output_id, finished=output.finished)

    def _enqueue_result(self, msg: Any) -> None:
        """vllm-omni's own, with pages for the message: see Note [A full /dev/shm]."""
        promise = isinstance(msg, AsyncDiffusionOutput) and msg.kind is AsyncOutputKind.COMPUTE_DONE
        with self._result_mq_lock:
            if not promise:  # that fits the pages that every part of the ring has from the start
                reserve_message(self.result_mq, msg)
            self.result_mq.enqueue(msg)

    def _stage(self, output: DiffusionOutput | BatchRunnerOutput, output_id: str) -> Staged | None:
        if self.exporter is None:
            return None
        min_bytes = self.worker_config.settings.min_bytes
        if min_bytes and tensors_nbytes(output) < min_bytes:
            return None
        return self.exporter.stage(output, output_id)

    # -- export thread -------------------------------------------------------------------------------------------------

    def _async_output_loop(self) -> None:
        """Started by vllm-omni as its packing thread; ends at the None its shutdown sends, and at nothing else."""
        try:
            if self.exporter is not None:
                self.exporter.device.bind_thread()
        except Exception:
            logger.exception("the device of worker %d does not work: its outputs will fail one by one", self.gpu_id)
        while (job := self._async_output_queue.get()) is not None:
            if not isinstance(job, (Staged, _OwnPath, _Fallback, _Unsent)):
                job = _Foreign(job)
            try:
                self._hand_over(job)
            except BaseException as error:  # SystemExit, too: somebody's pickling may raise it
                logger.exception("output %s failed after its forward", job.output_id)
                if not isinstance(job, _Unsent):
                    self._report(job.output_id, error)
                # The first is settled by the packer's ack of its withdrawal, the second by the loop that took it.
                if not (isinstance(job, Staged) or (isinstance(job, _Foreign) and job.taken)):
                    self._settled(job.output_id)
            del job  # else its output would stay until the next one comes

    def _hand_over(self, job: _Job) -> None:
        match job:
            case _Foreign():
                self._leave_to_vllm_omni(job)
            case Staged():
                assert self.exporter is not None
                self.exporter.submit(job, fail_unpicklable)
            case _Fallback():
                self._send_fallback(job)
            case _OwnPath():
                self._send_own_path(job)
                self._settled(job.output_id)
            case _Unsent(Staged() as staged):
                assert self.exporter is not None
                self.exporter.withdraw(staged)
            case _Unsent():
                self._settled(job.output_id)

    def _leave_to_vllm_omni(self, job: _Foreign) -> None:
        """Run vllm-omni's own loop over this one job; it sends the message and settles it."""
        # This worker in all but its queue: it shares whatever else the loop reads and writes.
        kind = type(type(self).__name__, (type(self),), {"_async_output_queue": property(lambda _: job.jobs)})
        alone: PackerWorkerProc = object.__new__(kind)
        alone.__dict__ = self.__dict__
        super(PackerWorkerProc, alone)._async_output_loop()

    def _report(self, output_id: str, error: BaseException) -> None:
        """Tell the engine that an output failed; where even that fails, this thread goes on for the other outputs' sake."""
        try:
            self._send_error(output_id, _not_handed_over(error))
        except Exception:
            logger.exception("the engine cannot be told that output %s failed", output_id)

    def _send_fallback(self, job: _Fallback) -> None:
        """The packer could not: rebuild the output from where it was staged, and pack it here."""
        assert self.exporter is not None
        staged = job.staged
        # Of a packer that is gone for a while was said that outputs go this way.
        level = logging.DEBUG if self.exporter.broken else logging.WARNING
        logger.log(level, "output %s takes vllm-omni's own path: %s", staged.output_id, job.reason)
        try:
            if isinstance(staged.second, Withdraw) and staged.second.incomplete:  # and the packer never told the engine
                raise DeviceError(staged.second.error)
            with self.exporter.device.after(staged.signal.ready):
                output = self.exporter.rebuild(staged)
            self._send_own_path(_OwnPath(staged.output_id, output))
        finally:
            self.exporter.release(staged)
        self._settled(staged.output_id)

    def _send_own_path(self, job: _OwnPath) -> None:
        stream = self._side_stream
        if stream is not None and job.event is not None:
            stream.wait_event(job.event)
        try:
            output = pack_diffusion_output_shm(job.output, d2h_stream=stream)
        except RecursionError:
            output = job.output  # it contains itself, and vllm-omni's own step mode sends such an output as it is
        if stream is not None:
            stream.synchronize()
        message = AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=job.output_id, output=output)
        try:
            self._send_ready(message)
        except Exception as error:
            if isinstance(error, NoRoom) or not fail_unpicklable(output, pickle.dumps):
                unpack_diffusion_output_shm(output)  # nobody else removes its named SHM
                raise
            self._send_ready(message)

    def _send_ready(self, message: AsyncDiffusionOutput) -> None:
        if self.od_config.step_execution:
            self.late.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        else:
            self._enqueue_result(message)

    @functools.cached_property
    def _torch_device(self) -> torch.device:
        return current_omni_platform.get_torch_device(self.gpu_id)

    @functools.cached_property
    def _side_stream(self) -> Any:
        return None if self._torch_device.type == "cpu" else torch.Stream(self._torch_device)

    def _send_error(self, output_id: str, error: str) -> None:
        self._send_ready(
            AsyncDiffusionOutput(kind=AsyncOutputKind.OUTPUT_READY, async_output_id=output_id, error=error)
        )

    def _settled(self, output_id: str) -> None:
        """Nothing of this output is in flight any more: ``drain_async_outputs`` waits for this."""
        with self._async_output_done:
            self._async_output_pending = max(self._async_output_pending - 1, 0)  # a foreign job may not be counted
            self._async_output_done.notify_all()

    def drain_async_outputs(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None: vllm-omni's own limit) until no output is in flight; then give the arena back,
        imports and all. False, and a warning, where some are in flight still.
        """
        exporter = self.exporter
        if exporter is None:
            return super().drain_async_outputs(timeout)
        limit_s = diffusion_worker._ASYNC_OUTPUT_DRAIN_TIMEOUT_S if timeout is None else timeout
        deadline = time.monotonic() + limit_s
        while True:
            exporter.take_acks()  # nobody is woken for them
            left_s = deadline - time.monotonic()
            with self._async_output_done:
                pending = self._async_output_pending
                if not pending or left_s <= 0:
                    break
                self._async_output_done.wait_for(lambda: self._async_output_pending == 0, min(left_s, _ACK_POLL_S))
        if pending:
            logger.warning("worker %d: %d outputs are still in flight after %.1f s", self.gpu_id, pending, limit_s)
            return False
        exporter.give_back_arena(max(deadline - time.monotonic(), 0.0))
        return True

    def shutdown(self) -> None:
        try:
            self.drain_async_outputs()
        finally:
            try:
                super().shutdown()
            finally:
                if self.exporter is not None:
                    self.exporter.close()
                    self.exporter = None


def fail_unpicklable(output: object, dump: Callable[[object], object]) -> bool:
    """Of a batch that does not pickle, make those results errors that do not. False where ``output`` is no batch."""
    if not isinstance(output, BatchRunnerOutput):
        return False
    for part in output.runner_outputs:
        try:
            dump(part)
        except Exception as error:
            logger.exception("the output of request %s cannot be pickled", part.request_id)
            unpack_diffusion_output_shm(part)  # nobody else removes its named SHM, where it has some
            part.result = DiffusionOutput(error=_not_handed_over(error))
    return True


def _not_handed_over(error: BaseException) -> str:
    return f"the output could not be handed over: {type(error).__name__}: {error}"


def worker_main(*args: Any, worker_config: WorkerConfig, reports: Connection, late: Connection, **kwargs: Any) -> None:
    """The worker process's entry point: vllm-omni's own, with its WorkerProc replaced by ours in this process only.

    vllm-omni's executor only learns that a worker is ready or ended; what ours should know goes through ``reports``.
    """
    open_standard_descriptors()
    # Only modules are there yet. vllm-omni's shutdown collects garbage five times, and each would walk all of them.
    gc.freeze()
    main = diffusion_worker.WorkerProc.worker_main
    ours = {"worker_config": worker_config, "late": late, "reports": reports}
    diffusion_worker.WorkerProc = type("PackerWorkerProc", (PackerWorkerProc,), ours)
    try:
        main(*args, **kwargs)
    except PackerUnavailable as error:
        reports.send(Refuses(str(error)))
        raise
