"""Budgets per minute: no order of reservations, uses and returns exceeds them, and no division among routers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.types import PRIORITIES, TenantLimits
from sglang_ext_router.decide.budgets import Bucket, shown_duration
from sglang_ext_router.decide.tenants import (
    BudgetRefusal,
    Exhausted,
    TenantAccount,
    bounded_priority,
)
from support.examples import examples

STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 400), st.floats(0, 1)), max_size=60)


@given(steps=STEPS)
@settings(max_examples=examples(200))
def test_what_is_used_never_exceeds_the_budget(steps: list[tuple[float, int, float]]) -> None:
    """Requests that use at most their reservations keep the budget in any stretch of time."""
    bucket, now_s = Bucket(600, 0.0), 0.0
    taken: list[tuple[float, float]] = []
    for pause_s, units, used_share in steps:
        now_s += pause_s
        if bucket.take(units, now_s):
            used = units * used_share
            bucket.settle(units, used)
            taken.append((now_s, used))
    for index, (first_s, _) in enumerate(taken):
        used = 0.0
        for at_s, units in taken[index:]:
            used += units
            assert used <= 600 + 10 * (at_s - first_s) + 1e-3


@given(steps=STEPS)
@settings(max_examples=examples(200))
def test_settling_returns_what_was_not_used(steps: list[tuple[float, int, float]]) -> None:
    """A bucket whose requests use a part of what they reserve is one whose requests reserve that part."""
    reserving, exact, now_s = Bucket(600, 0.0), Bucket(600, 0.0), 0.0
    for pause_s, units, used_share in steps:
        now_s += pause_s
        if reserving.take(units, now_s):
            reserving.settle(units, units * used_share)
            assert exact.take(units * used_share, now_s)
    exact.fill(now_s)
    reserving.fill(now_s)
    assert reserving.level == pytest.approx(exact.level, abs=1e-3)


@given(steps=STEPS)
@settings(max_examples=examples(100))
def test_a_refused_request_is_let_in_after_the_named_time(steps: list[tuple[float, int, float]]) -> None:
    bucket, now_s = Bucket(600, 0.0), 0.0
    for pause_s, units, _ in steps:
        now_s += pause_s
        if not bucket.take(units, now_s):
            wait_s = bucket.wait_s(units, now_s)
            assert wait_s > 0
            now_s += wait_s
            assert bucket.take(units, now_s)


def test_more_than_was_reserved_is_a_debt() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.take(60, 0.0)
    bucket.settle(60, 90)
    assert bucket.wait_s(1, 0.0) == pytest.approx(31.0)
    assert not bucket.take(1, 30.0)
    assert bucket.take(1, 31.0)


def test_what_exceeds_a_minutes_worth_never_comes() -> None:
    assert Bucket(60, 0.0).wait_s(61, 0.0) == float("inf")


@pytest.mark.parametrize(("per_minute", "level"), [(120, 60), (30, 30)])
def test_another_budget_keeps_what_is_used_up(per_minute: float, level: float) -> None:
    bucket = Bucket(60, 0.0)
    bucket.change(per_minute, 1, 0.0)
    assert bucket.level == level


def test_no_budget_is_taken_from_where_one_is_lacking() -> None:
    account = TenantAccount(TenantLimits("a", requests_per_minute=2, tokens_per_minute=100), 0.0)
    assert account.reserve(60, 0.0) is None
    assert account.reserve(60, 0.0) == BudgetRefusal(Exhausted.TOKENS, 100, pytest.approx(12.0))
    assert account.requests is not None
    assert account.requests.level == 1
    assert account.reserve(40, 0.0) is None
    assert account.reserve(1, 0.0) == BudgetRefusal(Exhausted.REQUESTS, 2, pytest.approx(30.0))
    account.settle(60, 10)
    assert account.reserve(50, 30.0) is None


@pytest.mark.parametrize(
    ("asked", "highest", "given_priority"),
    [
        (None, "real-time", None),
        (None, "normal", None),
        (None, "low", "low"),
        ("real-time", "high", "high"),
        ("high", "high", "high"),
        ("low", "normal", "low"),
    ],
)
def test_the_highest_priority(asked: str | None, highest: str, given_priority: str | None) -> None:
    assert bounded_priority(asked, TenantLimits("a", max_priority=highest)) == given_priority
    assert highest in PRIORITIES


@pytest.mark.parametrize(
    ("duration_s", "shown"),
    [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (1.5, "1.5s"), (59.9994, "1m0s"), (360, "6m0s"), (61.2, "1m2s")],
)
def test_durations_are_shown_as_openai_does(duration_s: float, shown: str) -> None:
    assert shown_duration(duration_s) == shown
