"""The M/G/1 formulas against cases that can be done by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.queueing import mean_wait_s, mixing_penalty_s


def test_constant_and_exponential_service() -> None:
    assert mean_wait_s(0.5, 1.0, 1.0) == pytest.approx(0.5)  # M/D/1
    assert mean_wait_s(0.5, 1.0, 2.0) == pytest.approx(1.0)  # M/M/1


def test_no_end_at_saturation() -> None:
    assert mean_wait_s(1.0, 1.0, 1.0) == inf
    assert mixing_penalty_s(2.0, 0.5, 0.1, 1.0) == inf


@given(rate=st.floats(0.01, 1), p=st.floats(0, 1), short_s=st.floats(0, 0.4), long_s=st.floats(0.4, 0.9))
def test_the_penalty_is_what_the_mixture_adds_to_equal_service(
    rate: float, p: float, short_s: float, long_s: float
) -> None:
    mean_s = p * short_s + (1 - p) * long_s
    square_s2 = p * short_s**2 + (1 - p) * long_s**2
    added_s = mean_wait_s(rate, mean_s, square_s2) - mean_wait_s(rate, mean_s, mean_s**2)
    assert mixing_penalty_s(rate, p, short_s, long_s) == pytest.approx(added_s, abs=1e-9)
