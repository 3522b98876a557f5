"""The estimated rate follows a burst at once and falls in the silence."""

from __future__ import annotations

from random import Random

import pytest

from sglang_ext.policy.arrival_rate import ArrivalRate


def test_nothing_has_arrived() -> None:
    assert ArrivalRate().per_s(5.0) == 0.0


def test_even_arrivals() -> None:
    rate = ArrivalRate()
    for index in range(20):
        rate.add(0.1 * index)
    assert rate.per_s(1.9) == pytest.approx(10.0)


def test_silence_lowers_it_and_ends_it() -> None:
    rate = ArrivalRate(horizon_s=10.0)
    for index in range(20):
        rate.add(0.1 * index)
    assert rate.per_s(3.9) == pytest.approx(19 / 3.9)
    assert rate.per_s(100.0) == 0.0


def test_a_burst_after_a_quiet_minute_shows_at_once() -> None:
    rate = ArrivalRate()
    for index in range(30):
        rate.add(float(index))
    for index in range(5):
        rate.add(90.0 + 0.01 * index)
    assert rate.per_s(90.04) == pytest.approx(100.0)


def test_one_instant_is_a_finite_rate() -> None:
    rate = ArrivalRate()
    for _ in range(10):
        rate.add(1.0)
    assert rate.per_s(1.0) == pytest.approx(9000.0)


def test_time_does_not_run_backwards() -> None:
    rate = ArrivalRate()
    rate.add(5.0)
    rate.add(4.0)
    assert rate.per_s(6.0) == pytest.approx(1.0)


def test_a_poisson_process() -> None:
    random = Random(1)
    rate = ArrivalRate(arrivals=64)
    now_s, estimates = 0.0, []
    for _ in range(2000):
        now_s += random.expovariate(20.0)
        rate.add(now_s)
        estimates.append(rate.per_s(now_s))
    settled = estimates[100:]
    assert sum(settled) / len(settled) == pytest.approx(20.0, rel=0.05)


@pytest.mark.parametrize(("arrivals", "horizon_s", "name"), [(1, 1.0, "arrivals"), (5, 0.0, "horizon_s")])
def test_a_window_without_room_is_refused(arrivals: int, horizon_s: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        ArrivalRate(arrivals, horizon_s)
