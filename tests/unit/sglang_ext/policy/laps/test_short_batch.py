"""Bucket first, then neighbours while padding pays, within requests, tokens, memory and time."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.laps.cost_model import CostCoefficients
from sglang_ext.policy.laps.graph_grid import GraphGrid, GraphShape
from sglang_ext.policy.laps.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.policy.laps.short_batch import (
    BatchBounds,
    FormedBatch,
    form_batch,
    joined_s,
    lone_batch,
)
from sglang_ext.policy.laps.slack import RankedPrefill, Urgency
from sglang_ext.types import LengthClass

GRID = GraphGrid.from_product((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64))
NO_GRID = GraphGrid()
OVERHEAD_BOUND = CostCoefficients(0.0, 1e-6, 0.0, 0.01)
COMPUTE_BOUND = CostCoefficients(0.0, 1e-3, 0.0, 1e-4)
BOUNDS = BatchBounds(max_requests=64, max_tokens=8192, free_kv_tokens=100_000, page_tokens=1, budget_s=inf)


def short(key: int, new_tokens: int, cost: CostCoefficients, cached_tokens: int = 0) -> RankedPrefill:
    request = QueuedPrefill(
        key, LengthClass.SHORT, new_tokens, cached_tokens, new_tokens, 0.0, inf, PriorityClass.NORMAL, False, False
    )
    time_s = cost.chunk_s(new_tokens, cached_tokens)
    return RankedPrefill(Urgency(2, float(key), 0.0, key), request, time_s, time_s)


def form(
    lengths: list[int], cost: CostCoefficients = OVERHEAD_BOUND, grid: GraphGrid = GRID, bounds: BatchBounds = BOUNDS
) -> FormedBatch:
    formed = form_batch([short(key, length, cost) for key, length in enumerate(lengths)], cost, grid, bounds)
    assert formed is not None
    return formed


def keys(formed: FormedBatch) -> list[int]:
    return [member.request.key for member in formed.members]


def test_no_short_prefill_waits() -> None:
    assert form_batch([], OVERHEAD_BOUND, GRID, BOUNDS) is None


def test_the_heads_bucket_comes_first() -> None:
    formed = form([20, 100, 30, 60, 25], bounds=BOUNDS._replace(max_requests=4))
    assert keys(formed) == [0, 2, 4, 3]
    assert formed.is_full
    assert formed.shape == GraphShape(64, 4)


def test_neighbours_join_only_while_padding_pays() -> None:
    assert keys(form([8, 256], COMPUTE_BOUND)) == [0]
    assert keys(form([8, 256], OVERHEAD_BOUND)) == [0, 1]
    assert not form([8, 256], COMPUTE_BOUND).is_full


def test_several_pay_for_a_larger_shape_that_one_does_not_pay_for() -> None:
    # Shapes of 32 to 256 tokens take 8.2, 11.4, 17.8 and 30.6 ms: the fifth request would cost 12.8 ms more.
    cost = CostCoefficients(0.0, 1e-4, 0.0, 5e-3)
    grid = GraphGrid.from_product((32,), (1, 2, 4, 8))
    assert [len(form([32] * count, cost, grid).members) for count in range(1, 9)] == [1, 2, 3, 4, 4, 4, 7, 8]
    # A request that fits into what is left joins although a more urgent one does not.
    assert keys(form([32, 32, 32, 20, 32, 10, 3], cost, grid)) == [0, 1, 2, 3, 5]


def test_without_shapes_urgency_alone_decides() -> None:
    formed = form([20, 100, 30, 60], grid=NO_GRID, bounds=BOUNDS._replace(max_requests=3))
    assert keys(formed) == [0, 1, 2]
    assert formed.shape is None
    assert formed.new_tokens == 150
    assert formed.predicted_s == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 150, 0))


def test_the_time_on_a_shape_is_that_of_its_padding() -> None:
    cost = CostCoefficients(1e-6, 1e-4, 1e-6, 0.01)
    ranked = [short(0, 20, cost, 100), short(1, 30, cost, 50), short(2, 25, cost, 0)]
    formed = form_batch(ranked, cost, GRID, BOUNDS)
    assert formed is not None
    assert formed.shape == GraphShape(32, 4)
    attention_work = sum(new * (new + 2 * cached) for new, cached in ((20, 100), (30, 50), (25, 0)))
    assert formed.predicted_s == pytest.approx(cost.iteration_s(attention_work, 128, 150))


def test_the_deepest_shape_bounds_the_batch() -> None:
    formed = form([20] * 5, grid=GraphGrid.from_product((32,), (1, 2)))
    assert len(formed.members) == GraphShape(32, 2).slots == 4
    assert formed.is_full


def test_a_shape_that_pads_too_much_is_not_planned_for() -> None:
    formed = form([256, *[8] * 8], grid=GraphGrid.from_product((256,), (1, 16)))
    assert len(formed.members) == 9
    assert formed.shape is None
    assert formed.predicted_s == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 256 + 64, 0))


def test_a_request_by_itself() -> None:
    alone = lone_batch(short(3, 20, OVERHEAD_BOUND), OVERHEAD_BOUND, GRID)
    assert (keys(alone), alone.new_tokens, alone.shape, alone.is_full) == ([3], 20, (32, 1), True)
    assert alone.predicted_s == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 32, 0))


def test_longer_than_any_shape_runs_on_the_ordinary_kernels() -> None:
    formed = form([300, 310])
    assert keys(formed) == [0, 1]
    assert formed.shape is None


@pytest.mark.parametrize(
    "bounds",
    [
        BOUNDS._replace(max_tokens=250),
        BOUNDS._replace(free_kv_tokens=250),
        BOUNDS._replace(free_kv_tokens=256, page_tokens=128),
        BOUNDS._replace(budget_s=OVERHEAD_BOUND.iteration_s(0, 250, 0)),
    ],
)
def test_room_is_bounded(bounds: BatchBounds) -> None:
    formed = form([100, 100, 100], grid=NO_GRID, bounds=bounds)
    assert keys(formed) == [0, 1]
    assert formed.is_full


def test_a_smaller_one_takes_the_room_that_is_left() -> None:
    assert keys(form([100, 200, 50], grid=NO_GRID, bounds=BOUNDS._replace(max_tokens=150))) == [0, 2]


def test_the_head_goes_whatever_it_costs_unless_memory_refuses() -> None:
    assert keys(form([100], grid=NO_GRID, bounds=BOUNDS._replace(budget_s=0.0, max_tokens=10))) == [0]
    head = short(0, 100, OVERHEAD_BOUND)
    assert form_batch([head], OVERHEAD_BOUND, NO_GRID, BOUNDS._replace(free_kv_tokens=99)) is None


def test_one_more_of_average_length() -> None:
    formed = form([100, 50], grid=NO_GRID)
    assert joined_s(formed, OVERHEAD_BOUND, NO_GRID) == pytest.approx(OVERHEAD_BOUND.iteration_s(0.0, 225, 0))
    padded = form([60, 60, 60])
    assert joined_s(padded, OVERHEAD_BOUND, GRID) == pytest.approx(padded.predicted_s)  # the fourth seat is free


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=40),
    max_requests=st.integers(1, 64),
    max_tokens=st.integers(400, 5000),
    free=st.integers(500, 5000),
    page=st.sampled_from([1, 16]),
    with_grid=st.booleans(),
)
def test_every_batch_keeps_its_bounds(
    lengths: list[int], max_requests: int, max_tokens: int, free: int, page: int, with_grid: bool
) -> None:
    bounds = BatchBounds(max_requests, max_tokens, free, page, 0.05)
    formed = form(lengths, COMPUTE_BOUND, GRID if with_grid else NO_GRID, bounds)
    members = [lengths[key] for key in keys(formed)]
    assert keys(formed)[0] == 0
    assert len(set(keys(formed))) == len(members) <= max_requests
    assert sum(members) == formed.new_tokens <= max_tokens
    assert sum(-(-length // page) * page for length in members) <= free
    if len(members) > 1:
        assert formed.predicted_s <= 0.05
    if formed.shape is not None:
        assert max(members) <= formed.shape.length_tokens
        assert len(members) <= formed.shape.slots
