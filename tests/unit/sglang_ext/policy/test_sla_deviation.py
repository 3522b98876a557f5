"""Late prefills in a sliding window."""

from __future__ import annotations

from math import inf

import pytest

from sglang_ext.policy.sla_deviation import SlaDeviation


def test_nothing_has_ended() -> None:
    assert SlaDeviation().late_share(10.0) == 0.0
    assert SlaDeviation().lateness(10.0) == 0.0


def test_share_and_mean_lateness() -> None:
    deviation = SlaDeviation(horizon_s=30.0)
    deviation.add(1.0, 0.0, 2.0)  # in time
    deviation.add(3.0, 0.0, 2.0)  # half of its time late
    deviation.add(9.0, 0.0, inf)  # no deadline
    deviation.add(9.0, 0.0, 9.0)  # just in time
    assert deviation.late_share(10.0) == pytest.approx(0.25)
    assert deviation.lateness(10.0) == pytest.approx(0.125)


def test_what_is_older_than_the_window_does_not_count() -> None:
    deviation = SlaDeviation(horizon_s=30.0)
    deviation.add(3.0, 0.0, 2.0)
    deviation.add(20.0, 10.0, 30.0)
    assert deviation.late_share(32.0) == 0.5
    assert deviation.late_share(33.0) == 0.0


def test_memory_is_bounded() -> None:
    deviation = SlaDeviation(prefills=8)
    for _ in range(100):
        deviation.add(1.0, 0.0, 0.5)
    assert len(deviation._ended) == 8


def test_a_deadline_at_arrival_is_finite_lateness() -> None:
    deviation = SlaDeviation()
    deviation.add(2.0, 1.0, 1.0)
    assert 0 < deviation.lateness(2.0) < inf


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="horizon_s"):
        SlaDeviation(horizon_s=0.0)
