"""What the engine tests share: engines on our executor, a bit-for-bit comparison, and what an engine may not leave behind."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zygote
from engine_harness import RunningEngine, engine
from packer_process import wait_until

from packer_service import run_directory
from worker_shim.synthetic.engine import nvidia_gpus

torch = pytest.importorskip("torch")

GPUS = nvidia_gpus()
DEVICE = "cuda:0" if GPUS else "host"
MIB = 1 << 20
DEADLINE_S = 60.0
POOL = {"pool_bytes": 256 * MIB}  # what no test fills; to touch the default's GiB takes a second


def packer_engine(
    pipeline: str = "RequestPipeline", packer: Any = None, **config: Any
) -> AbstractContextManager[RunningEngine]:
    """An engine on PackerDiffusionExecutor whose worker answers ``exporter_state``; ``packer`` are settings."""
    settings = {} if packer is None else packer
    if isinstance(settings, dict) and "PACKER_POOL_BYTES" not in os.environ:
        settings = {**POOL, **settings}
    return engine(
        "worker_shim.PackerDiffusionExecutor",
        pipeline,
        worker_extension_cls="worker_probe.WorkerProbe",
        additional_config={"packer": settings},
        **config,
    )


def run(running: RunningEngine, *requests: dict[str, Any]) -> list[Any]:
    """The results of requests with these keywords, sent at once, in their order."""
    made = [running.request(**request) for request in requests]
    results = running.run(made)
    return [results[request.request_id] for request in made]


def outputs(running: RunningEngine, *requests: dict[str, Any]) -> list[Any]:
    return [result.output for result in run(running, *requests)]


def in_one_wave(running: RunningEngine, *requests: dict[str, Any]) -> list[Any]:
    """The results of requests that the worker is given together: the engine's thread is held until all are there."""
    engine, gate = running.diffusion_engine, threading.Event()
    execute, inside = engine.execute_fn, threading.Event()

    def held(scheduled: Any) -> Any:
        inside.set()
        assert gate.wait(DEADLINE_S)
        return execute(scheduled)

    engine.execute_fn = held
    try:
        ahead = running.submit(running.request(seed=0, height=16, width=16))
        assert inside.wait(DEADLINE_S)
        futures = [running.submit(running.request(**request)) for request in requests]
        states = engine.scheduler._request_states
        wait_until(lambda: len(states) == 1 + len(requests), "all requests are scheduled")
    finally:
        engine.execute_fn = execute
        gate.set()
    ahead.result(DEADLINE_S)
    return [future.result(DEADLINE_S) for future in futures]


class References:
    """What `uni` gives for a request, on the host: computed when asked for, in one engine, once a request."""

    def __init__(self, running: RunningEngine) -> None:
        self._running = running
        self._known: dict[str, Any] = {}

    def __call__(self, *requests: dict[str, Any]) -> list[Any]:
        for request in requests:
            if repr(request) not in self._known:
                # `uni` hands out a static buffer that the next request overwrites
                plain = {**request, "behaviour": "image"} if request.get("behaviour") == "static" else request
                (result,) = run(self._running, plain)
                self._known[repr(request)] = [result.output, *trajectory(result)]
        return [self._known[repr(request)][0] for request in requests]

    def with_trajectory(self, request: dict[str, Any]) -> list[Any]:
        self(request)
        return self._known[repr(request)]


def trajectory(result: Any) -> list[Any]:
    (yielded,) = result.yielded
    return [getattr(yielded, f"trajectory_{name}") for name in ("latents", "timesteps", "log_probs")]


def assert_same(one: Any, other: Any, where: str = "output") -> None:
    """Equal bit for bit: types, containers, dtypes, shapes, bytes. Only the device may differ."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        flat, reference = (t.detach().cpu().contiguous().reshape(-1) for t in (one, other))
        assert torch.equal(flat.view(torch.uint8), reference.view(torch.uint8)), where
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (item, reference) in enumerate(zip(one, other, strict=True)):
            assert_same(item, reference, f"{where}[{index}]")
    else:
        assert one == other, where


# -- where things are --------------------------------------------------------------------------------------------------


def worker_pid(running: RunningEngine) -> int:
    (process,) = running.executor._processes
    return process.pid


def packer_pid(running: RunningEngine) -> int:
    (pid,) = running.executor.packer_pids
    return pid


def lease_books(running: RunningEngine) -> list[Any]:
    """One a packer; None where that is away."""
    return [getattr(keeper.queue._receiver, "leases", None) for keeper in running.executor._packers.keepers]


def leases(running: RunningEngine) -> Any:
    (book,) = lease_books(running)
    return book


def exporter_state(running: RunningEngine) -> dict[str, Any]:
    state = running.diffusion_engine.collective_rpc("exporter_state", unique_reply_rank=0)
    state.pop("wave_id")  # vllm-omni's
    return state


def wait_settled(running: RunningEngine) -> dict[str, Any]:
    """Until every output was acknowledged or went another way. The exporter's state then."""

    def settled() -> dict[str, Any] | None:
        state = exporter_state(running)
        return state if state["pending"] == 0 and state["arena_idle"] else None

    return wait_until(settled, "the worker's outputs settle")


