"""The coordinator against instances that answer late, fail and vanish: every request ends, nothing is held twice."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix, PromptBlocks, PromptText, within
from sglang_ext.long_pool.decide.orders import (
    Bind,
    Borrow,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    DropKept,
    Finish,
    GiveUp,
    Keep,
    MemberReport,
    Offer,
    Order,
    PromptTicket,
    RollBack,
    RunChunk,
)
from sglang_ext.long_pool.decide.pool_members import PoolMembers
from sglang_ext.long_pool.decide.pool_requests import AnnouncedPrompt
from sglang_ext.long_pool.decide.pool_schedule import PlacedPrefill, PoolSchedule
from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot, PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.decide.sharding import (
    Interleaving,
    KvSegment,
    Positions,
    after_moves,
    compacted,
    count_tokens,
    positions_of,
    tail,
)
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost

IDLE = MemberReport(0.0, 100_000)


def schedule(sizes: tuple[int, ...] = (1, 2, 4), min_chunk_tokens: int = 64, start_s: float = 0.001) -> PoolSchedule:
    """Two instances take half the time and a little more."""
    candidates = tuple(
        SpCandidate(size, SpCost(start_s * size, 1e-3 / size, 2e-7 / size, 1e-7 / size)) for size in sizes
    )
    return PoolSchedule(PricePlanner(PriceOptions(candidates, min_chunk_tokens)))


def coordinator(instances: int = 4, **settings: Any) -> Coordinator:
    one = Coordinator(schedule(), CoordinationSettings(layers=2, **settings))
    for instance in range(instances):
        one.join(instance, 0, IDLE, 0.0)
    return one


def offer(request: int = 1, owner: int = 0, tokens: int = 4000, cached: int = 0, arrival_s: float = 0.0) -> Offer:
    return Offer(request, owner, tokens, cached, arrival_s, math.inf)


def chunk_of(orders: list[Order]) -> RunChunk:
    (order,) = [one for one in orders if isinstance(one, RunChunk)]
    return order


def test_a_long_request_on_an_idle_pool_takes_everybody() -> None:
    one = coordinator()
    order = chunk_of(one.offer(offer(), 0.0))
    assert sorted(order.layout.group) == [0, 1, 2, 3]
    assert order.layout.last_token_owner == 0
    for instance in order.layout.group[:-1]:
        assert one.done(instance, order.sequence, 1.0) == []
    (collect,) = one.done(order.layout.group[-1], order.sequence, 1.0)
    assert isinstance(collect, Collect)
    assert collect.owner == 0
    for instance in collect.members[:-1]:
        assert one.done(instance, collect.sequence, 2.0) == []
    assert one.done(collect.members[-1], collect.sequence, 2.0) == [Drop(1, collect.members)]
    assert one.requests == ()


def test_what_the_owner_has_is_not_collected_again() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    one.done(0, order.sequence, 1.0)
    (collect,) = one.done(1, order.sequence, 1.0)
    assert isinstance(collect, Collect)
    one.done(0, collect.sequence, 2.0)
    assert one.lose(1, 2.1)[0] == Drop(1, (0,))
    assert one.requests == ()


def test_a_request_that_is_best_alone_goes_back() -> None:
    one = coordinator()
    assert one.offer(offer(tokens=2), 0.0) == [Drop(1, (0,)), Decline(1, 0, DeclineReason.ALONE_IS_BEST, 0.0)]
    assert one.requests == ()


def test_strangers_are_declined() -> None:
    assert coordinator().offer(offer(owner=9), 0.0) == [Decline(1, 9, DeclineReason.NOT_A_MEMBER, 0.0)]


@pytest.mark.parametrize("bad", [offer(tokens=10, cached=10), offer(tokens=0), offer(cached=-1)])
def test_offers_that_make_no_sense(bad: Offer) -> None:
    with pytest.raises(ValueError, match="cached tokens"):
        coordinator().offer(bad, 0.0)


def test_what_a_lost_instance_held_is_computed_again_and_nothing_else() -> None:
    one = Coordinator(schedule((1, 2), 64), CoordinationSettings(layers=2))
    for instance in range(3):
        one.join(instance, 0, IDLE, 0.0)
    order = chunk_of(one.offer(offer(), 0.0))
    other = next(instance for instance in order.layout.group if instance != 0)
    for instance in order.layout.group:
        orders = one.done(instance, order.sequence, 1.0)
    (collect,) = orders
    assert isinstance(collect, Collect)
    # It goes while its part is on the way.
    assert one.lose(other, 1.1) == [GiveUp(collect.sequence, tuple(sorted({*order.layout.group, 0} - {other})))]
    repair = chunk_of(one.failed(0, collect.sequence, 1.3))
    lost = {p for part in order.layout.new[order.layout.group.index(other)] for p in part}
    assert {p for positions in repair.layout.new for part in positions for p in part} == lost


def test_a_request_that_keeps_failing_goes_home() -> None:
    one = coordinator(2, max_attempts=2)
    orders = one.offer(offer(), 0.0)
    for _ in range(2):
        order = chunk_of(orders)
        one.done(0, order.sequence, 1.0)
        orders = one.failed(1, order.sequence, 1.0)
        assert RollBack(order.sequence, 1, (0,)) in orders
    assert Decline(1, 0, DeclineReason.FAILURES, 0.0) in orders
    assert one.requests == ()


def test_only_failures_in_a_row_send_a_request_home() -> None:
    one = coordinator(2, chunk_s=0.2, max_attempts=3)
    orders = one.offer(offer(), 0.0)
    failures = chunks = 0
    while not any(isinstance(order, Collect | Decline) for order in orders):
        order = chunk_of(orders)
        if chunks % 2 and failures < chunks:
            failures += 1
            one.done(0, order.sequence, 1.0)
            orders = one.failed(1, order.sequence, 1.0)
        else:
            chunks += 1
            orders = one.done_together((0, 1), order.sequence, 1.0)
    assert failures > 3
    assert any(isinstance(order, Collect) for order in orders)


def test_answers_that_come_late_or_twice_change_nothing() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    one.done(0, order.sequence, 1.0)
    assert one.done(0, order.sequence, 1.0) == []
    assert one.failed(0, order.sequence, 1.0) == []
    assert one.done(1, 999, 1.0) == []
    assert one.done(7, order.sequence, 1.0) == []


def test_cancelled_while_it_runs() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    assert one.cancel(1, 0.5) == []
    one.done(0, order.sequence, 1.0)
    assert one.done(1, order.sequence, 1.0) == [Drop(1, (0, 1))]
    assert one.cancel(1, 2.0) == []


def test_what_the_owner_has_computed_is_not_thrown_away() -> None:
    """The second instance was busy when the first chunk began, and is lost before the second."""
    one = coordinator(2)
    one.report(1, MemberReport(3.0, 100_000), 0.0)
    order = chunk_of(one.offer(offer(tokens=6000), 0.0))
    assert order.layout.group == (0,)
    computed = sum(len(part) for part in order.layout.new[0])
    assert computed < 6000
    one.lose(1, 1.0)
    (collect,) = one.done(0, order.sequence, 2.0)
    assert isinstance(collect, Collect)
    assert (collect.members, collect.moves) == ((0,), ())
    assert one.done(0, collect.sequence, 3.0) == [Drop(1, (0,))]


def test_an_instance_that_says_nothing_works_on_what_it_has() -> None:
    """The report was of the beginning of a long iteration, which has ended when the prompt comes."""
    one = coordinator(2)
    one.report(1, MemberReport(3.0, 100_000), 10.0)
    order = chunk_of(one.offer(offer(tokens=6000), 13.0))
    assert order.layout.group == (0, 1)


def test_the_others_need_not_wait_for_who_has_failed() -> None:
    one = coordinator(4)
    order = chunk_of(one.offer(offer(), 0.0))
    one.done(0, order.sequence, 1.0)
    assert one.failed(2, order.sequence, 1.1) == [GiveUp(order.sequence, (1, 3))]
    assert one.failed(1, order.sequence, 1.2) == [GiveUp(order.sequence, (3,))]
    orders = one.failed(3, order.sequence, 1.3)
    assert orders[0] == RollBack(order.sequence, 1, (0,))
    assert sorted(chunk_of(orders).layout.group) == [0, 1, 2, 3]


def test_a_member_whose_pool_was_full_gets_no_more_than_it_has_room_for() -> None:
    one = coordinator(4)
    order = chunk_of(one.offer(offer(), 0.0))
    assert {*order.layout.group} == {0, 1, 2, 3}
    for instance, free_tokens in ((0, 100_000), (1, 100_000), (2, 100)):
        one.failed(instance, order.sequence, 1.0, free_kv_tokens=free_tokens)
    again = chunk_of(one.failed(3, order.sequence, 1.0, free_kv_tokens=100_000))
    assert 2 not in again.layout.group


def test_a_failure_concerns_its_own_group() -> None:
    one = coordinator(4)
    one.report(2, MemberReport(50.0, 100_000), 0.0)
    one.report(3, MemberReport(50.0, 100_000), 0.0)
    first = chunk_of(one.offer(offer(1), 0.0))
    one.report(2, IDLE, 0.1)
    one.report(3, IDLE, 0.1)
    second = chunk_of(one.offer(offer(2, owner=2), 0.1))
    assert {*first.layout.group}.isdisjoint(second.layout.group)
    assert one.lose(1, 0.2) == [GiveUp(first.sequence, (0,))]
    one.join(4, 0, IDLE, 0.3)
    one.done(2, second.sequence, 1.0)
    assert {type(order) for order in one.done(3, second.sequence, 1.0)} <= {RunChunk, Collect}


def test_an_instance_that_others_cannot_reach_is_left_out_for_a_while() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    assert one.failed(0, order.sequence, 5.0, unreachable=1) == [GiveUp(order.sequence, (1,))]
    # It reports the same of the other one, later.
    assert chunk_of(one.failed(1, order.sequence, 5.0, unreachable=0)).layout.group == (0,)
    assert not one.is_ready(1, 5.9)
    assert one.is_ready(0, 5.9)
    assert one.is_ready(1, 6.1)


def test_it_is_left_out_the_longer_the_more_often() -> None:
    members, now_s = PoolMembers(0.05), 0.0
    for instance in (0, 1):
        members.add(instance, 0, IDLE)
    for shunned_s in (1.0, 2.0, 4.0, 8.0, 10.0, 10.0):
        members[1].record_unreachable(now_s)
        assert members[1].shunned_until_s == now_s + shunned_s
        now_s += 100
    members.record_reached((1,))
    members[1].record_unreachable(now_s)
    assert members[1].shunned_until_s == now_s + 10.0, "alone it has reached no other one"
    members.record_reached((0, 1))
    members[1].record_unreachable(now_s)
    assert members[1].shunned_until_s == now_s + 1.0


def test_who_is_shunned_is_in_no_new_group() -> None:
    one = coordinator(3)
    one.shun(1, 2.0)
    assert sorted(chunk_of(one.offer(offer(), 0.0)).layout.group) == [0, 2]


def test_how_long_others_wait_for_an_instance() -> None:
    one = coordinator(3)
    assert one.busy_s(0) is None
    one.shun(2, 100.0)
    order = chunk_of(one.offer(offer(), 0.0))
    busy_s = one.busy_s(1)
    assert busy_s is not None
    assert 0 < busy_s < 10
    assert one.busy_s(2) is None
    one.report(2, MemberReport(50.0, 100_000), 0.5)
    one.report(0, MemberReport(50.0, 100_000), 0.5)
    one.done_together((0, 1), order.sequence, 1.0)
    assert one.busy_s(1) is not None, "it holds KV of another one's prompt"


def test_other_costs_from_now_on() -> None:
    one = coordinator(2)
    one.use_planner(PricePlanner(PriceOptions((SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)),), 64)))
    assert one.offer(offer(), 0.0)[-1] == Decline(1, 0, DeclineReason.ALONE_IS_BEST, 0.0)


# ---- who need not wait for whom ----


def test_a_busy_owner_is_not_waited_for() -> None:
    one = coordinator(4)
    one.report(0, MemberReport(10.0, 100_000), 0.0)
    order = chunk_of(one.offer(offer(), 0.0))
    assert 0 not in order.layout.group
    orders = one.done_together(order.layout.group, order.sequence, 1.0)
    (collect,) = [item for item in orders if isinstance(item, Collect)]
    assert (collect.owner, collect.members) == (0, (0, *sorted(order.layout.group)))


def test_what_the_owner_has_cached_keeps_it_in_the_group() -> None:
    order = chunk_of(coordinator(4).offer(offer(cached=500), 0.0))
    assert order.layout.group[0] == 0


def test_short_ordinary_work_keeps_no_chunk_waiting() -> None:
    one = coordinator(2, short_backlog_s=0.1)
    for instance in (0, 1):
        one.report(instance, MemberReport(0.1, 100_000), 0.0)
    assert sorted(chunk_of(one.offer(offer(), 0.0)).layout.group) == [0, 1]


@pytest.mark.parametrize("short_per_s", [2.0, 0.0])
def test_a_prompt_that_has_begun_goes_on_between_batches_of_its_members(short_per_s: float) -> None:
    """Where short prefills arrive: there ordinary work may be followed by more of it all the time."""
    one = coordinator(2)
    slo_s = 0.8 if short_per_s else None
    for instance in (0, 1):
        one.report(instance, MemberReport(0.0, 100_000, None, short_per_s, slo_s), 0.0)
    first = chunk_of(one.offer(offer(tokens=4000), 0.0))
    if not short_per_s:
        assert sum(map(count_tokens, first.layout.new)) == 4000
        return
    for instance in (0, 1):
        one.report(instance, MemberReport(0.2, 100_000, None, short_per_s, slo_s), 0.4)
    second = chunk_of(one.done_together((0, 1), first.sequence, 0.4))
    assert second.layout.group == first.layout.group
    # A new prompt waits for members that are free.
    one.offer(offer(2, tokens=4000, arrival_s=0.4), 0.4)
    assert not one.planned(2)


def test_ordinary_work_without_end_is_not_waited_for() -> None:
    one = coordinator(2, backlog_timeout_s=5.0)
    orders = []
    for tenths in range(60):
        now_s = tenths / 10
        for instance in (0, 1):
            one.report(instance, MemberReport(2.0, 100_000), now_s)
        orders = one.offer(offer(), now_s) if not tenths else one.plan(now_s)
        if orders:
            break
    assert now_s == pytest.approx(5.1)
    assert isinstance(orders[0], RunChunk)


def test_a_collection_is_not_put_off_by_new_chunks() -> None:
    """The owner computes for another prompt; until it is free, the holder of the first gets nothing new."""
    one = coordinator(2)
    one.report(0, MemberReport(100.0, 100_000), 0.0)
    first = chunk_of(one.offer(offer(1, owner=0), 0.0))
    assert first.layout.group == (1,)
    one.report(0, IDLE, 0.1)
    second = chunk_of(one.offer(offer(2, owner=1, tokens=9000), 0.1))
    assert second.layout.group == (0,)
    assert one.done(1, first.sequence, 4.0) == []
    assert one.offer(offer(3, owner=1, tokens=3000), 4.1) == []
    orders = one.done(0, second.sequence, 9.0)
    assert isinstance(orders[0], Collect)
    assert orders[0].request == 1


def test_a_prompt_waits_for_room_while_others_make_it() -> None:
    one = coordinator(2, room_timeout_s=3.0)
    order = chunk_of(one.offer(offer(1, tokens=4000), 0.0))
    for instance in (0, 1):
        one.report(instance, MemberReport(0.0, 1000), 0.0)
    other = offer(2, owner=1, tokens=4000)
    assert one.offer(other, 0.1) == []
    one.done(0, order.sequence, 1.0)
    assert one.plan(1.1) == []
    assert one.waits_for_room
    for instance in (0, 1):
        one.report(instance, IDLE, 2.0)
    orders = one.done(1, order.sequence, 2.0)
    assert {item.request for item in orders if isinstance(item, RunChunk | Collect)} >= {1}


def test_others_are_computed_while_a_collection_waits() -> None:
    one = coordinator(3)
    one.report(0, MemberReport(100.0, 100_000), 0.0)
    first = chunk_of(one.offer(offer(1, owner=0), 0.0))
    assert first.layout.group == (1, 2)
    one.report(0, IDLE, 0.1)
    second = chunk_of(one.offer(offer(2, owner=0, tokens=9000), 0.1))
    assert second.layout.group == (0,)
    assert one.done_together((1, 2), first.sequence, 1.0) == []
    one.join(3, 0, IDLE, 1.1)
    one.report(1, MemberReport(10.0, 100_000), 1.1)
    assert chunk_of(one.offer(offer(3, owner=1, tokens=500), 1.2)).layout.group == (3,)


def test_what_a_chunk_takes_is_not_promised_twice_and_free_again_when_it_is_dropped() -> None:
    one = coordinator(2)
    for instance in (0, 1):
        one.report(instance, MemberReport(0.0, 5000), 0.0)
    order = chunk_of(one.offer(offer(1, tokens=4000), 0.0))
    one.done_together((0, 1), order.sequence, 1.0)
    assert one.offer(offer(2, owner=1, tokens=4000), 1.1) == []
    (sequence,) = [order.sequence + 1]
    orders = one.done_together((0, 1), sequence, 1.2)
    assert orders[0] == Drop(1, (0, 1))
    assert chunk_of(orders).request == 2


def test_what_holds_room_gives_it_back_before_a_more_urgent_prompt_goes_home() -> None:
    one = coordinator(2, chunk_s=0.5)
    order = chunk_of(one.offer(offer(1, tokens=4000), 0.0))
    for instance in (0, 1):
        one.report(instance, MemberReport(0.0, 0), 0.2)
    assert one.offer(offer(2, owner=1, tokens=3000)._replace(deadline_s=60.0), 0.3) == []
    orders = one.done_together((0, 1), order.sequence, 0.5)
    assert [type(item) for item in orders] == [Collect]
    assert {item.request for item in orders if isinstance(item, Collect)} == {1}


def test_a_prompt_that_fits_no_instance_alone_waits_for_room_as_long_as_any_may_come() -> None:
    one = coordinator(2, room_timeout_s=3.0)
    one.report(0, MemberReport(50.0, 30_000), 0.0)
    one.report(1, MemberReport(0.0, 30_000), 0.0)
    assert one.offer(offer(1, tokens=150_000), 0.0) == []
    assert one.offer(offer(2, tokens=80_000), 0.0) == []
    assert one.plan(2.9) == []
    assert one.plan(3.1)[-1] == Decline(2, 0, DeclineReason.NO_PLAN, 0.0)
    assert one.requests == (1,)


def test_a_prompt_that_no_group_can_hold_goes_home() -> None:
    one = coordinator(2)
    orders = one.offer(offer(tokens=300_000), 0.0)
    assert orders[-1] == Decline(1, 0, DeclineReason.NO_PLAN, 0.0)


def test_chunks_that_take_too_long_are_cut() -> None:
    one = coordinator(2, chunk_s=0.5)
    order = chunk_of(one.offer(offer(tokens=4000), 0.0))
    tokens = sum(len(part) for positions in order.layout.new for part in positions)
    assert tokens < 4000
    cost = SpCost(0.002, 5e-4, 1e-7, 5e-8)
    whole_s = cost.predict_s(0, 4000)
    assert whole_s == pytest.approx(2.802)
    assert cost.predict_s(0, tokens) <= whole_s / 6 < cost.predict_s(0, tokens + 2), "six equal parts"


def test_chunks_are_short_while_short_prefills_arrive() -> None:
    one = coordinator(2)
    busy = MemberReport(0.0, 100_000, None, 2.0, 0.8)
    for instance in (0, 1):
        one.report(instance, busy, 0.0)
    first = chunk_of(one.offer(offer(tokens=4000), 0.0))
    # Half of the objective, unless a tenth of it were fixed cost.
    assert 0 < count_tokens(first.layout.new[0]) * 5e-4 * 2 < 0.4
    for instance in (0, 1):
        one.report(instance, IDLE, 70.0)  # a minute without any
    one.done(0, first.sequence, 70.0)
    second = chunk_of(one.done(1, first.sequence, 70.0))
    computed = sum(count_tokens(part) for order in (first, second) for part in order.layout.new)
    assert computed == 4000


def test_chunks_are_longer_where_members_meet_long() -> None:
    """Two chunks, of which each has taken 0.3 s besides its computing."""
    tokens = []
    for meeting_s in (0.0, 0.3):
        one = coordinator(2)
        for instance in (0, 1):
            one.report(instance, MemberReport(0.0, 100_000, None, 10.0, 2.0), 0.0)
        now_s = 0.0
        order = chunk_of(one.offer(offer(tokens=20_000), now_s))
        for _ in range(2):
            parts = sum(map(count_tokens, order.layout.new))
            cached = sum(map(count_tokens, order.layout.history))
            now_s += SpCost(0.002, 5e-4, 1e-7, 5e-8).predict_s(cached, parts) + meeting_s
            order = chunk_of(one.done_together((0, 1), order.sequence, now_s))
        tokens.append(sum(map(count_tokens, order.layout.new)))
    assert tokens[1] > 2 * tokens[0]


def test_a_chunk_that_takes_longer_than_predicted_is_no_meeting() -> None:
    """Two chunks, each of which has taken 3 s from when the last member had come, where 0.1 s were predicted."""
    tokens = []
    for took_s in (None, 3.0):
        one = coordinator(2)
        for instance in (0, 1):
            one.report(instance, MemberReport(0.0, 100_000, None, 10.0, 2.0), 0.0)
        order = chunk_of(one.offer(offer(tokens=20_000), 0.0))
        for now_s in (3.0, 6.0):
            one.done(0, order.sequence, now_s, took_s=took_s)
            order = chunk_of(one.done(1, order.sequence, now_s, took_s=took_s and took_s + 0.5))
        tokens.append(sum(map(count_tokens, order.layout.new)))
    assert tokens[0] > 2 * tokens[1], "without the members' word it looks as if they had met long"


def test_a_prompt_that_is_best_alone_joins_its_owners_batches_however_long_it_is() -> None:
    one = coordinator(1)
    one.report(0, MemberReport(0.0, 100_000, None, 2.0, 0.8), 0.0)
    assert one.offer(offer(tokens=4000), 0.0)[-1] == Decline(1, 0, DeclineReason.ALONE_IS_BEST, 0.0)


@pytest.mark.parametrize(
    ("owner_delay_s", "short_per_s", "joins"),
    [(0.5, 2.0, True), (5.0, 2.0, True), (6.0, 2.0, False), (0.5, 0.0, False)],
)
def test_a_prompt_for_one_instance_joins_its_owners_batches_where_that_is_free_soon(
    owner_delay_s: float, short_per_s: float, joins: bool
) -> None:
    one_instance = schedule((1,))
    one = Coordinator(one_instance, CoordinationSettings(layers=2))
    for instance, backlog_s in ((0, owner_delay_s), (1, 0.0)):
        one.join(instance, 0, MemberReport(backlog_s, 100_000, None), 0.0)
        one.report(instance, MemberReport(backlog_s, 100_000, None, short_per_s, 0.8), 0.0)
    (cost,) = (candidate.cost for candidate in one_instance.planner.options.candidates)
    assert 5.0 < cost.predict_s(0, 4000) < 6.0
    orders = one.offer(offer(tokens=4000), 0.0)
    if joins:
        assert orders[-1] == Decline(1, 0, DeclineReason.ALONE_IS_BEST, 0.0)
        assert one.requests == ()
    else:
        assert chunk_of(orders).layout.group == (1,)


def test_a_prompt_waits_for_the_first_member() -> None:
    one = coordinator(0)
    assert one.announce(ticket(), 0.0) == []
    assert one.plan(100.0) == []
    assert one.join(0, 0, IDLE, 101.0) == [Bind(-1, 0, (0,))]


# ---- prompts that no instance has ----


def parts_of(order: RunChunk) -> dict[int, int]:
    return dict(zip(order.layout.group, map(count_tokens, order.layout.new), strict=True))


@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("interleaving", list(Interleaving))
@pytest.mark.parametrize("cached", [0, 7])
def test_no_member_gets_more_of_a_chunk_than_it_has_memory_for(
    page_tokens: int, interleaving: Interleaving, cached: int
) -> None:
    one = Coordinator(schedule(), CoordinationSettings(layers=2, page_tokens=page_tokens, interleaving=interleaving))
    for instance, bound in enumerate((None, 480, 700, None)):
        one.join(instance, 0, MemberReport(0.0, 100_000, bound), 0.0)
    orders, now_s, computed = one.offer(offer(tokens=4321, cached=cached), 0.0), 0.0, cached
    while not isinstance(orders[0], Collect):
        order = chunk_of(orders)
        parts = parts_of(order)
        assert max(parts.values()) <= 480
        computed += sum(parts.values())
        now_s += 1.0
        for instance in order.layout.group:
            orders = one.done(instance, order.sequence, now_s)
    assert computed == 4321
    assert now_s >= 3.0


def test_a_member_without_memory_for_its_part_gets_half_as_much() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    assert parts_of(order) == {0: 2000, 1: 2000}
    one.out_of_memory(1, order.sequence)
    one.failed(1, order.sequence, 1.0)
    again = chunk_of(one.done(0, order.sequence, 1.0))
    assert max(parts_of(again).values()) <= 1000
    one.report(1, IDLE, 1.1)
    one.out_of_memory(1, order.sequence)  # late: it says nothing of the step that runs
    for instance in (0, 1):
        orders = one.done(instance, again.sequence, 2.0)
    assert 900 <= max(parts_of(chunk_of(orders)).values()) <= 1000


def test_a_prompt_that_is_best_alone_has_no_chunks() -> None:
    one = coordinator(1)
    one.join(0, 0, MemberReport(0.0, 100_000, 64), 0.0)
    assert one.offer(offer(), 0.0)[-1] == Decline(1, 0, DeclineReason.ALONE_IS_BEST, 0.0)


def ticket(
    number: int = -1, tokens: int = 4000, arrival_s: float = 0.0, deadline_s: float | None = math.inf
) -> PromptTicket:
    return PromptTicket(number, tokens, 0, arrival_s, deadline_s)


def without_times(orders: Sequence[Order]) -> list[Order]:
    """The orders, with no time of a first chunk."""
    return [order._replace(chunk_s=0.0) if isinstance(order, Bind) else order for order in orders]


def test_an_announced_prompt_is_given_to_an_instance_in_its_turn() -> None:
    one = coordinator(2)
    (bind,) = one.announce(ticket(), 0.0)
    assert bind._replace(chunk_s=0.0) == Bind(-1, 0, (0, 1))
    # While it is on its way, its group is kept for it.
    assert one.announce(ticket(-2, arrival_s=0.1), 0.1) == []
    order = chunk_of(one.claim(-1, offer(1, tokens=4010), 0.2))
    assert order.layout.group == (0, 1)
    assert sum(len(part) for positions in order.layout.new for part in positions) == 4010
    assert one.tickets == (-2,)
    one.done_together((0, 1), order.sequence, 3.0)
    assert one.tickets == (-2,)


def test_a_turn_brings_the_time_of_the_first_chunk() -> None:
    one = coordinator(2)
    (bind,) = one.announce(ticket(), 0.0)
    assert isinstance(bind, Bind)
    assert bind.chunk_s == pytest.approx(2.802)
    alone = coordinator(1)
    assert alone.announce(ticket(), 0.0) == [Bind(-1, 0, (0,), 0.0)], "its own batches compute it"
    cut = coordinator(2, chunk_s=0.5)
    (bind,) = cut.announce(ticket(), 0.0)
    assert isinstance(bind, Bind)
    assert 0.0 < bind.chunk_s <= 0.5


def test_a_claim_has_the_arrival_and_the_deadline_of_its_ticket() -> None:
    one = coordinator(1)
    first = one.offer(offer(1, tokens=9000), 0.0)
    assert isinstance(first[-1], Decline)
    early, late = ticket(-1, 3000, 0.1, 60.0), ticket(-2, 3000, 0.2, 30.0)
    assert one.announce(early, 0.1) == one.announce(late, 0.2) == []
    one.report(0, IDLE, 20.0)
    assert one.plan(20.0) == [Bind(-2, 0, (0,))]


def test_without_a_clients_deadline_the_objective_grows_with_the_prompt() -> None:
    one = coordinator(1, ttft_slo_s=1.0, slo_stretch=2.0)
    assert isinstance(one.offer(offer(1, tokens=9000), 0.0)[-1], Decline)
    assert one.announce(ticket(-1, 3000, 0.1, None), 0.1) == []
    assert one.announce(ticket(-2, 300, 0.2, None), 0.2) == []
    # That of the long one is 2 * 3.9 s, the short one's 1 s: in time for both it is the order of these deadlines.
    assert one.plan(0.3) == []
    one.report(0, IDLE, 0.4)
    assert one.plan(0.4) == [Bind(-2, 0, (0,))]


def test_the_objective_follows_the_costs() -> None:
    one = coordinator(1, slo_stretch=2.0)
    assert isinstance(one.offer(offer(1, tokens=9000), 0.0)[-1], Decline)
    assert one.announce(ticket(-1, 3000, 0.1, None), 0.1) == one.announce(ticket(-2, 2000, 0.2, 5.0), 0.2) == []
    one.use_planner(PricePlanner(PriceOptions((SpCandidate(1, SpCost(0.0, 1e-4, 0.0, 0.0)),))))
    one.report(0, IDLE, 0.4)
    assert one.plan(0.4) == [Bind(-1, 0, (0,))]


def test_a_claim_without_a_deadline_keeps_its_instances_own() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    assert one.announce(ticket(-1), 0.1) == one.announce(ticket(-2, 4000, 0.2, 60.0), 0.2) == []
    assert one.claim(-1, offer(2)._replace(deadline_s=50.0), 0.3) == []
    (collect,) = one.done_together((0, 1), order.sequence, 3.0)
    assert isinstance(collect, Collect)
    assert chunk_of(one.done_together((0, 1), collect.sequence, 3.0)).request == 2


def test_a_prompt_is_brought_to_an_instance_while_all_compute() -> None:
    # Its way takes a while: whoever is free first would wait for it.
    one = coordinator(2)
    order = chunk_of(one.offer(offer()._replace(is_streamed=True), 0.0))
    ends_s = 0.002 + 4000 / 2 * 1e-3 + 1e-7 / 2 * 4000**2
    assert one.announce(ticket(-1), 0.1) == one.announce(ticket(-2, arrival_s=0.1), 0.1) == []
    assert one.plan(ends_s - 1.1) == []
    assert one.plan(ends_s - 0.9) == [Bind(-1, 0, (0,))]
    assert one.plan(ends_s - 0.8) == [], "one is on its way"
    assert one.claim(-1, offer(2)._replace(is_streamed=True), ends_s - 0.7) == []
    assert one.plan(ends_s - 0.6) == [], "one is there"
    assert chunk_of(one.done_together((0, 1), order.sequence, ends_s)).request == 2


def test_a_prompt_whose_instance_never_offers_it_is_forgotten() -> None:
    one = coordinator(2, bind_timeout_s=3.0)
    assert without_times(one.announce(ticket(), 0.0)) == [Bind(-1, 0, (0, 1))]
    assert one.plan(2.9) == []
    assert one.tickets == (-1,)
    one.plan(3.1)
    assert one.tickets == ()
    # It comes late, and is an offer as any other.
    assert isinstance(one.claim(-1, offer(), 3.2)[0], RunChunk)


def test_a_withdrawn_prompt_makes_room_for_the_next() -> None:
    one = coordinator(2)
    assert without_times(one.announce(ticket(-1), 0.0)) == [Bind(-1, 0, (0, 1))]
    assert one.announce(ticket(-2, arrival_s=0.1), 0.1) == []
    assert without_times(one.withdraw(-1, 0.2)) == [Bind(-2, 0, (0, 1))]
    assert one.withdraw(-1, 0.3) == []


def test_a_prompt_is_forgotten_with_the_instance_that_it_was_given_to() -> None:
    one = coordinator(2)
    assert without_times(one.announce(ticket(), 0.0)) == [Bind(-1, 0, (0, 1))]
    one.lose(0, 0.1)
    assert one.tickets == ()


def test_an_announced_prompt_that_no_group_can_hold_is_given_to_the_instance_with_most_room() -> None:
    one = coordinator(2)
    one.report(1, MemberReport(0.0, 200_000), 0.0)
    assert one.announce(ticket(tokens=900_000), 0.0) == [Bind(-1, 1, (1,))]
    assert one.claim(-1, offer(1, owner=1, tokens=900_000), 0.1)[-1] == Decline(1, 1, DeclineReason.NO_PLAN, 0.0)


@pytest.mark.parametrize("bad", [ticket(tokens=0), ticket()._replace(cached_tokens=4000)])
def test_tickets_that_make_no_sense(bad: PromptTicket) -> None:
    one = coordinator()
    with pytest.raises(ValueError, match="ticket -1"):
        one.announce(bad, 0.0)
    one.announce(ticket(), 0.0)
    with pytest.raises(ValueError, match="ticket -1 is announced twice"):
        one.announce(ticket(), 0.0)


def test_what_must_come_to_its_owner_is_not_computed_before_it_fits_there() -> None:
    one = coordinator(2)
    for instance in (0, 1):
        one.report(instance, MemberReport(1.0, 30_000), 0.0)
    assert one.offer(offer(1, tokens=38_000), 0.0) == []
    for instance in (0, 1):
        one.report(instance, MemberReport(0.0, 40_000), 1.0)
    order = chunk_of(one.plan(1.0))
    # Of 40,000 slots at the owner the prompt will take 38,000 in the end.
    for instance in (0, 1):
        one.report(instance, MemberReport(0.0, 40_000), 1.1)
    assert one.offer(offer(2, tokens=5000), 1.2) == []
    (collect,) = one.done_together(order.layout.group, order.sequence, 2.0)
    assert isinstance(collect, Collect)
    assert chunk_of(one.done_together(collect.members, collect.sequence, 3.0)).request == 2


def test_what_is_streamed_need_not_fit_its_owner() -> None:
    one = coordinator(4)
    for instance in range(4):
        one.report(instance, MemberReport(0.0, 30_000), 0.0)
    order = chunk_of(one.offer(offer(1, tokens=100_000)._replace(is_streamed=True, fits_owner=False), 0.0))
    assert sorted(order.layout.group) == [0, 1, 2, 3]
    one.failed(3, order.sequence, 1.0)
    assert one.done_together((0, 1, 2), order.sequence, 1.0)[-1] == Decline(1, 0, DeclineReason.NO_ROOM, 0.0)


def test_a_prompt_is_not_refused_because_of_a_report_from_before_there_was_room() -> None:
    one = coordinator(2)
    for instance in range(2):
        one.report(instance, MemberReport(0.0, 1000), 0.0)
    large = offer(1, tokens=30_000)._replace(is_streamed=True, fits_owner=False)
    assert one.offer(large, 0.1) == []
    for instance in range(2):
        one.report(instance, MemberReport(0.0, 15_000), 0.3)
    assert chunk_of(one.plan(0.3)).layout.group == (0, 1)
    assert one.offer(large._replace(request=2), 0.4) == []
    one.cancel(1, 0.5)
    for instance in range(2):
        one.report(instance, MemberReport(0.0, 1000), 0.6)
    one.done_together((0, 1), 1, 0.7)
    assert one.plan(5.6) == []
    assert one.plan(5.8) == [], "no report is as new as that"
    one.report(0, MemberReport(0.0, 1000), 9.0)
    assert one.plan(9.0) == [], "one member may still have room to report"
    one.report(1, MemberReport(0.0, 1000), 9.2)
    assert one.plan(9.2)[-1] == Decline(2, 0, DeclineReason.NO_ROOM, 0.0)


def test_a_prompt_gets_the_room_that_a_member_reports_late() -> None:
    one = coordinator(2)
    for instance in range(2):
        one.report(instance, MemberReport(0.0, 1000), 0.0)
    large = offer(1, tokens=30_000)._replace(is_streamed=True, fits_owner=False)
    assert one.offer(large, 0.1) == []
    one.report(0, MemberReport(0.0, 15_000), 0.3)
    assert one.plan(12.0) == []
    one.report(1, MemberReport(0.0, 15_000), 12.1)
    assert chunk_of(one.plan(12.1)).layout.group == (0, 1)


def test_what_is_free_at_the_end_of_a_step_is_known_before_the_next_report() -> None:
    one = coordinator(1)
    one.report(0, MemberReport(0.0, 5000), 0.0)
    order = chunk_of(one.offer(offer(1, tokens=4000)._replace(is_streamed=True, fits_owner=False), 0.1))
    assert one.done(0, order.sequence, 1.0, 1000) == [Finish(1, 0)]
    large = offer(2, tokens=3000)._replace(is_streamed=True, fits_owner=False)
    assert one.offer(large, 1.1) == [], "a claim beside what is free would leave 0, none would leave 5000"
    one.report(0, MemberReport(0.0, 3000), 1.2)
    assert chunk_of(one.plan(1.2)).request == 2


def test_a_report_that_crosses_a_chunk_on_the_wire_does_not_free_what_that_takes() -> None:
    one = coordinator(1)
    one.report(0, MemberReport(0.0, 3000), 0.0, 0)
    order = chunk_of(one.offer(offer(1, tokens=1000)._replace(is_streamed=True, fits_owner=False), 0.1))
    one.report(0, MemberReport(0.0, 3000), 0.2, order.sequence - 1)
    assert one.done(0, order.sequence, 1.0) == [Finish(1, 0)]
    large = offer(2, tokens=2500)._replace(is_streamed=True, fits_owner=False)
    assert one.offer(large, 1.1) == [], "2000 are free"
    one.report(0, MemberReport(0.0, 2500), 1.2, order.sequence)
    assert chunk_of(one.plan(1.2)).request == 2


def test_what_does_not_fit_its_owner_is_not_given_back_because_the_owner_is_fastest() -> None:
    one = coordinator(1)
    order = chunk_of(one.offer(offer(1)._replace(is_streamed=True, fits_owner=False), 0.0))
    assert order.layout.group == (0,)
    assert one.done(0, order.sequence, 1.0) == [Finish(1, 0)]


def test_a_prompt_that_begins_beside_another_leaves_it_the_room_that_it_still_needs() -> None:
    """Two that wait for each other's room would never end: it would be refused, though it fits."""
    one = Coordinator(schedule((1, 2, 3)), CoordinationSettings(layers=2, page_tokens=16))
    for instance in range(3):
        one.join(instance, 0, MemberReport(0.0, 640, 320), 0.0)
    first = chunk_of(one.offer(offer(1, tokens=1001)._replace(is_streamed=True, fits_owner=False), 0.0))
    assert parts_of(first) == {0: 288, 1: 288, 2: 288}
    free_tokens = 640 - 288
    for instance in range(2):
        one.done(instance, first.sequence, 0.1, free_tokens)
    one.report(2, MemberReport(100.0, 640, 320), 0.1)  # the rest, 46 tokens on each, has to wait for it
    assert not any(isinstance(order, RunChunk) for order in one.done(2, first.sequence, 0.2, free_tokens))
    # In whole pages, and one more; while its chunks run they claim it themselves.
    assert one._requests[1].reserved_tokens(16) == {0: 64, 1: 64, 2: 64}
    seen: list[tuple[int, ...]] = []

    class Watched(PoolSchedule):
        def turns(self, now_s: float, snapshot: PrefillSnapshot, *others: Any) -> list[PlacedPrefill]:
            seen.append(tuple(snapshot.free_kv_tokens))
            return super().turns(now_s, snapshot, *others)

    one._schedule = Watched(one._schedule.planner)
    one.report(2, MemberReport(0.0, free_tokens, 320), 0.3)
    last = chunk_of(one.plan(0.3))
    assert seen[0] == (free_tokens - 64,) * 3
    assert one._requests[1].reserved_tokens(16) == {}
    assert one.done_together(last.layout.group, last.sequence, 0.4)[-1] == Finish(1, 0)
    assert one._requests[1].reserved_tokens(16) == {}


