"""PackerDiffusionExecutor: the drop-in. vllm-omni's multi-process executor, whose worker outputs come from packers.

Note [What starts when, and what ends it]
start   compatibility check -> packers (managed) or connections (sidecar) -> engine sessions -> workers, which join the
        session and probe -> pumps. Whatever fails before the workers means vllm-omni's own path, or a refusal.
end     vllm-omni's own shutdown (workers, then pumps) -> packers -> engine sessions. If the engine is killed instead, its
        workers get vllm-omni's death signal and a managed packer sees its session end.
between a packer that dies is brought back by its keeper; a worker that dies ends everything, as vllm-omni has it, but not
        before the packer has delivered what that worker had finished.
"""

from __future__ import annotations

import functools
import multiprocessing
import secrets
import threading
import types
from collections.abc import Callable
from typing import Any

from vllm_omni.diffusion.executor import multiproc_executor
from vllm_omni.platforms import current_omni_platform

from packer_service.config import Settings
from packer_service.errors import PackerError, PackerUnavailable
from worker_shim import compat
from worker_shim.handoff import Handoff
from worker_shim.keeper import PackerKeeper
from worker_shim.log import get_logger
from worker_shim.receiver import Delivered
from worker_shim.result_queue import OnceQueue
from worker_shim.supervisor import Supervisor
from worker_shim.worker import worker_main

logger = get_logger(__name__)

_LAST_OUTPUTS_S = 5.0
_REPLY_RANKS = frozenset({0})  # of request mode; the other ranks send no outputs


