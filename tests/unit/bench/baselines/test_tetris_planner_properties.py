"""What every plan must be, whatever the algorithm found."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.tetris_planner import CdspPlanner, CdspRequest, ChunkPlan, NoPlan, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.table1 import fitted_candidates
from support.cdsp_cases import Case, cases, queue_delays_after, scaling_cases
from support.cdsp_reference import Reference


def planned(case: Case) -> ChunkPlan | None:
    plan = CdspPlanner(case.config).plan(case.snapshot, case.request, case.rate)
    return plan if isinstance(plan, ChunkPlan) else None


@pytest.mark.slow
@given(st.one_of(cases(), scaling_cases()))
def test_tokens_add_up_in_order(case: Case) -> None:
    if plan := planned(case):
        position = case.request.cached_tokens
        for chunk in plan.chunks:
            assert chunk.start_token == position
            assert chunk.tokens >= 1
            position += chunk.tokens
        assert position == case.request.cached_tokens + case.request.new_tokens


@pytest.mark.slow
@given(st.one_of(cases(), scaling_cases()))
def test_groups_grow_from_the_earlier_ones(case: Case) -> None:
    if plan := planned(case):
        before = case.request.group
        sizes = {candidate.size for candidate in case.config.candidates}
        for index, chunk in enumerate(plan.chunks):
            assert chunk.instances[: len(before)] == before
            assert index == 0 or len(chunk.instances) > len(before)
            assert len(set(chunk.instances)) == len(chunk.instances)
            assert len(chunk.instances) in sizes
            before = chunk.instances


@pytest.mark.slow
@given(st.one_of(cases(), scaling_cases()))
def test_chunks_start_when_their_group_is_free(case: Case) -> None:
    if plan := planned(case):
        costs = {candidate.size: candidate.cost for candidate in case.config.candidates}
        end_s = 0.0
        for chunk in plan.chunks:
            assert chunk.start_s == max(end_s, *(case.snapshot.queue_delays_s[i] for i in chunk.instances))
            assert chunk.compute_s == costs[len(chunk.instances)].predict_s(chunk.start_token, chunk.tokens)
            end_s = chunk.start_s + chunk.compute_s
        assert plan.ttft_s == end_s
        after = queue_delays_after(plan, case.snapshot.queue_delays_s)
        for instance, delay_s in enumerate(case.snapshot.queue_delays_s):
            assert after[instance] == (end_s if instance in plan.chunks[-1].instances else delay_s)


@pytest.mark.slow
@given(st.one_of(cases(), scaling_cases()))
def test_capacity_is_never_exceeded(case: Case) -> None:
    if plan := planned(case):
        reference = Reference(*case)
        for chunk in plan.chunks:
            held = reference.share(chunk.start_token + chunk.tokens, len(chunk.instances))
            assert all(held <= case.snapshot.free_kv_tokens[i] for i in chunk.instances)


@pytest.mark.slow
@given(st.one_of(cases(), scaling_cases()))
def test_short_chunks_are_not_made(case: Case) -> None:
    if (plan := planned(case)) and len(plan.chunks) > 1:
        assert min(chunk.tokens for chunk in plan.chunks) >= case.config.min_chunk_tokens


@pytest.mark.slow
@given(st.one_of(cases(), scaling_cases()))
def test_never_worse_than_one_chunk(case: Case) -> None:
    single = CdspPlanner(replace(case.config, is_chunking=False)).plan(case.snapshot, case.request, case.rate)
    plan = CdspPlanner(case.config).plan(case.snapshot, case.request, case.rate)
    if isinstance(single, NoPlan):
        assert plan == single
    else:
        assert len(single.chunks) == 1
        assert isinstance(plan, ChunkPlan)
        assert plan.ttft_s <= single.ttft_s


@pytest.mark.slow
@given(scaling_cases(), cases())
def test_a_plan_depends_on_its_inputs_alone(case: Case, other: Case) -> None:
    planner = CdspPlanner(case.config)
    first = planner.plan(case.snapshot, case.request, case.rate)
    planner.plan(other.snapshot, other.request, other.rate)
    assert planner.plan(case.snapshot, case.request, case.rate) == first
    backwards = replace(case.config, candidates=case.config.candidates[::-1])
    assert CdspPlanner(backwards).plan(case.snapshot, case.request, case.rate) == first


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.75])
def test_a_higher_rate_never_takes_a_larger_size(rate: float) -> None:
    planner = CdspPlanner(PlannerConfig(fitted_candidates(), is_chunking=False))
    idle = PrefillSnapshot((0,) * 8 + (1,) * 8, (0.0,) * 16, (10**6,) * 16)
    for tokens in (4096, 32_768, 190_000):
        eager = planner.plan(idle, CdspRequest(tokens), 0.0)
        careful = planner.plan(idle, CdspRequest(tokens), rate)
        assert isinstance(eager, ChunkPlan)
        assert isinstance(careful, ChunkPlan)
        assert len(careful.chunks[0].instances) <= len(eager.chunks[0].instances)
        assert math.isclose(eager.ttft_s, min(c.cost.predict_s(0, tokens) for c in fitted_candidates()))
