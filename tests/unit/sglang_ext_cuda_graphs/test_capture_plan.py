"""Which shapes are captured, in which order, and what a budget of memory lets through."""

from __future__ import annotations

import pytest

from sglang_ext.policy.laps_records import GraphShape
from sglang_ext_cuda_graphs.capture_plan import DEFAULT_BATCH_SIZES, DEFAULT_LENGTHS_TOKENS, plan_captures, tokens
from sglang_ext_cuda_graphs.memory_ledger import CaptureCost, MemoryLedger

MB = 1_000_000


def test_the_papers_grid_has_42_shapes_largest_first() -> None:
    plan = plan_captures(DEFAULT_LENGTHS_TOKENS, DEFAULT_BATCH_SIZES, 16384, 64)
    assert len(plan) == len(set(plan)) == 42
    assert plan[0] == GraphShape(256, 64)
    assert plan[-1] == GraphShape(8, 1)
    assert [tokens(shape) for shape in plan] == sorted(map(tokens, plan), reverse=True)


def test_limits_of_the_engine_bound_it() -> None:
    plan = plan_captures([8, 16], [1, 2, 4], 32, 3)
    assert plan == [(16, 2), (8, 2), (16, 1), (8, 1)]
    assert plan_captures([8], [1], 7, 3) == []


def test_the_first_capture_is_taken_at_the_assumed_size() -> None:
    ledger = MemoryLedger(100, assumed_bytes_per_token=1.0)
    assert ledger.can_capture(GraphShape(10, 10))
    assert not ledger.can_capture(GraphShape(10, 11))


def test_a_smaller_shape_costs_what_graphs_cost_a_larger_one_the_pools_growth_too() -> None:
    ledger = MemoryLedger(500 * MB, assumed_bytes_per_token=1.0)
    ledger.note(CaptureCost(GraphShape(100, 10), 400 * MB, 20 * MB, 0.5))
    assert ledger.expected_bytes(GraphShape(100, 5)) == 20 * MB
    assert ledger.expected_bytes(GraphShape(100, 20)) == 20 * MB + 400 * MB
    assert ledger.can_capture(GraphShape(100, 5))
    assert not ledger.can_capture(GraphShape(100, 20))
    ledger.note(CaptureCost(GraphShape(100, 5), 0, 40 * MB, 0.5))
    assert (ledger.pool_bytes, ledger.used_bytes) == (400 * MB, 460 * MB)
    assert ledger.expected_bytes(GraphShape(1, 1)) == 30 * MB
    ledger.note(CaptureCost(GraphShape(50, 5), 0, 30 * MB, 0.5))
    assert not ledger.can_capture(GraphShape(1, 1))


def test_without_a_budget_everything_is_captured() -> None:
    assert MemoryLedger(None, 1e12).can_capture(GraphShape(256, 64))
    with pytest.raises(ValueError, match="not negative, got -1"):
        MemoryLedger(-1, 1.0)
