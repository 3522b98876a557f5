"""Figures of a run, by hand."""

from __future__ import annotations

import pytest

from sglang_ext.planner.simulation.events import ServedPrefill, SimRequest
from sglang_ext.planner.simulation.report import by_class, summarise
from sglang_ext.planner.simulation.run import Collector


def served(key: int, ttft_s: float, tokens: int = 10) -> ServedPrefill:
    return ServedPrefill(SimRequest(key, 5.0, tokens, 1), 5.0 + ttft_s / 2, 5.0 + ttft_s)


def test_a_summary_by_hand() -> None:
    unfinished = [SimRequest(8, 1.0, 1, 1), SimRequest(9, 8.9, 1, 1)]
    one = summarise("all", [served(key, float(key)) for key in range(1, 5)], unfinished, [unfinished[0]], 9.0, 2.5)
    assert one.requests == 7
    assert (one.unfinished, one.refused) == (2, 1)
    assert one.violations == 2 + 1 + 1  # 3 s and 4 s, the one of age 8 s, the refused one
    assert (one.mean_s, one.p50_s, one.max_s) == (2.5, 2.5, 4.0)
    assert one.p90_s == pytest.approx(3.7)
    assert one.mean_wait_s == pytest.approx(1.25)


def test_nothing_served_has_no_times() -> None:
    one = summarise("all", [], [], [], 0.0, 1.0)
    assert (one.requests, one.mean_s, one.p99_s) == (0, None, None)


def test_classes_add_up() -> None:
    total, short, long = by_class(
        [served(0, 1.0, 100), served(1, 2.0, 101)],
        [SimRequest(2, 0.0, 100, 1)],
        [SimRequest(3, 0.0, 500, 1)],
        9,
        5,
        100,
    )
    assert (total.requests, short.requests, long.requests) == (4, 2, 2)
    assert (short.max_s, long.max_s) == (1.0, 2.0)


def test_a_warm_up_is_not_counted() -> None:
    collector = Collector(from_key=1)
    for key in range(3):
        collector.on_first_token(served(key, 1.0))
        collector.on_refused(SimRequest(key, 0.0, 1, 1))
    assert [one.request.key for one in collector.served] == [1, 2]
    assert [one.key for one in collector.refused] == [1, 2]