def streamed(instances: int = 4) -> tuple[Coordinator, RunChunk, list[Order]]:
    """A request that was sent to decode while it was computed, and what followed its only chunk."""
    one = coordinator(instances)
    order = chunk_of(one.offer(offer()._replace(is_streamed=True), 0.0))
    return one, order, one.done_together(order.layout.group, order.sequence, 1.0)


def test_what_is_streamed_is_not_collected() -> None:
    one, order, after = streamed()
    assert order.is_last
    assert after == [Finish(1, 0)]
    assert one.plan(2.0) == []
    assert one.held_by(1) == 1000, "kept until it is at decode"
    (last,) = one.transferred(1, 3.0)
    assert isinstance(last, Drop)
    assert sorted(last.members) == [0, 1, 2, 3]
    assert one.requests == ()


def test_others_are_computed_while_one_is_on_its_way() -> None:
    one, _, _ = streamed()
    assert sorted(chunk_of(one.offer(offer(2, owner=1), 1.5)).layout.group) == [0, 1, 2, 3]


def test_what_did_not_arrive_is_collected() -> None:
    one, _, _ = streamed()
    (collect,) = one.stream_failed(1, 2.0)
    assert isinstance(collect, Collect)
    assert collect.members == (0, 1, 2, 3)
    assert one.stream_failed(1, 2.0) == []


