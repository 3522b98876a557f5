"""So much a second, whatever the pattern."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.batch.decide.rate_limit import RateLimit


@given(st.floats(0.1, 1000), st.lists(st.tuples(st.floats(0, 2), st.floats(0, 50)), max_size=100))
def test_never_more_than_the_rate_and_a_burst(per_s: float, sends: list[tuple[float, float]]) -> None:
    limit = RateLimit(per_s)
    now_s = sent = largest = 0.0
    for gap_s, units in sends:
        now_s += gap_s
        wait_s = limit.wait_s(now_s)
        if wait_s > 0:
            now_s += wait_s
            assert limit.wait_s(now_s + 1e-6) == 0
        limit.take(units, now_s)
        sent += units
        largest = max(largest, units)
        assert sent <= (now_s + 1) * per_s + 1 + largest + 1e-3


def test_sends_at_the_rate() -> None:
    limit, now_s, sent = RateLimit(100.0), 0.0, 0
    while now_s < 10.0:
        wait_s = limit.wait_s(now_s)
        now_s += wait_s
        if wait_s == 0:
            limit.take(1, now_s)
            sent += 1
    assert 1000 <= sent <= 1102


def test_no_limit_never_waits() -> None:
    limit = RateLimit(None)
    limit.take(1e12, 0.0)
    assert limit.wait_s(0.0) == 0


@pytest.mark.parametrize("per_s", [0.0, -1.0, float("nan")])
def test_a_limit_that_cannot_be_is_refused(per_s: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        RateLimit(per_s)
