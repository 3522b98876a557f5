"""Which instances a group takes, one rule of section 5.1 at a time, and what free KV changes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from baselines.tetris_planner import CdspPlanner, CdspRequest, ChunkPlan, NoPlan, NoPlanReason, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

PLENTY = 10**6


def group(
    size: int,
    nodes: tuple[int, ...],
    delays_s: tuple[float, ...],
    before: tuple[int, ...] = (),
    free: tuple[int, ...] | None = None,
    tokens: int = 800,
    page_tokens: int = 1,
) -> tuple[int, ...] | NoPlan:
    """The group of a plan that can only be one chunk of `size`."""
    config = PlannerConfig((SpCandidate(size, SpCost(0.0, 0.001, 0.0, 0.0)),), page_tokens=page_tokens)
    snapshot = PrefillSnapshot(nodes, delays_s, free or (PLENTY,) * len(nodes))
    plan = CdspPlanner(config).plan(snapshot, CdspRequest(tokens, 0, before), 0.0)
    return plan.chunks[0].instances if isinstance(plan, ChunkPlan) else plan


def test_the_node_where_enough_are_free_first() -> None:
    # Node 0 has the least delayed instance, node 1 the smaller second shortest delay.
    assert group(2, (0, 0, 0, 1, 1, 1), (0.0, 5.0, 6.0, 2.0, 3.0, 9.0)) == (3, 4)
    assert group(1, (0, 0, 0, 1, 1, 1), (0.0, 5.0, 6.0, 2.0, 3.0, 9.0)) == (0,)


def test_ties_go_to_the_smaller_node_and_position() -> None:
    assert group(2, (1, 0, 1, 0), (1.0, 1.0, 1.0, 1.0)) == (1, 3)
    assert group(1, (0, 0, 0), (2.0, 1.0, 1.0)) == (1,)


def test_whole_nodes_least_delayed_first_then_the_rest() -> None:
    nodes = (0, 0, 1, 1, 2, 2, 3, 3)
    delays = (1.0, 9.0, 2.0, 3.0, 0.0, 8.0, 4.0, 4.0)
    # Node 1 is free at 3, node 3 at 4; the one instance left comes from node 2, which has the shortest delay.
    assert group(5, nodes, delays) == (2, 3, 6, 7, 4)


def test_an_earlier_group_grows_on_its_nodes_first() -> None:
    nodes = (0, 0, 0, 1, 1, 1, 2, 2, 2)
    delays = (7.0, 5.0, 6.0, 3.0, 4.0, 8.0, 0.0, 0.0, 0.0)
    assert group(4, nodes, delays, before=(5, 1)) == (5, 1, 3, 4)
    assert group(7, nodes, delays, before=(5, 1)) == (5, 1, 3, 4, 2, 0, 6)
    assert group(2, nodes, delays, before=(5, 1)) == (5, 1)
    assert group(1, nodes, delays, before=(5, 1)) == NoPlan(NoPlanReason.TOO_FEW_INSTANCES)


def test_instances_without_room_are_left_out() -> None:
    nodes, delays = (0, 0, 1, 1), (0.0, 0.0, 1.0, 2.0)
    assert group(2, nodes, delays, free=(400, 400, 400, 400)) == (0, 1)
    assert group(2, nodes, delays, free=(400, 399, 400, 400)) == (2, 3)
    assert group(2, nodes, delays, free=(400, 399, 400, 399)) == (0, 2)
    assert group(2, nodes, delays, free=(400, 399, 399, 399)) == NoPlan(NoPlanReason.KV_CAPACITY)


def test_a_share_takes_whole_pages() -> None:
    assert group(2, (0, 0), (0.0, 0.0), free=(448, 448), page_tokens=64) == (0, 1)
    assert group(2, (0, 0), (0.0, 0.0), free=(447, 448), page_tokens=64) == NoPlan(NoPlanReason.KV_CAPACITY)


def test_a_member_without_room_cannot_be_left_behind() -> None:
    free = (399, PLENTY, PLENTY)
    assert group(2, (0, 0, 0), (0.0,) * 3, before=(0,), free=free) == NoPlan(NoPlanReason.KV_CAPACITY)


def test_a_chunk_takes_no_more_than_its_group_has_room_for() -> None:
    """One instance is idle for long, but has free KV for 300 tokens only before the second joins."""
    cost = {size: SpCost(0.0, 0.001 / size, 0.0, 0.0) for size in (1, 2)}
    config = PlannerConfig(tuple(SpCandidate(size, cost[size]) for size in cost), min_chunk_tokens=1)
    snapshot = PrefillSnapshot((0, 0), (0.0, 0.4), (300, 300))
    plan = CdspPlanner(config).plan(snapshot, CdspRequest(600), 0.0)
    assert isinstance(plan, ChunkPlan)
    assert [chunk.tokens for chunk in plan.chunks] == [300, 300]
    # Too little for all 600 on one instance, and more than the budget of 0.4 s is good for.
    roomy = CdspPlanner(config).plan(snapshot._replace(free_kv_tokens=(599, 599)), CdspRequest(600), 0.0)
    assert isinstance(roomy, ChunkPlan)
    assert [chunk.tokens for chunk in roomy.chunks] == [400, 200]


def test_reasons_without_a_plan() -> None:
    assert group(3, (0, 0), (0.0, 0.0)) == NoPlan(NoPlanReason.TOO_FEW_INSTANCES)
    table = PlannerConfig((SpCandidate(1, TabulatedCost((100, 200), (0.1, 0.2))),))
    answer = CdspPlanner(table).plan(PrefillSnapshot((0,), (0.0,), (PLENTY,)), CdspRequest(201), 0.0)
    assert answer == NoPlan(NoPlanReason.COST_UNKNOWN)


@given(st.integers(1, 9000), st.floats(1e-6, 1e-2), st.floats(1e-6, 2e-5), st.floats(0, 1e-9))
def test_a_chunk_fills_its_budget_to_the_token(tokens: int, a_s: float, b_s: float, d_s: float) -> None:
    """Algorithm 3: a budget of just what n tokens take is good for n tokens, one rounding step less for n - 1."""
    cost = {1: SpCost(a_s, b_s, 2 * d_s, d_s), 2: SpCost(a_s, b_s / 2, d_s, d_s / 2)}
    config = PlannerConfig(tuple(SpCandidate(size, cost[size]) for size in cost), min_chunk_tokens=1)

    def first_chunk_tokens(budget_s: float) -> int:
        snapshot = PrefillSnapshot((0, 0), (0.0, budget_s), (PLENTY, PLENTY))
        plan = CdspPlanner(config).plan(snapshot, CdspRequest(100_000), 0.0)
        assert isinstance(plan, ChunkPlan)
        return plan.chunks[0].tokens if len(plan.chunks) > 1 else 0

    enough_s = cost[1].predict_s(0, tokens)
    assert first_chunk_tokens(enough_s) == tokens
    assert first_chunk_tokens(math.nextafter(enough_s, 0.0)) == tokens - 1
