"""Pairs out of one draw, and turns with a bounded memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.draws import LeastRecent, two_positions


@given(count=st.integers(2, 1000), draw=st.floats(0, 1, exclude_max=True))
def test_a_pair_is_of_two_positions(count: int, draw: float) -> None:
    first, second = two_positions(count, draw)
    assert first != second
    assert 0 <= first < count
    assert 0 <= second < count


@pytest.mark.parametrize("count", [2, 3, 7])
def test_all_ordered_pairs_are_equally_likely(count: int) -> None:
    pairs = count * (count - 1)
    counts = Counter(two_positions(count, (step + 0.5) / (10 * pairs)) for step in range(10 * pairs))
    assert set(counts.values()) == {10}
    assert len(counts) == pairs


def test_turns_remember_a_bounded_number_of_indices() -> None:
    turns = LeastRecent()
    for index in range(20_000):
        turns.take([index, index + 1])
    assert len(turns._last_turn) <= 4096


def test_the_last_turn_longest_ago_is_next_and_newcomers_come_first() -> None:
    turns = LeastRecent()
    assert [turns.take([7, 3]) for _ in range(3)] == [0, 1, 0]
    assert turns.take([7, 3, 9]) == 2
    assert turns.take([9, 7, 3]) == 2
    assert turns.take([9, 7]) == 1
    assert turns.take([9, 7]) == 0


@pytest.mark.slow
def test_more_instances_than_are_remembered_still_take_turns() -> None:
    turns = LeastRecent()
    everybody = list(range(5000))
    taken = Counter(turns.take(everybody) for _ in range(5))
    assert taken == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    for _ in range(4995):
        turns.take(everybody)
    assert turns.take(everybody) == 0
