"""The rows of the demo: what is asked for, what it came to, and the same bytes copied with nothing around it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple


class Case(NamedTuple):
    """One row: what is asked for, by shape and dtype."""

    name: str
    height: int
    width: int
    num_frames: int
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 3, self.num_frames, self.height, self.width)


ON_HOST = [
    Case("image", 512, 512, 1, "float32"),
    Case("image", 1024, 1024, 1, "float32"),
    Case("image", 1024, 1024, 1, "bfloat16"),
    Case("video", 256, 256, 17, "uint8"),
    Case("video", 512, 512, 17, "float32"),
]
ON_GPU = [*ON_HOST, Case("video", 768, 768, 81, "bfloat16"), Case("video", 768, 768, 81, "float32")]


class Handoffs(NamedTuple):
    """What one case came to: seconds from the worker's hand-off to the engine, one at a time; then all at once."""

    latencies_s: list[float]
    wall_s: float
    mismatches: int
    own_path: int = 0  # outputs that did not come through the packer


class BareCopy:
    """The same bytes copied to the host and nothing else: pinned memory on a GPU, a plain copy without one."""

    def __init__(self, case: Case, device: Any) -> None:
        import torch

        from worker_shim.synthetic.content import content

        self.source = content(case.shape, case.dtype, 1, device)
        self.target = torch.empty(case.shape, dtype=self.source.dtype, device="cpu", pin_memory=device.type == "cuda")
        self.run()

    def run(self) -> float:
        """Seconds of one copy."""
        import torch

        begin = time.perf_counter()
        self.target.copy_(self.source, non_blocking=True)
        if self.source.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def equal(output: Any, case: Case, seed: int, device: Any) -> bool:
    """Whether ``output`` is, byte for byte, what the pipeline makes of this seed."""
    import torch

    from worker_shim.synthetic.content import content

    expected = content(case.shape, case.dtype, seed, device).cpu()
    if output.dtype != expected.dtype or output.shape != expected.shape:
        return False
    return torch.equal(output.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
