"""Outputs of every kind that the tests send: dense tensors of any bits, and hypothesis' strategies for all that there may be.

It imports torch, and so the tests that use it skip themselves first where there is none.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst


def torch_dtypes() -> list[torch.dtype]:
    """Every dtype of this torch in which it can hold and clone a tensor, but the quantized, which carry more than bytes."""
    found = []
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not torch.empty(1, dtype=dtype).clone().is_quantized:
                    found.append(dtype)
        except (RuntimeError, NotImplementedError):  # torch itself can do nothing with it (int4 and its like)
            pass
    return sorted(found, key=str)


DTYPES = torch_dtypes()
LAZY = {torch.complex64, torch.complex128}  # those with lazy conjugation


def content(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A dense tensor of any bit patterns (of 0 and 1, for bool)."""
    numel = int(np.prod(shape))
    data = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, numel * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


@st.composite
def tensors(draw: Any, dtypes: Any = None) -> torch.Tensor:
    """A tensor of any dtype and any layout that torch makes of one by viewing."""
    dtype = draw(st.sampled_from(DTYPES) if dtypes is None else dtypes)
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    if draw(st.booleans()):
        shape = (*shape, draw(st.integers(600, 900)))  # too large to travel inline
    tensor = content(dtype, shape, draw(st.integers(0, 1 << 30)))
    for layout in draw(st.lists(st.sampled_from(sorted(LAYOUTS)), max_size=3)):
        tensor = LAYOUTS[layout](tensor)
    return tensor


LAYOUTS = {
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "every other": lambda tensor: tensor[::2] if tensor.dim() else tensor,
    "but the first": lambda tensor: tensor[1:] if tensor.dim() else tensor,
    "one column": lambda tensor: tensor.select(-1, 0) if tensor.dim() and tensor.shape[-1] else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape) if tensor.dim() < 5 else tensor,
    "channels last": lambda tensor: (
        tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 and tensor.numel() else tensor
    ),
    "conjugated": lambda tensor: tensor.conj() if tensor.dtype in LAZY else tensor,
    "negated": lambda tensor: torch._neg_view(tensor) if tensor.dtype in LAZY | {torch.float32} else tensor,
    "imaginary": lambda tensor: tensor.conj().imag if tensor.dtype in LAZY else tensor,
}


@dataclasses.dataclass
class Media:
    frames: Any
    audio: Any = None
    fps: float = 16.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Slotted:
    __slots__ = ("value",)
    value: Any


Pair = collections.namedtuple("Pair", "first second")

LEAVES = st.one_of(
    tensors(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.complex64])),
    npst.arrays(st.sampled_from(["f4", "u1", "i8"]), npst.array_shapes(min_dims=0, min_side=0, max_side=30)),
    st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False),
)
OUTPUTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4),
        st.dictionaries(st.text(max_size=5), inner, max_size=4).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Media, inner, inner),
        st.builds(Frozen, inner),
    ),
    max_leaves=12,
)


# -- how long it is held -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Whatever dies meanwhile dies because nobody refers to it any more."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def nested() -> tuple[dict[str, Any], list[weakref.ref[Any]]]:
    """An output of several kinds of containers, and references to its arrays."""
    arrays = [content(torch.float32, (5000,)), np.arange(5000), content(torch.float32, (5,))]
    output = {"media": Media([arrays[0]], (arrays[1],)), "slots": Slotted(arrays[2])}
    return output, [weakref.ref(array) for array in arrays]