def nothing_kept(running: RunningEngine) -> None:
    """Until nothing of any output is left: in the worker, at the engine, in the pool. The caller holds none either."""
    executor = running.executor

    def kept() -> dict[str, int]:
        gc.collect()
        counts = {
            "waited for": len(executor._output_futures),
            "cached": len(executor._completed_outputs),
            "unsplit batches": len(executor._batch_split_map),
            "unclaimed": len(executor._unclaimed),
            "leases": sum(book.outstanding for book in lease_books(running)),
        }
        return {name: count for name, count in counts.items() if count}

    wait_settled(running)
    try:
        wait_until(lambda: not kept(), "nothing is kept")
    except AssertionError:
        raise AssertionError(f"kept: {kept()}") from None


def _mappings(pid: int | str) -> Iterator[list[str]]:
    """The fields of each line of a process's memory map that is memory of ours."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:packer-" in line:
            yield line.split()


def packer_memory(pid: int | str = "self") -> list[range]:
    """The address ranges of a process that are memory of ours."""
    bounds = [fields[0].split("-") for fields in _mappings(pid)]
    return [range(int(start, 16), int(end, 16)) for start, end in bounds]


def packer_memfds() -> set[str]:
    """The inodes of the memory of ours that this process maps. One may be mapped in several ranges."""
    return {fields[4] for fields in _mappings("self")}


def in_packer_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor came through a packer: it lies in a segment, not in memory of torch's."""
    return any(tensor.data_ptr() in memory for memory in packer_memory())


def packer_descriptors() -> list[str]:
    """This process's descriptors of memory of ours."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # listdir's own is gone
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith("/memfd:packer-"):
                found.append(target)
    return found


# -- what is left ------------------------------------------------------------------------------------------------------


def run_directories(engine_pid: int) -> list[str]:
    found = [Path(base).glob(f"packer-{engine_pid}-*") for base in dict.fromkeys(run_directory.bases().values())]
    return [str(path) for paths in found for path in paths]


def named_memory() -> set[str]:
    """Names in /dev/shm, less what is nobody's output: semaphores (multiprocessing's, loky's), which vllm-omni has for as
    long as it lives, and what the CUDA driver keeps there for itself."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "cuda."))}


def mapped_elsewhere(names: set[str]) -> set[str]:
    """Those of ``names`` in /dev/shm that a process maps which is not of this one's family."""
    family = {process.pid for process in psutil.Process().children(recursive=True)} | {os.getpid()}
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        if int(directory.name) not in family:
            with contextlib.suppress(OSError):  # gone, or not ours to read
                text = (directory / "maps").read_text()
                found.update(name for name in names if f"/dev/shm/{name}" in text)
    return found


def children() -> set[int]:
    """Every process below this one but multiprocessing's resource tracker and the zygote, which live as long as this one."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process.pid)
    return found - zygote.pids()


class Residue:
    """What is there now; ``assert_none`` is that nothing has been added since."""

    def __init__(self) -> None:
        gc.collect()
        self._children = children()
        self._directories = set(run_directories(os.getpid()))
        self._names = named_memory()
        self._memfds = packer_memfds()
        self._descriptors = len(packer_descriptors())

    def found(self) -> dict[str, Any]:
        gc.collect()
        names = named_memory() - self._names
        return {
            "processes": children() - self._children,
            "run directories": set(run_directories(os.getpid())) - self._directories,
            "named shared memory": names and names - mapped_elsewhere(names),
            "memfds": len(packer_memfds() - self._memfds),
            "descriptors": max(len(packer_descriptors()) - self._descriptors, 0),
        }

    def assert_none(self, timeout_s: float = DEADLINE_S) -> None:
        left: dict[str, Any] = {}

        def gone() -> bool:
            left.update(self.found())
            return not any(left.values())

        try:
            wait_until(gone, "nothing is left", timeout_s)
        except AssertionError:
            raise AssertionError(f"left behind: { {name: what for name, what in left.items() if what} }") from None


def wait_gone(pids: Iterable[int], timeout_s: float = DEADLINE_S) -> None:
    def alive() -> list[int]:
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    wait_until(lambda: not alive(), f"processes {list(pids)} end", timeout_s)


# -- logs --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """What worker_shim logs in this process at WARNING or above. vLLM's loggers do not propagate to pytest's."""
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Collect(logging.WARNING), logging.getLogger("vllm.worker_shim")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
