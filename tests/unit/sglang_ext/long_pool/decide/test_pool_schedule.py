"""What a pool computes next: orders by hand, the price that a load makes, chunks that fit a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.prefill_orders import Urgency, UrgencyOrder, arrival, deadline, remaining_time, slack
from sglang_ext.long_pool.decide.chunk_length import ShortLoad
from sglang_ext.long_pool.decide.on_time_order import PendingPrefill
from sglang_ext.long_pool.decide.pool_schedule import (
    OrdinaryWork,
    PoolSchedule,
    PrefillOrder,
    fastest_s,
    min_work_s,
    tokens_within,
)
from sglang_ext.long_pool.decide.price_planner import Holder, Placement, PrefillSnapshot, PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost

COSTS = (SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)), SpCandidate(2, SpCost(0.1, 0.5e-3, 0.0, 0.0)))


NO_SHORTS = [0.0] * 3


def pending(key: int, tokens: int, arrival_s: float, slo_s: float = math.inf, **fields: Any) -> PendingPrefill:
    whole_s = fastest_s(COSTS, 0, tokens)
    work_s = min_work_s(COSTS, 0, tokens)
    one = PendingPrefill(
        *(key, tokens, 0, -1, (), arrival_s, arrival_s + slo_s, whole_s, whole_s, work_s, False),
    )
    return one._replace(**fields)


def starts(schedule: PoolSchedule, now_s: float, instances: int, *waiting: PendingPrefill) -> list[int]:
    """Keys in the order of the decision."""
    snapshot = PrefillSnapshot([0] * instances, [0.0] * instances, [10**6] * instances)
    return [one.key for one in schedule.turns(now_s, snapshot, waiting, 0.0)]


def schedule(order: PrefillOrder | None = None) -> PoolSchedule:
    planner = PricePlanner(PriceOptions(COSTS))
    return PoolSchedule(planner) if order is None else PoolSchedule(planner, order)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (UrgencyOrder(arrival), [0, 1, 2]),
        (UrgencyOrder(remaining_time), [2, 1, 0]),
        (UrgencyOrder(deadline), [1, 2, 0]),
        # (deadline - now - remaining) / total: (60 - 2 - 4.1) / 4.1, (5 - 2 - 2.1) / 2.1, (7.5 - 2 - 0.35) / 0.35
        (UrgencyOrder(slack), [1, 0, 2]),
        (None, [1, 2, 0]),
    ],
)
def test_orders_by_hand(order: PrefillOrder | None, expected: list[int]) -> None:
    waiting = (pending(0, 8000, 0.0, 60.0), pending(1, 4000, 1.0, 4.0), pending(2, 500, 1.5, 6.0))
    assert starts(schedule(order), 2.0, 8, *waiting) == expected


def test_without_deadlines_all_orders_but_srpt_are_that_of_arrival() -> None:
    waiting = (pending(0, 8000, 0.0), pending(1, 500, 1.0))
    for urgency in (None, arrival, slack, deadline, remaining_time):
        order = None if urgency is None else UrgencyOrder(urgency)
        assert starts(schedule(order), 2.0, 8, *waiting) == ([1, 0] if urgency is remaining_time else [0, 1])


def test_a_load_makes_sizes_smaller() -> None:
    calm, busy = schedule(), schedule()
    for number in range(600):
        busy.record_arrival(0.1 * number, 0.19)
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    waiting = [pending(0, 1000, 60.0)]
    assert len(calm.turns(60.0, snapshot, waiting, 0.0)[0].placement.group) == 2
    assert len(busy.turns(60.0, snapshot, waiting, 0.0)[0].placement.group) == 1


def test_more_wait_than_are_considered() -> None:
    one = PoolSchedule(PricePlanner(PriceOptions(COSTS, max_considered=2)), UrgencyOrder(arrival))
    waiting = [pending(key, 1000, 0.0) for key in range(5)]
    assert starts(one, 0.0, 8, *waiting) == [0, 1]


def test_those_that_are_not_considered_count_as_waiting() -> None:
    one = PoolSchedule(PricePlanner(PriceOptions(COSTS, max_considered=1)), UrgencyOrder(arrival))
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    waiting = [pending(key, 1000, 0.0) for key in range(8)]
    assert len(one.turns(0.0, snapshot, waiting[:1], 0.0)[0].placement.group) == 2
    assert len(one.turns(0.0, snapshot, waiting, 0.0)[0].placement.group) == 1


def test_the_price_counts_the_short_prefills_that_wait_for_the_end_of_a_chunk() -> None:
    """Eight arrive in a second, each waits for half of a chunk of a fifth of a second, and counts twelve times."""
    one, snapshot = schedule(), PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    one.turns(0.0, snapshot, [pending(0, 1000, 0.0)], 0.0, ShortLoad(8.0, 0.4, 0.05))
    assert one.price == pytest.approx(9.6)


def test_short_prefills_make_sizes_smaller() -> None:
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    waiting = [pending(0, 1000, 0.0)]
    few, many = (
        schedule().turns(0.0, snapshot, waiting, 0.0, ShortLoad(per_s, 0.4, 0.05 * per_s)) for per_s in (0.1, 40.0)
    )
    assert [len(turns[0].placement.group) for turns in (few, many)] == [2, 1]


def test_short_chunks_make_sizes_smaller_for_their_launches() -> None:
    """Both loads have the same price, and chunks of two are mostly launches where the objective is short."""
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    waiting = [pending(0, 1000, 0.0)]
    sizes = []
    for shorts in (ShortLoad(0.075, 4.0), ShortLoad(0.75, 0.4)):
        one = schedule()
        (turn,) = one.turns(0.0, snapshot, waiting, 0.0, shorts)
        assert one.price == pytest.approx(0.9)
        sizes.append(len(turn.placement.group))
    assert sizes == [2, 1]


def test_a_single_instance_meets_nobody_and_may_launch_in_no_time() -> None:
    one = schedule()
    one.record_meeting(0.5)
    tokens, compute_s = one.cut(Placement(0, 4000, (0,), 0.0, 4.0, 4.0), 0, ShortLoad(1.0, 4.0), None)
    assert (tokens, compute_s) == (512, pytest.approx(0.512)), "the least length of a chunk"


def test_who_has_begun_goes_on_with_busy_members_in_its_turn() -> None:
    shorts = ShortLoad(0.15, 0.4, 0.1)
    snapshot = PrefillSnapshot([0] * 3, [0.3, 0.3, 0.0], [10**6] * 3)
    begun = pending(0, 1000, 1.0, 9.0, holders=(Holder(0, 100), Holder(1, 100)), is_started=True)
    one = schedule(UrgencyOrder(deadline))
    (turn,) = one.turns(1.0, snapshot, [begun], 0.6, shorts)
    assert (turn.placement.group, turn.placement.start_s) == ((0, 1), 0.0)
    assert one.turns(1.0, snapshot, [begun], 0.6)[0].placement.start_s == 0.3
    # Nor does it begin in the middle of something else than ordinary work.
    assert (
        one.turns(1.0, snapshot, [begun], 0.6, shorts, OrdinaryWork([0.0, math.inf, 0.0], NO_SHORTS))[
            0
        ].placement.start_s
        == 0.3
    )
    # One that is before it and waits for these members is not passed by.
    before = pending(1, 5000, 1.0, 4.0, holders=(Holder(0, 1),))
    turns = {turn.key: turn.placement.start_s for turn in one.turns(1.0, snapshot, [begun, before], 0.6, shorts)}
    assert turns[1] > 0.0
    assert turns[0] > 0.0
    later = before._replace(deadline_s=20.0)
    turns = {turn.key: turn.placement.start_s for turn in one.turns(1.0, snapshot, [begun, later], 0.6, shorts)}
    assert turns[0] == 0.0


@pytest.mark.parametrize(
    ("shorts_s", "running_s", "slo_s", "waits"),
    [
        (0.3, 0.0, 9.0, True),  # the chunk of .25 s would come before .3 s of short prefills: half a second is allowed
        (0.2, 0.0, 9.0, False),
        (0.2, 0.1, 9.0, True),  # behind the batch that runs
        (0.0, 0.0, 9.0, False),
        (0.3, 0.0, 2.0, False),  # .25 s are left of it, and .5 s until its deadline
        (0.3, 0.0, math.inf, True),
    ],
)
def test_who_has_begun_lets_short_prefills_go_first_while_it_has_time(
    shorts_s: float, running_s: float, slo_s: float, waits: bool
) -> None:
    shorts = ShortLoad(0.2, 1.0, 0.1)
    snapshot = PrefillSnapshot([0] * 2, [0.5, 0.5], [10**6] * 2)
    begun = pending(0, 300, 0.0, slo_s, holders=(Holder(0, 100), Holder(1, 100)), is_started=True)
    work = OrdinaryWork([0.0, running_s], [0.0, shorts_s])
    turns = schedule(UrgencyOrder(deadline)).turns(1.5, snapshot, [begun], 1.0, shorts, work)
    assert [turn.placement.start_s for turn in turns] == ([] if waits else [0.0])


def test_who_has_begun_and_has_no_deadline_waits_for_short_prefills_for_a_minute() -> None:
    shorts = ShortLoad(0.2, 1.0, 0.1)
    snapshot = PrefillSnapshot([0] * 2, [0.5, 0.5], [10**6] * 2)
    begun = pending(0, 300, 0.0, holders=(Holder(0, 100), Holder(1, 100)), is_started=True)
    one, work = schedule(UrgencyOrder(deadline)), OrdinaryWork([0.0, 0.0], [0.4, 0.4])
    assert not one.turns(59.0, snapshot, [begun], 1.0, shorts, work)
    assert one.turns(60.0, snapshot, [begun], 1.0, shorts, work)


def test_who_begins_behind_kept_rows_does_not_wait_for_ordinary_work_either() -> None:
    shorts = ShortLoad(1.0, 0.4, 0.1)
    snapshot = PrefillSnapshot([0] * 3, [0.3, 3.0, 0.0], [10**6] * 3)
    follow_up = pending(0, 50, 1.0, 9.0, cached_tokens=4000, holders=(Holder(0, 2000), Holder(1, 2000)))
    one = schedule(UrgencyOrder(deadline))
    (turn,) = one.turns(1.0, snapshot, [follow_up], 3.3, shorts)
    assert (turn.placement.group, turn.placement.start_s) == ((0, 1), 0.0)
    # Also where none is idle.
    busy = snapshot._replace(queue_delays_s=[0.3, 3.0, 0.3])
    (turn,) = one.turns(1.0, busy, [follow_up], 3.6, shorts)
    assert (turn.placement.group, turn.placement.start_s) == ((0, 1), 0.0)
    assert (
        one.turns(1.0, snapshot, [follow_up], 3.3, shorts, OrdinaryWork([0.0, math.inf, 0.0], NO_SHORTS))[
            0
        ].placement.start_s
        == 3.0
    )
    # A batch runs at one of them, and at the other none: that would be idle until it has ended.
    alone = pending(0, 50, 1.0, 9.0, cached_tokens=4000, holders=(Holder(0, 2000), Holder(1, 2000)))
    soon = snapshot._replace(queue_delays_s=[0.0, 0.2, 0.0])
    one.price = 9.0
    assert (
        one.turns(1.0, soon, [alone], 0.2, shorts, OrdinaryWork([0.0, 0.1, 0.0], NO_SHORTS))[0].placement.start_s == 0.0
    )
    assert (
        one.turns(1.0, soon, [alone], 0.2, shorts, OrdinaryWork([0.0, 0.2, 0.0], NO_SHORTS))[0].placement.start_s == 0.2
    )


@pytest.mark.parametrize(("tokens", "goes_on"), [(50, True), (500, False)])
def test_who_ends_before_an_earlier_one_can_begin_does_not_wait_for_it(tokens: int, goes_on: bool) -> None:
    shorts = ShortLoad(1.0, 0.4, 0.1)
    snapshot = PrefillSnapshot([0] * 3, [0.3, 3.0, 0.3], [10**6] * 3)
    follow_up = pending(0, tokens, 1.0, 9.0, cached_tokens=4000, holders=(Holder(0, 2000), Holder(1, 2000)))
    before = pending(1, 5000, 1.0, 4.0)  # no instance is idle
    turns = schedule(UrgencyOrder(deadline)).turns(1.0, snapshot, [follow_up, before], 3.6, shorts)
    assert [turn.key for turn in turns if turn.placement.start_s == 0.0] == ([0] if goes_on else [])


@given(st.integers(0, 5000), st.integers(1, 5000), st.floats(0.0, 10.0))
def test_the_longest_chunk_that_fits(cached: int, new: int, budget_s: float) -> None:
    cost = SpCost(0.1, 1e-3, 2e-7, 1e-7)
    tokens = tokens_within(cost, cached, new, budget_s)
    assert 1 <= tokens <= new
    assert tokens == 1 or cost.predict_s(cached, tokens) <= budget_s
    assert tokens == new or cost.predict_s(cached, tokens + 1) > budget_s


@pytest.mark.parametrize("urgency", [arrival, slack, deadline, remaining_time])
def test_in_orders_that_put_none_back_a_deadline_makes_no_group_larger(urgency: Urgency) -> None:
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    waiting = [pending(key, 1000, 0.0, 1.01) for key in range(8)]
    sizes = [len(one.placement.group) for one in schedule(UrgencyOrder(urgency)).turns(0.9, snapshot, waiting, 0.0)]
    assert sizes[0] == 1
