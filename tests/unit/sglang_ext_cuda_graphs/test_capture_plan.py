"""Shapes in the order of capture, and what captures cost of a budget."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_cuda_graphs.capture_plan import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_LENGTHS_TOKENS,
    UNEXPLAINED_BYTES,
    CaptureCost,
    MemoryLedger,
    plan_captures,
)


def test_the_papers_grid_has_42_shapes_largest_first() -> None:
    plan = plan_captures(DEFAULT_LENGTHS_TOKENS, DEFAULT_BATCH_SIZES, 16384, 64)
    assert len(plan) == len(set(plan)) == 42
    assert plan[0] == GraphShape(256, 64)
    assert plan[-1] == GraphShape(8, 1)
    assert [shape.tokens for shape in plan] == sorted((shape.tokens for shape in plan), reverse=True)


def test_limits_of_the_engine_bound_it() -> None:
    plan = plan_captures([8, 16], [1, 4, 2, 8], 32, 4)
    assert plan == [(8, 4), (16, 2), (8, 2), (16, 1), (8, 1)]
    assert plan_captures([8], [2], 7, 1) == []


def test_no_shape_is_larger_than_what_holds_the_largest_batch() -> None:
    plan = plan_captures(DEFAULT_LENGTHS_TOKENS, DEFAULT_BATCH_SIZES, 8192, 64)
    assert plan[:2] == [GraphShape(128, 64), GraphShape(256, 32)]
    assert GraphShape(256, 64) not in plan
    assert len(plan) == 41
    # the next one up where no shape has just so many tokens
    assert plan_captures([8, 64], [1, 2, 8], 100, 64) == [(64, 2), (8, 8), (64, 1), (8, 2), (8, 1)]
    assert plan_captures([256], [1, 2], 100, 64) == [(256, 1)]


MB = 1_000_000
PAPER = [GraphShape(length, requests) for length in DEFAULT_LENGTHS_TOKENS for requests in DEFAULT_BATCH_SIZES]


class Truth(NamedTuple):
    """What captures take on a device that has not been measured."""

    bytes_per_token: int
    reused: float  # of what the pool has, the part that a larger shape can use
    workspace_bytes: int
    segment_bytes: int
    own_bytes: int  # of the smallest graph; the largest has twice as much


class SimulatedPool:
    """Grows by whole segments, for a shape that is larger than all before it, and keeps what is left over."""

    def __init__(self, truth: Truth) -> None:
        self._truth = truth
        self._tokens = 0
        self._left_bytes = 0

    def capture(self, shape: GraphShape, own_share: float) -> CaptureCost:
        truth, growth = self._truth, 0
        if shape.tokens > self._tokens:
            needed = truth.bytes_per_token * (shape.tokens - truth.reused * self._tokens) - self._left_bytes
            needed += 0 if self._tokens else truth.workspace_bytes
            growth = max(0, -int(-needed // truth.segment_bytes) * truth.segment_bytes)
            self._left_bytes = max(0, int(growth - needed))
            self._tokens = shape.tokens
        return CaptureCost(shape, growth, int(truth.own_bytes * (1 + own_share)), 0.1)


TRUTHS = st.builds(
    Truth,
    st.integers(1000, 1_000_000),
    st.floats(0, 1),
    st.integers(0, 24 * MB),
    st.integers(1, 20 * MB),
    st.integers(0, 20 * MB),
)


@pytest.mark.slow
@given(
    truth=TRUTHS,
    assumed_over_truth=st.floats(0.5, 2.0),
    budget_bytes=st.integers(0, 20_000 * MB),
    wanted=st.lists(st.tuples(st.sampled_from(PAPER), st.floats(0, 1)), min_size=1, max_size=42),
)
def test_the_budget_holds_and_what_fits_is_captured(
    truth: Truth, assumed_over_truth: float, budget_bytes: int, wanted: list[tuple[GraphShape, float]]
) -> None:
    pool = SimulatedPool(truth)
    ledger = MemoryLedger(budget_bytes, truth.bytes_per_token * assumed_over_truth)
    for shape, own_share in wanted:
        used_bytes = ledger.used_bytes
        if ledger.can_capture(shape):
            assert used_bytes <= budget_bytes  # so it is exceeded by this shape at most
            cost = pool.capture(shape, own_share)
            ledger.record(cost)
            assert ledger.used_bytes == used_bytes + cost.pool_growth_bytes + cost.own_bytes
        else:
            # twice what it takes by itself would not fit
            assert used_bytes + 2 * truth.bytes_per_token * shape.tokens + 2 * truth.own_bytes + 1 > budget_bytes


@pytest.mark.slow
@given(truth=TRUTHS, order=st.permutations(PAPER), assumed_over_truth=st.floats(0.01, 100.0))
def test_after_the_largest_shape_a_capture_costs_what_graphs_cost(
    truth: Truth, order: list[GraphShape], assumed_over_truth: float
) -> None:
    pool = SimulatedPool(truth)
    ledger = MemoryLedger(None, truth.bytes_per_token * assumed_over_truth)
    for shape in order:
        ledger.record(pool.capture(shape, 0.5))
    assert {ledger.expected_bytes(shape) for shape in PAPER} == {int(truth.own_bytes * 1.5)}


def test_a_small_shape_first_says_little_of_a_large_one() -> None:
    ledger = MemoryLedger(3000 * MB, assumed_bytes_per_token=150_000)
    ledger.record(CaptureCost(GraphShape(8, 1), 54 * MB, 5 * MB, 0.5))  # workspaces and a segment: 7 MB a token
    assert ledger.expected_bytes(GraphShape(256, 64)) == 5 * MB + (16384 - 8) * 150_000
    ledger.record(CaptureCost(GraphShape(16, 1), 0, 5 * MB, 0.5))  # it had room in the segment
    assert ledger.expected_bytes(GraphShape(256, 64)) == 5 * MB + (16384 - 16) * 150_000
    assert ledger.can_capture(GraphShape(256, 64))


def test_a_large_shape_corrects_what_was_assumed() -> None:
    ledger = MemoryLedger(None, assumed_bytes_per_token=10_000)
    ledger.record(CaptureCost(GraphShape(1000, 10), 2000 * MB, 0, 0.5))
    least = (2000 * MB - UNEXPLAINED_BYTES) / 10_000
    assert ledger.expected_bytes(GraphShape(1000, 20)) == int(least * 10_000)
    ledger.record(CaptureCost(GraphShape(1000, 20), 4000 * MB, 0, 0.5))  # nothing of the pool could be used again
    assert ledger.expected_bytes(GraphShape(1000, 40)) == pytest.approx(8000 * MB, rel=0.04)
    assert ledger.expected_bytes(GraphShape(1000, 21)) == pytest.approx(400 * MB, rel=0.04)


def test_one_odd_graph_does_not_count() -> None:
    ledger = MemoryLedger(500 * MB, assumed_bytes_per_token=1.0)
    for own_bytes in (300 * MB, 20 * MB, 30 * MB):
        ledger.record(CaptureCost(GraphShape(100, 10), 0, own_bytes, 0.5))
    assert ledger.used_bytes == 350 * MB
    assert ledger.expected_bytes(GraphShape(1, 1)) == 30 * MB
    assert ledger.can_capture(GraphShape(1, 1))


def test_the_first_capture_is_taken_at_the_assumed_size() -> None:
    ledger = MemoryLedger(100, assumed_bytes_per_token=1.0)
    assert ledger.can_capture(GraphShape(10, 10))
    assert not ledger.can_capture(GraphShape(10, 11))


def test_without_a_budget_everything_is_captured() -> None:
    assert MemoryLedger(None, 1e12).can_capture(GraphShape(256, 64))
    with pytest.raises(ValueError, match="not negative, got -1"):
        MemoryLedger(-1, 1.0)
