"""Runs vllm-omni's own DiffusionEngine in this process, with any executor and any pipeline.

    prepare()
    with engine("uni", "worker_shim.synthetic.pipeline.SyntheticPipeline") as running:
        results = running.run([running.request(seed=seed) for seed in range(8)])   # all at once
    results["request-3"].output                                                    # as the engine's caller gets it

The engine's asyncio loop runs in a thread of its own for the engine's whole life, because the engine keeps the loop of
its first request. So the caller is free to do something else (kill a process, say) between ``submit`` and the result.

Nothing here imports torch or vllm before an engine is asked for: ``prepare`` comes first.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a pipeline's mode needs of the engine's configuration: engine(backend, pipeline, **BATCH).
BATCH: dict[str, Any] = {"max_num_seqs": 4, "request_batch_max_wait_ms": 50.0}
STEP: dict[str, Any] = {"step_execution": True, "max_num_seqs": 4}
STREAM: dict[str, Any] = {**STEP, "streaming_output": True}
_SIZE = {
    "height": 64,
    "width": 96,
    "num_frames": 1,
    "num_inference_steps": 2,
}  # of an output, unless another is asked for

# vllm-omni ships no platform for a CPU but loads platforms by entry point, from whatever is on the path. It calls `register`
# in every process of its own, and takes a platform's qualified name for yes, None for no.
_HOST_PLUGIN = {
    "packer_host_platform-0.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: packer-host-platform\nVersion: 0.1\n",
    "packer_host_platform-0.1.dist-info/entry_points.txt": (
        "[vllm_omni.platform_plugins]\npacker_host = packer_host_platform:register\n"
    ),
    "packer_host_platform.py": '''\
"""Written by worker_shim.synthetic.engine: vllm-omni's platform on a machine with no GPU."""

import os


def register():
    wanted = os.environ.get("VLLM_TARGET_DEVICE") == "cpu"
    return "worker_shim.synthetic.host_platform.HostOmniPlatform" if wanted else None
''',
}


def nvidia_gpus() -> list[str]:
    """The lines of `nvidia-smi -L`, one a GPU; none where the command or the driver is missing."""
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in listing.stdout.splitlines() if line.startswith("GPU ")]


def prepare(*paths: Path) -> None:
    """Set the environment in which this process and those it spawns run engines. Call it before anything imports vllm.

    With no NVIDIA GPU, vllm-omni is put on the host platform; with one it is left alone. Installing this project registers
    nothing: a GPU machine never meets that platform unless it asks for it. ``paths`` are put on the module path of all
    processes, for pipelines outside this package.
    """
    multiprocessing.set_start_method("spawn", force=True)
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here has weights; nothing may wait for a hub
    found = [str(path) for path in paths]
    if not nvidia_gpus():
        plugin = tempfile.mkdtemp(prefix="packer-host-platform-")
        atexit.register(shutil.rmtree, plugin, ignore_errors=True)
        for name, text in _HOST_PLUGIN.items():
            path = Path(plugin, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        os.environ["VLLM_TARGET_DEVICE"] = "cpu"
        found.append(plugin)
    root = str(Path(__file__).resolve().parents[2])  # a source checkout; harmless where the package is installed
    sys.path[:0] = found
    os.environ["PYTHONPATH"] = os.pathsep.join([*found, root, *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass
class Result:
    """What a request came to: the OmniRequestOutputs it yielded (several when streaming), or what it raised."""

    request_id: str
    yielded: list[Any]
    error: BaseException | None = None

    @property
    def outputs(self) -> list[Any]:
        """The payload of each OmniRequestOutput: the tensor, or what a pipeline put under "output"."""
        if self.error is not None:
            raise self.error
        return [request_output.images[0] for request_output in self.yielded]

    @property
    def output(self) -> Any:
        return self.outputs[-1]


class RunningEngine:
    """An engine and its event loop's thread. Its methods belong to the test's thread."""

    def __init__(self, diffusion_engine: Any) -> None:
        self.diffusion_engine = diffusion_engine
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()

    @property
    def executor(self) -> Any:
        return self.diffusion_engine.executor

    def request(self, *, seed: int, request_id: str | None = None, **given: Any) -> Any:
        """An OmniDiffusionRequest, of a size as in ``_SIZE``. What else is given is the pipeline's: dtype="bfloat16".

        A `request_id` must be new to this engine: one used again right after it finished can end vllm-omni's engine
        thread ("Diffusion scheduler lost state"), after which requests hang.
        """
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams, OmniTextPrompt

        number = next(self._numbers)
        size = {name: given.pop(name, default) for name, default in _SIZE.items()}
        return OmniDiffusionRequest(
            prompt=OmniTextPrompt(prompt="a test"),
            request_id=f"request-{number}" if request_id is None else request_id,
            sampling_params=OmniDiffusionSamplingParams(seed=seed, extra_args=given, **size),
        )

    def submit(self, request: Any) -> Future[Result]:
        """Start one request. Cancelling the future leaves the request as a client that goes away does."""
        return self._start(self._drain(request))

    def run(self, requests: Iterable[Any], timeout_s: float = 120) -> dict[str, Result]:
        """Run all of them at once and return their results by request id, failed ones too."""
        return self._start(self._drain_all(list(requests))).result(timeout_s)

    def close(self) -> None:
        """Shut the engine, its executor and its workers down, then the loop. Results stay the caller's."""
        try:
            self.diffusion_engine.close()
        finally:
            if not self._loop.is_closed():
                self._start(self._cancel_the_rest()).result(60)
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _drain(self, request: Any) -> Result:
        result = Result(request.request_id, [])
        try:
            async with aclosing(self.diffusion_engine.step_streaming(request)) as stream:
                async for request_outputs in stream:
                    result.yielded.extend(request_outputs)
        except Exception as error:
            result.error = error
        return result

    async def _drain_all(self, requests: list[Any]) -> dict[str, Result]:
        results = await asyncio.gather(*(self._drain(request) for request in requests))
        return {result.request_id: result for result in results}

    async def _cancel_the_rest(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()


@contextmanager
def engine(backend: str, pipeline: str, **config: Any) -> Iterator[RunningEngine]:
    """A running engine, closed at the end of the block.

    ``backend`` is what a user gives as distributed_executor_backend: "uni", "mp" or a dotted path. ``pipeline`` is the
    dotted path of a class. ``config`` goes into OmniDiffusionConfig; BATCH, STEP and STREAM above are such.

    With no GPU vllm-omni's own "mp" runs in step mode only: in request mode its worker's output thread asks for an
    accelerator, dies, and every request hangs.
    """
    import torch
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.diffusion_engine import DiffusionEngine

    settings: dict[str, Any] = {
        "model": str(Path(__file__).parent),  # a directory without a model: a name would be asked of a hub
        "model_class_name": "SyntheticPipeline",  # in no registry: no pre- or postprocessing
        "num_gpus": 1,
        "enforce_eager": True,
        "dtype": torch.float32,
        "output_type": "pt",
        "custom_pipeline_args": {"pipeline_class": pipeline},
        "distributed_executor_backend": backend,
        **config,
    }
    with closing(RunningEngine(DiffusionEngine.make_engine(OmniDiffusionConfig(**settings)))) as running:
        yield running
