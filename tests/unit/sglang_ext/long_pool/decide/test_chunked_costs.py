"""Times of prompts in bounded chunks: against chunks that are added up, and places that keep what a chunk computes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.chunked_costs import ChunkBound, ChunkedPlanner, in_chunks
from sglang_ext.long_pool.decide.price_planner import (
    Placement,
    PrefillSnapshot,
    PriceOptions,
    PricePlanner,
    WaitingPrompt,
)
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

FREE = ChunkBound(math.inf, 0.0)
ONE, TWO = SpCost(0.05, 1e-3, 0.0, 0.0), SpCost(0.07, 0.6e-3, 0.0, 0.0)


def plan(bounds: dict[int, ChunkBound], price: float = 0.0) -> Placement:
    planner = ChunkedPlanner(PricePlanner(PriceOptions((SpCandidate(1, ONE), SpCandidate(2, TWO)))))
    planner.bound(bounds)
    snapshot = PrefillSnapshot([0, 0], [0.0, 0.0], [10**6] * 2)
    (placed,) = planner.place(snapshot, [WaitingPrompt(4000, 0, math.inf)], price)
    return placed


@given(st.floats(0.001, 0.1), st.floats(0, 0.2), st.floats(1.0, 20.0), st.integers(1, 40_000), st.integers(0, 100_000))
def test_whole_chunks_take_what_is_said(
    launch_s: float, meeting_s: float, bound: float, tokens: int, cached: int
) -> None:
    """A prompt that fills its chunks, with half a meeting each: the fixed cost comes once more than there are."""
    cost = SpCost(launch_s, 1e-4, 2e-9, 1e-9)
    fixed_s = launch_s + meeting_s / 2
    longest_s = (1 + bound) * fixed_s
    computing_s = cost.predict_s(cached, tokens) - launch_s
    chunks = computing_s / (longest_s - fixed_s)
    expected_s = computing_s + (chunks + 1) * fixed_s
    assert in_chunks(cost, ChunkBound(longest_s, meeting_s)).predict_s(cached, tokens) == pytest.approx(expected_s)


def test_a_table_is_stretched_alike() -> None:
    table = TabulatedCost((0, 1000, 2000), (0.05, 1.05, 2.55))
    chunked = in_chunks(table, ChunkBound(0.4, 0.1))
    assert [chunked.predict_s(0, tokens) for tokens in (0, 1000, 2000)] == pytest.approx(
        [0.1, 0.1 + 1 / 0.75, 0.1 + 2.5 / 0.75]
    )


def test_without_bounds_and_meetings_nothing_changes() -> None:
    assert in_chunks(ONE, FREE) == ONE
    assert in_chunks(SpCost(0.0, 1e-3, 0.0, 0.0), ChunkBound(0.0, 0.0)) == SpCost(0.0, 1e-3, 0.0, 0.0)
    assert plan({1: FREE, 2: FREE}).group == (0, 1)


def test_a_chunk_is_never_all_fixed_cost() -> None:
    assert in_chunks(ONE, ChunkBound(0.01, 0.0)).predict_s(0, 1000) == pytest.approx(0.05 + 2.0)


def test_a_group_that_meets_long_is_not_worth_its_gain() -> None:
    bounds = {1: ChunkBound(0.35, 0.0), 2: ChunkBound(0.35, 0.2)}
    assert plan(bounds).group == (0,)


def test_a_place_ends_with_all_chunks_and_names_the_computing_of_one() -> None:
    bounds = {1: ChunkBound(0.35, 0.0), 2: ChunkBound(0.35, 0.02)}
    placed = plan(bounds)
    assert placed.group == (0, 1)
    assert placed.compute_s == pytest.approx(TWO.predict_s(0, 4000))
    assert placed.end_s == pytest.approx(in_chunks(TWO, bounds[2]).predict_s(0, 4000))
