"""PackerWorkerProc: vllm-omni's worker process, with its outputs leaving through the exporter.

Note [Nothing may raise after COMPUTE_DONE]
The busy loop would answer an rpc_id that is gone, and the request would wait for its timeout. So what can fail early is
done before, and what fails later is caught, sent as OUTPUT_READY with an error, and counted as done.
"""

from __future__ import annotations

import functools
import pickle
import queue
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind, DiffusionOutput
from vllm_omni.diffusion.ipc import unpack_diffusion_output_shm
from vllm_omni.diffusion.worker import diffusion_worker
from vllm_omni.diffusion.worker.utils import BatchRunnerOutput
from vllm_omni.platforms import current_omni_platform

from packer_service.errors import PackerError, PackerUnavailable
from worker_shim.log import get_logger
from worker_shim.outputs.own_path import OwnPathReason
from worker_shim.outputs.replies import replace_in_reply
from worker_shim.outputs.survey import tensors_nbytes
from worker_shim.worker.export_thread import ExportThread
from worker_shim.worker.exporter import Exporter
from worker_shim.worker.in_flight import InFlight
from worker_shim.worker.jobs import Fallback, Foreign, OwnPath, Unsent
from worker_shim.worker.open_device import open_export_device
from worker_shim.worker.own_path import OwnPathSender, not_handed_over
from worker_shim.worker.shm_room import NoRoom, Rings, pack_into_what_is_free, reserve_message
from worker_shim.worker_config import Exports, WorkerConfig

logger = get_logger(__name__)

_ACK_POLL_S = 0.005


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
                on_fallback=lambda output, reason: self._async_output_queue.put(Fallback(output, reason)),
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
        job: InFlight | OwnPath | OwnPathReason = self._stage(output, output_id)
        if isinstance(job, OwnPathReason):
            job = OwnPath(output_id, output, current_omni_platform.record_device_event(), job)
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

    def _pass_on(self, job: InFlight | OwnPath, sent: bool) -> None:
        """Send what is left of an output, or have the export thread do it. ``sent``: the engine was promised it."""
        if sent and isinstance(job, InFlight):
            assert self.exporter is not None
            if self.exporter.submit_now(job):
                return
        self._async_output_queue.put(job if sent else Unsent(job))

    def _reply(self, reply: Any, rpc_id: str | None) -> None:
        """A reply that vllm-omni packs right here, on this thread: a step's, or a DP wave's.

        Its outputs leave through the exporter, and placeholders in the reply stand for them. One that cannot leave that way
        now stays in the reply. Nothing more is sent of them before the reply is out: with no placeholder at the engine nobody
        would ask for them.
        """
        staged: list[InFlight] = []
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

    def _replace(self, staged: list[InFlight], output: DiffusionOutput) -> DiffusionOutput:
        """The placeholder of ``output``, which is staged; or itself, where it stays as it is; or its error."""
        if output.error is not None or output.aborted or output.request_started:
            return output
        output_id = self._generate_async_output_id()
        try:
            one = self._stage(output, output_id)
        except Exception as error:
            logger.exception("output %s cannot be staged", output_id)
            return DiffusionOutput(error=not_handed_over(error), finished=output.finished)
        if isinstance(one, OwnPathReason):
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

    def _stage(self, output: DiffusionOutput | BatchRunnerOutput, output_id: str) -> InFlight | OwnPathReason:
        """The output on its way to the packer, or why it is not."""
        if self.exporter is None:
            return OwnPathReason.NO_PACKER
        min_bytes = self.worker_config.settings.min_bytes
        if min_bytes and tensors_nbytes(output) < min_bytes:
            return OwnPathReason.SMALL
        staged = self.exporter.stage(output, output_id)
        return staged or self.exporter.exchange.own_path or OwnPathReason.NO_DEVICE_ROOM

    # -- export thread -------------------------------------------------------------------------------------------------

    def _async_output_loop(self) -> None:
        """Started by vllm-omni as its packing thread; ends at the None its shutdown sends, and at nothing else."""
        own_path = OwnPathSender(self._torch_device, self._send_ready)
        thread = ExportThread(self.exporter, own_path, self._settled, self._leave_to_vllm_omni)
        thread.run(self._async_output_queue, f"worker {self.gpu_id}")

    def _leave_to_vllm_omni(self, job: Foreign) -> None:
        """Run vllm-omni's own loop over this one job; it sends the message and settles it."""

        def set_pending(_: object, pending: int) -> None:
            self._async_output_pending = pending
            job.settled = True

        # This worker in all but its queue, and in that it hears when the loop counts the job as done.
        own = {
            "_async_output_queue": property(lambda _: job.jobs),
            "_async_output_pending": property(lambda _: self._async_output_pending, set_pending),
        }
        kind = type(type(self).__name__, (type(self),), own)
        alone: PackerWorkerProc = object.__new__(kind)
        alone.__dict__ = self.__dict__
        super(PackerWorkerProc, alone)._async_output_loop()

    def _send_ready(self, message: AsyncDiffusionOutput) -> None:
        if self.od_config.step_execution:
            self.late.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        else:
            self._enqueue_result(message)

    @functools.cached_property
    def _torch_device(self) -> torch.device:
        return current_omni_platform.get_torch_device(self.gpu_id)

    # -- any thread ----------------------------------------------------------------------------------------------------

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
