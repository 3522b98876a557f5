"""Prompts that have gone to decode come to their owner's prefix cache, and hold up nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.orders import Collect, Drop, Finish, MemberReport, Offer, Order, RunChunk
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule
from sglang_ext.long_pool.decide.price_planner import PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.sharding import KvMove, count_tokens, part_of_move, tail
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost

TOKENS = 8000
FREE = 10_000


def streamed(request: int = 1, tokens: int = TOKENS, owner: int = 0, *, fits_owner: bool = True) -> Offer:
    return Offer(request, owner, tokens, 0, 0.0, math.inf, is_streamed=True, fits_owner=fits_owner)


def pool(offer: Offer | None = None, free_tokens: int = FREE, **settings: Any) -> Coordinator:
    """Two instances that have computed a prompt together, of which all is at decode."""
    candidates = tuple(SpCandidate(size, SpCost(0.001 * size, 1e-3 / size, 0.0, 0.0)) for size in (1, 2))
    schedule = PoolSchedule(PricePlanner(PriceOptions(candidates, 64)))
    one = Coordinator(schedule, CoordinationSettings(layers=2, keeps_prefixes=True, **settings))
    for instance in range(2):
        one.join(instance, 0, MemberReport(0.0, free_tokens), 0.0)
    (chunk,) = one.offer(offer or streamed(), 0.0)
    assert isinstance(chunk, RunChunk)
    left = free_tokens - (offer or streamed()).tokens // 2
    one.done(0, chunk.sequence, 1.0, left)
    (finish,) = one.done(1, chunk.sequence, 1.0, left)
    assert isinstance(finish, Finish)
    return one


def step_of(orders: list[Order]) -> Collect:
    (step,) = [order for order in orders if isinstance(order, Collect)]
    return step


def end(one: Coordinator, step: Collect, now_s: float) -> list[Order]:
    *others, last = step.members
    for instance in others:
        assert one.done(instance, step.sequence, now_s) == []
    return one.done(last, step.sequence, now_s)


def test_it_comes_in_steps_and_then_all_is_dropped() -> None:
    one = pool()
    orders, now_s, moved = one.transferred(1, 1.0), 1.0, []
    while orders != [Drop(1, (0, 1))]:
        step = step_of(orders)
        assert (step.owner, step.members) == (0, (0, 1))
        moved += [move.tokens for move in step.moves]
        now_s += 0.04  # neither too long nor so short that more is tried
        orders = end(one, step, now_s)
        assert step.is_last == (sum(moved) == TOKENS // 2)
    assert moved == [1024, 1024, 1024, 928]
    assert one.requests == ()


def test_steps_take_the_time_that_is_allowed() -> None:
    one = pool(streamed(tokens=16_000), 20_000, keep_step_s=0.05)
    step = step_of(one.transferred(1, 1.0))
    step = step_of(end(one, step, 1.2))
    assert step.moves[0].tokens == 512
    step = step_of(end(one, step, 1.21))
    assert step.moves[0].tokens == 1024
    assert step_of(end(one, step, 1.22)).moves[0].tokens == 2048


@pytest.mark.parametrize(
    ("offer", "free_tokens", "settings"),
    [
        (streamed(), 7000, {}),
        (streamed(fits_owner=False), FREE, {}),
        (streamed(), FREE, {"keeps_prefixes": False}),
    ],
    ids=["the owner is full", "larger than its owner", "not wanted"],
)
def test_it_is_not_kept(offer: Offer, free_tokens: int, settings: dict[str, bool]) -> None:
    if settings:
        one = pool()
        one._keeping._settings = one._keeping._settings._replace(**settings)
    else:
        one = pool(offer, free_tokens)
    assert one.transferred(1, 1.0) == [Drop(1, (0, 1))]


def test_ordinary_work_comes_first_and_it_is_not_waited_for_for_ever() -> None:
    one = pool()
    one.report(1, MemberReport(3.0, FREE), 1.0)
    assert one.transferred(1, 1.0) == []
    one.report(1, MemberReport(0.0, FREE), 2.0)
    step = step_of(one.plan(2.0))
    one.report(1, MemberReport(100.0, FREE), 2.0)
    assert end(one, step, 2.1) == []
    assert one.plan(7.0) == []
    assert one.plan(7.2) == [Drop(1, (0, 1))]


def test_ordinary_work_gets_the_memory_that_it_takes() -> None:
    one = pool()
    one.report(1, MemberReport(3.0, 100), 1.0)
    assert one.transferred(1, 1.0) == [Drop(1, (0, 1))]


def test_a_prompt_gets_the_memory_that_it_takes() -> None:
    one = pool(keep_timeout_s=1000.0)
    one.report(1, MemberReport(1.0, FREE - TOKENS // 2), 1.0)  # it waits
    assert one.transferred(1, 1.0) == []
    drop, chunk = one.offer(streamed(2, 16_000), 2.1)
    assert drop == Drop(1, (0, 1))
    assert isinstance(chunk, RunChunk)
    assert chunk.layout.group == (0, 1)


def test_a_prompt_does_not_begin_before_the_step_has_ended_that_takes_its_memory() -> None:
    one = pool()
    step = step_of(one.transferred(1, 1.0))
    assert one.offer(streamed(2, 16_000), 1.01) == []
    drop, chunk = end(one, step, 1.05)
    assert drop == Drop(1, (0, 1))
    assert isinstance(chunk, RunChunk)


def test_another_prompt_goes_before_its_next_step() -> None:
    one = pool()
    step = step_of(one.transferred(1, 1.0))
    assert one.offer(streamed(2, 4000), 1.01) == []
    (chunk,) = end(one, step, 1.05)
    assert isinstance(chunk, RunChunk)
    for instance in chunk.layout.group:
        orders = one.done(instance, chunk.sequence, 2.0)
    assert [type(order) for order in orders] == [Finish, Collect]


@pytest.mark.parametrize("instance", [0, 1])
def test_it_ends_with_a_member_that_has_a_part_of_it(instance: int) -> None:
    one = pool()
    step = step_of(one.transferred(1, 1.0))
    one.lose(instance, 1.01)
    assert one.failed(1 - instance, step.sequence, 1.02) == [Drop(1, (1 - instance,))]
    assert one.requests == ()


def test_it_ends_with_a_member_that_has_a_part_of_it_between_two_steps() -> None:
    one = pool()
    one.report(0, MemberReport(3.0, FREE), 1.0)
    assert one.transferred(1, 1.0) == []
    assert one.lose(1, 1.01) == [Drop(1, (0,))]
    assert one.requests == ()


def test_a_step_that_fails_ends_it() -> None:
    one = pool()
    step = step_of(one.transferred(1, 1.0))
    one.failed(0, step.sequence, 1.01)
    assert one.done(1, step.sequence, 1.02) == [Drop(1, (0, 1))]


def test_given_up_while_a_step_of_it_runs() -> None:
    one = pool()
    step = step_of(one.transferred(1, 1.0))
    assert one.cancel(1, 1.01) == []
    assert end(one, step, 1.02) == [Drop(1, (0, 1))]


@given(
    tokens=st.integers(1, 300), wanted=st.integers(1, 400), page=st.sampled_from([1, 4, 16]), start=st.integers(0, 9)
)
def test_a_part_of_a_move_is_whole_pages_of_its_end(tokens: int, wanted: int, page: int, start: int) -> None:
    positions = (range(start, start + tokens),)
    move = KvMove(1, 0, 2, tokens, positions)
    part = part_of_move(move, wanted, page)
    assert part.positions == tail(positions, tokens, part.tokens)
    assert count_tokens(part.positions) == part.tokens
    assert (tokens - part.tokens) % page == 0
    assert 0 < part.tokens <= max(page, wanted) + page
