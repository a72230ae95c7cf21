"""What a synthetic output holds: it follows from its request alone, so that anybody can check it."""

from __future__ import annotations

import torch


def content(shape: tuple[int, ...], dtype: str, seed: int, device: torch.device) -> torch.Tensor:
    """The output of a request with this seed; the same values in every process with the same device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    if getattr(torch, dtype).is_floating_point:
        return torch.rand(shape, generator=generator, device=device).to(getattr(torch, dtype))
    return torch.randint(0, 128, shape, generator=generator, device=device).to(getattr(torch, dtype))
