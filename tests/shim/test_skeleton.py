"""Any output, taken apart and put together: values, dtypes, shapes, structure and shared objects are what they were.

No packer here: ``through`` does to the bytes what the way through it does, piece by piece and with exact sizes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import io
import itertools
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from worker_shim.outputs import skeleton
from worker_shim.outputs.arrays import (
    ARRAY_ALIGNMENT,
    INLINE_BYTES,
    ArraySpec,
    Place,
    flat_bytes,
    tensor_from_bytes,
    tensor_over,
)
from worker_shim.outputs.survey import survey, tensors_nbytes
from worker_shim.worker.placement import OWN_PIECE_BYTES, plan

torch = pytest.importorskip("torch")

from any_output import (  # noqa: E402
    DTYPES,
    LAYOUTS,
    OUTPUTS,
    Frozen,
    Media,
    Pair,
    Slotted,
    content,
    nested,
    no_garbage_collection,
    tensors,
)
from bit_for_bit import assert_same, assert_same_array, assert_same_tensor  # noqa: E402

PROPERTY = settings(database=None, deadline=None, max_examples=150)
KEY = bytes(32)


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*experimental"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse.*beta"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
]


def through(output: object, *, staged: bool) -> Any:
    """``output`` dumped, its bytes copied to fresh memory as a packer would, and loaded."""
    tensors, _, yielding = survey(output, lambda tensor: staged)
    places, sizes = plan([tensor.numel() * tensor.element_size() for tensor in tensors])
    pieces = [bytearray(size) for size in sizes]
    for tensor, place in zip(tensors, places, strict=True):
        flat = flat_bytes(tensor).numpy()
        pieces[place.piece][place.offset : place.offset + flat.nbytes] = flat.tobytes()
    payload, host = skeleton.dump(output, list(zip(tensors, places, strict=True)), lambda tensor: tensor, yielding)
    buffer = bytearray(host.nbytes)
    host.write_into(buffer)
    specs, pickled = skeleton.array_specs(payload)

    def tensor(spec: ArraySpec) -> torch.Tensor:
        flat = np.frombuffer(pieces[spec.piece], np.uint8, spec.nbytes, spec.offset)
        got = tensor_over(flat, spec)
        assert_same_tensor(tensor_from_bytes(torch.from_numpy(flat), spec), got)
        return got

    return skeleton.load(specs, pickled, tensor, buffer)


# -- torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (2, 3, 500)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_tensor_of_every_dtype_arrives_bit_for_bit(dtype, shape, staged):
    tensor = content(dtype, shape)
    assert_same_tensor(through(tensor, staged=staged), tensor)


def test_the_dtypes_of_diffusion_models_are_among_those_tested():
    names = {str(dtype).removeprefix("torch.") for dtype in DTYPES}
    assert names >= {"bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
    assert names >= {"float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"}


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@PROPERTY
@given(tensor=tensors())
def test_a_tensor_of_any_layout_arrives_with_its_values_dtype_and_shape(staged, tensor):
    assert_same_tensor(through(tensor, staged=staged), tensor)


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_each_layout_of_a_complex_image_arrives(layout, staged):
    tensor = LAYOUTS[layout](content(torch.complex64, (2, 3, 32, 16)))
    assert_same_tensor(through(tensor, staged=staged), tensor)


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
def test_overlapping_and_disjoint_views_of_one_storage_each_arrive_with_their_own_values(staged):
    base = content(torch.float32, (4000,))
    output = {"all": base, "first": base[:3000], "overlap": base[2000:], "windows": base.unfold(0, 100, 10)}
    got = through(output, staged=staged)
    assert_same(got, output)
    got["first"].zero_()
    assert_same_tensor(got["overlap"], output["overlap"])


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("shape", [(10,), (2000,)], ids=["small", "large"])
def test_an_array_that_stands_in_two_places_is_one_array_again(shape, staged):
    tensor, array = content(torch.float32, shape), np.arange(shape[0])
    one, other = through(({"image": tensor, "array": array}, [tensor, array]), staged=staged)
    assert one["image"] is other[0]
    assert one["array"] is other[1]


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
def test_what_arrives_can_be_written_to(staged):
    for got in through(
        [content(torch.float32, (5,)), content(torch.float32, (5000,)), np.zeros(5), np.zeros(5000)], staged=staged
    ):
        got += 1


def test_a_tensor_that_requires_gradients_and_a_parameter_arrive_as_plain_values():
    weight = torch.nn.Parameter(content(torch.float32, (700,)))
    for staged in (False, True):
        got = through({"latent": weight * 2, "weight": weight}, staged=staged)
        assert_same_tensor(got["latent"], weight * 2)
        assert_same_tensor(got["weight"], weight)


class Named(torch.Tensor):
    """A subclass, which pickles itself."""


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_one_element_cut_out_with_strides_arrives(shape, staged):
    tensor = torch.arange(8.0).view(4, 2)[3:, 1:].as_strided(shape, (2,) * len(shape), 7)
    assert_same(through(tensor, staged=staged), tensor)


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_plain_strided_tensor_travels_by_its_own_pickling(staged):
    dense = content(torch.float32, (20, 20)).nan_to_num()
    output = {
        "sparse": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "meta": torch.empty(5, 6, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(5), 0.1, 3, torch.quint8),
        "nested": torch.nested.nested_tensor([dense, dense[:3]]),
        "subclass": dense.as_subclass(Named),
    }
    got = through(output, staged=staged)
    assert torch.equal(got["sparse"].to_dense(), dense)
    assert torch.equal(got["csr"].to_dense(), dense)
    assert got["meta"].is_meta
    assert got["meta"].shape == (5, 6)
    assert torch.equal(got["quantized"].dequantize(), output["quantized"].dequantize())
    assert all(map(torch.equal, got["nested"].unbind(), (dense, dense[:3])))
    assert type(got["subclass"]) is Named
    assert torch.equal(got["subclass"].as_subclass(torch.Tensor), dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", [(6,), (3, 2)], ids=str)
def test_a_tensor_over_an_array_keeps_that_array_and_has_a_storage_of_its_bytes(dtype, shape):
    buffer = bytearray(4096)
    flat = np.frombuffer(buffer, np.uint8, 6 * dtype.itemsize, 512)
    alive = weakref.ref(flat)
    tensor = tensor_over(flat, ArraySpec("torch", str(dtype).removeprefix("torch."), shape, flat.nbytes))
    del flat
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, shape, True)
    assert tensor.untyped_storage().nbytes() == 6 * dtype.itemsize
    for keep in (lambda t: t.detach(), lambda t: t.view(torch.uint8)[..., :1], lambda t: t.untyped_storage()):
        kept = keep(tensor)
        del tensor
        assert alive() is not None
        tensor = kept if isinstance(kept, torch.Tensor) else torch.empty(0, dtype=dtype).set_(kept)
        del kept
    assert alive() is not None
    alive().view(np.int8)[0] = 1
    assert tensor.view(torch.uint8).flatten()[0] == buffer[512] == 1
    del tensor
    assert alive() is None


# -- numpy -------------------------------------------------------------------------------------------------------------

NUMPY_DTYPES = st.one_of(
    npst.boolean_dtypes(),
    npst.integer_dtypes(endianness="?"),
    npst.unsigned_integer_dtypes(endianness="?"),
    npst.floating_dtypes(endianness="?"),
    npst.complex_number_dtypes(endianness="?"),
    npst.datetime64_dtypes(),
    npst.timedelta64_dtypes(),
    npst.byte_string_dtypes(),
    npst.unicode_string_dtypes(),
    npst.array_dtypes(),
    st.sampled_from([np.dtype("V7"), np.dtype("longdouble"), np.dtype("clongdouble")]),
)


@PROPERTY
@given(st.data())
def test_a_numpy_array_of_any_dtype_and_layout_arrives(data):
    shape = data.draw(npst.array_shapes(min_dims=0, min_side=0, max_side=4))
    if data.draw(st.booleans()):
        shape = (*shape, 600)
    dtype = data.draw(NUMPY_DTYPES)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(data.draw(st.integers(0, 1000))).integers(
        0, 2 if dtype.kind == "b" else 100, size, np.uint8
    )
    if dtype.kind == "U":
        array = np.full(shape, "ü", dtype)  # not every bit pattern is a character
    else:
        array = np.ndarray(shape, dtype, bits.tobytes()) if size else np.empty(shape, dtype)
    layout = data.draw(st.sampled_from(["as it is", "transposed", "reversed", "broadcast", "fortran"]))
    if layout == "transposed":
        array = array.T
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "broadcast":
        array = np.broadcast_to(array, (2, *array.shape))
    elif layout == "fortran":
        array = np.asfortranarray(array)
    assert_same_array(through(array, staged=False), array)


@pytest.mark.parametrize(
    "array",
    [
        np.array(5),
        np.array("text"),
        np.array(None, dtype=object),
        np.empty((0, 3), "f4"),
        np.zeros(3, "S0"),
        np.zeros((2, 3), "U0"),
        np.arange(10, dtype=">f8"),
        np.array([(1, 2.5, "a")] * 300, dtype=[("id", "i4"), ("score", "f8"), ("name", "U3")]),
        np.zeros(200, dtype=[("pixel", "u1", (3,)), ("depth", ">f4")]).view(np.recarray),
        np.array([{"a": 1}, [2], "three", None] * 400, dtype=object),
        np.array([[]], dtype=object),
        np.ma.masked_array(np.arange(1000), mask=[True, False] * 500),
        np.arange("2024-01", "2024-12", dtype="datetime64[D]"),
        np.lib.stride_tricks.sliding_window_view(np.arange(500), 100),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype.kind} {array.shape}",
)
def test_numpy_arrays_that_are_more_than_numbers_arrive(array):
    got = through({"array": array}, staged=True)["array"]
    assert_same_array(got, array)
    if isinstance(array, np.ma.MaskedArray):
        assert got.mask.tolist() == array.mask.tolist()


def test_an_object_array_may_hold_tensors():
    array = np.empty(2, dtype=object)
    array[:] = [content(torch.float32, (2000,)), "text"]
    got = through(array, staged=True)
    assert_same_tensor(got[0], array[0])
    assert got[1] == "text"


def test_a_large_array_is_not_inside_the_payload_and_a_small_one_is():
    small, large = np.zeros(INLINE_BYTES, np.uint8), np.zeros(INLINE_BYTES + 1, np.uint8)
    payload, host = skeleton.dump(small, [], lambda tensor: tensor)
    assert (host.nbytes, len(payload) > INLINE_BYTES) == (0, True)
    payload, host = skeleton.dump(large, [], lambda tensor: tensor)
    assert host.nbytes >= large.nbytes
    assert len(payload) < 300


# -- outputs -----------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Tensors(enum.Enum):
    ONES = torch.ones(3)


class Reduced(enum.Enum):
    RED = 1

    def __reduce_ex__(self, protocol: int) -> Any:
        return Reduced, (self.value,)


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
@PROPERTY
@given(output=OUTPUTS)
def test_any_nesting_of_containers_and_dataclasses_arrives_as_it_was(staged, output):
    assert_same(through(output, staged=staged), output)


@PROPERTY
@given(output=OUTPUTS)
def test_what_is_found_is_each_tensor_once(output):
    found = survey(output, lambda tensor: True).tensors
    assert len({id(tensor) for tensor in found}) == len(found)
    again = survey([output, output], lambda tensor: True).tensors
    assert [id(tensor) for tensor in again] == [id(tensor) for tensor in found]


def test_tensors_are_found_in_containers_and_dataclasses_in_order_and_only_those_wanted():
    named = {name: content(torch.float32, (index + 1,)) for index, name in enumerate("abcdefg")}
    output = {
        "x": [named["a"], (named["b"], {"y": Media(named["c"], [named["d"]])})],
        "again": named["a"],
        "pair": Pair(Frozen(named["e"]), named["f"]),
        "other": [np.zeros(3), "text", None, Media, named["g"]],
    }
    found = survey(output, lambda tensor: tensor.numel() != 2).tensors
    assert [tensor.numel() for tensor in found] == [1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("output", "plain"),
    [
        ([Media(torch.zeros(5)), Colour.RED], True),
        ([Tensors.ONES], False),
        ([Reduced.RED], False),
        ([torch.zeros(5) for _ in range(10)], True),
        ([torch.zeros(5) for _ in range(100)], False),
        (torch.zeros(INLINE_BYTES // 4 + 1), False),
        (torch.zeros(5, device="meta"), False),
        (torch.zeros(5).to_sparse(), False),
        (functools.reduce(lambda inner, _: [inner], range(13), 1.0), False),
        ({(1, 2): 3}, False),
    ],
    ids=[
        "enum",
        "enum of tensors",
        "enum that pickles itself",
        "few host arrays",
        "many",
        "large",
        "of another device",
        "sparse",
        "deep",
        "odd key",
    ],
)
def test_what_of_the_host_is_plain(output, plain):
    assert survey(output, lambda tensor: False).plain is plain


@dataclasses.dataclass
class Making(Slotted):
    """A list of its own for each look at it."""

    value = property(lambda self: [torch.ones(3)], lambda self, value: None)


def test_a_container_that_was_made_for_one_look_does_not_pass_for_the_next():
    assert len(survey([Making(0) for _ in range(5)], lambda tensor: True).tensors) == 5


def test_a_tensor_where_nobody_looks_still_arrives():
    class_like = Slotted(content(torch.float32, (2000,)))
    deep: Any = content(torch.float32, (2000,))
    for _ in range(40):
        deep = [deep]
    assert_same_tensor(through(class_like, staged=True).value, class_like.value)
    got = through(deep, staged=True)
    for _ in range(40):
        (got,) = got
    assert_same_tensor(got, content(torch.float32, (2000,)))


def test_an_output_that_contains_itself_arrives():
    output: dict[str, Any] = {"image": content(torch.float32, (2000,))}
    output["self"] = [output]
    got = through(output, staged=True)
    assert got["self"][0] is got
    assert_same_tensor(got["image"], output["image"])


def test_what_cannot_be_pickled_raises_what_pickling_raises():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        skeleton.dump({"image": torch.zeros(3), "callback": lambda: None}, [], lambda tensor: tensor)


def test_only_tensors_that_are_not_staged_are_brought_to_the_host():
    here, there = content(torch.float32, (10,)), content(torch.float32, (10,), seed=1)
    brought = []
    skeleton.dump([here, there], [(there, Place(0, 0))], lambda t: brought.append(t) or t)
    assert len(brought) == 1
    assert brought[0] is here


def test_a_plain_unpickler_cannot_read_a_skeleton_with_arrays():
    """Its placeholders mean something only beside the table of arrays."""
    payload, _ = skeleton.dump(torch.zeros(3), [], lambda tensor: tensor)
    with pytest.raises(pickle.UnpicklingError):
        pickle.Unpickler(io.BytesIO(skeleton.array_specs(payload)[1])).load()


def test_a_mac_depends_on_key_output_and_payload():
    macs = [
        skeleton.mac(key, output, payload)
        for key, output, payload in itertools.product((KEY, b"k" * 32), ("a", "ab"), (b"payload", b"b\0payload", b""))
    ]
    assert len(set(macs)) == len(macs)
    assert {len(mac) for mac in macs} == {32}
    assert skeleton.mac(KEY, "a", memoryview(b"payload")) == skeleton.mac(KEY, "a", b"payload")


# -- how long it is held -----------------------------------------------------------------------------------------------


def test_nothing_keeps_the_arrays_of_an_output_once_they_were_found():
    output, references = nested()
    with no_garbage_collection():
        assert len(survey(output, lambda tensor: True).tensors) == 2
        assert tensors_nbytes(output) > 0
        del output
        assert [reference() for reference in references] == [None] * 3


@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
def test_nothing_keeps_the_arrays_of_an_output_once_it_was_dumped_and_loaded(staged):
    output, references = nested()
    with no_garbage_collection():
        got = through(output, staged=staged)
        references += [weakref.ref(got["media"].frames[0]), weakref.ref(got["slots"].value)]
        del output, got
        assert [reference() for reference in references] == [None] * 5


def test_nothing_keeps_the_arrays_of_an_output_that_could_not_be_pickled():
    output, references = nested()
    output["callback"] = lambda: None
    with no_garbage_collection():
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            skeleton.dump(output, [], lambda tensor: tensor)
        del output
        assert [reference() for reference in references] == [None] * 3


# -- where arrays go in the arena --------------------------------------------------------------------------------------


@PROPERTY
@given(st.lists(st.one_of(st.integers(0, 3 * ARRAY_ALIGNMENT), st.integers(OWN_PIECE_BYTES - 2, 4 * OWN_PIECE_BYTES))))
def test_a_plan_gives_every_array_aligned_bytes_of_its_own_and_every_large_one_a_piece(sizes):
    places, pieces = plan(sizes)
    assert len(places) == len(sizes)
    assert all(pieces)
    ranges: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for place, nbytes in zip(places, sizes, strict=True):
        assert place.offset % ARRAY_ALIGNMENT == 0
        assert place.offset + nbytes <= pieces[place.piece]
        ranges[place.piece].append((place.offset, nbytes))
        if nbytes >= OWN_PIECE_BYTES:
            assert (place.offset, pieces[place.piece]) == (0, nbytes)
    assert set(ranges) == set(range(len(pieces)))
    small = [piece for piece, held in ranges.items() if any(nbytes < OWN_PIECE_BYTES for _, nbytes in held)]
    assert len(small) <= 1, "small arrays share one piece, one copy and one lease"
    for held in ranges.values():
        for (offset, nbytes), (following, _) in itertools.pairwise(sorted(held)):
            assert offset + nbytes <= following
            assert offset != following
