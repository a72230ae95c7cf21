"""What a stream of requests gains where its outputs are post-processed, and how long the engine's event loop stands still.

    python -m benchmarks.postprocess [--json FILE] [--seconds S] [--only CELL ...]

Each engine is in a process of its own and runs rounds of requests, by turns with the others, some of them in flight: ``packer``
is our executor in vllm-omni's own engine, ``packer_engine`` the same in PackerDiffusionEngine, ``mp`` (with a GPU only) and
``uni`` are vllm-omni as it comes. The forward is so many launches of a small kernel; the post-processing is diffusers' own, as
vllm-omni's pipelines call it. ``requests_per_s`` is the median of the rounds with the bootstrap's 95 % interval;
``loop_stall_p99_ms`` the 99th percentile of what a coroutine that sleeps for a millisecond found to be more than that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks import machine
from benchmarks.harness import PIPELINE, ROOT, arguments, is_quick, say, set_up, settings_in_force, table
from benchmarks.percentile import percentile

SECONDS = 120.0
ROUNDS = 7
IMPLS = ("packer", "packer_engine", "mp", "uni")
_RESAMPLES = 2000
_TICK_S = 0.001
_START_S = 300.0


class Cell(NamedTuple):
    """One row of the table, for each engine."""

    name: str
    shape: tuple[int, ...]
    postprocess: str  # pil or np
    launches: int  # of the forward
    in_flight: int
    requests: int  # a round


ON_GPU = [
    Cell("image", (1, 3, 1024, 1024), "pil", 3000, 4, 40),
    Cell("image, 8", (1, 3, 1024, 1024), "pil", 3000, 8, 40),
    Cell("video 480p", (1, 3, 81, 480, 832), "np", 3000, 4, 8),
    Cell("video 768p", (1, 3, 81, 768, 768), "np", 3000, 4, 8),
    Cell("slow video 768p", (1, 3, 81, 768, 768), "np", 70000, 4, 8),
]
QUICK = [
    Cell("image", (1, 3, 512, 512), "pil", 300, 4, 12),
    Cell("video", (1, 3, 17, 256, 256), "np", 300, 4, 6),
]


def postprocessor(kind: str) -> Callable[[Any], Any]:
    """As vllm-omni's pipelines make them: images to PIL, videos to numpy."""
    if kind == "pil":
        from diffusers.image_processor import VaeImageProcessor

        return VaeImageProcessor(vae_scale_factor=16).postprocess
    from diffusers.video_processor import VideoProcessor

    videos = VideoProcessor(vae_scale_factor=8)
    return lambda video: videos.postprocess_video(video, output_type="np")


# -- an engine's process -----------------------------------------------------------------------------------------------


def _serve(impl: str) -> None:
    """Run the rounds that come as lines of JSON, and answer each with a line."""
    stdout = set_up()
    import torch

    from worker_shim.synthetic.engine import engine

    config: dict[str, Any] = {"additional_config": {"packer": settings_in_force()}}
    if impl == "packer_engine":
        config["engine_backend"] = "worker_shim.PackerDiffusionEngine"
    backend = impl if impl in ("mp", "uni") else "worker_shim.PackerDiffusionExecutor"
    with engine(backend, PIPELINE, dtype=torch.float32, **config) as running:
        print(json.dumps({"ready": torch.get_num_threads()}), file=stdout, flush=True)
        for line in sys.stdin:
            cell = Cell(**json.loads(line))
            running.diffusion_engine.post_process_func = postprocessor(cell.postprocess)
            print(json.dumps(running._start(_round(running, cell)).result()), file=stdout, flush=True)


async def _round(running: Any, cell: Cell) -> dict[str, Any]:
    slots = asyncio.Semaphore(cell.in_flight)
    extra = {"shape": list(cell.shape), "dtype": "float32", "launches": cell.launches}
    stalls: list[float] = []
    over = asyncio.Event()

    async def tick() -> None:
        while not over.is_set():
            begin = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            stalls.append(time.perf_counter() - begin - _TICK_S)

    async def one(request: Any) -> None:
        async with slots:
            async for _ in running.diffusion_engine.step_streaming(request):
                pass

    begin = time.perf_counter()
    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(one(running.request(seed=7, **extra)) for _ in range(cell.requests)))
    seconds = time.perf_counter() - begin
    over.set()
    await ticking
    return {"seconds": seconds, "stalls": sorted(stalls)[-200:], "ticks": len(stalls)}


# -- the rounds --------------------------------------------------------------------------------------------------------


class Engine:
    """One engine's process, as the rounds see it."""

    def __init__(self, impl: str) -> None:
        self.impl = impl
        command = [sys.executable, "-m", "benchmarks.postprocess", "--serve", impl]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT
        )

    def read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine {self.impl} ended with {self._process.wait()}: see the log above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, cell: Cell) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cell._asdict()) + "\n")
        return self.read()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def measure(engines: list[Engine], cell: Cell, seconds: float) -> list[dict[str, Any]]:
    rounds: dict[str, list[dict[str, Any]]] = {engine.impl: [] for engine in engines}
    for engine in engines:
        engine.run(cell._replace(requests=cell.in_flight))
    deadline = time.monotonic() + seconds
    for number in range(ROUNDS):
        for engine in engines if number % 2 == 0 else reversed(engines):
            rounds[engine.impl].append(engine.run(cell))
        if time.monotonic() > deadline:
            break
    return [_row(cell, impl, found) for impl, found in rounds.items()]


def _row(cell: Cell, impl: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    rates = [cell.requests / found["seconds"] for found in rounds]
    ticks = sum(found["ticks"] for found in rounds)
    longest = sorted((stall for found in rounds for stall in found["stalls"]), reverse=True)
    rank = min(max(ticks // 100, 1), len(longest))  # the kept ones are the longest of each round
    return {
        "cell": cell.name,
        "launches": cell.launches,
        "output": "x".join(map(str, cell.shape)),
        "dtype": "float32",
        "postprocess": cell.postprocess,
        "in_flight": cell.in_flight,
        "impl": impl,
        "rounds": len(rounds),
        "requests_per_s": round(statistics.median(rates), 3),
        "requests_per_s_ci95": [round(value, 3) for value in interval(rates)],
        "loop_stall_p99_ms": round(longest[rank - 1] * 1e3, 2),
        "loop_stall_max_ms": round(longest[0] * 1e3, 2),
    }


def interval(rates: list[float]) -> tuple[float, float]:
    """The bootstrap's 95 % interval of the median."""
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(rates, k=len(rates))) for _ in range(_RESAMPLES)]
    return percentile(medians, 2.5), percentile(medians, 97.5)


def main() -> None:
    parser = arguments(__doc__, SECONDS, "--json")
    parser.add_argument("--serve", choices=IMPLS, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", metavar="CELL", help="some of the cells, by name")
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve)
        return
    quick = is_quick(options)
    cells = [cell for cell in (QUICK if quick else ON_GPU) if not options.only or cell.name in options.only]
    found = machine.Recorder(options.json, "postprocess", settings=settings_in_force(), notes=[])
    engines = []
    try:
        for impl in IMPLS:
            if impl != "mp" or machine.gpus():  # without a GPU it serves no request-mode request
                engines.append(Engine(impl))
                say(f"the engine {impl} runs with {engines[-1].read()['ready']} torch threads")
        for cell in cells:
            found.add(*measure(engines, cell, options.seconds / len(cells)))
            say(cell.name)
    finally:
        for engine in engines:
            engine.close()
    print(table("postprocess", found.rows), flush=True)


if __name__ == "__main__":
    main()
