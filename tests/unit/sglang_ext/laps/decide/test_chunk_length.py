"""The number of tokens of a long prefill that a batch takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.packed_batch import choose_chunk

COST = CostCoefficients(alpha_s=3e-8, token_s=2e-5, read_s=1e-7, kappa_s=4e-3)


def chunk(
    remaining: int, cached: int = 0, budget_s: float = 0.05, page: int = 1, least: int = 64, most: int = 8192
) -> int:
    return choose_chunk(COST, remaining, cached, budget_s, page, least, most)


def test_chunks_shrink_as_the_cache_grows() -> None:
    sizes = [chunk(100_000, cached) for cached in (0, 1000, 10_000, 30_000)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[-1]


def test_all_that_is_left_if_it_fits() -> None:
    assert chunk(900) == 900


def test_a_crumb_is_left_a_little_longer() -> None:
    largest = chunk(100_000)
    assert chunk(largest + 10) == largest + 10 - 64
    assert chunk(largest + 200) == largest


def test_a_crumb_is_taken_along_when_there_is_nothing_to_leave() -> None:
    assert chunk(100, budget_s=0.0) == 100
    assert chunk(64 + 64, budget_s=0.0) == 64


def test_an_engine_limit_below_the_minimum_wins() -> None:
    assert chunk(1000, least=512, most=128) == 128


@given(
    remaining=st.integers(1, 50_000),
    cached=st.integers(0, 100_000),
    budget_s=st.floats(0, 1),
    page=st.sampled_from([1, 16, 64]),
    least=st.integers(1, 600),
    most=st.integers(64, 20_000),
)
def test_every_chunk_keeps_the_rules(
    remaining: int, cached: int, budget_s: float, page: int, least: int, most: int
) -> None:
    tokens = chunk(remaining, cached, budget_s, page, least, most)
    assert 1 <= tokens <= remaining
    assert tokens == remaining or tokens % page == 0
    assert tokens <= most
    least = min(-(-least // page), most // page) * page
    assert tokens >= min(least, remaining)
    over = COST.chunk_s(tokens, cached) > budget_s
    if over:  # only what the minimum or a crumb of less than a minimum forces
        assert tokens < 2 * least or tokens <= least
    if remaining - tokens >= 2 * least + page and tokens + page <= most:
        assert COST.chunk_s(tokens + page, cached) > budget_s


@pytest.mark.parametrize("page", [1, 16])
def test_a_prompt_comes_to_its_end(page: int) -> None:
    remaining, cached, sizes = 20_000, 0, []
    while remaining:
        sizes.append(chunk(remaining, cached, page=page))
        remaining -= sizes[-1]
        cached += sizes[-1]
    assert min(sizes) >= 64
