"""Which ranges of a block are taken: against a model that marks every page, for any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer_service.memory.extents import ALIGNMENT, Extents, align

PAGES = 24

# a positive number allocates so many bytes; a negative one releases one of those that are out
CALLS = st.lists(st.one_of(st.integers(1, 8 * ALIGNMENT), st.integers(-100, -1)), max_size=60)


def free_bytes(extents: Extents) -> int:
    return sum(nbytes for _, nbytes in extents._free)


@settings(database=None, deadline=None, max_examples=300)
@given(CALLS)
def test_ranges_never_overlap_and_a_request_is_refused_only_where_no_gap_is_large_enough(calls):
    extents, owner, out = Extents(PAGES * ALIGNMENT), [0] * PAGES, {}
    for number, call in enumerate(calls, start=1):
        if call > 0:
            pages = align(call) // ALIGNMENT
            gaps = "".join(" x"[bool(page)] for page in owner)
            offset = extents.allocate(call)
            if " " * pages not in gaps:
                assert offset is None
                continue
            assert offset == gaps.index(" " * pages) * ALIGNMENT, "not the first gap that fits"
            first = offset // ALIGNMENT
            owner[first : first + pages] = [number] * pages
            out[offset] = number
        elif out:
            offset, released = list(out.items())[call % len(out)]
            del out[offset]
            extents.release(offset)
            owner = [0 if page == released else page for page in owner]
        assert free_bytes(extents) == owner.count(0) * ALIGNMENT
        assert extents.idle == (not out)
        longest = max(map(len, "".join(" x"[bool(page)] for page in owner).split("x")))
        assert extents.largest_free == longest * ALIGNMENT
    for offset in out:
        extents.release(offset)
    assert extents.allocate(PAGES * ALIGNMENT) == 0, "what was released did not coalesce"


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_neighbours_coalesce_in_whatever_order_they_come_back(order):
    extents = Extents(3 * ALIGNMENT)
    offsets = [extents.allocate(1) for _ in range(3)]
    assert extents.allocate(1) is None
    for index in order:
        extents.release(offsets[index])
    assert extents.largest_free == 3 * ALIGNMENT


def test_a_range_released_twice_is_refused_and_changes_nothing():
    extents = Extents(2 * ALIGNMENT)
    offset, other = extents.allocate(1), extents.allocate(1)
    extents.release(offset)
    with pytest.raises(KeyError):
        extents.release(offset)
    with pytest.raises(KeyError):
        extents.release(other + 1)
    assert free_bytes(extents) == ALIGNMENT
    assert not extents.idle


def test_an_empty_request_still_gets_a_range_of_its_own():
    extents = Extents(2 * ALIGNMENT)
    assert {extents.allocate(0), extents.allocate(0)} == {0, ALIGNMENT}


@pytest.mark.parametrize("nbytes", [0, -ALIGNMENT, ALIGNMENT - 1, ALIGNMENT + 1])
def test_a_block_that_is_no_positive_number_of_pages_is_refused(nbytes):
    with pytest.raises(ValueError, match=str(ALIGNMENT)):
        Extents(nbytes)


@given(st.integers(0, 1 << 62), st.sampled_from([1, 512, 4096, 2 << 20]))
@settings(database=None, deadline=None)
def test_align_is_the_next_multiple(nbytes, alignment):
    aligned = align(nbytes, alignment)
    assert aligned % alignment == 0
    assert nbytes <= aligned < nbytes + alignment
