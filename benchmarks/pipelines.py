"""What the benchmarks' engines run. It costs nothing where a hand-off is timed, and times itself where forwards are.

``extra_args`` of a request say which:

shape, dtype                       an output made once for this shape, dtype and seed, and returned again each time: there
                                   is no forward, and nothing to wait for. ``launches``: a forward of so many small kernels.
forward, pairs, nbytes, varying    forwards of that kind, alone and beside an output of ``nbytes``, by turns (``varying``:
                                   between half of it and all of it). The request's own output is the samples: a small
                                   CPU tensor (n, 2) of kind (ALONE or BESIDE) and seconds.

Note [A forward beside an output]
A pipelined engine starts forward n + 1 while output n is on its way, but how much of the two meets depends on the
engine's dispatch. Here they always meet: the output is given to the worker's own ``_return_result`` as the first thing
inside the timed forward. So the time counts all that the forward pays for that output: the call on the main thread, the
staging copy on the forward's stream, whatever other threads of the worker do meanwhile, and what the copy takes from the
device. Forwards follow one another until the output is through (``mp``: packed and sent; the packer: acknowledged, whether
that ack was taken or not); each that began before then is a sample.
The time ends when the current stream has finished. Between pairs the worker is idle.
The engine never asked for these outputs: they carry the stamp UNCLAIMED, by which ``Arrivals`` drops them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker import diffusion_worker

from benchmarks.harness import ALONE, BESIDE
from worker_shim.synthetic.pipeline import UNCLAIMED, TimedPipeline, content

_DRAIN_TIMEOUT_S = 60.0
_DRAIN_POLL_S = 0.001
_MAX_BESIDE = 200  # forwards beside one output: a worker that never gets rid of it ends the pair


class BenchmarkPipeline(TimedPipeline):
    """One request a forward. See the module."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        self._cached: tuple[Any, torch.Tensor] | None = None
        self._bodies: dict[str, Callable[[], None]] = {}
        self._worker_proc: Any = None
        self._small = torch.zeros(64, device=self.weight.device)
        self._remember_worker_proc(diffusion_worker.WorkerProc)

    def _remember_worker_proc(self, worker_proc: Any) -> None:
        """Learn the WorkerProc this pipeline runs in from the first output it returns."""
        original = worker_proc._return_result

        def remembering(proc: Any, output: Any, rpc_id: str | None = None) -> None:
            self._worker_proc = proc
            original(proc, output, rpc_id)

        worker_proc._return_result = remembering

    @torch.no_grad()
    def forward(self, batch: Any) -> DiffusionOutput:
        params = batch.sampling_params
        extra = params.extra_args or {}
        if "forward" in extra:
            return DiffusionOutput(output=self._time_forwards(**extra))
        if "shape" in extra:
            for _ in range(extra.get("launches", 0)):
                self._small.add_(1)
            return DiffusionOutput(output=self._content(tuple(extra["shape"]), extra["dtype"], params.seed or 0))
        return super().forward(batch)  # vllm-omni's own warm-up

    def _content(self, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
        key = (shape, dtype, seed)
        if self._cached is None or self._cached[0] != key:
            self._cached = None
            self._cached = key, content(shape, dtype, seed, self.weight.device)
            if self.weight.is_cuda:
                torch.cuda.synchronize()
        return self._cached[1]

    # -- see Note [A forward beside an output] -------------------------------------------------------------------------

    def _time_forwards(self, forward: str, pairs: int, nbytes: int, varying: bool) -> torch.Tensor:
        body = self._body(forward)
        whole = self._content((nbytes // 4,), "float32", 0)
        sizes = random.Random(nbytes)
        samples: list[tuple[float, float]] = []
        for _ in range(pairs):
            self._drain()
            samples.append((ALONE, self._timed(body)))
            output = whole[: int(len(whole) * sizes.uniform(0.5, 1.0))] if varying else whole
            samples.append((BESIDE, self._timed(body, output)))
            for _ in range(_MAX_BESIDE):
                if not self._in_flight():
                    break
                samples.append((BESIDE, self._timed(body)))
        self._drain()
        return torch.tensor(samples, dtype=torch.float64)

    def _timed(self, body: Callable[[], None], output: torch.Tensor | None = None) -> float:
        begin = time.perf_counter()
        if output is not None:
            handed_over = DiffusionOutput(output=output, stage_durations={UNCLAIMED: 1.0})
            self._worker_proc._return_result(handed_over, None)
        body()
        if self.weight.is_cuda:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin

    def _in_flight(self) -> int:
        """How many outputs are neither settled nor acknowledged. Acks stay where they are, for the worker to take when it
        would anyway."""
        exporter = getattr(self._worker_proc, "exporter", None)
        return self._worker_proc._async_output_pending - (exporter.exchange.acknowledged if exporter is not None else 0)

    def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while self._in_flight():
            if time.monotonic() > deadline:
                raise RuntimeError(f"an output was still in flight after {_DRAIN_TIMEOUT_S:g} s")
            time.sleep(_DRAIN_POLL_S)

    def _body(self, forward: str) -> Callable[[], None]:
        if forward not in self._bodies:
            body = self._bodies[forward] = FORWARDS[forward](self.weight.device)
            for _ in range(3):
                body()
        return self._bodies[forward]


def launch_bound(device: torch.device) -> Callable[[], None]:
    """3000 kernels that do nothing: the time is the main thread's."""
    values = torch.zeros(64, device=device)
    launches = 3000 if device.type == "cuda" else 1000

    def body() -> None:
        for _ in range(launches):
            values.add_(1)

    return body


def mixed(device: torch.device) -> Callable[[], None]:
    """Small kernels and matrix products by turns, as in a transformer's blocks."""
    on_gpu = device.type == "cuda"
    size, blocks = (4096, 80) if on_gpu else (128, 20)
    values = torch.zeros(64, device=device)
    hidden, weight, product = _matrices(size, device)

    def body() -> None:
        for _ in range(blocks):
            for _ in range(20):
                values.add_(1)
            torch.mm(hidden, weight, out=product)

    return body


def gemm(device: torch.device) -> Callable[[], None]:
    """Large matrix products alone: the time is the GPU's."""
    size, products = (8192, 18) if device.type == "cuda" else (256, 20)
    hidden, weight, product = _matrices(size, device)

    def body() -> None:
        for _ in range(products):
            torch.mm(hidden, weight, out=product)

    return body


FORWARDS: dict[str, Callable[[torch.device], Callable[[], None]]] = {
    "launch_bound": launch_bound,
    "mixed": mixed,
    "gemm": gemm,
}


def _matrices(size: int, device: torch.device) -> list[torch.Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(size, size, device=device, dtype=dtype) for _ in range(3)]
