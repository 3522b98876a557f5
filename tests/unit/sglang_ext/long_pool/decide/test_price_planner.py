"""The price planner: its C++ core against the search in Python, which lists every choice; and by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.price_planner import (
    Holder,
    Placement,
    PrefillSnapshot,
    PriceOptions,
    PricePlanner,
    WaitingPrompt,
)
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost
from support.cdsp_cases import PLENTY, Case, cases, scaling_cases
from support.examples import examples

# One instance computes 1,000 tokens in 1 s, two in 0.6 s, four in 0.4 s.
COSTS = tuple(
    SpCandidate(size, SpCost(start_s, 1e-3 / size, 0.0, 0.0)) for size, start_s in ((1, 0.0), (2, 0.1), (4, 0.15))
)


def planner(**options: Any) -> PricePlanner:
    return PricePlanner(PriceOptions(COSTS, **{"min_chunk_tokens": 50, "cross_node_factor": math.inf} | options))


def place(
    one: PricePlanner,
    delays_s: list[float],
    *prompts: WaitingPrompt,
    others: float = 0.0,
    nodes: list[int] | None = None,
    room: list[int] | None = None,
) -> list[Placement]:
    count = len(delays_s)
    return one.place(PrefillSnapshot(nodes or [0] * count, delays_s, room or [PLENTY] * count), prompts, others)


def prompt(tokens: int = 1000, **fields: Any) -> WaitingPrompt:
    return WaitingPrompt(tokens, **{"cached_tokens": 0, "due_s": math.inf} | fields)


@st.composite
def decisions(draw: st.DrawFn) -> tuple[PriceOptions, PrefillSnapshot, list[WaitingPrompt], float]:
    """Around the cases of the paper's planner: several prompts, some of them held somewhere, low and high prices."""
    case: Case = draw(st.one_of(scaling_cases(), cases()))
    count = len(case.snapshot.node_ids)
    prompts = []
    for _ in range(draw(st.integers(1, 5))):
        held = draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True)) if draw(st.booleans()) else []
        holders = tuple(Holder(instance, draw(st.integers(1, 400))) for instance in held)
        due_s = draw(st.sampled_from([math.inf, math.inf, 0.5, 1.0, -1.0]))
        cached = sum(one.tokens for one in holders)
        prompts.append(
            WaitingPrompt(draw(st.integers(1, 6000)), cached, due_s, draw(st.integers(-1, count - 1)), holders)
        )
    options = PriceOptions(
        case.config.candidates,
        case.config.min_chunk_tokens,
        case.config.page_tokens,
        draw(st.sampled_from([math.inf, 1.0, 1.5])),
        draw(st.sampled_from([0.0, 1000.0])),
        draw(st.sampled_from([0.0, 0.01])),
        draw(st.sampled_from([2, 64])),
    )
    return options, case.snapshot, prompts, draw(st.sampled_from([0.0, 0.5, 4.0, 40.0]))


@pytest.mark.parametrize("is_native", [False, True])
def test_prompts_that_take_no_time_leave_the_others_idle(is_native: bool) -> None:
    nothing = TabulatedCost(prompt_tokens=(0, 256), duration_s=(0.0, 0.0))
    options = PriceOptions((SpCandidate(2, nothing),), 1)
    snapshot = PrefillSnapshot((0, 0, 0), (0.0, 0.0, 0.0), (1000, 1000, 1000))
    prompts = [WaitingPrompt(1, 0, math.inf, 0, ())] * 5
    placed = PricePlanner(options, is_native=is_native).place(snapshot, prompts, 0.0)
    assert [one.group for one in placed] == [(0, 1)] * 5


@pytest.mark.slow
@settings(max_examples=examples(800), deadline=None)
@given(decisions())
def test_equals_the_best_of_all_choices(
    decision: tuple[PriceOptions, PrefillSnapshot, list[WaitingPrompt], float],
) -> None:
    options, snapshot, prompts, others = decision
    found = PricePlanner(options, is_native=True).place(snapshot, prompts, others)
    expected = PricePlanner(options, is_native=False).place(snapshot, prompts, others)
    assert found == expected
    for one in found:
        kind = (
            "none"
            if not one.group
            else "reserved"
            if one.start_s
            else "grows"
            if one.end_s > one.compute_s
            else "starts"
        )
        event(kind)


