"""Typed media, whose rules vllm-omni checks where it packs and unpacks an output: it does neither with one of ours."""

from __future__ import annotations

from vllm_omni.diffusion.data import DiffusionOutput


def check_media(output: DiffusionOutput) -> None:
    """What vllm-omni checks when it packs and unpacks typed media. TypeError or ValueError says what is wrong."""
    from vllm_omni.diffusion.media import DiffusionMediaOutput

    if output.output is not None:
        raise ValueError("DiffusionOutput cannot contain both media and legacy output")
    media = output.media
    if not isinstance(media, DiffusionMediaOutput):
        raise TypeError(f"DiffusionOutput.media must be DiffusionMediaOutput, got {type(media).__name__}")
    media.validate()
    if not media.prepared_for_transport:
        raise ValueError("Diffusion media must be prepared before it leaves the worker")
