"""What the benchmarks that run engines share: the engines of one run, what arrives at them, the bare copy, the budget.

All sides of a run are up at once and take turns, sample by sample. Nothing here imports torch or vllm before it is needed:
``worker_shim.synthetic.engine.prepare`` comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks import machine

if TYPE_CHECKING:
    from worker_shim.synthetic.pipeline import Arrivals

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
PIPELINE = "benchmarks.pipelines.BenchmarkPipeline"
PACKER = "worker_shim.PackerDiffusionExecutor"
ON_GPU_SETTINGS = {
    "arena_max_bytes": "12GiB",
    "pool_max_bytes": "16GiB",
}  # eight outputs of 573 MB, and those being read
REQUEST_TIMEOUT_S = 120.0

ALONE, BESIDE = 0.0, 1.0  # kinds of a forward's sample, as benchmarks.pipelines sends them

NO_MP = "mp is left out: without an accelerator vllm-omni's own output thread dies and its requests hang."

_START = time.monotonic()


def say(text: str) -> None:
    """One line of progress, on stderr."""
    print(f"[{time.monotonic() - _START:6.1f} s] {text}", file=sys.stderr, flush=True)


class Budget:
    """Wall time for a number of parts. What one part leaves over, the next may use."""

    def __init__(self, seconds: float, parts: int) -> None:
        self._end = time.monotonic() + seconds
        self._parts = parts

    def next_deadline(self) -> float:
        """Until when (``time.monotonic``) the part that starts now may go on."""
        now = time.monotonic()
        share = max(self._end - now, 0.0) / max(self._parts, 1)
        self._parts -= 1
        return now + share


@dataclass
class Side:
    """One engine of the run, named as in the rows."""

    impl: str
    running: Any
    arrivals: Arrivals

    def one(self, *, seed: int = 0, **extra: Any) -> Any:
        """One request, alone; its output. Drop it at once: it may be a lease."""
        (result,) = self.running.run([self.running.request(seed=seed, **extra)], REQUEST_TIMEOUT_S).values()
        return result.output

    def many(self, count: int, in_flight: int, *, seed: int = 0, **extra: Any) -> None:
        """``count`` requests, ``in_flight`` of them at any time until the last are sent; outputs are dropped as they come."""
        slots = threading.Semaphore(in_flight)
        errors: list[BaseException] = []

        def done(future: Any) -> None:
            try:
                if (error := future.result().error) is not None:
                    errors.append(error)
            except BaseException as error:
                errors.append(error)
            slots.release()

        def wait() -> None:
            if not slots.acquire(timeout=REQUEST_TIMEOUT_S):
                raise TimeoutError(f"{self.impl}: no output came for {REQUEST_TIMEOUT_S:g} s")
            if errors:
                raise errors[0]

        for _ in range(count):
            wait()
            self.running.submit(self.running.request(seed=seed, **extra)).add_done_callback(done)
        for _ in range(in_flight):
            wait()


@contextlib.contextmanager
def open_sides(pipeline: str = PIPELINE, only: str = "", **config: Any) -> Iterator[list[Side]]:
    """The engines this machine can run, all up: the packer's, and vllm-omni's own ``mp`` with a GPU or in step mode.

    ``only``: that one of the two, ``packer`` or ``mp``. ``config`` goes into OmniDiffusionConfig.
    """
    import torch

    from worker_shim.synthetic.engine import engine
    from worker_shim.synthetic.pipeline import Arrivals

    with_mp = machine.gpus() or config.get("step_execution")
    backends = {"packer": PACKER, "mp": "mp"} if with_mp else {"packer": PACKER}
    if only:
        backends = {only: backends[only]}
    with contextlib.ExitStack() as stack:
        sides = []
        for impl, backend in backends.items():
            say(f"starting the engine {impl}")
            settings = {"packer": ON_GPU_SETTINGS} if impl == "packer" and machine.gpus() else {}
            running = stack.enter_context(
                engine(backend, pipeline, dtype=torch.float32, additional_config={**settings}, **config)
            )
            if impl == "packer" and not running.executor.packer_pids:
                raise SystemExit("the engine did not get a packer: see the log above")
            sides.append(Side(impl, running, Arrivals(running.executor)))
        say("engines are up")
        yield sides
        say("closing the engines")


def settings_in_force() -> dict[str, str]:
    """The packer's settings that differ from the defaults, for the results."""
    return dict(ON_GPU_SETTINGS) if machine.gpus() else {}


