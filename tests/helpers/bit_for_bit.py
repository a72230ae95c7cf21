"""Whether what arrived is what was sent, bit for bit, on the same device and with the same types all the way down."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch


def raw(tensor: torch.Tensor) -> bytes:
    """The values of a tensor as bytes, in logical order, one item after the other."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    out = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain)
    return out.reshape(-1).view(torch.uint8).numpy().tobytes() if out.numel() else b""


def assert_same_tensor(got: Any, expected: torch.Tensor) -> None:
    assert isinstance(got, torch.Tensor)
    assert (got.dtype, got.shape, got.device) == (expected.dtype, expected.shape, expected.device)
    assert raw(got) == raw(expected)


def assert_same_array(got: Any, expected: np.ndarray) -> None:
    assert type(got) is type(expected)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if expected.dtype.hasobject:
        assert got.tolist() == expected.tolist()
    else:
        assert got.tobytes() == expected.tobytes()


def assert_same(got: Any, expected: Any) -> None:
    """Equal all the way down, types of containers included."""
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(got, expected)
    elif isinstance(expected, np.ndarray):
        assert_same_array(got, expected)
    else:
        assert type(got) is type(expected)
        if isinstance(expected, dict):
            assert list(got) == list(expected)
            got, expected = list(got.values()), list(expected.values())
        elif dataclasses.is_dataclass(expected):
            names = [field.name for field in dataclasses.fields(expected)]
            got, expected = ([getattr(one, name) for name in names] for one in (got, expected))
        if isinstance(expected, (list, tuple)):
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                assert_same(one, other)
        else:
            assert got == expected
