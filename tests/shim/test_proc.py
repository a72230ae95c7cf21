"""The worker's own bookkeeping when a message cannot be sent, which cannot be had at will: its queues are broken by hand."""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from typing import Any

import pytest
from packer_process import DEADLINE_S, wait_until

pytest.importorskip("vllm_omni")
import torch
from engine_checks import warnings_logged
from vllm_omni.diffusion import ipc
from vllm_omni.diffusion.data import AsyncDiffusionOutput, AsyncOutputKind, DiffusionOutput
from vllm_omni.diffusion.worker import diffusion_worker

from packer_service.errors import DeviceError
from worker_shim.engine import executor
from worker_shim.outputs.own_path import OwnPathReason
from worker_shim.worker import own_path, proc
from worker_shim.worker.worker_main import worker_main

pytestmark = pytest.mark.engine


class Config:
    step_execution = False


class Worker(proc.PackerWorkerProc):
    """A worker without a process, an exporter or a device: outputs take vllm-omni's own path."""

    od_config = Config()
    result_mq = object()
    gpu_id = 0
    _torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._async_output_done = threading.Condition()
        self._async_output_pending = 0
        self._async_output_queue = queue.SimpleQueue()
        self.broken: tuple[AsyncOutputKind, ...] = ()
        self.sent: list[Any] = []

    def _stage(self, output: Any, output_id: str) -> OwnPathReason:
        return OwnPathReason.NO_PACKER

    def _enqueue_result(self, msg: Any) -> None:
        if msg.kind in self.broken:
            raise BrokenPipeError(f"no {msg.kind} can be sent")
        self.sent.append(msg)

    def run_export_thread(self) -> None:
        """On this thread, until its queue is empty."""
        self._async_output_queue.put(None)
        self._async_output_loop()


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(proc, "current_omni_platform", type("Platform", (), {"record_device_event": lambda: None}))
    monkeypatch.setattr(own_path, "pack_diffusion_output_shm", lambda output, d2h_stream: output)
    return Worker()


def test_an_output_whose_compute_done_cannot_be_sent_is_not_handed_over(running):
    running.broken = (AsyncOutputKind.COMPUTE_DONE,)
    with pytest.raises(BrokenPipeError):
        running._return_result(DiffusionOutput(output=1), "rpc-1")
    running.run_export_thread()
    assert (running.sent, running._async_output_pending) == ([], 0)


def test_the_export_thread_survives_an_error_it_cannot_report(running):
    running.broken = (AsyncOutputKind.OUTPUT_READY,)
    for number in range(2):
        running._return_result(DiffusionOutput(output=number), f"rpc-{number}")
    running.run_export_thread()
    assert running._async_output_pending == 0
    assert [message.kind for message in running.sent] == [AsyncOutputKind.COMPUTE_DONE] * 2


def loop_of_another_version(self: Any) -> None:
    """vllm-omni's own loop as it may become: jobs of four, each with the kind of its message."""
    while (job := self._async_output_queue.get()) is not None:
        output, output_id, _, kind = job
        try:
            self._enqueue_result(AsyncDiffusionOutput(kind=kind, async_output_id=output_id, output=output))
        finally:
            with self._async_output_done:
                self._async_output_pending = max(0, self._async_output_pending - 1)
                self._async_output_done.notify_all()


def loop_that_does_not_begin(self: Any) -> None:
    raise RuntimeError("no accelerator")


def queue_foreign(running: Worker, output_id: str, kind: AsyncOutputKind = AsyncOutputKind.RPC_RESULT) -> None:
    running._async_output_pending += 1
    running._async_output_queue.put((DiffusionOutput(output=1), output_id, None, kind))


@pytest.mark.parametrize("broken", [False, True], ids=["sent", "cannot be sent"])
def test_a_job_of_another_version_of_vllm_omni_takes_that_versions_own_way(running, monkeypatch, broken):
    monkeypatch.setattr(diffusion_worker.WorkerProc, "_async_output_loop", loop_of_another_version)
    running.broken = (AsyncOutputKind.RPC_RESULT,) if broken else ()
    queue_foreign(running, "foreign")
    running._return_result(DiffusionOutput(output=2), "rpc")
    running.run_export_thread()
    assert running._async_output_pending == 0
    kind = AsyncOutputKind.OUTPUT_READY if broken else AsyncOutputKind.RPC_RESULT
    foreign = next(message for message in running.sent if message.async_output_id == "foreign")
    assert (foreign.kind, bool(foreign.error)) == (kind, broken)
    assert running.sent[-1].output.output == 2


@pytest.mark.parametrize("begins", [False, True])
def test_a_job_that_vllm_omni_cannot_take_either_fails_its_request_and_holds_up_no_drain(running, monkeypatch, begins):
    """Its loop does not begin, as where there is no accelerator, or it takes the job and fails before it counts it as done."""
    loop = loop_of_another_version if begins else loop_that_does_not_begin
    monkeypatch.setattr(diffusion_worker.WorkerProc, "_async_output_loop", loop)
    running._async_output_pending += 1
    running._async_output_queue.put((DiffusionOutput(output=1), "foreign", None, AsyncOutputKind.OUTPUT_READY, "more"))
    running._async_output_queue.put(object())
    running._return_result(DiffusionOutput(output=2), "rpc")
    running.run_export_thread()
    assert running._async_output_pending == 0
    (failed,) = [message for message in running.sent if message.async_output_id == "foreign"]
    assert "could not be handed over" in failed.error
    assert running.sent[-1].output.output == 2


