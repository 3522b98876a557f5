"""No two requests ever get the same room, within a process or between the processes of a router."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.request.request_ids import COUNTER_BITS, ROOM_BITS, RoomAllocator

DRAWS = st.integers(0, (1 << 31) - 1)


@pytest.mark.slow
@given(draw=DRAWS, counts=st.lists(st.integers(1, 4096), min_size=1, max_size=200))
def test_ranges_of_a_process_never_overlap(draw: int, counts: list[int]) -> None:
    rooms = RoomAllocator(draw, 0, 1)
    end = -1
    for count in counts:
        first = rooms.take(count)
        assert first > end
        end = first + count - 1
        assert 0 <= first <= end < 1 << ROOM_BITS


@pytest.mark.slow
@given(data=st.data(), process_count=st.integers(1, 64))
def test_ranges_of_processes_never_overlap(data: st.DataObject, process_count: int) -> None:
    """Whatever each process draws."""
    taken: set[int] = set()
    for index in range(process_count):
        rooms = RoomAllocator(data.draw(DRAWS), index, process_count)
        for count in data.draw(st.lists(st.integers(1, 5), max_size=3)):
            first = rooms.take(count)
            mine = set(range(first, first + count))
            assert not mine & taken
            taken |= mine


@pytest.mark.slow
@given(draws=st.tuples(DRAWS, DRAWS), process_count=st.integers(1, 64), data=st.data())
def test_processes_are_apart_even_when_their_counters_are_used_up(
    draws: tuple[int, int], process_count: int, data: st.DataObject
) -> None:
    first, second = data.draw(st.lists(st.integers(0, process_count), min_size=2, max_size=2, unique=True))
    ranges = []
    for draw, index in zip(draws, (first, second), strict=True):
        if index == process_count:
            return
        start = RoomAllocator(draw, index, process_count).take(1)
        ranges.append((start, start + (1 << COUNTER_BITS)))
    (start_a, end_a), (start_b, end_b) = ranges
    assert end_a <= start_b or end_b <= start_a
    assert max(end_a, end_b) <= 1 << ROOM_BITS


def test_a_used_up_counter_begins_anew_without_a_broken_range() -> None:
    rooms = RoomAllocator(5, 0, 1)
    base = rooms.take(1)
    rooms._next = (1 << COUNTER_BITS) - 2
    assert rooms.take(3) == base
    assert rooms.take(1) == base + 3


@pytest.mark.parametrize("count", [0, -1])
def test_a_range_has_at_least_one_room(count: int) -> None:
    with pytest.raises(ValueError, match="count"):
        RoomAllocator(1, 0, 1).take(count)
