"""Which long prefill goes on, and that memory is never promised twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.laps_compositions import LongChoice, choose_long
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.laps.decide.urgency import RankedPrefill, Urgency
from sglang_ext.types import LengthClass


def long(
    key: int,
    slack: float,
    new_tokens: int = 100,
    *,
    started: bool = False,
    current: bool = False,
    aged: int = PriorityClass.NORMAL,
) -> RankedPrefill:
    request = QueuedPrefill(
        key, LengthClass.LONG, new_tokens, 0, new_tokens, 0.0, 0.0, PriorityClass.NORMAL, started or current, current
    )
    return RankedPrefill(Urgency(aged, slack, 0.0, key), request, 1.0, 1.0)


def choose(*ranked: RankedPrefill, free: int = 10_000, parked: int = 4, margin: float = 1.0) -> LongChoice | None:
    return choose_long(sorted(ranked), free, parked, margin)


def chosen(choice: LongChoice | None) -> int:
    assert choice is not None
    return choice.ranked.request.key


def test_no_long_prefill_waits() -> None:
    assert choose() is None


def test_the_most_urgent_starts() -> None:
    assert chosen(choose(long(1, 2.0), long(2, 1.0))) == 2


def test_the_current_one_goes_on_within_the_margin() -> None:
    current = long(1, 2.0, current=True)
    assert chosen(choose(current, long(2, 1.1))) == 1
    assert chosen(choose(current, long(2, 0.9))) == 2
    assert chosen(choose(current, long(2, 1.9), margin=0.0)) == 2


def test_a_more_urgent_class_needs_no_margin() -> None:
    assert chosen(choose(long(1, 2.0, current=True), long(2, 1.9, aged=PriorityClass.HIGH))) == 2


def test_no_more_are_parked_than_allowed() -> None:
    current, urgent = long(1, 9.0, current=True), long(2, 0.0)
    assert chosen(choose(current, urgent, parked=0)) == 1
    assert chosen(choose(current, urgent, parked=1)) == 2
    assert chosen(choose(long(3, 5.0, started=True), urgent, parked=0)) == 3


def test_going_back_to_a_parked_one_needs_no_room() -> None:
    assert chosen(choose(long(1, 9.0, current=True), long(2, 0.0, started=True), parked=1, free=0)) == 2


def test_memory_of_started_ones_is_not_given_away() -> None:
    current = long(1, 9.0, 600, current=True)
    assert chosen(choose(current, long(2, 0.0, 400), free=1000)) == 2
    assert chosen(choose(current, long(2, 0.0, 401), free=1000)) == 1
    assert chosen(choose(current, long(2, 0.0, 401), long(3, 1.0, 50), free=1000)) == 3


def test_an_aged_one_that_waits_for_memory_is_not_overtaken() -> None:
    current = long(1, 9.0, 600, current=True)
    aged = long(2, 0.0, 401, aged=PriorityClass.NORMAL - 1)
    assert chosen(choose(current, aged, long(3, 1.0, 50), free=1000)) == 1


def test_alone_a_prompt_larger_than_the_memory_is_still_offered() -> None:
    choice = choose(long(1, 0.0, 5000), free=1000)
    assert choice is not None
    assert choice.ranked.request.key == 1
    assert not choice.fits
    assert chosen(choose(long(1, 0.0, 5000), long(2, 3.0, 900), free=1000)) == 2


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.floats(-5, 5), st.integers(1, 2000), st.booleans(), st.integers(0, 3)), min_size=1, max_size=12
    ),
    st.integers(0, 4000),
    st.integers(0, 3),
    st.floats(0, 2),
)
def test_a_start_leaves_room_for_all_that_are_started(
    longs: list[tuple[float, int, bool, int]], free: int, parked: int, margin: float
) -> None:
    ranked = [
        long(key, slack, tokens, started=started, aged=aged) for key, (slack, tokens, started, aged) in enumerate(longs)
    ]
    choice = choose_long(sorted(ranked), free, parked, margin)
    assert choice is not None
    started = [item.request.new_tokens for item in ranked if item.request.is_started]
    if not choice.ranked.request.is_started and started:
        assert len(started) <= parked
        assert choice.ranked.request.new_tokens + sum(started) <= free


@pytest.mark.parametrize("free", [0, 100])
def test_started_ones_can_always_go_on(free: int) -> None:
    choice = choose(long(1, 0.0, 700), long(2, 1.0, 500, started=True), free=free)
    assert chosen(choice) == 2