def test_alone_it_takes_what_is_fastest_and_in_a_crowd_what_is_cheapest() -> None:
    (alone,) = place(planner(), [0.0] * 4, prompt())
    assert (alone.group, alone.start_s, alone.end_s) == ((0, 1, 2, 3), 0.0, pytest.approx(0.4))
    crowd = place(planner(), [0.0] * 4, *(prompt() for _ in range(4)), others=8.0)
    assert [len(one.group) for one in crowd] == [1, 1, 1, 1]


def test_an_idle_pool_is_not_shared_for_next_to_nothing() -> None:
    # 101 tokens: 0.101 s alone, 0.1505 s on two; 200 tokens: 0.2 s both.
    assert place(planner(), [0.0] * 2, prompt(200))[0].group == (0,)


def test_who_waits_reserves_and_a_short_one_fills_the_gap() -> None:
    # Two are busy for 1 s: all four from then on end at 1 + 2.15 s, two at once at 4.1 s.
    long, short = prompt(8000), prompt(500)
    waiting, filling = place(planner(), [0.0, 0.0, 1.0, 1.0], long, short)
    assert (len(waiting.group), waiting.start_s) == (4, 1.0)
    assert (filling.start_s, filling.end_s) == (0.0, pytest.approx(0.35))
    (_, too_long) = place(planner(), [0.0, 0.0, 1.0, 1.0], long, prompt(2200))
    assert too_long.start_s > 0


def test_a_prompt_grows_where_none_is_behind_it() -> None:
    (grows,) = place(planner(), [0.0, 0.5], prompt(2000))
    # 500 tokens alone until the other is free, then 1,500 on both: 0.5 + 0.1 + 0.75 s instead of 0.5 + 0.1 + 1 s.
    assert grows == Placement(0, 500, (0,), 0.0, pytest.approx(0.5), pytest.approx(1.35))
    first, _ = place(planner(), [0.0, 0.5], prompt(2000), prompt(2000))
    assert first.end_s == first.start_s + first.compute_s


def test_holders_come_first_and_the_owner_among_equals() -> None:
    (held,) = place(planner(), [0.0] * 4, prompt(owner=0, cached_tokens=10, holders=(Holder(3, 5), Holder(1, 5))))
    assert held.group[:2] == (3, 1)
    (owned,) = place(planner(), [0.0] * 4, prompt(100, owner=2))
    assert owned.group == (2,)


def test_nodes_are_a_cost() -> None:
    nodes = [0, 0, 1, 1]
    delays_s = [0.0, 5.0, 0.0, 5.0]
    assert len(place(planner(), delays_s, prompt(), nodes=nodes)[0].group) == 1
    (spread,) = place(planner(cross_node_factor=1.1), delays_s, prompt(), nodes=nodes)
    assert (spread.group, spread.compute_s) == ((0, 2), pytest.approx(0.66))


def test_without_room_there_is_no_group() -> None:
    (nowhere,) = place(planner(), [0.0, 0.0], prompt(1000), room=[400, 400])
    assert nowhere == Placement(0, 0, (), 0.0, 0.0, 0.0)
    (both,) = place(planner(), [0.0, 0.0], prompt(800), room=[400, 400])
    assert len(both.group) == 2


def test_equals_are_decided_equally() -> None:
    decision = [0.0, 0.0, 0.25, 0.5], prompt(700), prompt(900, due_s=0.5), prompt(100)
    assert place(planner(), *decision) == place(planner(), *decision)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("candidates", ()),
        ("candidates", (COSTS[0], COSTS[0])),
        ("min_chunk_tokens", 0),
        ("page_tokens", 0),
        ("max_considered", 0),
        ("cross_node_factor", 0.5),
        ("cross_node_factor", math.nan),
        ("tardiness_weight", -1.0),
        ("min_price", math.inf),
    ],
)
def test_an_option_that_makes_no_sense_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        PriceOptions(**{"candidates": COSTS} | {field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (prompt(0), "new_tokens"),
        (prompt(cached_tokens=-1), "cached_tokens"),
        (prompt(due_s=math.nan), "due_s"),
        (prompt(owner=2), "owner"),
        (prompt(holders=((2, 1),)), "holders"),
        (prompt(holders=((1, 1), (1, 1))), "holders"),
        ((1, 2, 3.0), "prompts"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_named(bad: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        place(planner(), [0.0, 0.0], bad)


def test_a_price_that_makes_no_sense_is_named() -> None:
    with pytest.raises(ValueError, match="others_price"):
        place(planner(), [0.0], prompt(), others=-1.0)