class PackerDiffusionExecutor(multiproc_executor.MultiprocDiffusionExecutor):
    """Select it with ``distributed_executor_backend="worker_shim.PackerDiffusionExecutor"``.

    Settings come from ``PACKER_*`` and ``additional_config={"packer": {...}}`` (see ``packer_service.config``); a bad one
    raises SettingError. With no packer to be had it serves through vllm-omni's own path after one warning, or raises
    PackerUnavailable where ``fallback="fail"``.
    """

    def _init_executor(self) -> None:
        self._shutdown_lock = threading.RLock()
        self._supervisor: Supervisor | None = None
        self._keepers: list[PackerKeeper] = []
        self._handoff: Handoff | None = None
        self._delivered = Delivered()
        settings = Settings.load((self.od_config.additional_config or {}).get("packer"))
        if self.od_config.step_execution:
            logger.info("step mode: outputs take vllm-omni's own path")
        else:
            self._handoff = self._open_packers(settings)
        try:
            super()._init_executor()
        except BaseException:
            self._close_packers()
            raise

    def _open_packers(self, settings: Settings) -> Handoff | None:
        """Have a packer for every GPU whose worker replies, and a session with each.

        With none to be had, a Handoff in which no rank exports: our worker packs outputs vllm-omni's own way, on any device.
        None where vllm-omni is not one we know: it is left wholly alone.
        """
        known = False
        try:
            found = compat.problems()
            if found:
                raise PackerUnavailable("; ".join(found))
            known = True
            packers, key = self._start_or_find(settings)
            session, mac_key = secrets.token_hex(16), secrets.token_bytes(32)
            for socket, restart in packers.items():
                keeper = PackerKeeper(socket, key, session, mac_key, self._delivered, settings, restart)
                self._keepers.append(keeper)
                device = keeper.welcome
                logger.info(
                    "outputs of %s (%s) go through packer %d", device.device_name, device.device_uuid, device.pid
                )
        except (PackerError, OSError) as error:
            self._close_packers()
            if settings.fallback == "fail":
                raise
            logger.warning(
                "packer: serving through vllm-omni's own output path: %s. The setting fallback='fail' refuses instead",
                error,
            )
            return Handoff(settings, "", {}, frozenset(), b"", b"") if known else None
        by_device = {keeper.welcome.device_uuid: keeper.socket for keeper in self._keepers}
        return Handoff(settings, session, by_device, _REPLY_RANKS, key, mac_key)

    def _start_or_find(self, settings: Settings) -> tuple[dict[str, Callable[[], None] | None], bytes]:
        """The sockets of the packers, one a GPU, with what starts each again where that is ours to do, and their key."""
        if settings.mode == "sidecar":
            if not settings.sockets():
                raise PackerUnavailable("mode is 'sidecar' and the setting socket names no packer's socket")
            return dict.fromkeys(settings.sockets()), settings.read_key()
        kind = current_omni_platform.device_type
        if kind not in ("cuda", "cpu") or (kind == "cuda" and not current_omni_platform.is_cuda()):
            raise PackerUnavailable(f"the packer copies from NVIDIA GPUs, and this platform is {kind!r}")
        self._supervisor = supervisor = Supervisor(settings)
        for rank in sorted(_REPLY_RANKS):
            supervisor.start(f"cuda:{rank}" if kind == "cuda" else "host")
        restarts = {packer.socket: functools.partial(supervisor.restart, packer) for packer in supervisor.packers}
        return {**restarts}, supervisor.key

    @property
    def packer_pids(self) -> list[int]:
        """The packers that serve this executor; none where outputs take vllm-omni's own path."""
        return [pid for keeper in self._keepers if (pid := keeper.queue.packer_pid) is not None]

    def _launch_workers(self, *args: Any, **kwargs: Any) -> Any:
        """vllm-omni's own, run with a WorkerProc whose entry point is ours. Its module stays as it is."""
        launch = multiproc_executor.MultiprocDiffusionExecutor._launch_workers
        if self._handoff is None:
            return launch(self, *args, **kwargs)
        reader, writer = multiprocessing.Pipe(duplex=False)
        entry = functools.partial(worker_main, handoff=self._handoff, refusals=writer)
        ours = types.SimpleNamespace(worker_main=entry)
        namespace = {**launch.__globals__, "WorkerProc": ours}
        rebound = types.FunctionType(
            launch.__code__, namespace, launch.__name__, launch.__defaults__, launch.__closure__
        )
        with reader, writer:
            try:
                return rebound(self, *args, **kwargs)
            except Exception as error:
                if reader.poll():
                    raise PackerUnavailable(reader.recv()) from error
                raise

    def _init_result_queue(self, result_handle: Any) -> Any:
        own = super()._init_result_queue(result_handle)
        return own if self._handoff is None else OnceQueue(own, self._delivered)

    def _start_result_pump(self) -> None:
        super()._start_result_pump()
        for number, keeper in enumerate(self._keepers):
            thread = threading.Thread(
                target=self._result_pump, args=(keeper.queue,), daemon=True, name=f"PackerResultPump-{number}"
            )
            self._result_pump_threads.append(thread)
            thread.start()

    def _finish_output(self, async_output_id: str, result: Any, exc: BaseException | None) -> None:
        """vllm-omni's own, under its lock, plus a batch whose split map came while the pump unpacked its output.

        The pump looks for the map before it unpacks and ``execute_batch`` for the output before it registers the map: each
        can miss the other, and vllm-omni would then keep the whole batch for ever, with its requests waiting.
        """
        per_request = self._batch_split_map.pop(async_output_id, None)
        if per_request is None:
            super()._finish_output(async_output_id, result, exc)
        else:
            self._deliver_batch_split(per_request, result, None if exc is None else str(exc))

    def describe_pending_state(self, async_output_id: str | None = None) -> str:
        """vllm-omni's own, and how far the packer is with that output."""
        own = super().describe_pending_state(async_output_id)
        exported = (async_output_id or "").partition("/")[0]  # a member of a batch is named batch/member
        if not exported or not self._keepers:
            return own
        if exported in self._delivered:
            return f"{own} packer=[delivered to the engine]"
        return f"{own} packer={[keeper.queue.describe(exported) for keeper in self._keepers]}"

    def shutdown(self) -> None:
        """End workers, pumps, packers and sessions, in that order. Idempotent; concurrent callers wait for the first."""
        with self._shutdown_lock:
            for keeper in self._keepers:
                keeper.stop()
            if not self._closed:
                self._await_dead_workers()
            try:
                super().shutdown()
            finally:
                self._close_packers()

    def _await_dead_workers(self) -> None:
        """What a worker had finished before it died is delivered before anybody is told that it died."""
        exporting = self._handoff.ranks if self._handoff is not None else frozenset()
        if any(rank in exporting and not process.is_alive() for rank, process in enumerate(self._processes)):
            for keeper in self._keepers:
                keeper.queue.await_last_outputs(_LAST_OUTPUTS_S)

    def _close_packers(self) -> None:
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.stop()
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None
        for keeper in keepers:
            keeper.close()
