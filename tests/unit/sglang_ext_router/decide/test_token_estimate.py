"""Calibration on synthetic traffic whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.token_estimate import TokenEstimator

SIZES = {"all": (20, 200_000), "chat": (150, 1500), "documents": (5_000, 100_000)}


def traffic(
    seed: int, sizes: tuple[int, int], ratio: float, overhead: int, noise: float = 0.05
) -> Iterator[tuple[int, int]]:
    """(bytes, tokens) of prompts with log-uniform sizes and relative noise of mean zero."""
    random = Random(seed)
    low, high = math.log(sizes[0]), math.log(sizes[1])
    while True:
        size_bytes = int(math.exp(random.uniform(low, high)))
        tokens = size_bytes / ratio * (1 + random.gauss(0, noise)) + overhead
        yield size_bytes, max(1, min(round(tokens), size_bytes + overhead))


def calibrated(samples: Iterator[tuple[int, int]], count: int = 1000) -> TokenEstimator:
    estimator = TokenEstimator()
    for size_bytes, tokens in islice(samples, count):
        estimator.observe(size_bytes, tokens)
    return estimator


def test_before_samples_the_prior_is_wide() -> None:
    estimator = TokenEstimator(template_tokens=256)
    assert estimator.estimate(4000) == 1000
    low, high = estimator.interval(6000)
    assert low == 250
    assert high == 4000 + 256


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ratio", [2.0, 3.4, 4.6])
@pytest.mark.parametrize("overhead", [0, 30, 200])
def test_converges_within_two_percent(sizes: str, ratio: float, overhead: int) -> None:
    estimator = calibrated(traffic(1, SIZES[sizes], ratio, overhead))
    for size_bytes in (SIZES[sizes][0] * 8, math.isqrt(SIZES[sizes][0] * SIZES[sizes][1]), SIZES[sizes][1]):
        truth = size_bytes / ratio + overhead
        assert estimator.estimate(size_bytes) == pytest.approx(truth, rel=0.02, abs=1)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.25])
def test_the_interval_covers_stationary_traffic(sizes: str, noise: float) -> None:
    samples = traffic(2, SIZES[sizes], 3.7, 25, noise)
    estimator = calibrated(samples)
    covered = 0
    for size_bytes, tokens in islice(samples, 2000):
        low, high = estimator.interval(size_bytes)
        covered += low <= tokens <= high
        estimator.observe(size_bytes, tokens)
    assert covered / 2000 >= 0.95


def test_the_interval_covers_a_mix_of_languages_and_is_narrower_than_the_prior() -> None:
    english, chinese = traffic(3, SIZES["all"], 4.5, 20), traffic(4, SIZES["all"], 2.2, 20)
    random = Random(5)
    estimator = TokenEstimator()
    covered = 0
    for number in range(3000):
        size_bytes, tokens = next(english if random.random() < 0.7 else chinese)
        low, high = estimator.interval(size_bytes)
        covered += number >= 1000 and low <= tokens <= high
        estimator.observe(size_bytes, tokens)
    assert covered / 2000 >= 0.95
    low, high = estimator.interval(10_000)
    assert high - low < 0.85 * (10_000 / 1.5 + 256 - 10_000 / 6)


@pytest.mark.parametrize("absurd", [(480, 1), (480, 480), (480, 10**9), (10**9, 1), (1, 10**6), (200_000, 200_000)])
def test_one_absurd_sample_does_not_move_it(absurd: tuple[int, int]) -> None:
    estimator = calibrated(traffic(6, SIZES["all"], 4.0, 20), 500)
    before = {size: estimator.estimate(size) for size in (100, 1000, 10_000, 100_000)}
    width = {size: estimator.interval(size) for size in before}
    estimator.observe(*absurd)
    for size, tokens in before.items():
        assert estimator.estimate(size) == pytest.approx(tokens, rel=0.01, abs=1)
        assert estimator.interval(size) == pytest.approx(width[size], rel=0.02, abs=1)


def test_follows_a_change_of_traffic() -> None:
    estimator = calibrated(traffic(7, SIZES["all"], 4.5, 20), 3000)
    for size_bytes, tokens in islice(traffic(8, SIZES["all"], 2.2, 20), 2500):
        estimator.observe(size_bytes, tokens)
    assert estimator.estimate(10_000) == pytest.approx(10_000 / 2.2, rel=0.03)


def test_sizes_that_were_not_seen_stay_open() -> None:
    """Short prompts of one size cannot tell overhead from slope: a long one's tokens are anybody's guess."""
    random = Random(9)
    estimator = TokenEstimator()
    for _ in range(1000):
        size_bytes = random.randrange(440, 490)
        estimator.observe(size_bytes, round(size_bytes / 5.1 + 150))
    low, high = estimator.interval(460)
    assert high - low < 30
    low, high = estimator.interval(100_000)
    assert low <= 100_000 / 5.1 + 150 <= high


def test_impossible_counts_are_ignored() -> None:
    estimator = TokenEstimator()
    for size_bytes, tokens in ((0, 5), (-3, 5), (100, 0), (100, -1), (100, 100 + 4 * 256 + 1)):
        estimator.observe(size_bytes, tokens)
    assert estimator.samples == 0


def test_a_larger_template_raises_the_upper_bound() -> None:
    estimator = TokenEstimator(template_tokens=10)
    assert estimator.upper_bound(100) == 110
    estimator.observe(20, 60)
    assert estimator.upper_bound(100) == 140


def test_template_tokens_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match="template_tokens must be at least 0"):
        TokenEstimator(-1)


@pytest.mark.slow
@given(
    samples=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=80),
    size_bytes=st.integers(0, 10**9),
)
def test_any_history_leaves_it_in_order(samples: list[tuple[int, int]], size_bytes: int) -> None:
    estimator = TokenEstimator()
    for sample_bytes, tokens in samples:
        estimator.observe(sample_bytes, tokens)
    low, high = estimator.interval(size_bytes)
    assert 1 <= low <= high <= max(1, estimator.upper_bound(size_bytes))
    assert low <= estimator.estimate(size_bytes)
    assert 1 <= estimator.bytes_per_token <= 24 + 1e-9
    assert estimator.overhead_tokens >= 0
