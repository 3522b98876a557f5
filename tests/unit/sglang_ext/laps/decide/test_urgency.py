"""LARS: Medha's own example, classes that waiting lifts, and the order that follows."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.laps.decide.round_plan import PriorityClass
from sglang_ext.laps.decide.urgency import (
    SlaDeviation,
    aged_class,
)


def test_waiting_lifts_by_a_class_and_again() -> None:
    assert aged_class(PriorityClass.LOW, 9.9, 10.0) == 3
    assert aged_class(PriorityClass.LOW, 30.0, 10.0) == 0
    assert aged_class(PriorityClass.LOW, 50.0, 10.0) == -2
    assert aged_class(PriorityClass.LOW, -1.0, 10.0) == 3


@given(
    old=st.sampled_from(PriorityClass),
    young=st.sampled_from(PriorityClass),
    gap_s=st.floats(0, 100),
    waited_s=st.floats(0, 1000),
)
def test_none_that_arrives_late_enough_is_of_a_more_urgent_class(
    old: PriorityClass, young: PriorityClass, gap_s: float, waited_s: float
) -> None:
    late_s = (max(0, old - young) + 1) * 10.0 + gap_s
    now_s = late_s + waited_s
    assert aged_class(old, now_s, 10.0) <= aged_class(young, now_s - late_s, 10.0)
    assert aged_class(old, now_s + 10.0, 10.0) < aged_class(young, now_s - late_s, 10.0)


def test_nothing_has_ended() -> None:
    assert SlaDeviation().slo_violation_rate(10.0) == 0.0
    assert SlaDeviation().tardiness(10.0) == 0.0


def test_violation_rate_and_mean_tardiness() -> None:
    deviation = SlaDeviation(horizon_s=30.0)
    deviation.add(1.0, 0.0, 2.0)  # in time
    deviation.add(3.0, 0.0, 2.0)  # half of its time late
    deviation.add(9.0, 0.0, inf)  # no deadline
    deviation.add(9.0, 0.0, 9.0)  # just in time
    assert deviation.slo_violation_rate(10.0) == pytest.approx(0.25)
    assert deviation.tardiness(10.0) == pytest.approx(0.125)


def test_what_is_older_than_the_window_does_not_count() -> None:
    deviation = SlaDeviation(horizon_s=30.0)
    deviation.add(3.0, 0.0, 2.0)
    deviation.add(20.0, 10.0, 30.0)
    assert deviation.slo_violation_rate(32.0) == 0.5
    assert deviation.slo_violation_rate(33.0) == 0.0


def test_memory_is_bounded() -> None:
    deviation = SlaDeviation(prefills=8)
    for _ in range(100):
        deviation.add(1.0, 0.0, 0.5)
    assert len(deviation._ended) == 8


def test_a_deadline_at_arrival_is_finite_tardiness() -> None:
    deviation = SlaDeviation()
    deviation.add(2.0, 1.0, 1.0)
    assert 0 < deviation.tardiness(2.0) < inf


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon_s"):
        SlaDeviation(horizon_s=0.0)
