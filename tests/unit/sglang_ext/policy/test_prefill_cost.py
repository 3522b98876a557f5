"""The cost model adds up over chunks, and the boundary is where its two sides are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.prefill_cost import CostCoefficients, boundary_tokens

COST = CostCoefficients(alpha_s=3e-8, token_s=2e-5, read_s=1e-7, kappa_s=4e-3)


def test_an_iteration_is_the_sum_of_its_terms() -> None:
    assert COST.iteration_s(1000.0, 20, 300) == pytest.approx(3e-5 + 4e-4 + 3e-5 + 4e-3)
    assert COST.chunk_s(20, 300) == pytest.approx(COST.iteration_s(20 * (20 + 600), 20, 300))


def test_a_prior_from_throughput() -> None:
    prior = CostCoefficients.from_throughput(10_000, 0.005)
    assert prior.chunk_s(1000, 0) == pytest.approx(0.105)


@pytest.mark.parametrize(("tokens_per_s", "fixed_s"), [(0.0, 0.1), (-1.0, 0.1), (100.0, -0.1)])
def test_a_prior_that_is_none_is_refused(tokens_per_s: float, fixed_s: float) -> None:
    with pytest.raises(ValueError, match="tokens_per_s must be above 0"):
        CostCoefficients.from_throughput(tokens_per_s, fixed_s)


def test_a_prompt_within_the_budget_is_one_chunk() -> None:
    assert COST.prefill_s(100, 50, 1.0) == COST.chunk_s(100, 50)


@given(chunk=st.integers(200, 3000), chunks=st.integers(2, 12), cached=st.integers(0, 20_000))
def test_the_closed_form_is_near_the_sum_over_chunks(chunk: int, chunks: int, cached: int) -> None:
    total = chunk * chunks
    summed_s = sum(COST.chunk_s(chunk, cached + index * chunk) for index in range(chunks))
    whole_s = COST.chunk_s(total, cached)
    assert summed_s > whole_s
    predicted_s = COST.prefill_s(total, cached, whole_s / chunks * 1.0001)
    assert predicted_s == pytest.approx(summed_s, rel=0.01)


@given(
    alpha=st.floats(1e-9, 1e-6),
    token=st.floats(1e-6, 1e-3),
    read=st.floats(0, 1e-5),
    kappa=st.floats(0, 0.1),
    write_share=st.floats(0, 1),
    cached=st.integers(0, 100_000),
    with_kappa=st.booleans(),
)
def test_at_the_boundary_compute_equals_memory(
    alpha: float, token: float, read: float, kappa: float, write_share: float, cached: int, with_kappa: bool
) -> None:
    write_s = write_share * token
    limit = boundary_tokens(CostCoefficients(alpha, token, read, kappa), write_s, cached, with_kappa=with_kappa)
    assert limit is not None
    compute_s = alpha * limit * (limit + 2 * cached) + (token - write_s) * limit
    memory_s = write_s * limit + read * cached + (kappa if with_kappa else 0.0)
    assert compute_s == pytest.approx(memory_s, rel=1e-6, abs=1e-12)


def test_the_papers_forms() -> None:
    cost = CostCoefficients(alpha_s=1e-7, token_s=5e-5, read_s=4e-6, kappa_s=0.0)
    gamma_w, beta = 4e-5, 1e-5
    assert boundary_tokens(cost, gamma_w, 0, with_kappa=False) == pytest.approx((gamma_w - beta) / 1e-7)
    assert boundary_tokens(cost, gamma_w / 4, 0, with_kappa=False) == 0.0
    far = boundary_tokens(cost, gamma_w, 10**9, with_kappa=False)
    assert far == pytest.approx(4e-6 / (2 * 1e-7), rel=1e-3)  # gamma_r / 2 alpha


def test_memory_bound_for_ever_has_no_boundary() -> None:
    assert boundary_tokens(CostCoefficients(0.0, 1e-5, 0.0, 0.0), 9e-6, 0, with_kappa=True) is None