def test_a_member_lost_before_all_has_arrived_is_computed_again_and_collected() -> None:
    one, _, _ = streamed(5)
    again = chunk_of(one.lose(2, 2.0))
    assert sum(len(part) for positions in again.layout.new for part in positions) == 1000
    assert not again.is_last, "its logits are not wanted any more"
    after = one.done_together(again.layout.group, again.sequence, 3.0)
    assert [type(order) for order in after] == [Collect]


def test_a_chunk_that_fails_ends_the_streaming() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer()._replace(is_streamed=True), 0.0))
    one.failed(1, order.sequence, 1.0)
    again = chunk_of(one.done(0, order.sequence, 1.0))
    assert not again.is_last
    assert [type(more) for more in one.done_together(again.layout.group, again.sequence, 2.0)] == [Collect]


def test_a_chunk_that_fails_before_anything_is_sent_is_streamed_again() -> None:
    one = coordinator(3)
    order = chunk_of(one.offer(offer()._replace(is_streamed=True, fits_owner=False), 0.0))
    one.failed(1, order.sequence, 1.0, is_unsent=True)
    one.failed(2, order.sequence, 1.0, is_unsent=True)
    again = chunk_of(one.failed(0, order.sequence, 1.0, is_unsent=True))
    assert again.is_last
    assert one.done_together(again.layout.group, again.sequence, 2.0) == [Finish(1, 0)]


