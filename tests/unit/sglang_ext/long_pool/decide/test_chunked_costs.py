"""Times of prompts in bounded chunks: against chunks that are added up, and places that keep what a chunk computes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.chunked_costs import ChunkedPlanner, in_chunks
from sglang_ext.long_pool.decide.price_planner import (
    Placement,
    PrefillSnapshot,
    PriceOptions,
    PricePlanner,
    WaitingPrompt,
)
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

ONE, TWO = SpCost(0.05, 1e-3, 0.0, 0.0), SpCost(0.07, 0.6e-3, 0.0, 0.0)


def plan(longest_s: dict[int, float], price: float = 0.0) -> Placement:
    planner = ChunkedPlanner(PricePlanner(PriceOptions((SpCandidate(1, ONE), SpCandidate(2, TWO)))))
    planner.bound(longest_s)
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    (placed,) = planner.place(snapshot, [WaitingPrompt(4000, 0, math.inf)], price)
    return placed


@given(st.floats(0.001, 0.1), st.floats(1.0, 20.0), st.integers(1, 40_000), st.integers(0, 100_000))
def test_whole_chunks_take_what_is_said(launch_s: float, factor: float, tokens: int, cached: int) -> None:
    """A prompt that fills its chunks: launches are one more than there are chunks, as the first is in the cost."""
    cost = SpCost(launch_s, 1e-4, 2e-9, 1e-9)
    longest_s = (1 + factor) * launch_s
    computing_s = cost.predict_s(cached, tokens) - launch_s
    chunks = computing_s / (longest_s - launch_s)
    expected_s = computing_s + (chunks + 1) * launch_s
    assert in_chunks(cost, longest_s).predict_s(cached, tokens) == pytest.approx(expected_s)


def test_a_table_is_stretched_alike() -> None:
    table = TabulatedCost((0, 1000, 2000), (0.1, 1.1, 2.6))
    chunked = in_chunks(table, 0.4)
    assert [chunked.predict_s(0, tokens) for tokens in (0, 1000, 2000)] == pytest.approx(
        [0.1, 0.1 + 1 / 0.75, 0.1 + 2.5 / 0.75]
    )


def test_without_bounds_nothing_changes() -> None:
    assert in_chunks(ONE, math.inf) == ONE
    assert in_chunks(SpCost(0.0, 1e-3, 0.0, 0.0), 0.0) == SpCost(0.0, 1e-3, 0.0, 0.0)
    assert plan({1: math.inf, 2: math.inf}).group == (0, 1)


def test_without_bounds_the_planner_itself_decides() -> None:
    """Also after there were some: it may place prompts by something else than costs."""

    class Nowhere(PricePlanner):
        def place(
            self, snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float
        ) -> list[Placement]:
            return []

    planner = ChunkedPlanner(Nowhere(PriceOptions((SpCandidate(1, ONE), SpCandidate(2, TWO)))))
    snapshot, waiting = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2), [WaitingPrompt(4000, 0, math.inf)]
    places = []
    for longest_s in (math.inf, 0.35, math.inf):
        planner.bound({1: longest_s, 2: longest_s})
        places.append(len(planner.place(snapshot, waiting, 0.0)))
    assert places == [0, 1, 0]


def test_a_group_whose_chunks_are_mostly_launches_is_not_worth_its_gain() -> None:
    assert plan({1: 0.35, 2: 0.35}).group == (0, 1)
    assert plan({1: 0.35, 2: 0.14}).group == (0,)
    assert plan({1: math.inf, 2: 0.14}).group == (0,), "one size alone may have a bound"


def test_bounds_follow_the_latest_but_for_small_changes() -> None:
    planner = ChunkedPlanner(PricePlanner(PriceOptions((SpCandidate(1, ONE), SpCandidate(2, TWO)))))
    snapshot, waiting = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2), [WaitingPrompt(4000, 0, math.inf)]
    ends_s = []
    for longest_s in (math.inf, 0.35, 0.36, 0.5):
        planner.bound({1: longest_s, 2: longest_s})
        ends_s.append(planner.place(snapshot, waiting, 0.0)[0].end_s)
    kept = (math.inf, 0.35, 0.35, 0.5)
    assert ends_s == pytest.approx([in_chunks(TWO, longest_s).predict_s(0, 4000) for longest_s in kept])


def test_a_place_ends_with_all_chunks_and_names_the_computing_of_one() -> None:
    placed = plan({1: 0.35, 2: 0.35})
    assert placed.group == (0, 1)
    assert placed.compute_s == pytest.approx(TWO.predict_s(0, 4000))
    assert placed.end_s == pytest.approx(in_chunks(TWO, 0.35).predict_s(0, 4000))
