"""What arrives at a pool, by hand."""

from __future__ import annotations

import math

import pytest

from sglang_ext.long_pool.decide.pool_load import PoolLoad


def test_arrivals_until_the_queue_has_gone() -> None:
    load = PoolLoad()
    assert load.arrivals_until_empty(0.0, 10.0, 4) == 0.0
    for number in range(6000):
        load.record_arrival(0.1 * number, 0.2)
    now_s = 600.0
    assert load.arrivals_per_s(now_s) == pytest.approx(10.0, rel=0.01)
    # 2 of 4 instances are busy with what comes: 10 instance-seconds take 5 s.
    assert load.arrivals_until_empty(now_s, 10.0, 4) == pytest.approx(50.0, rel=0.03)
    # Beyond its capacity a pool has no such time.
    assert load.arrivals_until_empty(now_s, 10.0, 1) == pytest.approx(10 * 10 / 0.2, rel=0.02)
    assert load.arrivals_per_s(now_s + 600.0) < 0.06


def test_short_prefills_make_the_queue_longer_and_do_not_wait_for_it() -> None:
    load = PoolLoad()
    for number in range(6000):
        load.record_arrival(0.1 * number, 0.1)
    # A quarter of the time goes to long prefills, half of it to short ones.
    assert load.arrivals_until_empty(600.0, 10.0, 4, 0.5) == pytest.approx(10 * 10 / 4 / 0.25, rel=0.03)


def test_a_shorter_window_sees_a_burst_sooner() -> None:
    rates = []
    for window_s in (60.0, 10.0):
        load = PoolLoad(window_s)
        for number in range(500):
            load.record_arrival(0.1 * number, 0.01)
        for number in range(1000):
            load.record_arrival(50.0 + 0.01 * number, 0.01)
        rates.append(load.arrivals_per_s(60.0))
    assert rates == [pytest.approx(25.0), pytest.approx(100.0, rel=0.01)]


def test_one_long_prompt_is_no_full_pool() -> None:
    load = PoolLoad()
    load.record_arrival(0.0, 800.0)
    assert load.arrivals_until_empty(0.0, 800.0, 16) < 0.2
    load.record_arrival(1.0, math.inf)
    assert load.arrivals_until_empty(1.0, 800.0, 16) < 0.5


def test_a_second_of_an_instance_delays_what_arrives_there_until_its_queue_has_gone() -> None:
    load = PoolLoad(10.0)
    for number in range(400):
        load.record_arrival(0.025 * number, 0.02)
    # 40 a second on 4 instances, of which each has 0.5 s to do and a fifth of its time taken: 10/s for 0.625 s.
    assert load.price(10.0, 2.0, 4) == pytest.approx(6.25, rel=0.05)
    assert load.price(10.0, 0.0, 4) == 0.0
