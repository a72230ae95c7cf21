"""What is in an output, by a look that runs none of its code: its tensors, and whether all of it is plain."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from worker_shim.outputs.arrays import INLINE_BYTES, is_plain_tensor

_MAX_DEPTH = 12
_PLAIN_ITEMS = 512
_ITEMS_AN_ARRAY = 32  # a host array takes as long to pickle as that many values
_PLAIN_TEXT = 64 << 10
_LEAVES = frozenset({type(None), str, int, float, bool, bytes})
_TEXT = frozenset({str, bytes})
_CONTAINERS = frozenset({dict, list, tuple})


class Survey(NamedTuple):
    """What ``survey`` found: the wanted tensors, each object once, in order, and whether the output is plain.

    A plain output holds nothing beside those tensors but a few hundred values of Python's own with little text among them, in
    containers, enums and dataclasses that pickle in the default way. So it is pickled in no time, and neither making the pickle
    nor taking it apart runs anybody's code, which could read a tensor whose bytes are not there yet.

    ``yielding`` are its containers' classes that define in Python what they hold (``__iter__``, ``items``). They may give other
    tensors each time, so ``dump`` asks them once and makes of them what vllm-omni's own packing does: a plain list, tuple or
    dict.
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


def tensors_nbytes(output: object) -> int:
    """The bytes of the tensors in ``output``, wherever they are."""
    return sum(tensor.nbytes for tensor in survey(output, lambda tensor: True).tensors)


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
