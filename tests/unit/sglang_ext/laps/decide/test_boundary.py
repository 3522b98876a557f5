"""Where short ends follows what iterations cost, in coarse steps, and never flaps."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.boundary import (
    ClassBoundary,
    coarse_tokens,
    expected_boundary_tokens,
    fitted_boundary_tokens,
    tokens_within,
)
from sglang_ext.laps.decide.cost_model import CostCoefficients, CostFit, IterationSample

COST = CostCoefficients(alpha_s=5e-8, token_s=4e-4, read_s=1e-6, kappa_s=0.014)
OBJECTIVE_S = 0.4


def slower(times: float) -> CostCoefficients:
    """Computing takes longer, launching does not."""
    return COST._replace(alpha_s=times * COST.alpha_s, token_s=times * COST.token_s)


def sample(random: Random, cost: CostCoefficients, noise: float = 0.05) -> IterationSample:
    new = int(2 ** random.uniform(2, 10))
    duration_s = cost.chunk_s(new, 0) * random.lognormvariate(0, noise)
    return IterationSample(float(new * new), new, 0, 1, duration_s)


def run(boundary: ClassBoundary, fit: CostFit, random: Random, cost: CostCoefficients, count: int) -> list[int]:
    """The boundary after each of so many iterations."""
    seen = []
    for _ in range(count):
        fit.add(sample(random, cost))
        boundary.record_iteration(fit, None, OBJECTIVE_S)
        seen.append(boundary.tokens)
    return seen


def changes(seen: list[int]) -> int:
    return sum(one != other for one, other in pairwise(seen))


def new_fit() -> CostFit:
    return CostFit(CostCoefficients.from_throughput(400.0, 0.02))


@given(
    alpha=st.floats(0, 1e-6),
    token=st.floats(1e-6, 1e-2),
    kappa=st.floats(0, 0.5),
    budget_s=st.floats(1e-3, 1.0),
)
def test_a_prefill_of_that_length_takes_the_budget(alpha: float, token: float, kappa: float, budget_s: float) -> None:
    cost = CostCoefficients(alpha, token, 0.0, kappa)
    tokens = tokens_within(cost, budget_s)
    if kappa >= budget_s:
        assert tokens == 0.0
    else:
        assert alpha * tokens * tokens + token * tokens + kappa == pytest.approx(budget_s)


@given(st.floats(0, 1e6))
def test_steps_are_coarse_and_below(tokens: float) -> None:
    step = coarse_tokens(tokens)
    assert step == 32 or step <= tokens < 1.5 * step
    assert coarse_tokens(step) == step


def test_some_steps() -> None:
    assert [coarse_tokens(n) for n in (1, 47, 48, 64, 95, 96, 460, 600, 800, 1023, 1024)] == [
        *(32, 32, 48, 64, 64, 96, 384, 512, 768, 768, 1024)
    ]


def test_one_that_is_given_holds() -> None:
    boundary = ClassBoundary(100, max_tokens=64)
    assert set(run(boundary, new_fit(), Random(1), COST, 400)) == {100}
    assert not boundary.is_fitted


def test_it_is_what_takes_half_of_the_objective() -> None:
    boundary, fit = ClassBoundary(None, max_tokens=8192), new_fit()
    seen = run(boundary, fit, Random(2), COST, 200)
    assert seen[0] == 512
    assert boundary.is_fitted
    assert boundary.tokens == coarse_tokens(tokens_within(COST, OBJECTIVE_S / 2)) == 384
    assert changes(seen) == 1
    assert boundary.tokens == expected_boundary_tokens(COST, OBJECTIVE_S, 8192)
    assert expected_boundary_tokens(COST, OBJECTIVE_S, 300) == 256
    assert expected_boundary_tokens(COST, OBJECTIVE_S, 20) == 20


def test_what_launches_and_memory_bound_is_short_whatever_the_objective() -> None:
    """Where the fixed cost alone is above the objective, what takes ten times the fixed cost is left."""
    slow = CostCoefficients(alpha_s=1e-6, token_s=1e-3, read_s=0.0, kappa_s=0.5)
    fit, random = new_fit(), Random(3)
    for _ in range(300):
        fit.add(sample(random, slow))
    fitted = fitted_boundary_tokens(fit, 1e-5, OBJECTIVE_S, 8192)
    assert fitted is not None
    memory_bound = fit.boundary_tokens(1e-5, 0)
    assert memory_bound is not None
    assert fitted == pytest.approx(tokens_within(fit.fitted, 10 * fit.fitted.kappa_s))
    assert fitted > memory_bound > 300


def test_it_is_never_below_what_the_fixed_cost_is_worth() -> None:
    """However tight the objective: cut below 900 tokens, a tenth of a part and more is its fixed cost."""
    slow = CostCoefficients(0.0, 1e-3, 0.0, 0.1)
    assert expected_boundary_tokens(slow, 0.01, 8192) == 768
    assert expected_boundary_tokens(slow, 1.0, 8192) == 768
    assert expected_boundary_tokens(slow, 4.0, 8192) == 1536  # half of it


def test_it_is_never_above_what_is_cut_at_no_cost() -> None:
    """However lax the objective: of 6,300 tokens less than a sixtieth is the fixed cost."""
    slow = CostCoefficients(0.0, 1e-3, 0.0, 0.1)
    assert expected_boundary_tokens(slow, 100.0, 8192) == 6144


def test_no_iteration_computes_more() -> None:
    boundary = ClassBoundary(None, max_tokens=200)
    assert boundary.tokens == 200
    run(boundary, new_fit(), Random(4), COST, 200)
    assert boundary.tokens == 192


def test_one_length_says_nothing() -> None:
    boundary, fit = ClassBoundary(None, max_tokens=8192), new_fit()
    for _ in range(400):
        fit.add(IterationSample(4096.0, 64, 0, 1, COST.chunk_s(64, 0)))
        boundary.record_iteration(fit, None, OBJECTIVE_S)
    assert boundary.tokens == 512
    assert not boundary.is_fitted


def test_a_machine_that_is_faster_and_slower_in_turn_does_not_make_it_flap() -> None:
    boundary, fit, random = ClassBoundary(None, max_tokens=8192), new_fit(), Random(5)
    run(boundary, fit, random, COST, 600)
    seen = []
    for turn in range(20):
        seen += run(boundary, fit, random, COST.times(1.3 if turn % 2 else 1 / 1.3), 100)
    assert changes(seen) == 0


def test_a_start_beside_others_does_not_decide_for_long() -> None:
    boundary, fit, random = ClassBoundary(None, max_tokens=8192), new_fit(), Random(8)
    run(boundary, fit, random, slower(4), 64)
    assert boundary.tokens < 128
    run(boundary, fit, random, COST, 320)
    assert boundary.tokens in {256, 384}


def test_a_machine_that_has_become_slower_for_good_is_followed_once() -> None:
    boundary, fit, random = ClassBoundary(None, max_tokens=8192), new_fit(), Random(6)
    run(boundary, fit, random, COST, 200)
    seen = run(boundary, fit, random, slower(3), 1500)
    assert boundary.tokens == coarse_tokens(tokens_within(slower(3), OBJECTIVE_S / 2)) == 128
    assert changes(seen) == 1


def test_a_length_at_a_step_does_not_make_it_flap() -> None:
    """The value lies on a step itself, and noise puts it above and below."""
    at_step = COST._replace(token_s=(OBJECTIVE_S / 2 - COST.kappa_s - 5e-8 * 384 * 384) / 384)
    boundary, fit, random = ClassBoundary(None, max_tokens=8192), new_fit(), Random(7)
    run(boundary, fit, random, at_step, 200)
    assert changes(run(boundary, fit, random, at_step, 3000)) == 0


def known_fit(cost: CostCoefficients) -> CostFit:
    """One that has found these costs."""
    fit = CostFit(cost)
    for tokens in (8, 32, 128, 512, 1024, 2048, 4096, 8192) * 16:
        for cached in (0, 1024):
            work = float(tokens * (tokens + 2 * cached))
            fit.add(IterationSample(work, tokens, cached, 1, cost.iteration_s(work, tokens, cached)))
    return fit


def test_eight_looks_in_a_row_must_contradict() -> None:
    boundary, right, wrong = ClassBoundary(None, max_tokens=8192), known_fit(COST), known_fit(slower(3))

    def look(fit: CostFit, times: int) -> int:
        for _ in range(32 * times):
            boundary.record_iteration(fit, None, OBJECTIVE_S)
        return boundary.tokens

    assert look(right, 20) == 384
    assert look(wrong, 7) == 384
    assert look(right, 1) == 384
    assert look(wrong, 7) == 384
    assert look(wrong, 1) == 128