@pytest.mark.parametrize("sender_fails", [True, False])
def test_a_chunk_of_which_one_member_has_sent_something_ends_the_streaming(sender_fails: bool) -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer()._replace(is_streamed=True), 0.0))
    one.failed(1, order.sequence, 1.0, is_unsent=True)
    last = one.failed(0, order.sequence, 1.0) if sender_fails else one.done(0, order.sequence, 1.0)
    assert not chunk_of(last).is_last


class SimulatedCluster:
    """Instances with mailboxes; whatever they hold they really hold."""

    def __init__(self, seed: int, *, keeps_rows: bool | None = None, is_alike: bool = False) -> None:
        """`is_alike`: prompts are announced, go to decode, and begin with one of two texts."""
        self.random = random.Random(seed)
        self.is_alike = is_alike
        if keeps_rows is None:
            keeps_rows = self.random.random() < 0.7
        self.now_s = 0.0
        self.coordinator = Coordinator(
            schedule((1, 2, 3), 1, 1e-4),
            CoordinationSettings(
                layers=2,
                page_tokens=self.random.choice((1, 16)),
                keeps_rows=keeps_rows,
            ),
        )
        self.rows: dict[tuple[int, int], Positions] = {}  # kept ones: by instance, kept prompt
        self.borrowed = self.pulled = 0
        self.read: dict[int, set[int]] = {}  # by request: the kept prompts that it begins behind
        self.evicted: set[tuple[int, int]] = set()  # instance, kept prompt
        self.missed: set[tuple[int, int]] = set()  # instance, request: rows that it was to read were gone
        self.mail: dict[int, deque[Order]] = {}
        self.held: dict[tuple[int, int], tuple[KvSegment, ...]] = {}  # instance, request
        self.before: dict[tuple[int, int], tuple[KvSegment, ...]] = {}
        self.offers: dict[int, Offer] = {}
        self.ended: dict[int, str] = {}
        self.broken: set[int] = set()  # steps in which a peer has failed
        self.arrived: set[int] = set()  # collecting steps whose owner has everything
        self.announced: dict[int, Offer] = {}  # by ticket
        self.bound: list[Bind] = []
        self.sending: set[int] = set()  # requests whose owner waits for their transfer
        for instance in range(4):
            self.join(instance)

    def join(self, instance: int) -> None:
        if instance in self.mail:
            self.forget(instance)
        self.mail[instance] = deque()
        self.deliver(self.coordinator.join(instance, 0, IDLE, self.now_s))

    def deliver(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Decline):
                self.end(order.request, order.reason)
                continue
            if isinstance(order, Bind):
                assert order.owner in self.mail
                assert order.ticket in self.announced
                self.bound.append(order)
                continue
            if isinstance(order, Finish):
                held = [one for (_, request), one in self.held.items() if request == order.request]
                have = sorted(p for segments in held for part in positions_of(segments) for p in part)
                assert have == list(range(self.offers[order.request].tokens))
                self.mail[order.owner].append(order)
                continue
            to = order.layout.group if isinstance(order, RunChunk) else order.members
            for instance in to:
                if instance in self.mail:
                    if isinstance(order, RunChunk | Collect):
                        waiting = [one for one in self.mail[instance] if isinstance(one, RunChunk | Collect)]
                        assert not waiting, "an instance has two chunks"
                    self.mail[instance].append(order)

    def end(self, request: int, how: str) -> None:
        assert request not in self.ended, "a request ends twice"
        self.ended[request] = how
        self.sending.discard(request)

    def offer(self, request: int) -> None:
        owner = self.random.choice(list(self.mail))
        tokens = self.random.choice((self.random.randrange(2, 8), self.random.randrange(200, 3000)))
        one = Offer(request, owner, tokens, self.random.choice((0, 0, tokens // 3)), self.now_s, math.inf)
        first = self.random.randrange(2) if self.is_alike else 0
        text = tuple(first if self.is_alike else self.random.randrange(2) for _ in range(tokens // 200))
        blocks = PromptBlocks(200, tuple(hash(text[: end + 1]) for end in range(len(text))))
        is_streamed = self.is_alike or self.random.random() < 0.5
        is_known = self.is_alike or self.random.random() < 0.8
        one = one._replace(is_streamed=is_streamed, blocks=blocks if is_known else None)
        if self.is_alike or self.random.random() < 0.4:
            self.announced[-request] = one._replace(cached_tokens=0)
            ends = tuple(200 * (end + 1) for end in range(len(text)))
            known_text = None if one.blocks is None else PromptText(one.blocks.hashes, ends)
            ticket = PromptTicket(-request, tokens, 0, self.now_s, math.inf, known_text)
            self.deliver(self.coordinator.announce(ticket, self.now_s))
            return
        self.accept(one)

    def claim(self, bind: Bind) -> None:
        """The router has given the prompt to the instance that the pool has named, or it has gone."""
        self.bound.remove(bind)
        one = self.announced.pop(bind.ticket, None)
        if one is None or bind.owner not in self.mail:
            return
        one = one._replace(owner=bind.owner)
        self.offers[one.request] = one
        self.deliver(self.coordinator.claim(bind.ticket, one, self.now_s))

    def accept(self, one: Offer) -> None:
        request, owner = one.request, one.owner
        self.offers[request] = one
        if one.cached_tokens:
            self.held[owner, request] = (KvSegment((range(one.cached_tokens),), is_borrowed=True),)
        self.deliver(self.coordinator.offer(one, self.now_s))

    def kill(self, instance: int) -> None:
        self.forget(instance)
        self.deliver(self.coordinator.lose(instance, self.now_s))

    def forget(self, instance: int) -> None:
        del self.mail[instance]
        for there in (self.held, self.rows):
            for key in [key for key in there if key[0] == instance]:
                del there[key]
        for request, one in self.offers.items():
            if one.owner == instance and request not in self.ended:
                self.ended[request] = "owner lost"
                self.sending.discard(request)

    def end_transfer(self, request: int, *, may_fail: bool) -> None:
        """Something has become of a transfer that an owner waits for."""
        self.sending.discard(request)
        how = self.random.choice(("streamed", "failed", "aborted")) if may_fail else "streamed"
        if how == "failed":
            self.deliver(self.coordinator.stream_failed(request, self.now_s))
            return
        self.end(request, how)
        event = self.coordinator.transferred if how == "streamed" else self.coordinator.cancel
        self.deliver(event(request, self.now_s))

    def work(self, instance: int, may_fail: bool) -> None:
        order = self.mail[instance].popleft()
        if isinstance(order, GiveUp):
            self.broken.add(order.sequence)
        elif isinstance(order, RollBack):
            if (instance, order.request) in self.held:  # an owner that has gone on does not look back
                self.held[instance, order.request] = self.before[instance, order.request]
        elif isinstance(order, Finish):
            if order.request not in self.ended:
                self.sending.add(order.request)
        elif isinstance(order, Borrow):
            self.borrow(instance, order)
        elif isinstance(order, Keep):
            segments = self.held.pop((instance, order.request))
            begins_behind_others = order.request in self.read
            owned = [
                part for one in segments if not (one.is_borrowed and begins_behind_others) for part in one.positions
            ]
            self.rows[instance, order.request] = within(tuple(owned), order.start_tokens, order.end_tokens)
        elif isinstance(order, Pull):
            self.pull(instance, order, may_fail)
        elif isinstance(order, DropKept):
            self.rows.pop((instance, order.request), None)
        elif isinstance(order, Drop):
            self.held.pop((instance, order.request), None)
        elif isinstance(order, RunChunk | Collect):
            self.step(instance, order, may_fail)

    def pull(self, instance: int, order: Pull, may_fail: bool) -> None:
        """The target gets all rows, or says that it does not; of rows that were freed the coordinator is informed."""
        if instance != order.target:
            return
        if may_fail and self.random.random() < 0.2:
            self.deliver(self.coordinator.pull_failed(order.pull, self.now_s))
            return
        there = []
        for source in order.sources:
            for key, end in order.parts:
                there += [p for part in within(self.rows.get((source, key), ()), 0, end) for p in part]
        if sorted(there) == list(range(order.tokens)):
            self.rows[instance, order.pull] = (range(order.tokens),)
            self.pulled += 1
            self.deliver(self.coordinator.pulled(instance, order.pull, self.now_s))

    def borrow(self, instance: int, order: Borrow) -> None:
        parts = [within(self.rows[instance, key], 0, end) for key, end in order.parts if (instance, key) in self.rows]
        self.read[order.request] = {key for key, _ in order.parts}
        if any((instance, key) in self.evicted for key, _ in order.parts):
            self.missed.add((instance, order.request))
        self.held.pop((instance, order.request), None)
        if any(parts):
            self.held[instance, order.request] = tuple(KvSegment(part, is_borrowed=True) for part in parts if part)
        self.borrowed += 1

    def evict(self) -> None:
        """An instance frees the rows of a kept prompt that it knows of no reader of."""
        free = [
            (instance, prompt)
            for instance, prompt in self.rows
            if not any(prompt in self.read.get(request, ()) for holder, request in self.held if holder == instance)
        ]
        if free:
            instance, prompt = self.random.choice(free)
            del self.rows[instance, prompt]
            self.evicted.add((instance, prompt))
            self.deliver(self.coordinator.kept_lost(instance, (prompt,), self.now_s))

    def step(self, instance: int, order: RunChunk | Collect, may_fail: bool) -> None:
        key = instance, order.request
        if isinstance(order, Collect):
            cached_tokens = self.offers[order.request].cached_tokens
            assert all(move.positions[-1][-1] >= cached_tokens for move in order.moves), "the owner has it in its cache"
        group = order.layout.group if isinstance(order, RunChunk) else order.members
        is_alone = any(member not in self.mail for member in group) and order.sequence not in self.arrived
        if (
            isinstance(order, Collect)
            and instance == order.owner
            and not is_alone
            and order.sequence not in self.broken
        ):
            if any(self.is_waiting(member, order.sequence) for member in group if member != instance):
                self.mail[instance].appendleft(order)  # it blocks until everything has come
                return
            self.arrived.add(order.sequence)
        does_not_hold = key in self.missed and not self.holds_what_it_should(instance, order)
        if does_not_hold or order.sequence in self.broken or is_alone or (may_fail and self.random.random() < 0.1):
            self.broken.add(order.sequence)
            unreachable = self.random.choice((None, *group))
            self.deliver(
                self.coordinator.failed(
                    instance, order.sequence, self.now_s, unreachable, is_unsent=self.random.random() < 0.7
                )
            )
            return
        self.before[key] = self.held.get(key, ())
        moves = order.layout.moves if isinstance(order, RunChunk) else order.moves
        mine = [move for move in moves if instance in (move.source, move.target)]
        moved = compacted(after_moves({instance: self.held.get(key, ())}, [m for m in mine if m.source == instance]))
        segments = [*moved[instance], *(KvSegment(move.positions) for move in mine if move.target == instance)]
        if isinstance(order, RunChunk):
            new = order.layout.new[group.index(instance)]
            segments += [KvSegment(new)] if new else []
            assert positions_of(segments) == (*order.layout.history[group.index(instance)], *new)
        self.held[key] = tuple(segments)
        self.deliver(self.coordinator.done(instance, order.sequence, self.now_s))
        if isinstance(order, Collect) and instance == order.owner and order.request not in self.ended:
            self.finish(order)

    def is_waiting(self, instance: int, sequence: int) -> bool:
        waiting = [order for order in self.mail.get(instance, ()) if isinstance(order, RunChunk | Collect)]
        return any(order.sequence == sequence for order in waiting)

    def finish(self, order: Collect) -> None:
        one = self.offers[order.request]
        have = sorted(p for part in positions_of(self.held[one.owner, order.request]) for p in part)
        assert have == sorted(set(have)), "a position is held twice"
        have = sorted({*have, *range(one.cached_tokens)})
        self.end(order.request, "whole" if have == list(range(one.tokens)) else "in part")
        del self.held[one.owner, order.request]

    def holds_what_it_should(self, instance: int, order: RunChunk | Collect) -> bool:
        """As an instance sees it when a step begins."""
        held = self.held.get((instance, order.request), ())
        moves = order.layout.moves if isinstance(order, RunChunk) else order.moves
        for move in moves:
            if move.source == instance and (
                move.segment >= len(held)
                or tail(held[move.segment].positions, held[move.segment].tokens, move.tokens) != move.positions
            ):
                return False
        moved = compacted(after_moves({instance: held}, [move for move in moves if move.source == instance]))
        there = (*positions_of(moved[instance]), *(p for m in moves if m.target == instance for p in m.positions))
        return isinstance(order, Collect) or there == order.layout.history[order.layout.group.index(instance)]

    def quiet_down(self) -> None:
        for _ in range(3000):
            self.now_s += 0.05
            busy = [instance for instance, mail in self.mail.items() if mail]
            if busy:
                self.work(self.random.choice(busy), may_fail=False)
            elif self.sending:
                self.end_transfer(min(self.sending), may_fail=False)
            elif self.bound:
                self.claim(self.bound[0])
            elif self.coordinator.requests or self.coordinator.tickets:
                self.deliver(self.coordinator.plan(self.now_s))
            else:
                return
        raise AssertionError(f"requests {self.coordinator.requests} never end")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_any_history_ends(seed: int) -> None:
    cluster = SimulatedCluster(seed)
    for request in range(1, 13):
        for _ in range(cluster.random.randrange(1, 25)):
            cluster.now_s += 0.02
            busy = [instance for instance, mail in cluster.mail.items() if mail]
            if busy:
                cluster.work(cluster.random.choice(busy), may_fail=True)
            if cluster.bound and cluster.random.random() < 0.3:
                cluster.claim(cluster.random.choice(cluster.bound))
            if cluster.random.random() < 0.1:
                cluster.evict()
            if cluster.sending and cluster.random.random() < 0.1:
                cluster.end_transfer(cluster.random.choice(sorted(cluster.sending)), may_fail=True)
        chance = cluster.random.random()
        if chance < 0.1 and len(cluster.mail) > 1:
            cluster.kill(cluster.random.choice(list(cluster.mail)))
        elif chance < 0.2:
            cluster.join(cluster.random.randrange(6))
        elif chance < 0.25 and cluster.announced:
            gone = cluster.random.choice(list(cluster.announced))
            del cluster.announced[gone]
            cluster.deliver(cluster.coordinator.withdraw(gone, cluster.now_s))
        elif chance < 0.35 and cluster.coordinator.requests:
            victim = cluster.random.choice(cluster.coordinator.requests)
            cluster.ended.setdefault(victim, "cancelled")
            cluster.sending.discard(victim)
            cluster.deliver(cluster.coordinator.cancel(victim, cluster.now_s))
        if cluster.mail:
            cluster.offer(request)
    cluster.quiet_down()
    assert_is_at_rest(cluster)


def assert_is_at_rest(cluster: SimulatedCluster) -> None:
    assert set(cluster.ended) == set(cluster.offers)
    assert not cluster.coordinator.tickets
    # A member that holds nothing any more gets the end, too.
    assert not cluster.held
    # Of each kept prompt its members have the rows that the coordinator believes to be there.
    for instance in cluster.mail:
        kept = sum(count_tokens(rows) for (holder, _), rows in cluster.rows.items() if holder == instance)
        assert kept == cluster.coordinator.kept.tokens_on(instance)


@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(range(20 * i, 20 * i + 20), marks=pytest.mark.slow) for i in range(1, 9))]
)
def test_any_history_of_pulls_ends(seeds: range) -> None:
    pulled = 0
    for seed in seeds:
        cluster = SimulatedCluster(seed, keeps_rows=True, is_alike=True)
        for request in range(1, 25):
            for instance in cluster.mail:
                busy_s = cluster.random.choice((0.0, 0.0, 1.0))
                cluster.coordinator.report(instance, MemberReport(busy_s, 100_000, running_s=busy_s), cluster.now_s)
            cluster.offer(request)
            for _ in range(cluster.random.randrange(1, 40)):
                cluster.now_s += 0.02
                busy = [instance for instance, mail in cluster.mail.items() if mail]
                if busy:
                    cluster.work(cluster.random.choice(busy), may_fail=cluster.random.random() < 0.1)
                elif cluster.sending:
                    cluster.end_transfer(min(cluster.sending), may_fail=cluster.random.random() < 0.1)
                elif cluster.bound:
                    cluster.claim(cluster.bound[0])
                else:
                    cluster.deliver(cluster.coordinator.plan(cluster.now_s))
            chance = cluster.random.random()
            if chance < 0.1:
                cluster.evict()
            elif chance < 0.15 and len(cluster.mail) > 2:
                cluster.kill(cluster.random.choice(list(cluster.mail)))
            elif chance < 0.2:
                cluster.join(cluster.random.randrange(4))
        pulled += cluster.pulled
        cluster.quiet_down()
        assert_is_at_rest(cluster)
    assert pulled > 10


def test_rows_are_kept_until_something_else_wants_the_memory() -> None:
    one = coordinator(2, keeps_rows=True, pulls_rows=False)
    blocks = PromptBlocks(500, tuple(range(8)))
    first = offer(1)._replace(is_streamed=True, blocks=blocks)
    order = chunk_of(one.offer(first, 0.0))
    assert len(order.layout.group) == 2
    one.done(0, order.sequence, 1.0)
    assert one.done(1, order.sequence, 1.0) == [Finish(1, 0)]
    assert one.transferred(1, 1.1) == [Keep(1, (0, 1), 0, 4000)]
    assert [one.kept.tokens_on(instance) for instance in (0, 1)] == [2000, 2000]
    # The next turn computes only what is new, on the members that hold the rest.
    longer = PromptBlocks(500, tuple(range(10)))
    borrow, run = one.offer(offer(2, owner=1, tokens=5000)._replace(is_streamed=True, blocks=longer), 2.0)
    assert borrow == Borrow(2, (0, 1), (KeptPrefix(1, 4000),), 0)
    assert isinstance(run, RunChunk)
    assert sum(map(count_tokens, run.layout.history)) == 4000
    assert sum(map(count_tokens, run.layout.new)) == 1000
    one.done(0, run.sequence, 3.0)
    one.done(1, run.sequence, 3.0)
    assert one.transferred(2, 3.1)[0] == Keep(2, (0, 1), 4000, 5000)
    one.report(1, MemberReport(0.0, 2100), 4.0)
    assert one.plan(4.0) == [DropKept(2, (0, 1))]  # the newest: the other one is its beginning
    one.report(1, MemberReport(0.0, 0), 5.0)
    assert one.plan(5.0) == [DropKept(1, (0, 1))]


def test_an_owner_does_not_use_a_shorter_prefix_of_its_own() -> None:
    one = coordinator(2, keeps_rows=True)
    one.kept.keep(7, PromptBlocks(500, tuple(range(8))), {1: (range(4000),)})
    later = offer(2, owner=0, tokens=5000, cached=500)._replace(is_streamed=True)
    orders = one.offer(later._replace(blocks=PromptBlocks(500, tuple(range(10)))), 0.0)
    assert orders[0] == Borrow(2, (0, 1), (KeptPrefix(7, 4000),), 500)


@pytest.mark.parametrize(("running_s", "is_behind"), [(0.1, True), (60.0, False)])
def test_a_prompt_begins_behind_kept_rows_unless_their_holders_run_something_long(
    running_s: float, is_behind: bool
) -> None:
    """What is queued at them does not matter: their chunk comes between two batches."""
    one = coordinator(4, keeps_rows=True)
    one.kept.keep(7, PromptBlocks(500, tuple(range(8))), {1: (range(4000),)})
    one.report(1, MemberReport(running_s + 60.0, 100_000, running_s=running_s), 0.0)
    prompt = offer(2, tokens=5000)._replace(is_streamed=True, blocks=PromptBlocks(500, tuple(range(10))))
    assert any(isinstance(order, Borrow) for order in one.offer(prompt, 0.0)) is is_behind


@pytest.mark.parametrize(("backlog_s", "is_ordered"), [(0.1, True), (0.11, False)])
def test_members_wait_for_each_other_for_a_sixteenth_of_the_short_objective(backlog_s: float, is_ordered: bool) -> None:
    one = coordinator(2)
    one.report(0, MemberReport(0.0, 100_000, None, 0.0, 1.6), 0.0)
    one.report(1, MemberReport(backlog_s, 100_000, None, 0.0, 1.6), 0.0)
    orders = one.offer(offer(1, tokens=4000), 0.0)
    assert any(isinstance(one, RunChunk) and len(one.layout.group) == 2 for one in orders) is is_ordered


@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize(
    ("tokens", "backlog_s", "is_ordered"),
    [(4000, 0.39, True), (4000, 0.41, False), (1400, 0.15, True), (1400, 0.2, False)],
)
def test_a_group_begins_while_its_members_end_their_batches(
    tokens: int, backlog_s: float, is_ordered: bool, is_announced: bool
) -> None:
    """For a fifth of what its chunk takes (2.8 and 0.8 s), and a quarter of the short objective at most."""
    one = Coordinator(schedule(min_chunk_tokens=600), CoordinationSettings(layers=2, bind_ahead_s=0.0))
    for instance, left_s in ((0, 0.0), (1, backlog_s)):
        one.join(instance, 0, MemberReport(left_s, 100_000, None, 0.0, 1.6), 0.0)
        one.report(instance, MemberReport(left_s, 100_000, None, 0.0, 1.6), 0.0)
    if is_announced:
        bound = one.announce(PromptTicket(-1, tokens, 0, 0.0, None, None), 0.0)
        assert [order.members for order in bound if isinstance(order, Bind)] == ([(1, 0)] if is_ordered else [])
        return
    orders = one.offer(offer(1, tokens=tokens), 0.0)
    assert [len(order.layout.group) for order in orders if isinstance(order, RunChunk)] == ([2] if is_ordered else [])


def test_a_long_prompt_does_not_begin_before_one_that_has_reserved_its_group() -> None:
    for is_reserved in (False, True):
        one = Coordinator(schedule((2,)), CoordinationSettings(layers=2))
        for instance, left_s in ((0, 0.0), (1, 0.3)):
            one.join(instance, 0, MemberReport(left_s, 100_000, None, 0.0, 4.0), 0.0)
            one.report(instance, MemberReport(left_s, 100_000, None, 0.0, 4.0), 0.0)
        if is_reserved:  # by a prompt whose members would not meet for more than a fifth of 0.4 s
            assert not one.offer(offer(1, tokens=700)._replace(deadline_s=5.0), 0.0)
        assert bool(one.offer(offer(2, tokens=40_000), 0.0)) is not is_reserved


def test_a_group_that_begins_is_not_given_to_a_prompt_that_would_have_ended_before_it() -> None:
    one = Coordinator(schedule((2, 3)), CoordinationSettings(layers=2))
    for instance in range(3):
        one.join(instance, 0, MemberReport(5.0, 100_000, None, 0.0, 1.6), 0.0)
        one.report(instance, MemberReport(5.0, 100_000, None, 0.0, 1.6), 0.0)
    assert not one.offer(offer(1, tokens=4000)._replace(deadline_s=9.0), 0.0)
    assert not one.offer(offer(2, tokens=200), 0.0)
    for instance, left_s in ((0, 0.0), (1, 0.0), (2, 0.3)):
        one.report(instance, MemberReport(left_s, 100_000, None, 0.0, 1.6), 1.0)
    chunk = chunk_of(one.plan(1.0))
    assert (chunk.request, len(chunk.layout.group)) == (1, 3)


def test_no_prompt_is_bound_to_a_group_before_the_chunk_of_another_has_ended() -> None:
    one = Coordinator(schedule((2,)), CoordinationSettings(layers=2, bind_ahead_s=0.0))
    for instance in range(3):
        one.join(instance, 0, MemberReport(0.0, 100_000, None, 0.0, 1.6), 0.0)
    (first,) = one.announce(PromptTicket(-1, 4000, 0, 0.0, None, None), 0.0)
    assert isinstance(first, Bind)
    chunk = chunk_of(one.claim(-1, offer(1, first.owner)._replace(is_streamed=True), 0.0))
    assert not one.announce(PromptTicket(-2, 4000, 0, 2.7, None, None), 2.7)  # a tenth of a second before it ends
    orders = one.done_together(chunk.layout.group, chunk.sequence, 2.8)
    assert [order.ticket for order in orders if isinstance(order, Bind)] == [-2]


def test_prompts_begin_with_rows_that_were_kept_of_others() -> None:
    borrowed = 0
    for seed in range(20):
        cluster = SimulatedCluster(seed, keeps_rows=True)
        for request in range(1, 13):
            cluster.offer(request)
            cluster.quiet_down()
        borrowed += cluster.borrowed
        assert not cluster.held
    assert borrowed > 20


def test_most_requests_are_shared_when_nothing_fails() -> None:
    cluster = SimulatedCluster(7)
    for request in range(1, 10):
        cluster.offer(request)
        cluster.quiet_down()
    assert {how for request, how in cluster.ended.items() if cluster.offers[request].tokens >= 200} == {
        "whole",
        "streamed",
    }


@pytest.mark.parametrize("is_running", [True, False])
def test_rows_that_were_freed_before_their_reader_came_are_computed_again(is_running: bool) -> None:
    one = coordinator(2)
    blocks = PromptBlocks(500, tuple(range(10)))
    one.kept.keep(7, PromptBlocks(500, blocks.hashes[:8]), {0: (range(2000),), 1: (range(2000, 4000),)})
    if not is_running:
        one.report(1, MemberReport(10.0, 100_000), 0.0)
    orders = one.offer(offer(2, owner=0, tokens=5000)._replace(is_streamed=True, blocks=blocks), 0.0)
    assert isinstance(orders[0], Borrow)
    assert any(isinstance(order, RunChunk) for order in orders) is is_running
    lost = one.kept_lost(1, (7,), 0.1)
    assert lost[0] == DropKept(7, (0,))  # which reads its part still, and frees it afterwards
    if is_running:
        run = chunk_of(orders)
        for instance in run.layout.group:
            lost += one.failed(instance, run.sequence, 0.2, is_unsent=True)
    else:
        one.report(1, MemberReport(0.0, 100_000), 0.2)
        lost += one.plan(0.2)
    again = chunk_of(lost)
    assert sum(map(count_tokens, again.layout.history)) == 2000
    assert sorted(p for parts in again.layout.new for run in parts for p in run) == list(range(2000, 5000))


def test_a_chunk_that_failed_for_want_of_room_is_ordered_again_once_there_is_some() -> None:
    one = coordinator(2)
    for instance in range(2):
        one.report(instance, MemberReport(0.0, 640), 0.0)
    first = chunk_of(one.offer(offer(1, tokens=700)._replace(is_streamed=True, fits_owner=False), 0.0))
    assert set(first.layout.group) == {0, 1}
    one.failed(0, first.sequence, 0.1, None, 256, is_unsent=True)  # others have taken it meanwhile
    assert one.failed(1, first.sequence, 0.1, 0, 640, is_unsent=True) == []
    one.report(0, MemberReport(0.0, 640), 3.0)
    assert set(chunk_of(one.plan(3.0)).layout.group) == {0, 1}


def test_room_that_was_kept_for_a_prompt_and_is_gone_is_not_counted_upon() -> None:
    one = coordinator(2)
    one.report(0, MemberReport(9.0, 640), 0.0)
    one.report(1, MemberReport(0.0, 640), 0.0)
    long = offer(1, owner=1, tokens=700)._replace(is_streamed=True, fits_owner=False)
    first = chunk_of(one.offer(long, 0.0))
    assert (first.layout.group, sum(map(count_tokens, first.layout.new))) == ((1,), 576)
    orders = one.done(1, first.sequence, 1.0, 0)
    assert not any(isinstance(order, RunChunk) for order in orders), "nothing more fits there"
    one.report(0, MemberReport(0.0, 640), 3.0)
    assert set(chunk_of(one.plan(3.0)).layout.group) == {0, 1}


def test_an_announced_prompt_is_planned_behind_what_is_kept_of_its_text() -> None:
    one = coordinator(2)
    first = PromptTicket(-1, 4000, 0, 0.0, math.inf, PromptText((71, 72), (1000, 3990)))
    assert [type(order) for order in one.announce(first, 0.0)] == [Bind]
    blocks = PromptBlocks(500, tuple(range(8)))
    order = chunk_of(one.claim(-1, offer(1)._replace(is_streamed=True, blocks=blocks), 0.1))
    for instance in order.layout.group:
        one.done(instance, order.sequence, 1.0)
    one.transferred(1, 1.1)
    known, other = PromptText((71, 72, 73), (1000, 3990, 4990)), PromptText((71, 75), (1000, 4990))
    fresh = PromptTicket(-2, 5000, 0, 2.0, math.inf, PromptText((99,), (4990,)))
    for ticket, kept in ((fresh, 0), (fresh._replace(ticket=-3, text=known), 3500), (fresh._replace(text=other), 1000)):
        one.announce(ticket._replace(ticket=ticket.ticket - 10), 2.0)
        prompt = one._announced[ticket.ticket - 10]
        assert prompt.cached_tokens == kept
        assert sum(tokens for _, tokens in prompt.holders) == kept
        one.withdraw(ticket.ticket - 10, 2.0)


# ---- rows that are pulled ----


def pool_that_keeps(held: dict[int, Positions], instances: int = 4) -> Coordinator:
    """A prompt of 4,000 tokens is kept under the number 7."""
    one = coordinator(instances, keeps_rows=True)
    one.kept.keep(7, PromptBlocks(500, tuple(range(8))), held, PromptText((71,), (4000,)))
    return one


def follow_up(number: int = -1, tokens: int = 4100) -> PromptTicket:
    return PromptTicket(number, tokens, 0, 0.0, math.inf, PromptText((71, 72), (4000, tokens)))


def keep_busy(one: Coordinator, *instances: int, seconds: float = 60.0) -> None:
    for instance in instances:
        one.report(instance, MemberReport(seconds, 100_000, running_s=seconds), 0.0)


def test_rows_of_a_busy_holder_are_pulled_to_an_instance_that_is_free() -> None:
    one = pool_that_keeps({1: (range(4000),)})
    keep_busy(one, 1)
    (pull,) = one.announce(follow_up(), 0.0)
    assert pull == Pull(-1, 0, (1,), (KeptPrefix(7, 4000),))
    assert one.plan(0.01) == [], "the prompt waits for its rows"
    assert one.kept.locked_on(1) == 4000
    assert without_times(one.pulled(0, -1, 0.02)) == [DropKept(7, (1,)), Bind(-1, 0, (0, 2))]
    assert (one.kept.tokens_on(1), one.kept.tokens_on(0)) == (0, 4000)


def test_rows_of_several_holders_are_pulled_together_where_a_group_would_cost_others_more() -> None:
    one = pool_that_keeps({0: (range(2000),), 1: (range(2000, 4000),)}, instances=2)
    keep_busy(one, 1, seconds=1.0)
    (pull,) = one.announce(follow_up(), 0.0)
    assert pull == Pull(-1, 0, (0, 1), (KeptPrefix(7, 4000),))


@pytest.mark.parametrize(("deadline_s", "is_pulled"), [(math.inf, True), (0.15, False), (0.05, True)])
def test_a_pull_that_others_gain_by_makes_no_prompt_late(deadline_s: float, is_pulled: bool) -> None:
    one = pool_that_keeps({0: (range(2000),), 1: (range(2000, 4000),)}, instances=2)
    one._schedule.price = 50.0
    ticket = follow_up()._replace(deadline_s=deadline_s)
    prompt = AnnouncedPrompt.of(ticket, one._schedule.planner.options.candidates, CoordinationSettings(layers=2))
    one._rows.match(prompt, [0.0, 0.0], 0.0)
    in_place = Placement(0, 100, (0, 1), 0.0, 0.1, 0.1)  # on one instance it takes 0.19 s
    orders = one._rows.pull(prompt, in_place, PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2), 0.0)
    assert [type(order) for order in orders] == ([Pull] if is_pulled else [])


def test_rows_are_used_in_place_where_their_only_holder_is_free() -> None:
    one = pool_that_keeps({1: (range(4000),)})
    assert without_times(one.announce(follow_up(), 0.0)) == [Bind(-1, 1, (1, 0, 2, 3))]


def test_a_slow_network_is_learned_from() -> None:
    one = pool_that_keeps({1: (range(4000),)})
    keep_busy(one, 1)
    (pull,) = one.announce(follow_up(), 0.0)
    one.pulled(pull.target, pull.pull, 4.0)
    one.withdraw(-1, 4.0)
    keep_busy(one, 0)
    assert not any(isinstance(order, Pull) for order in one.announce(follow_up(-2), 4.1))


@pytest.mark.parametrize("how", ["failed", "target lost", "source lost", "rows lost", "late"])
def test_a_prompt_whose_rows_do_not_come_goes_on_without_them(how: str) -> None:
    one = pool_that_keeps({1: (range(2000),), 2: (range(2000, 4000),)})
    keep_busy(one, 1, 2)
    (pull,) = one.announce(follow_up(), 0.0)
    assert isinstance(pull, Pull)
    match how:
        case "failed":
            orders = one.pull_failed(pull.pull, 0.1)
        case "target lost":
            orders = one.lose(pull.target, 0.1)
        case "source lost":
            orders = one.lose(1, 0.1)
        case "rows lost":
            orders = one.kept_lost(2, (7,), 0.1)
        case _:
            assert one.plan(4.9) == []
            orders = one.plan(5.1)
    members = tuple(instance for instance in pull.members if instance in one.members)
    assert orders[0] == DropKept(pull.pull, members)
    assert isinstance(orders[-1], Bind)
    assert one.kept.locked_on(1) == one.kept.locked_on(2) == 0
    # What comes all the same is not kept.
    if pull.target in one.members:
        assert one.pulled(pull.target, pull.pull, 9.0) == [DropKept(pull.pull, (pull.target,))]


@pytest.mark.parametrize("is_instance_lost", [True, False])
def test_a_pull_ends_where_rows_behind_those_that_it_reads_are_gone(is_instance_lost: bool) -> None:
    """The beginning of a prompt is pulled from 1; its end, which 2 holds, is no part of that."""
    one = pool_that_keeps({1: (range(2000),), 2: (range(2000, 4000),)})
    keep_busy(one, 1)
    ticket = PromptTicket(-1, 2100, 0, 0.0, math.inf, PromptText((71,), (2000,)))
    (pull,) = one.announce(ticket, 0.0)
    assert pull == Pull(-1, 0, (1,), (KeptPrefix(7, 2000),))
    orders = one.lose(2, 0.1) if is_instance_lost else one.kept_lost(2, (7,), 0.1)
    assert orders[:2] == [DropKept(-1, (0, 1)), DropKept(7, (1,))]
    assert isinstance(orders[-1], Bind)
    assert one.pulled(0, -1, 0.2) == [DropKept(-1, (0,))]


def test_an_instance_takes_part_in_one_pull_at_a_time() -> None:
    one = pool_that_keeps({1: (range(4000),)})
    keep_busy(one, 1)
    assert isinstance(one.announce(follow_up(-1), 0.0)[0], Pull)
    assert not any(isinstance(order, Pull) for order in one.announce(follow_up(-2), 0.0))


def test_a_prefix_that_no_instance_has_room_for_stays_where_it_is() -> None:
    one = pool_that_keeps({1: (range(4000),)})
    for instance in (0, 2, 3):
        one.report(instance, MemberReport(0.0, 3000), 0.0)
    keep_busy(one, 1)
    assert not any(isinstance(order, Pull) for order in one.announce(follow_up(), 0.0))


@pytest.mark.parametrize("is_done", [True, False])
def test_when_a_pull_has_ended_its_instances_may_take_part_in_another(is_done: bool) -> None:
    one = pool_that_keeps({1: (range(4000),)})
    keep_busy(one, 1)
    (pull,) = one.announce(follow_up(-1), 0.0)
    if is_done:
        one.pulled(pull.target, pull.pull, 0.1)
    else:
        one.pull_failed(pull.pull, 0.1)
    one.withdraw(-1, 0.2)
    keep_busy(one, *one.kept.rows(KeptPrefix(pull.pull if is_done else 7, 4000)))
    assert isinstance(one.announce(follow_up(-2), 0.3)[0], Pull)


def test_room_for_rows_on_their_way_is_not_given_to_others() -> None:
    one = pool_that_keeps({1: (range(4000),)}, instances=2)
    one.report(0, MemberReport(0.0, 4100), 0.0)
    keep_busy(one, 1)
    assert isinstance(one.announce(follow_up(-1), 0.0)[0], Pull)
    assert one.announce(PromptTicket(-2, 2000, 0, 0.0, math.inf), 0.0) == []


# ---- rows that are gathered ----


def compute_and_keep(one: Coordinator, request: int = 1, at_s: float = 0.0) -> list[Order]:
    """All instances compute 4,000 tokens; return what follows once they are at decode."""
    blocks = PromptBlocks(500, tuple(range(1000 * request, 1000 * request + 8)))
    order = chunk_of(one.offer(offer(request)._replace(is_streamed=True, blocks=blocks), at_s))
    assert len(order.layout.group) == len(one.members)
    for instance in order.layout.group:
        one.done(instance, order.sequence, at_s + 1.0)
    return one.transferred(request, at_s + 1.1)


def test_rows_of_several_members_are_gathered_before_the_next_turn_comes() -> None:
    one = coordinator(2, keeps_rows=True)
    pull = Pull(-1, 0, (0, 1), (KeptPrefix(1, 4000),))
    assert compute_and_keep(one) == [Keep(1, (0, 1), 0, 4000), pull]
    assert [one.kept.locked_on(instance) for instance in (0, 1)] == [2000, 2000]
    assert one.pulled(0, -1, 2.0) == [DropKept(1, (0, 1))]
    assert [one.kept.tokens_on(instance) for instance in (0, 1)] == [4000, 0]
    # The next turn needs no other member.
    keep_busy(one, 1)
    longer = PromptBlocks(500, (*range(1000, 1008), 8))
    borrow, run = one.offer(offer(2, tokens=4500)._replace(is_streamed=True, blocks=longer), 3.0)
    assert borrow == Borrow(2, (0,), (KeptPrefix(-1, 4000),), 0)
    assert isinstance(run, RunChunk)
    assert run.layout.group == (0,)


def test_rows_are_gathered_where_the_fewest_are_kept() -> None:
    one = coordinator(2, keeps_rows=True)
    one.kept.keep(7, PromptBlocks(500, (77,)), {0: (range(500),)})
    *_, pull = compute_and_keep(one)
    assert isinstance(pull, Pull)
    assert pull.target == 1


def test_rows_of_one_member_stay_there() -> None:
    one = coordinator(2, keeps_rows=True)
    one._rows.keep(7, PromptBlocks(500, tuple(range(8))), {1: (range(4000),)}, None)
    assert one.plan(0.0) == []


def test_rows_are_gathered_when_other_pulls_of_their_holders_have_ended() -> None:
    one = coordinator(2, keeps_rows=True)
    *_, first = compute_and_keep(one)
    assert compute_and_keep(one, 2, 2.0) == [Keep(2, (0, 1), 0, 4000)]
    assert isinstance(first, Pull)
    *_, second = one.pulled(first.target, first.pull, 4.0)
    assert second == Pull(-2, 1, (0, 1), (KeptPrefix(2, 4000),))


@pytest.mark.parametrize("how", ["failed", "late", "target lost", "rows lost"])
def test_rows_that_cannot_be_gathered_stay_where_they_are(how: str) -> None:
    """It is not tried again: the next turn uses them in place, or has them pulled."""
    one = coordinator(2, keeps_rows=True)
    *_, pull = compute_and_keep(one)
    assert isinstance(pull, Pull)
    match how:
        case "failed":
            one.pull_failed(pull.pull, 2.0)
        case "late":
            one.plan(100.0)
        case "target lost":
            one.lose(pull.target, 2.0)
        case _:
            one.kept_lost(1, (1,), 2.0)
    assert all(one.kept.locked_on(instance) == 0 for instance in one.members)
    assert len(one.kept) == (1 if how in ("failed", "late") else 0)
    assert not any(isinstance(order, Pull) for order in one.plan(101.0))


def test_rows_are_gathered_only_where_there_is_room_for_all_of_them() -> None:
    one = coordinator(2, keeps_rows=True)
    for instance in one.members:
        one.report(instance, MemberReport(0.0, 3900), 0.0)
    assert compute_and_keep(one) == [Keep(1, (0, 1), 0, 4000)]


def test_rows_that_no_member_may_keep_by_itself_are_not_gathered() -> None:
    one = coordinator(2, keeps_rows=True, kept_share=3000 / IDLE.free_kv_tokens)
    assert compute_and_keep(one) == [Keep(1, (0, 1), 0, 4000)]


def test_room_that_is_promised_to_what_has_begun_is_not_taken_by_gathered_rows() -> None:
    one = coordinator(2, keeps_rows=True, chunk_s=0.1)
    order = chunk_of(one.offer(offer(5, tokens=90_000)._replace(is_streamed=True), 0.0))
    one.kept.keep(1, PromptBlocks(500, tuple(range(8))), {0: (range(2000),), 1: (range(2000, 4000),)})
    one._rows._spread[1] = (0, 1)
    for instance in order.layout.group:
        one.report(instance, MemberReport(0.0, 46_000), 0.5)
    assert one._promised()
    assert not any(isinstance(order, Pull) for order in one.plan(0.6))
