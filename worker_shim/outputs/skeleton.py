"""An output taken apart and put together: its arrays, and the skeleton they were in.

The skeleton is a pickle in which every tensor and every plain numpy array is a numbered placeholder, next to a table that
says of each array what it is and where its bytes are: in a piece that went through the device, in the memfd of host
arrays, or right here when it is tiny. It is pickled in the worker and unpickled in the engine, and only if it carries the
MAC of that engine's own worker: whoever carries it in between cannot make one.

Note [Waiting for the GIL]
A reader of vLLM's queues polls for a second after each message, on a thread of the same process (in the engine ours sleeps
between two looks: worker_shim.engine.sleeping_reader). Whoever lets go of the GIL beside a busy thread has to win it back,
which costs a wake-up: up to 0.1 ms on a virtual machine. Nearly every method of a tensor lets go of it (``view`` twice,
``detach``, ``is_conj``), and so does the death of a tensor. ``torch.from_numpy``, ``torch.frombuffer`` and all of numpy's
own views do not, nor does HMAC over less than 2 KiB, unless it is ``hmac.digest``. So tensors over host memory are given
dtype and shape by numpy before torch sees them, where numpy knows the dtype.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import hmac
import io
import pickle
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from packer_service.memory.extents import align

INLINE_BYTES = 2048  # a host array up to this travels inside the skeleton
ARRAY_ALIGNMENT = 512  # of every array in a piece or in the host memfd
_MAX_DEPTH = 12
_PLAIN_ITEMS = 512
_ITEMS_AN_ARRAY = 32  # a host array takes as long to pickle as that many values
_PLAIN_TEXT = 64 << 10
_PROTOCOL = pickle.HIGHEST_PROTOCOL


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


class _Payload(msgspec.Struct, frozen=True, array_like=True):
    arrays: tuple[ArraySpec, ...]
    pickled: bytes


_NUMPY_DTYPES = {
    name: np.dtype(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
"""Those that torch and numpy share, by the name that both give them."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Payload).decode


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


class Survey(NamedTuple):
    """What ``survey`` found: the wanted tensors, each object once, in order, and whether the output is plain.

    A plain output holds nothing beside those tensors but a few hundred values of Python's own with little text among them, in
    containers, enums and dataclasses that pickle in the default way. So it is pickled in no time, and neither making the pickle
    nor taking it apart runs anybody's code, which could read a tensor whose bytes are not there yet.

    ``yielding`` are the kinds of its containers that say themselves, in Python, what they hold. That may be other tensors each
    time they are asked, so they are asked once, by ``dump``, which makes of them what vllm-omni's own packing does: a plain
    list, tuple or dict.
    """

    tensors: list[torch.Tensor]
    plain: bool
    yielding: frozenset[type] = frozenset()


