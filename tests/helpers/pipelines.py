"""vllm-omni custom pipelines with no weights, for tests: what an output holds follows from its request alone.

A request's seed, height, width, num_frames and `extra_args` ("dtype", "behaviour") determine its output, on any
executor, in any order and any batch. So the same request through `uni` is the reference, bit for bit.
`num_inference_steps` only takes time.

This module imports vllm_omni. A test names its classes to the engine ("RequestPipeline") and does not import them, so
that it can be collected, and skipped, where vllm-omni is not installed.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from typing import Any, ClassVar

import PIL.Image
import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.media import (
    DiffusionMediaOutput,
    VideoMediaOutput,
    VideoTensorEncoding,
    VideoTensorLayout,
    VideoTensorSpec,
    VideoValueRange,
)
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

DTYPE_ENVIRONMENT = "PIPELINE_DTYPE"
"""The dtype of requests that name none; float32 if unset."""

ERROR = "the pipeline was asked to fail"
"""In every error of the behaviours "error" and "output_error", followed by the request's seed."""

CHUNKS = 3
"""Chunks a request of StepPipeline has with streaming_output."""


def behaviour(params: Any) -> str:
    return (params.extra_args or {}).get("behaviour", "image")


def content(params: Any, device: torch.device, seed_offset: int = 0) -> torch.Tensor:
    """The picture of a request: (1, 3, num_frames, height, width) of its dtype, from a generator seeded by its seed."""
    generator = torch.Generator(device=device).manual_seed((params.seed or 0) + seed_offset)
    name = (params.extra_args or {}).get("dtype") or os.environ.get(DTYPE_ENVIRONMENT) or "float32"
    dtype: torch.dtype = getattr(torch, name)
    shape = (1, 3, params.num_frames or 1, params.height, params.width)
    if not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype is torch.bool else 128, shape, generator=generator, device=device).to(dtype)
    return torch.rand(shape, generator=generator, device=device).to(dtype)


class Pipeline(nn.Module):
    """What vllm-omni's loader asks of any pipeline; its one parameter tells the device."""

    weights_sources = ()
    supports_request_batch = False

    def __init__(self, *, od_config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64), requires_grad=False)
        self._static_buffers: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    def denoise(self, params: Any) -> None:
        """Take the time of `num_inference_steps` small matrix products; the output does not depend on them."""
        hidden = self.weight
        for _ in range(params.num_inference_steps or 0):
            hidden = torch.tanh(hidden @ self.weight)

    def static(self, value: torch.Tensor) -> torch.Tensor:
        """`value` in the pipeline's own buffer for its shape and dtype, over what was there: a CUDA graph's output."""
        key = (value.shape, value.dtype)
        if key not in self._static_buffers:
            self._static_buffers[key] = torch.empty_like(value)
        return self._static_buffers[key].copy_(value)


# Behaviours: extra_args["behaviour"] names one of these. Nested outputs are under a key "output", because the engine
# hands that one to its caller whole, as the `images[0]` of its OmniRequestOutput; of others it keeps those it knows.


