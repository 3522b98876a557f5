"""Registered memory: views inside it, refusals outside it, removal that waits for users."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError, Span

SIZE = 64


class Block:
    """Memory with an address, as long as the object lives."""

    def __init__(self, size_bytes: int = SIZE) -> None:
        self.buffer = ctypes.create_string_buffer(size_bytes)
        self.address = ctypes.addressof(self.buffer)


def test_view_writes_through_to_the_memory() -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, SIZE)
    with regions.views([Span(block.address + 8, 4)]) as (view,):
        view[:] = b"abcd"
    assert block.buffer.raw[8:12] == b"abcd"


@given(offset=st.integers(-SIZE, 2 * SIZE), length=st.integers(1, 2 * SIZE))
def test_exactly_the_spans_inside_the_region_are_granted(offset: int, length: int) -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, SIZE)
    inside = offset >= 0 and offset + length <= SIZE
    try:
        with regions.views([Span(block.address + offset, length)]) as views:
            assert inside
            assert len(views[0]) == length
    except OutOfBoundsError:
        assert not inside


def test_one_bad_span_grants_none() -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, SIZE)
    good, bad = Span(block.address, 4), Span(block.address + SIZE, 1)
    with pytest.raises(OutOfBoundsError), regions.views([good, bad]):
        pytest.fail("views of an invalid batch were handed out")


@pytest.mark.slow
@given(
    regions=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), max_size=5),
    pieces=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 40)), min_size=1, max_size=8),
)
def test_pieces_are_held_exactly_where_one_region_has_all_of_each(
    regions: list[tuple[int, int]], pieces: list[tuple[int, int]]
) -> None:
    """Also of regions that overlap, or lie one in another."""
    block, registered = Block(200), MemoryRegions()
    for start, length in regions:
        registered.add(block.address + start, length)
    inside = all(
        any(start <= offset and offset + size <= start + length for start, length in regions) for offset, size in pieces
    )
    vectors = np.array([(block.address + offset, size) for offset, size in pieces], np.uint64)
    try:
        with registered.hold(vectors):
            assert inside
    except OutOfBoundsError:
        assert not inside


@pytest.mark.parametrize("piece", [(0, 8), (2**64 - 1, 1), (2**64 - 8, 16), (1, 2**64 - 1)])
def test_no_number_overflows_into_a_region(piece: tuple[int, int]) -> None:
    block, registered = Block(), MemoryRegions()
    registered.add(block.address, SIZE)
    vectors = np.array([piece, (block.address, 2**64 - block.address + 8)], np.uint64)
    for one in (vectors[:1], vectors[1:]):
        with pytest.raises(OutOfBoundsError), registered.hold(one):
            pytest.fail("memory outside of the region is held")


def test_span_across_two_neighbouring_regions_is_refused() -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, 32)
    regions.add(block.address + 32, 32)
    with pytest.raises(OutOfBoundsError), regions.views([Span(block.address + 28, 8)]):
        pytest.fail("a span over a region's end was handed out")


def test_larger_region_is_found_behind_a_smaller_one_inside_it() -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, SIZE)
    regions.add(block.address + 16, 4)
    with regions.views([Span(block.address + 17, 20)]) as (view,):
        assert len(view) == 20


@pytest.mark.parametrize(("address", "length"), [(0, 8), (4096, 0), (4096, -1)])
def test_impossible_region_is_refused(address: int, length: int) -> None:
    with pytest.raises(ValueError, match="cannot register"):
        MemoryRegions().add(address, length)


def test_removed_region_is_refused() -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, SIZE)
    regions.remove(block.address)
    with pytest.raises(OutOfBoundsError), regions.views([Span(block.address, 1)]):
        pytest.fail("removed memory was handed out")
    with pytest.raises(KeyError):
        regions.remove(block.address)


def test_removal_waits_until_views_are_given_back() -> None:
    block, regions = Block(), MemoryRegions()
    regions.add(block.address, SIZE)
    removed = threading.Event()

    def remove() -> None:
        regions.remove(block.address)
        removed.set()

    with regions.views([Span(block.address, 1)]):
        thread = threading.Thread(target=remove)
        thread.start()
        assert not removed.wait(0.1)
    assert removed.wait(5)
    thread.join()
