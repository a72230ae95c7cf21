"""One array of an output: the row that a skeleton has of it, its bytes in order, and the array that is made over them again.

Note [Waiting for the GIL]
A reader of vLLM's queues polls for a second after each message, on a thread of the same process (in the engine ours sleeps
between two looks: worker_shim.engine.pump). Whoever lets go of the GIL beside a busy thread has to win it back,
which costs a wake-up: up to 0.1 ms on a virtual machine. Nearly every method of a tensor lets go of it (``view`` twice,
``detach``, ``is_conj``), and so does the death of a tensor. ``torch.from_numpy``, ``torch.frombuffer`` and all of numpy's
own views do not, nor does HMAC over less than 2 KiB, unless it is ``hmac.digest``. So tensors over host memory are given
dtype and shape by numpy before torch sees them, where numpy knows the dtype.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from packer_service.memory.extents import align

INLINE_BYTES = 2048  # a host array up to this travels inside the skeleton
ARRAY_ALIGNMENT = 512  # of every array in a piece or in the host memfd

_NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Those that torch and numpy share, by the name that both give them."""


class Place(NamedTuple):
    """Where a device array was staged: the piece, and the offset in it."""

    piece: int
    offset: int


class ArraySpec(msgspec.Struct, frozen=True, array_like=True):
    """One array: numpy or torch, its dtype by name, its shape, and where its bytes are."""

    kind: Literal["torch", "numpy"]
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    piece: int = -1  # of the device; -1: not there
    offset: int = -1  # in the piece, or in the host memfd; -1: neither
    inline: bytes = b""


class HostArrays:
    """The host arrays of one output, laid out one behind the other; ``write_into`` copies each exactly once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._arrays: list[tuple[int, np.ndarray]] = []  # (offset, uint8)

    def add(self, array: np.ndarray) -> int:
        """Reserve room for a flat uint8 array; its offset."""
        offset = self.nbytes
        self._arrays.append((offset, array))
        self.nbytes = align(offset + array.nbytes, ARRAY_ALIGNMENT)
        return offset

    def write_into(self, buffer: Any) -> None:
        target = np.frombuffer(buffer, np.uint8)
        for offset, array in self._arrays:
            target[offset : offset + array.nbytes] = array


def is_plain_tensor(value: object) -> bool:
    """A strided tensor with bytes of its own, of torch's own classes; subclasses know better how they pickle."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_meta  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def is_plain_ndarray(value: np.ndarray) -> bool:
    """One of numbers or text alone, whose dtype is known by its ``str``."""
    return not value.dtype.hasobject and np.dtype(value.dtype.str) == value.dtype


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, densely and in order, as flat uint8; a view where the layout allows, a copy otherwise."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # Dense now, but torch says so of one element with any strides, and would keep those.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def tensor_over(flat: np.ndarray, spec: ArraySpec) -> torch.Tensor:
    """The tensor whose bytes are ``flat`` (uint8, exactly its bytes), which it keeps alive. See Note [Waiting for the GIL]."""
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu")
    dtype = _NUMPY_DTYPES.get(spec.dtype)
    if dtype is not None:
        return torch.from_numpy(flat.view(dtype).reshape(spec.shape))
    tensor = torch.frombuffer(flat, dtype=getattr(torch, spec.dtype))
    return tensor if tensor.shape == spec.shape else tensor.view(spec.shape)


def tensor_from_bytes(flat: torch.Tensor, spec: ArraySpec) -> torch.Tensor:
    """The same as ``tensor_over``, over a flat uint8 tensor on any device."""
    dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype, device="cpu")
    return flat.view(dtype).view(spec.shape)
