"""Retries are a bounded share of the requests, whatever comes when."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.retry_budget import SLOTS, RetryBudget

STEPS = st.lists(st.tuples(st.sampled_from(["request", "retry"]), st.floats(0, 3), st.integers(0, 30)), max_size=300)
SETTINGS = st.tuples(st.floats(0, 1), st.floats(0, 3), st.floats(0.5, 20))


@pytest.mark.slow
@given(steps=STEPS, settings=SETTINGS)
def test_no_window_has_more_retries_than_its_share_allows(
    steps: list[tuple[str, float, int]], settings: tuple[float, float, float]
) -> None:
    """Counted apart from the budget, by exact times."""
    ratio, min_per_s, window_s = settings
    budget = RetryBudget(ratio, min_per_s, window_s)
    requests: deque[float] = deque()
    retries: deque[float] = deque()
    now_s, most_running = 1000.0, 0
    for kind, pause_s, running in steps:
        now_s += pause_s
        most_running = max(most_running, running)
        if kind == "request":
            budget.record_request(now_s)
            requests.append(now_s)
        elif budget.spend(now_s, running):
            retries.append(now_s)
        # A tenth is let go at a time: what counts is between nine tenths of the window and all of it.
        recently = [at_s for at_s in retries if at_s > now_s - window_s * (SLOTS - 1) / SLOTS]
        base = max(sum(at_s >= now_s - 2 * window_s for at_s in requests), most_running)
        assert len(recently) <= ratio * base + min_per_s * window_s


@given(requests=st.integers(0, 500), running=st.integers(0, 500), settings=SETTINGS)
def test_at_one_moment_the_share_is_exact(requests: int, running: int, settings: tuple[float, float, float]) -> None:
    ratio, min_per_s, window_s = settings
    budget = RetryBudget(ratio, min_per_s, window_s)
    for _ in range(requests):
        budget.record_request(5.0)
    spent = 0
    while budget.spend(5.0, running):
        spent += 1
    assert spent == int(ratio * max(requests, running) + min_per_s * window_s)
    assert budget.spend(5.0 + 2 * window_s, running) == (ratio * running + min_per_s * window_s >= 1)


def test_what_was_spent_comes_back_as_the_window_slides() -> None:
    budget = RetryBudget(ratio=0.0, min_per_s=1.0, window_s=10.0)
    assert [budget.spend(100.0, 0) for _ in range(11)] == [True] * 10 + [False]
    assert not budget.spend(108.9, 0)
    assert budget.spend(110.1, 0)


def test_a_clock_that_goes_back_is_borne() -> None:
    budget = RetryBudget(ratio=0.0, min_per_s=0.1, window_s=10.0)
    assert budget.spend(100.0, 0)
    assert not budget.spend(50.0, 0)


@pytest.mark.parametrize(
    ("field", "value"), [("ratio", -0.1), ("ratio", float("nan")), ("min_per_s", -1.0), ("window_s", 0.0)]
)
def test_settings_that_make_no_sense(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        RetryBudget(**{field: value})
