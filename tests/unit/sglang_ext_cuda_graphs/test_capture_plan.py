"""Which shapes are captured, and in which order."""

from __future__ import annotations

from sglang_ext.policy.laps.graph_grid import GraphShape
from sglang_ext_cuda_graphs.capture_plan import DEFAULT_BATCH_SIZES, DEFAULT_LENGTHS_TOKENS, plan_captures


def test_the_papers_grid_has_42_shapes_largest_first() -> None:
    plan = plan_captures(DEFAULT_LENGTHS_TOKENS, DEFAULT_BATCH_SIZES, 16384, 64)
    assert len(plan) == len(set(plan)) == 42
    assert plan[0] == GraphShape(256, 64)
    assert plan[-1] == GraphShape(8, 1)
    assert [shape.tokens for shape in plan] == sorted((shape.tokens for shape in plan), reverse=True)


def test_limits_of_the_engine_bound_it() -> None:
    plan = plan_captures([8, 16], [1, 2, 4], 32, 3)
    assert plan == [(16, 2), (8, 2), (16, 1), (8, 1)]
    assert plan_captures([8], [1], 7, 3) == []