def an_image(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    return DiffusionOutput(output=image)


def a_bfloat16_image(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    return DiffusionOutput(output=image.to(torch.bfloat16))


def a_small_tensor(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """48 bytes of float32: far below vllm-omni's threshold for shared memory."""
    return DiffusionOutput(output=image[:, :, :1, :2, :2].clone())


def a_noncontiguous_image(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """Height and width exchanged, as a view: (1, 3, num_frames, width, height)."""
    return DiffusionOutput(output=image.transpose(-1, -2))


def the_static_buffer(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """The image in a buffer that the next forward of this shape overwrites.

    In one process with the engine (`uni`) it is overwritten under the engine too: its reference is "image".
    """
    return DiffusionOutput(output=pipeline.static(image))


def two_views(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """The upper and the lower half of the image, in one storage."""
    middle = image.shape[-2] // 2
    return DiffusionOutput(output={"output": {"upper": image[..., :middle, :], "lower": image[..., middle:, :]}})


def a_dict(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """Tensors on the device and on the host, numpy arrays, containers in containers and values that are no arrays."""
    host = image.float().cpu()
    return DiffusionOutput(
        output={
            "output": {
                "image": image,
                "pair": (image[0], "and text"),
                "list": [image.float() * 2, {"deeper": image.float() + 1}],
                "host_tensor": host + 2,
                "array": host.numpy() + 3,
                "small_array": host.flatten()[:5].numpy(),
                "empty": image[:0],
                "scalar": image.float().max(),
                "seed": params.seed,
                "nothing": None,
            }
        }
    )


def a_trajectory(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """The image, and the fields beside it: latents, timesteps and log-probabilities of every step."""
    steps = params.num_inference_steps or 1
    weights = torch.arange(1, steps + 1, device=image.device, dtype=torch.float32)
    return DiffusionOutput(
        output=image,
        trajectory_latents=torch.stack([image.float() * weight for weight in weights]),
        trajectory_timesteps=1000 / weights,
        trajectory_log_probs=-weights,
    )


def a_wordy_dict(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """The image beside 100 kB that are no array."""
    return DiffusionOutput(output={"output": {"image": image, "text": f"{params.seed:04}" * 25_000}})


def a_typed_video(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """`DiffusionOutput.media`: what video pipelines return instead of a bare tensor. Pixels from -1 to 1."""
    spec = VideoTensorSpec(
        VideoTensorLayout.BCTHW, VideoTensorEncoding.NORMALIZED_FLOAT, VideoValueRange.NEGATIVE_ONE_TO_ONE
    )
    return DiffusionOutput(media=DiffusionMediaOutput(VideoMediaOutput(image * 2 - 1, spec)))


@dataclasses.dataclass
class Custom:
    """A class that is no container vllm-omni knows, with a tensor in it."""

    name: str
    tensor: torch.Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.name == other.name and torch.equal(self.tensor, other.tensor)


def everything(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """What else an output carries: pictures, audio, custom objects, trajectories, durations."""
    host = image.float().cpu()
    pixels = (host[0, :, 0].permute(1, 2, 0) * 255).to(torch.uint8).numpy()
    return DiffusionOutput(
        output={
            "output": {
                "video_and_audio": (image, image.float().flatten()[:16000]),
                "pictures": [PIL.Image.fromarray(pixels), PIL.Image.fromarray(255 - pixels)],
                "custom": Custom("of the request", host[0, 0]),
                "array": host.numpy()[..., ::2],
                "text": f"{params.seed:04}" * 25_000,
            }
        },
        trajectory_latents=image.float() * 2,
        trajectory_timesteps=torch.arange(3),
        trajectory_log_probs=-image.float().flatten()[:3],
        trajectory_decoded=[PIL.Image.fromarray(pixels)],
        stage_durations={"denoise": 1.5},
        peak_memory_mb=7.0,
    )


def an_output_that_contains_itself(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    parts: list[Any] = [image]
    parts.append(parts)
    return DiffusionOutput(output=parts)


def an_unpicklable_dict(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    return DiffusionOutput(output={"output": {"image": image, "callable": lambda: None}})


def a_small_unpicklable_dict(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    return DiffusionOutput(output={"output": {"image": image[..., :2, :2].clone(), "callable": lambda: None}})


def an_error_raised(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """In a batch this fails all of it: a forward that raises has no outputs."""
    raise ValueError(f"{ERROR}: seed {params.seed}")


def an_error_returned(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """The error of this request alone, also in a batch."""
    return DiffusionOutput(error=f"{ERROR}: seed {params.seed}")


def an_image_the_device_breaks_at(pipeline: Pipeline, params: Any, image: torch.Tensor) -> DiffusionOutput:
    """An image after which the GPU is busy for a while, and then meets an assertion: its context is broken from then on."""
    torch.cuda._sleep(1_000_000_000)
    torch._assert_async(torch.zeros((), device=image.device))
    return DiffusionOutput(output=image)


BEHAVIOURS = {
    "image": an_image,
    "bfloat16": a_bfloat16_image,
    "small": a_small_tensor,
    "noncontiguous": a_noncontiguous_image,
    "static": the_static_buffer,
    "views": two_views,
    "dict": a_dict,
    "trajectory": a_trajectory,
    "wordy": a_wordy_dict,
    "cyclic": an_output_that_contains_itself,
    "media": a_typed_video,
    "everything": everything,
    "unpicklable": an_unpicklable_dict,
    "small_unpicklable": a_small_unpicklable_dict,
    "error": an_error_raised,
    "output_error": an_error_returned,
    "device_assert": an_image_the_device_breaks_at,
}


class RequestPipeline(Pipeline):
    """One request a forward."""

    @torch.no_grad()
    def forward(self, batch: Any) -> DiffusionOutput:
        params = batch.sampling_params
        self.denoise(params)
        return BEHAVIOURS[behaviour(params)](self, params, content(params, self.weight.device))


class ServedPipeline(Pipeline):
    """One image a forward, as an image model's VAE gives it: (1, 3, height, width). vllm-omni's server makes a PNG of it."""

    @torch.no_grad()
    def forward(self, batch: Any) -> DiffusionOutput:
        params = batch.sampling_params
        return DiffusionOutput(output=content(params, self.weight.device)[:, :, 0] * 2 - 1)


class PagedPipeline(RequestPipeline):
    """Its worker says, as in paged-KV mode, that it measured the device before the model was loaded."""

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        (worker,) = (each for each in gc.get_objects() if issubclass(type(each), DiffusionWorker))
        worker.init_snapshot = object()


class BatchPipeline(Pipeline):
    """Several requests a forward. Their bare images are views of one fused storage, one a behaviour and dtype."""

    supports_request_batch = True

    @torch.no_grad()
    def forward(self, batch: Any) -> list[DiffusionOutput]:
        self.denoise(batch.sampling_params_list[0])
        outputs: list[DiffusionOutput] = []
        fusible: dict[tuple[str, torch.dtype], list[DiffusionOutput]] = {}
        for params in batch.sampling_params_list:
            name = behaviour(params)
            make = an_image if name == "static" else BEHAVIOURS[name]
            outputs.append(make(self, params, content(params, self.weight.device)))
            if name in ("image", "bfloat16", "static"):
                fusible.setdefault((name, outputs[-1].output.dtype), []).append(outputs[-1])
        for (name, _), group in fusible.items():
            # The scheduler batches only requests of one height, width and num_frames.
            fused = torch.cat([output.output for output in group])
            if name == "static":
                fused = self.static(fused)
            for row, output in enumerate(group):
                output.output = fused[row : row + 1]
        return outputs


class StepPipeline(Pipeline):
    """Step mode: the scheduler calls each denoising step. With streaming_output a request yields CHUNKS outputs.

    An output is the request's behaviour; that of chunk i is seeded by the request's seed + 1000 i.
    """

    supports_step_execution: ClassVar[bool] = True
    interrupt = False

    def __init__(self, *, od_config: Any) -> None:
        super().__init__(od_config=od_config)
        self.streaming = od_config.streaming_output

    def forward(self, batch: Any) -> DiffusionOutput:
        raise RuntimeError("StepPipeline runs in step mode only: set step_execution=True")

    def prepare_encode(self, state: Any, **kwargs: Any) -> Any:
        device, steps = self.weight.device, state.sampling.num_inference_steps
        state.latents = torch.zeros(1, 64, device=device)
        state.prompt_embeds = torch.zeros(1, 1, 64, device=device)
        state.prompt_embeds_mask = torch.ones(1, 1, device=device)
        state.timesteps = torch.arange(steps, dtype=torch.float32)
        if self.streaming:
            state.total_chunks, state.chunk_num_steps = CHUNKS, steps
        return state

    def denoise_step(self, input_batch: Any, *, states: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.tanh(input_batch.latents @ self.weight)

    def step_scheduler(self, state: Any, noise_pred: torch.Tensor, **kwargs: Any) -> None:
        state.latents = state.latents - noise_pred
        state.step_index += 1
        state.step_in_chunk += 1

    def post_decode(self, state: Any, **kwargs: Any) -> DiffusionOutput:
        image = content(state.sampling, self.weight.device, seed_offset=1000 * state.chunk_index)
        output = BEHAVIOURS[behaviour(state.sampling)](self, state.sampling, image)
        if self.streaming:
            output.chunk_index, output.total_chunks = state.chunk_index, CHUNKS
            state.chunk_index, state.step_in_chunk = state.chunk_index + 1, 0
            output.finished = state.chunk_index >= CHUNKS
            if not output.finished:
                state.step_index = 0
        return output
