"""The planner against an independent enumeration of the paper's space, exactly, and against every possible plan."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from baselines.tetris_planner import CdspPlanner, CdspRequest, ChunkPlan, NoPlan, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from support.cdsp_cases import PLENTY, Case, cases, polynomial_costs, scaling_cases
from support.cdsp_reference import Reference, optimum_s
from support.examples import examples


@pytest.mark.full
@settings(max_examples=examples(1500))
@given(st.one_of(cases(), scaling_cases()))
def test_equals_the_enumeration(case: Case) -> None:
    plan = CdspPlanner(case.config).plan(case.snapshot, case.request, case.rate)
    expected = Reference(*case).plan()
    if expected is None:
        event("no plan")
        assert isinstance(plan, NoPlan)
        return
    event(f"{len(expected.chunks)} chunks")
    assert isinstance(plan, ChunkPlan)
    assert Fraction(plan.ttft_s) == expected.ttft_s
    assert [tuple(chunk) for chunk in plan.chunks] == [tuple(chunk) for chunk in expected.chunks]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.data())
def test_no_plan_is_better_than_what_is_possible(data: st.DataObject) -> None:
    candidates = tuple(SpCandidate(size, data.draw(polynomial_costs(size))) for size in (1, 2, 3))
    delays = data.draw(st.lists(st.integers(0, 64).map(lambda value: value * 2.0**-9), min_size=3, max_size=3))
    snapshot = PrefillSnapshot((0, 0, 1), delays, (PLENTY,) * 3)
    request = CdspRequest(data.draw(st.integers(1, 9)))
    config = PlannerConfig(candidates, min_chunk_tokens=1)
    plan = CdspPlanner(config).plan(snapshot, request, 0.0)
    assert isinstance(plan, ChunkPlan)
    assert Fraction(plan.ttft_s) >= optimum_s(config, snapshot, request)