def survey(output: object, wanted: Callable[[torch.Tensor], bool]) -> Survey:
    """Look into the containers and dataclasses of ``output`` for tensors that ``wanted`` accepts.

    It looks into dicts, lists, tuples and dataclasses: what vllm-omni's own packing looks into, and media. A tensor hidden
    elsewhere is found when the skeleton is pickled. It runs no code of their classes but properties of dataclasses.
    """
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, object] = {}  # by id(), and so held: a container made for one look must not pass for the next
    yielding: set[type] = set()
    items = text = 0
    plain = True
    # A stack rather than a function that calls itself: such a closure is a reference cycle, which would keep the output,
    # and its device memory, until the garbage collector comes by.
    stack: list[tuple[Any, int]] = [(output, 0)]
    while stack:
        value, depth = stack.pop()
        kind: Any = type(value)
        children: Any
        if issubclass(kind, (dict, list, tuple)):
            if kind not in _CONTAINERS and _yields(kind):
                plain = False
                yielding.add(kind)
                continue
            children = value
            if issubclass(kind, dict):
                children = value.values()
                plain = plain and all(type(key) in _LEAVES for key in value)
        elif issubclass(kind, torch.Tensor):
            if not is_plain_tensor(value):
                plain = False
            elif wanted(value):
                found.setdefault(id(value), value)
            elif value.device.type != "cpu" or value.nbytes > INLINE_BYTES or value.is_pinned():
                plain = False  # the device may still write to pinned memory
            else:
                items += _ITEMS_AN_ARRAY
            continue
        elif hasattr(kind, "__dataclass_fields__"):
            children = [*getattr(value, "__dict__", {}).values()]
            if _has_slots(kind):  # as media has
                children += [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            plain = plain and (kind in _LEAVES or _is_plain_enum(value))
            continue
        if depth >= _MAX_DEPTH:
            plain = False
        elif id(value) not in seen:
            seen[id(value)] = value
            plain = plain and (kind in _CONTAINERS or _pickles_by_default(kind))
            if plain:  # else its children may be anything, and without a length
                items += len(children)
                plain = items <= _PLAIN_ITEMS
            if plain:
                text += sum(len(child) for child in children if type(child) in _TEXT)
                plain = text <= _PLAIN_TEXT
            inner = [(child, depth + 1) for child in children if type(child) not in _LEAVES]
            inner.reverse()
            stack += inner
    return Survey(list(found.values()), plain and items <= _PLAIN_ITEMS, frozenset(yielding))


def find_tensors(output: object, wanted: Callable[[torch.Tensor], bool]) -> list[torch.Tensor]:
    """The tensors of ``survey``."""
    return survey(output, wanted).tensors


@functools.cache
def _pickles_by_default(kind: Any) -> bool:
    """Whether what comes out of a pickle of this dataclass is its dict as it was, or its fields, as ``dataclasses`` has it."""
    default = getattr(object, "__getstate__", None)  # of Python 3.11
    getstate, setstate = getattr(kind, "__getstate__", default), getattr(kind, "__setstate__", None)
    return (
        hasattr(kind, "__dataclass_fields__")
        and not issubclass(kind, (dict, list, tuple))
        and kind not in copyreg.dispatch_table
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__getnewargs__")
        and not hasattr(kind, "__getnewargs_ex__")
        and (
            # Slots pickle itself would set as attributes, which may be somebody's code.
            (getstate is default and setstate is None and not _has_slots(kind))
            or all(getattr(one, "__module__", "") == dataclasses.__name__ for one in (getstate, setstate))
        )
    )


@functools.cache
def _yields(kind: Any) -> bool:
    """See ``Survey.yielding``. Containers written in C iterate over what they hold."""
    return any(
        isinstance(getattr(kind, name, None), types.FunctionType) for name in ("__iter__", "keys", "values", "items")
    )


def _reduce_yielding(value: Any) -> Any:
    if isinstance(value, dict):
        return dict, ([*value.items()],)
    return list if isinstance(value, list) else tuple, ([*value],)


def _is_plain_enum(value: object) -> bool:
    """Whether its pickle is its class and its name or a value of Python's own."""
    return (
        isinstance(value, enum.Enum)
        and type(value._value_) in _LEAVES
        and getattr(type(value).__reduce_ex__, "__module__", "") == enum.__name__
    )


@functools.cache
def _has_slots(kind: Any) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


_LEAVES = frozenset({type(None), str, int, float, bool, bytes})
_TEXT = frozenset({str, bytes})
_CONTAINERS = frozenset({dict, list, tuple})


def is_plain_tensor(value: object) -> bool:
    """A strided tensor with bytes of its own, of torch's own classes; subclasses know better how they pickle."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided  # type: ignore[attr-defined]
        and not value.is_meta  # type: ignore[attr-defined]
        and not value.is_quantized  # type: ignore[attr-defined]
        and not value.is_nested  # type: ignore[attr-defined]
    )


def _is_plain_ndarray(value: np.ndarray) -> bool:
    return not value.dtype.hasobject and np.dtype(value.dtype.str) == value.dtype


def _array(number: int) -> Any:
    """Stands in a skeleton for array ``number``; only ``load`` knows which that is."""
    raise pickle.UnpicklingError(f"array {number} is beside the skeleton, not in it")


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
        return self._placeholder(self._ndarray(value)) if _is_plain_ndarray(value) else value.__reduce_ex__(_PROTOCOL)

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


def tensors_nbytes(output: object) -> int:
    """The bytes of the tensors in ``output``, wherever they are."""
    return sum(tensor.nbytes for tensor in find_tensors(output, lambda tensor: True))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values, densely and in order, as flat uint8; a view where the layout allows, a copy otherwise."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # Dense now, but torch says so of one element with any strides, and would keep those.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


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


def mac(key: bytes, output: str, payload: bytes | memoryview) -> bytes:
    """What only the engine and its own workers can make: HMAC-SHA256 over the output's id and its payload."""
    digest = hmac.new(key, output.encode() + b"\0", hashlib.sha256)
    digest.update(payload)
    return digest.digest()