def test_an_output_that_contains_itself_takes_the_own_path_as_it_is(running, monkeypatch):
    parts: list[Any] = [1]
    parts.append(parts)
    monkeypatch.setattr(own_path, "pack_diffusion_output_shm", ipc.pack_diffusion_output_shm)
    running._return_result(DiffusionOutput(output=parts), "rpc")
    running.run_export_thread()
    assert running.sent[-1].output.output is parts


class BreakingExporter:
    """Of a device that does not work."""

    @property
    def device(self) -> Any:
        raise DeviceError("no context")


def test_nothing_ends_the_export_thread_but_its_shutdown(running, monkeypatch):
    running.exporter = BreakingExporter()
    pack = own_path.pack_diffusion_output_shm

    def exit_at_first(output: Any, d2h_stream: Any) -> Any:
        monkeypatch.setattr(own_path, "pack_diffusion_output_shm", pack)
        raise SystemExit("no licence")

    monkeypatch.setattr(own_path, "pack_diffusion_output_shm", exit_at_first)
    for number in range(2):
        running._return_result(DiffusionOutput(output=number), f"rpc-{number}")
    running.run_export_thread()
    assert running._async_output_pending == 0
    first, second = [message for message in running.sent if message.kind is AsyncOutputKind.OUTPUT_READY]
    assert "SystemExit: no licence" in first.error
    assert second.output.output == 1


class LazyExporter:
    """An exporter with acks that nobody has taken."""

    def __init__(self, running: Worker, delivered: int) -> None:
        self.given_back = 0
        self._running = running
        self._delivered = delivered

    def take_acks(self) -> None:
        for _ in range(self._delivered):
            self._running._settled("output")
        self._delivered = 0

    def give_back_arena(self, timeout_s: float) -> None:
        assert timeout_s >= 0
        self.given_back += 1


def test_a_drain_that_may_not_wait_takes_the_acks_that_are_there(running):
    running._async_output_pending = 2
    running.exporter = LazyExporter(running, 2)
    assert running.drain_async_outputs(0.0)
    assert running.exporter.given_back == 1


@pytest.mark.parametrize("limit_s", [0.0, 0.1])
def test_a_drain_in_vain_ends_in_time_and_says_how_long_it_took(running, limit_s):
    running._async_output_pending = 2
    running.exporter = LazyExporter(running, 1)
    begin = time.monotonic()
    with warnings_logged() as log:
        assert not running.drain_async_outputs(limit_s)
    assert limit_s <= time.monotonic() - begin < limit_s + 1.0
    assert log == [f"worker 0: 1 outputs are still in flight after {limit_s:.1f} s"]
    assert running.exporter.given_back == 0


def test_the_export_thread_does_not_keep_an_output_that_it_sent(running):
    output = DiffusionOutput(output=1)
    reference = weakref.ref(output)
    running._return_result(output, "rpc")
    thread = threading.Thread(target=running._async_output_loop)
    thread.start()
    try:
        with running._async_output_done:
            assert running._async_output_done.wait_for(lambda: not running._async_output_pending, DEADLINE_S)
        assert [message.kind.name for message in running.sent] == ["COMPUTE_DONE", "OUTPUT_READY"]
        running.sent.clear()
        del output
        wait_until(lambda: reference() is None, "nobody holds the output, though the thread waits for the next")
    finally:
        running._async_output_queue.put(None)
        thread.join(DEADLINE_S)


@pytest.mark.parametrize("process", ["engine", "worker"])
def test_what_our_processes_open_is_never_their_standard_error(process, monkeypatch):
    """A fork whose standard descriptors are closed stands for a process that was started so."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            for number in range(3):
                os.close(number)

            def open_something(*_: Any) -> None:
                os.write(writer, bytes([os.memfd_create("mine"), os.get_inheritable(2)]))

            if process == "worker":
                monkeypatch.setattr(diffusion_worker.WorkerProc, "worker_main", open_something)
                worker_main(worker_config=None, reports=None, late=None)
            else:
                made = object.__new__(executor.PackerDiffusionExecutor)
                made.od_config = type("Config", (), {"additional_config": property(open_something)})()
                made._init_executor()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        mine, inherited = pipe.read(2)
    os.waitpid(child, 0)
    assert mine > 2
    assert inherited


class BrokenExporter(LazyExporter):
    """An exporter whose device cannot give its memory back."""

    closed = False

    def give_back_arena(self, timeout_s: float) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def close(self) -> None:
        self.closed = True


def test_a_device_that_cannot_free_leaves_nothing_of_vllm_omnis_behind(running, monkeypatch):
    ended = []
    monkeypatch.setattr(diffusion_worker.WorkerProc, "shutdown", lambda self: ended.append(self))
    running.exporter = exporter = BrokenExporter(running, 0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        running.shutdown()
    assert ended == [running]
    assert exporter.closed
