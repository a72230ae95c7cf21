"""What the engines of ``benchmarks.overlap`` run: step mode and streaming, with the gaps between steps measured where they are.

``extra_args`` of a request: ``shape`` and ``dtype`` of each output, ``chunks`` (1 without streaming). ``num_inference_steps``
is for each chunk. Chunk i of a request is ``content`` of the request's seed + i, made once and returned again each time.

Note [The gap]
A gap begins where the stream has done all of a step (``post_decode`` included, where an output was made) and ends where it
comes to the next step's first work (``prepare_encode`` of a new request, else ``denoise_step``). On a GPU both marks are
events on the current stream, so it is the device's own time in which no step ran: the CPU may be far ahead of it or behind.
They are read in a later ``post_decode``, so nothing waits between them. What an executor itself puts on that stream
(ours: the staging copy) counts as gap. Without a GPU the marks are the clock's.
A step here is next to nothing and the decoded output is there already, so all that the CPUs of worker and engine do between
two steps shows. Behind a real step, which the worker submits and does not wait for, part of that would be hidden.
Without a GPU the worker copies on one thread: with one for each core, as torch has it, its copies wait for a core that the
engine polls its queue on, which says nothing about a GPU.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from vllm_omni.diffusion.data import DiffusionOutput

from worker_shim.synthetic.pipeline import SyntheticPipeline, content

GAP_BEFORE = "gap_before_s"
"""Stamp of an output: the gap before the first step of its chunk."""
GAP_BETWEEN = "gap_between_s"
"""Stamp of an output: the gap before its last step, behind a step that had no output."""


class Gaps:
    """The gaps before the steps since the last ``take``, in order. See Note [The gap]. Nothing here waits but ``take``."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self._end: Any = None
        self._gaps: list[tuple[Any, Any]] = []

    def end(self) -> None:
        """A step ends here, unless it is said again."""
        self._end = self._mark()

    def begin(self) -> None:
        """A step begins here, unless that was said already."""
        if self._end is not None:
            self._gaps.append((self._end, self._mark()))
            self._end = None

    def take(self) -> list[float]:
        """Seconds. On a GPU it waits for the beginning of the step that it is called in, which is not part of any gap."""
        gaps, self._gaps = self._gaps, []
        if not self._on_gpu:
            return [begin - end for end, begin in gaps]
        if gaps:
            gaps[-1][1].synchronize()  # the others came before it on the stream
        return [end.elapsed_time(begin) / 1e3 for end, begin in gaps]

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()  # on the current stream
        return event


class StepPipeline(SyntheticPipeline):
    """One request at a time (``max_num_seqs=1``). See the module."""

    supports_step_execution: ClassVar[bool] = True
    interrupt = False

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        self._streaming = od_config.streaming_output
        self._contents: dict[tuple[Any, ...], torch.Tensor] = {}
        self._gaps: Gaps | None = None
        if not torch.cuda.is_available():
            torch.set_num_threads(1)  # Note [The gap]

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any:
        self._clock.begin()
        device, steps = self.weight.device, state.sampling.num_inference_steps
        state.latents = torch.zeros(1, 64, device=device)
        state.prompt_embeds = torch.zeros(1, 1, 64, device=device)
        state.prompt_embeds_mask = torch.ones(1, 1, device=device)
        state.timesteps = torch.arange(steps, dtype=torch.float32, device=device)
        if self._streaming:
            state.total_chunks, state.chunk_num_steps = (state.sampling.extra_args or {}).get("chunks", 1), steps
        return state

    def denoise_step(self, input_batch: Any, *, states: Any = None, **kwargs: Any) -> torch.Tensor:
        self._clock.begin()
        return torch.tanh(input_batch.latents @ self.weight)

    def step_scheduler(self, state: Any, noise_pred: torch.Tensor, **kwargs: Any) -> None:
        state.latents = state.latents - noise_pred
        state.step_index += 1
        state.step_in_chunk += 1
        self._clock.end()

    def post_decode(self, state: Any, **kwargs: Any) -> DiffusionOutput:
        gaps = self._clock.take()
        extra = state.sampling.extra_args or {}
        image = self._content(tuple(extra.get("shape", (64,))), extra.get("dtype", "float32"), self._seed(state))
        output = DiffusionOutput(output=image)
        if len(gaps) > 1:  # vllm-omni's own warm-up begins with no step before it
            output.stage_durations = {GAP_BEFORE: gaps[0], GAP_BETWEEN: gaps[-1]}
        if self._streaming:
            output.chunk_index, output.total_chunks = state.chunk_index, state.total_chunks
            state.chunk_index, state.step_in_chunk = state.chunk_index + 1, 0
            output.finished = state.chunk_index >= state.total_chunks
            if not output.finished:
                state.step_index = 0
        self._clock.end()
        return output

    @property
    def _clock(self) -> Gaps:
        if self._gaps is None:  # the weight is on its device only after __init__
            self._gaps = Gaps(self.weight.is_cuda)
        return self._gaps

    @staticmethod
    def _seed(state: Any) -> int:
        return int(state.sampling.seed or 0) + int(state.chunk_index)

    def _content(self, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
        if any(key[:2] != (shape, dtype) for key in self._contents):
            self._contents.clear()
        key = (shape, dtype, seed)
        if key not in self._contents:
            self._contents[key] = content(shape, dtype, seed, self.weight.device)
        return self._contents[key]
