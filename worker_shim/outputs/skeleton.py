"""An output without its arrays: dumped in the worker, and put together again in the engine.

The skeleton is a pickle in which every tensor and every plain numpy array is a numbered placeholder, next to a table that
says of each array what it is and where its bytes are: in a piece that went through the device, in the memfd of host
arrays, or right here when it is tiny. It is pickled in the worker and unpickled in the engine, and only if it carries the
MAC of that engine's own worker: whoever carries it in between cannot make one.
"""

from __future__ import annotations

import copyreg
import hashlib
import hmac
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from worker_shim.outputs.arrays import (
    INLINE_BYTES,
    ArraySpec,
    HostArrays,
    Place,
    flat_bytes,
    is_plain_ndarray,
    is_plain_tensor,
    tensor_over,
)

_PROTOCOL = pickle.HIGHEST_PROTOCOL


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    arrays: tuple[ArraySpec, ...]
    pickled: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


def _array(number: int) -> Any:
    """Stands in a skeleton for array ``number``; only ``load`` knows which that is."""
    raise pickle.UnpicklingError(f"array {number} is beside the skeleton, not in it")


def _reduce_yielding(value: Any) -> Any:
    """See ``Survey.yielding``."""
    if isinstance(value, dict):
        return dict, ([*value.items()],)
    return list if isinstance(value, list) else tuple, ([*value],)


class _Arrays:
    """The table of an output's arrays, while that is pickled: a pickler calls here for arrays, and for nothing else.

    It looks a reducer up by exact type, so that a subclass pickles itself; and it remembers the placeholder of each object,
    so that one that stands in two places is one array.
    """

    def __init__(
        self, staged: Sequence[tuple[torch.Tensor, Place]], to_host: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.specs: list[ArraySpec] = []
        self.host = HostArrays()
        self._staged = staged  # held: another tensor could have the id of one that is gone
        self._places = {id(tensor): place for tensor, place in staged}
        self._to_host = to_host

    def reducers(self, yielding: Iterable[type]) -> dict[type, Callable[[Any], Any]]:
        """For a pickler's ``dispatch_table``, which takes the place of ``copyreg``'s."""
        tensor, ndarray = self._reduce_tensor, self._reduce_ndarray
        ours: dict[type, Any] = {torch.Tensor: tensor, torch.nn.Parameter: tensor, np.ndarray: ndarray}
        return {**copyreg.dispatch_table, **ours, **dict.fromkeys(yielding, _reduce_yielding)}

    def _reduce_tensor(self, value: torch.Tensor) -> Any:
        return self._placeholder(self._tensor(value)) if is_plain_tensor(value) else value.__reduce_ex__(_PROTOCOL)

    def _reduce_ndarray(self, value: np.ndarray) -> Any:
        return self._placeholder(self._ndarray(value)) if is_plain_ndarray(value) else value.__reduce_ex__(_PROTOCOL)

    def _placeholder(self, spec: ArraySpec) -> tuple[Callable[[int], Any], tuple[int]]:
        self.specs.append(spec)
        return _array, (len(self.specs) - 1,)

    def _tensor(self, tensor: torch.Tensor) -> ArraySpec:
        dtype, shape, nbytes = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes
        place = self._places.get(id(tensor))
        if place is not None:
            return ArraySpec("torch", dtype, shape, nbytes, place.piece, place.offset)
        return self._on_host(ArraySpec("torch", dtype, shape, nbytes), flat_bytes(self._to_host(tensor)).numpy())

    def _ndarray(self, array: np.ndarray) -> ArraySpec:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
        return self._on_host(ArraySpec("numpy", array.dtype.str, array.shape, array.nbytes), flat)

    def _on_host(self, spec: ArraySpec, flat: np.ndarray) -> ArraySpec:
        if spec.nbytes <= INLINE_BYTES:
            return msgspec.structs.replace(spec, inline=flat.tobytes())
        return msgspec.structs.replace(spec, offset=self.host.add(flat))


def dump(
    output: object,
    staged: Sequence[tuple[torch.Tensor, Place]],
    to_host: Callable[[torch.Tensor], torch.Tensor],
    yielding: Iterable[type] = (),
) -> tuple[bytes, HostArrays]:
    """The payload of ``output``, and the host arrays that go with it.

    ``staged`` says where each staged tensor is; ``to_host`` brings any other tensor to the host; ``yielding``: see ``Survey``.
    Raises what pickling raises.
    """
    arrays = _Arrays(staged, to_host)
    file = io.BytesIO()
    pickler = pickle.Pickler(file, _PROTOCOL)
    pickler.dispatch_table = arrays.reducers(yielding)
    pickler.dump(output)
    return _encode(_Payload(tuple(arrays.specs), file.getvalue())), arrays.host


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: list[Any]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def find_class(self, module: str, name: str) -> Any:
        if name == _array.__name__ and module == __name__:
            return self._arrays.__getitem__
        return super().find_class(module, name)


def array_specs(payload: bytes | memoryview) -> tuple[tuple[ArraySpec, ...], bytes]:
    """The table of arrays and the pickle of a payload whose MAC was checked."""
    decoded = _decode(payload)
    return decoded.arrays, decoded.pickled


def load(
    specs: tuple[ArraySpec, ...], pickled: bytes, find_staged: Callable[[ArraySpec], torch.Tensor], host: Any
) -> Any:
    """Put the output together. ``find_staged`` gives the tensor of a staged array; ``host`` is the host buffer."""

    def build(spec: ArraySpec) -> Any:
        if spec.piece >= 0:
            return find_staged(spec)
        flat = (
            np.frombuffer(host, np.uint8, spec.nbytes, spec.offset)
            if spec.offset >= 0
            else np.frombuffer(bytearray(spec.inline), np.uint8)
        )
        if spec.kind == "numpy":
            if not spec.nbytes:  # its items may have no size either
                return np.empty(spec.shape, np.dtype(spec.dtype))
            return flat.view(np.dtype(spec.dtype)).reshape(spec.shape)
        return tensor_over(flat, spec)

    return _Unpickler(io.BytesIO(pickled), [build(spec) for spec in specs]).load()


def mac(key: bytes, output: str, payload: bytes | memoryview) -> bytes:
    """What only the engine and its own workers can make: HMAC-SHA256 over the output's id and its payload."""
    digest = hmac.new(key, output.encode() + b"\0", hashlib.sha256)
    digest.update(payload)
    return digest.digest()