def device() -> Any:
    """The benchmark's own view of the device its workers use."""
    import torch

    return torch.device("cuda", 0) if machine.gpus() else torch.device("cpu")


class BareCopy:
    """The limit: the same bytes to the host and nothing else. Pinned memory on a GPU, a plain copy without one."""

    def __init__(self, shape: Sequence[int], dtype: str, seed: int) -> None:
        import torch

        from worker_shim.synthetic.pipeline import content

        self.source = content(tuple(shape), dtype, seed, device())
        self.target = torch.empty(self.source.shape, dtype=self.source.dtype, pin_memory=self.source.is_cuda)
        self.one()

    def one(self) -> float:
        """Seconds of one copy."""
        import torch

        begin = time.perf_counter()
        self.target.copy_(self.source, non_blocking=True)
        if self.source.is_cuda:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin

    def many(self, count: int, in_flight: int) -> tuple[list[float], list[float]]:
        """``count`` copies, ``in_flight`` of them queued at any time: seconds of each, and when each was seen to be done."""
        import torch

        queued: list[tuple[float, Any]] = []
        latencies, done_at = [], []

        def finish() -> None:
            begin, event = queued.pop(0)
            if event is not None:
                event.synchronize()
            done_at.append(time.perf_counter())
            latencies.append(done_at[-1] - begin)

        for _ in range(count):
            if len(queued) == in_flight:
                finish()
            begin = time.perf_counter()
            self.target.copy_(self.source, non_blocking=True)
            event = torch.cuda.Event() if self.source.is_cuda else None
            if event is not None:
                event.record()
            queued.append((begin, event))
        while queued:
            finish()
        return latencies, done_at

    def equals(self, output: Any) -> bool:
        """Whether ``output`` is, byte for byte, what was copied."""
        import torch

        output = output.cpu()  # below 1 MB, `mp` hands it over on the GPU
        alike = output.dtype == self.target.dtype and output.shape == self.target.shape
        return alike and torch.equal(output.reshape(-1).view(torch.uint8), self.target.reshape(-1).view(torch.uint8))


def arguments(description: str | None, seconds: float | None, *outputs: str) -> argparse.ArgumentParser:
    """The options every benchmark has: ``outputs`` are those that name a file.

    ``seconds`` is the default of --seconds; None for a benchmark that goes by samples alone and has no such option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in outputs:
        parser.add_argument(option, metavar="FILE", help="write the results there, as one JSON object")
    if seconds is not None:
        parser.add_argument(
            "--seconds",
            type=float,
            default=seconds,
            help="wall time of the measurement, starts not counted; samples are trimmed to it (default %(default)g)",
        )
    parser.add_argument("--quick", action="store_true", help="small sizes and few samples, as without a GPU")
    return parser


def set_up() -> TextIO:
    """Prepare this process for engines, quiet them, and send all they print to stderr. Returns the real stdout."""
    from worker_shim.synthetic.engine import prepare

    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    prepare(ROOT)
    if not os.environ.get("VLLM_LOGGING_LEVEL"):
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ.setdefault("PACKER_LOG_LEVEL", "warning")
        logging.disable(logging.INFO)
    return stdout


def is_quick(options: argparse.Namespace) -> bool:
    return options.quick or not machine.gpus()


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned text, one column a key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys, *([_cell(row.get(key, "")) for key in keys] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(keys))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([f"== {title}", *lines, ""])


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 4)
