"""Costs of SP sizes: close to what they were taken from, and corrected by what chunks take."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from sglang_ext.costs.engine_profile import EngineProfile, load_profile, sp_entry, write_profile
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.long_pool.coordinator.pool_cost import (
    RING_OVERHEAD_S,
    PoolCosts,
    UnknownCostError,
    divided,
    prior_candidates,
    profiled_candidates,
)
from sglang_ext.long_pool.decide.orders import MeasuredCost
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot, PriceOptions, PricePlanner, WaitingPrompt
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost
from sglang_ext.long_pool.decide.table1 import LATENCY_S, PROMPT_TOKENS

ONE = SpCost(0.01, 1e-3, 2e-7, 1e-7)


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., EngineProfile]:
    def load(*candidates: SpCandidate, coefficients: CostCoefficients | None = None) -> EngineProfile:
        content: dict[str, object] = {"model": "model"}
        if candidates:
            content["sp"] = [sp_entry(one.size, one.cost) for one in candidates if isinstance(one.cost, SpCost)]
        if coefficients is not None:
            content["prefill"] = coefficients._asdict()
        write_profile(tmp_path / "profile.json", content)
        return load_profile(tmp_path / "profile.json")

    return load


def test_the_prior_is_close_to_table_1() -> None:
    for candidate in prior_candidates((1, 2, 4, 8, 16)):
        for tokens, measured_s in zip(PROMPT_TOKENS, LATENCY_S[candidate.size], strict=False):
            ratio = candidate.cost.predict_s(0, tokens) / measured_s
            assert 2 / 3 < ratio < 4 / 3, (candidate.size, tokens, ratio)


def test_any_size_has_a_prior_and_more_instances_take_less_work() -> None:
    costs = [candidate.cost for candidate in prior_candidates((1, 2, 3, 5, 6))]
    times_s = [cost.predict_s(0, 100_000) for cost in costs]
    assert times_s == sorted(times_s, reverse=True)
    assert [cost.a_s for cost in costs] == sorted(cost.a_s for cost in costs)  # type: ignore[union-attr]


def test_measured_sizes_are_taken_as_they_are_and_others_divided(profile: Callable[..., EngineProfile]) -> None:
    two = SpCost(0.5, 0.0, 0.0, 1e-9)
    candidates = profiled_candidates(profile(SpCandidate(1, ONE), SpCandidate(2, two)), (1, 2, 4))
    assert [candidate.cost for candidate in candidates] == [ONE, two, divided(ONE, 4)]


def test_a_profile_of_one_instance_for_laps(profile: Callable[..., EngineProfile]) -> None:
    coefficients = CostCoefficients(alpha_s=1e-7, token_s=1e-3, read_s=0.0, kappa_s=0.01)
    (candidate,) = profiled_candidates(profile(coefficients=coefficients), (1,))
    assert candidate.cost == ONE
    assert candidate.cost.predict_s(50, 200) == pytest.approx(coefficients.chunk_s(200, 50))


def test_a_profile_without_what_is_needed(profile: Callable[..., EngineProfile]) -> None:
    with pytest.raises(UnknownCostError, match="neither SP size 4 nor 1"):
        profiled_candidates(profile(SpCandidate(2, ONE)), (2, 4))


def test_costs_follow_the_median_and_small_changes_are_none() -> None:
    costs = PoolCosts([SpCandidate(1, ONE), SpCandidate(2, TabulatedCost((0, 100), (0.0, 1.0)))])
    expected_s = ONE.predict_s(0, 100)
    answers = [costs.observe(1, 0, 100, expected_s * ratio, 0.0) for ratio in (3.0, 1000.0, 3.0, 3.1, 2.9)]
    assert answers == [False, False, True, False, False]
    assert costs.scale == pytest.approx(3.0)
    assert costs.candidates[0].cost.predict_s(0, 100) == pytest.approx(3 * expected_s)
    assert costs.candidates[1].cost.predict_s(0, 100) == pytest.approx(3.0)
    for _ in range(15):
        costs.observe(2, 0, 100, 1.0, 0.0)
    assert costs.scale == pytest.approx(1.0)


def test_what_tells_nothing_changes_nothing() -> None:
    costs = PoolCosts([SpCandidate(2, TabulatedCost((0, 100), (0.0, 1.0)))])
    for size, tokens, duration_s in ((1, 100, 1.0), (2, 101, 1.0), (2, 0, 1.0), (2, 100, 0.0)):
        assert not any(costs.observe(size, 0, tokens, duration_s, 0.0) for _ in range(9))
    assert costs.scale == 1.0


def test_what_members_measure_counts_instead_of_a_prior() -> None:
    costs = PoolCosts(prior_candidates((1, 2)), is_prior=True)
    for _ in range(3):
        costs.observe(1, 0, 4000, 60.0, 0.0)
    assert costs.scale > 10
    assert costs.learn(0, MeasuredCost(0.04, 1e-3, 1e-7), 0.0)
    assert costs.scale == 1.0
    one, two = (candidate.cost for candidate in costs.candidates)
    assert one.predict_s(1000, 2000) == pytest.approx(0.04 + 2.0 + 1e-7 * 2000 * 4000)
    assert two.predict_s(0, 0) == pytest.approx(0.04 + RING_OVERHEAD_S)
    assert not costs.learn(0, MeasuredCost(0.041, 1.02e-3, 1e-7), 0.0), "nearly the same"
    assert costs.learn(1, MeasuredCost(0.08, 1e-3, 1e-7), 0.0), "what every chunk costs has changed"
    assert costs.candidates[0].cost.predict_s(0, 0) == pytest.approx(0.0605)
    costs.forget(1)
    assert costs.learn(0, MeasuredCost(0.04, 1e-3, 1e-7), 0.0)
    assert costs.candidates[0].cost.predict_s(0, 0) == pytest.approx(0.04)


def test_the_first_chunk_corrects_a_prior_that_is_too_fast_but_for_its_fixed_cost() -> None:
    costs = PoolCosts(prior_candidates((1, 2)), is_prior=True)
    one, two = (candidate.cost for candidate in prior_candidates((1, 2)))
    assert costs.observe(2, 0, 1500, two.predict_s(0, 0) + 12 * (two.predict_s(0, 1500) - two.predict_s(0, 0)), 0.0)
    cost = costs.candidates[0].cost
    assert cost.predict_s(0, 0) == one.predict_s(0, 0)
    expected_s = one.predict_s(0, 0) + 12 * (one.predict_s(500, 4000) - one.predict_s(0, 0))
    assert cost.predict_s(500, 4000) == pytest.approx(expected_s)
    assert costs.scale == pytest.approx(12)


def test_a_machine_that_is_faster_than_the_prior_also_launches_faster() -> None:
    costs = PoolCosts(prior_candidates((1,)), is_prior=True)
    (before,) = (candidate.cost for candidate in prior_candidates((1,)))
    assert costs.observe(1, 0, 4000, before.predict_s(0, 4000) / 4, 0.0)
    (after,) = (candidate.cost for candidate in costs.candidates)
    for cached, new in ((0, 0), (0, 4000), (9000, 100)):
        assert after.predict_s(cached, new) == pytest.approx(before.predict_s(cached, new) / 4)


def test_each_size_of_a_group_has_a_ratio_of_its_own_where_members_have_measured() -> None:
    costs = PoolCosts(prior_candidates((1, 2, 4)), is_prior=True)
    costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0), 0.0)
    one, two, four = (candidate.cost.predict_s(0, 2000) for candidate in costs.candidates)
    for _ in range(3):
        assert not costs.observe(1, 0, 2000, 3 * one, 0.0), "members measure that by themselves"
    assert [costs.observe(2, 0, 2000, 1.5 * two, 0.0) for _ in range(3)] == [False, False, True]
    assert [candidate.cost.predict_s(0, 2000) for candidate in costs.candidates] == pytest.approx(
        [one, 1.5 * two, 1.5 * four]
    ), "a ring of four was never run: it is as far from what was expected as one of two"
    assert costs.scale == 1.5
    for _ in range(3):
        costs.observe(4, 0, 2000, 2.0 * four, 0.0)
    assert costs.candidates[1].cost.predict_s(0, 2000) == pytest.approx(1.5 * two)
    assert costs.scale == 2.0
    # A member's own costs change, and what a ring adds to them does not.
    assert costs.learn(0, MeasuredCost(0.08, 2e-3, 0.0), 0.0)
    assert costs.candidates[0].cost.predict_s(0, 2000) == pytest.approx(4.08)
    assert costs.scale == 2.0


def test_what_members_measure_does_not_count_where_there_is_a_profile() -> None:
    costs = PoolCosts(prior_candidates((1, 2)))
    before = costs.candidates
    assert not costs.learn(0, MeasuredCost(0.04, 1e-3, 1e-7), 0.0)
    assert costs.candidates == before


def test_what_short_prefills_show_counts_until_a_member_has_measured_long_ones() -> None:
    costs = PoolCosts(prior_candidates((1, 2)), is_prior=True)
    assert costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0, is_extrapolated=True), 0.0)
    for _ in range(3):
        costs.observe(2, 0, 4000, 6.0, 0.0)
    assert costs.scale > 2, "two instances take what a single one was expected to take, and more"
    assert costs.learn(1, MeasuredCost(0.05, 1e-3, 1e-7), 1.0)
    assert costs.candidates[0].cost.predict_s(0, 4000) == pytest.approx(0.05 + 4.0 + 1.6)
    assert costs.scale == 1.0, "what two take is compared with that anew"
    assert not costs.learn(0, MeasuredCost(0.9, 1e-3, 0.0, is_extrapolated=True), 2.0), "one knows better"
    assert not costs.learn(1, MeasuredCost(0.9, 1e-3, 0.0, is_extrapolated=True), 3.0), "it knew better"


def test_prompts_go_to_one_instance_while_members_have_measured_nothing() -> None:
    costs = PoolCosts(prior_candidates((1, 2, 4)), is_prior=True)
    assert not costs.learn(0, None, 0.0)
    (alone,) = prior_candidates((1,))
    assert costs.candidates == tuple(SpCandidate(size, alone.cost) for size in (1, 2, 4))
    planner = PricePlanner(PriceOptions(costs.candidates))
    idle = PrefillSnapshot((0,) * 4, (0.0,) * 4, (100_000,) * 4)
    for tokens, instances in ((90_000, 1), (150_000, 2), (390_000, 4)):
        (placement,) = planner.place(idle, [WaitingPrompt(tokens, 0, inf)], 0.0)
        assert len(placement.group) == instances, "a group where one has no room"
    assert costs.learn(1, MeasuredCost(0.05, 1e-4, 1e-9), 1.0)
    one, two, four = (candidate.cost.predict_s(0, 20_000) for candidate in costs.candidates)
    assert four < two < one
    assert not costs.learn(0, None, 2.0), "another one knows"


def test_groups_that_are_faster_than_short_prefills_admit_show_that_one_instance_is_too() -> None:
    costs = PoolCosts(prior_candidates((1, 2)), is_prior=True)
    costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0, is_extrapolated=True), 0.0)
    one_s, two_s = (candidate.cost.predict_s(0, 4000) for candidate in costs.candidates)
    for _ in range(12):
        costs.observe(2, 0, 4000, 0.7 * two_s, 0.0)
    assert [candidate.cost.predict_s(0, 4000) for candidate in costs.candidates] == pytest.approx(
        [0.7 * one_s, 0.7 * two_s]
    )
    for _ in range(15):
        costs.observe(2, 0, 4000, 1.5 * two_s, 0.0)
    assert [candidate.cost.predict_s(0, 4000) for candidate in costs.candidates] == pytest.approx([one_s, 1.5 * two_s])
    # What was measured with long ones holds.
    costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0), 1.0)
    for _ in range(3):
        costs.observe(2, 0, 4000, 0.7 * two_s, 1.0)
    assert costs.candidates[0].cost.predict_s(0, 4000) == pytest.approx(one_s)


def test_ratios_are_forgotten_so_that_a_size_that_was_slow_is_tried_again() -> None:
    costs = PoolCosts(prior_candidates((1, 2)), is_prior=True)
    costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0), 0.0)
    two_s = costs.candidates[1].cost.predict_s(0, 2000)
    for now_s in (1.0, 2.0, 3.0):
        costs.observe(2, 0, 2000, 5 * two_s, now_s)
    assert costs.scale == 5.0
    assert not costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0), 300.0)
    assert costs.learn(0, MeasuredCost(0.04, 1e-3, 0.0), 304.0)
    assert costs.candidates[1].cost.predict_s(0, 2000) == two_s


def test_what_corrects_a_profile_is_kept() -> None:
    costs = PoolCosts([SpCandidate(1, ONE)])
    for _ in range(3):
        costs.observe(1, 0, 100, 3 * ONE.predict_s(0, 100), 0.0)
    assert not costs.learn(0, None, 1e6)
    assert costs.scale == pytest.approx(3.0)
