"""Back-off times and their bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.retry import RETRYABLE_STATUS, RetryPolicy


def test_doubles_up_to_its_maximum() -> None:
    policy = RetryPolicy(jitter=0.0)
    times_s = [policy.backoff_s(attempt, 0.5) for attempt in range(9)]
    assert times_s == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


@given(attempt=st.integers(0, 10_000), draw=st.floats(0, 1, exclude_max=True))
def test_jitter_stays_around_the_plain_back_off(attempt: int, draw: float) -> None:
    plain_s = RetryPolicy(jitter=0.0).backoff_s(attempt, draw)
    assert 0.8 * plain_s <= RetryPolicy().backoff_s(attempt, draw) <= 1.2 * plain_s


def test_jitter_spreads_evenly() -> None:
    policy = RetryPolicy(jitter=0.5)
    assert policy.backoff_s(0, 0.0) == pytest.approx(0.025)
    assert policy.backoff_s(0, 0.5) == pytest.approx(0.05)
    assert policy.backoff_s(0, 1 - 1e-9) == pytest.approx(0.075)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_retries", -1),
        ("initial_backoff_s", -0.1),
        ("max_backoff_s", 0.01),
        ("backoff_multiplier", 0.5),
        ("jitter", 1.0),
        ("jitter", float("nan")),
        ("max_backoff_s", float("nan")),
    ],
)
def test_nonsense_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        RetryPolicy(**{field: value})  # type: ignore[arg-type]


def test_the_ends_of_the_ranges_are_allowed() -> None:
    RetryPolicy(max_retries=0, initial_backoff_s=0.0, max_backoff_s=0.0, backoff_multiplier=1.0, jitter=0.0)
    defaults = RetryPolicy()
    assert (defaults.max_retries, defaults.jitter) == (5, 0.2)


def test_retryable_statuses() -> None:
    assert sorted(RETRYABLE_STATUS) == [408, 429, 500, 502, 503, 504]
