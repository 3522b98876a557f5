"""Improvement rates by load: the table, its file format, and what a window of arrivals looks up when."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.cdsp.improvement_rate import (
    FixedImprovementRate,
    ImprovementRateTable,
    ProfiledImprovementRate,
    ProfiledRate,
    table_from_json,
)

TABLE = ImprovementRateTable((ProfiledRate(0.5, 0.05), ProfiledRate(1.0, 0.2), ProfiledRate(2.0, 0.5)))


def table(*entries: tuple[float, float]) -> ImprovementRateTable:
    return ImprovementRateTable(tuple(ProfiledRate(*entry) for entry in entries))


@pytest.mark.parametrize(
    ("arrivals_per_s", "closest"),
    [(0.0, 0.5), (0.5, 0.5), (0.74, 0.5), (0.75, 1.0), (1.0, 1.0), (1.49, 1.0), (1.5, 2.0), (2.0, 2.0), (99.0, 2.0)],
)
def test_the_closest_entry_counts_and_the_higher_one_in_the_middle(arrivals_per_s: float, closest: float) -> None:
    assert TABLE.closest(arrivals_per_s).arrivals_per_s == closest


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=20, unique=True).map(sorted),
    st.floats(0, 2e4),
)
def test_no_entry_is_closer_than_the_closest(arrival_rates: list[float], arrivals_per_s: float) -> None:
    entries = table(*((rate, 0.5) for rate in arrival_rates))
    found = abs(entries.closest(arrivals_per_s).arrivals_per_s - arrivals_per_s)
    assert found == min(abs(rate - arrivals_per_s) for rate in arrival_rates)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "there is no entry"),
        ([(1.0, 0.1), (1.0, 0.2)], "arrivals_per_s must rise: 1 comes after 1"),
        ([(2.0, 0.1), (1.0, 0.2)], "arrivals_per_s must rise: 1 comes after 2"),
        ([(-1.0, 0.1)], "arrivals_per_s -1 is not a finite number of at least 0"),
        ([(float("inf"), 0.1)], "arrivals_per_s inf is not"),
        ([(1.0, 1.0)], "improvement_rate 1 is not at least 0 and below 1"),
        ([(1.0, float("nan"))], "improvement_rate nan is not"),
        ([(1.0, -0.1)], "improvement_rate -0.1 is not"),
    ],
)
def test_a_wrong_table_says_what_is_wrong(entries: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        table(*entries)


# ---- the file ----


def test_a_file_is_read_with_whatever_else_it_says() -> None:
    text = '{"version": 1, "provenance": {}, "rates": [{"arrivals_per_s": 1, "improvement_rate": 0.05, "ttft_s": 3}]}'
    assert table_from_json(json.loads(text)) == table((1.0, 0.05))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a table of improvement rates is an object"),
        ('{"rates": []}', "version None is not known, 1 is needed"),
        ('{"version": 2, "rates": []}', "version 2 is not known, 1 is needed"),
        ('{"version": true, "rates": []}', "version True is not known"),
        ('{"version": 1}', "rates is not a list"),
        ('{"version": 1, "rates": "0.5"}', "rates is not a list"),
        ('{"version": 1, "rates": []}', "there is no entry"),
        ('{"version": 1, "rates": [3]}', "rates[0].arrivals_per_s is not a number"),
        ('{"version": 1, "rates": [{"arrivals_per_s": true}]}', "rates[0].arrivals_per_s is not a number"),
        ('{"version": 1, "rates": [{"arrivals_per_s": 1}]}', "rates[0].improvement_rate is not a number"),
        ('{"version": 1, "rates": [{"arrivals_per_s": 1, "improvement_rate": 1.5}]}', "improvement_rate 1.5 is not"),
        ('{"version": 1, "rates": [{"arrivals_per_s": NaN, "improvement_rate": 0}]}', "arrivals_per_s nan is not"),
    ],
)
def test_a_wrong_file_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        table_from_json(json.loads(text))
    assert "\n" not in str(caught.value)


# ---- the load ----


def note_all(source: ProfiledImprovementRate, arrivals_s: Sequence[float]) -> list[float]:
    """The rate after each arrival."""
    rates = []
    for now_s in arrivals_s:
        source.note_arrival(now_s)
        rates.append(source.current)
    return rates


def test_a_load_is_light_until_it_is_known() -> None:
    source = ProfiledImprovementRate(TABLE)
    assert (source.current, source.arrivals_per_s) == (0.05, None)
    assert set(note_all(source, [0.5 * step for step in range(60)])) == {0.05}
    source.note_arrival(30.0)  # the first after 30 s
    assert source.current == 0.5
    assert source.arrivals_per_s == pytest.approx(2.0, rel=0.02)


def test_the_rate_is_that_of_the_window_and_only_every_refresh() -> None:
    source = ProfiledImprovementRate(TABLE, window_s=10.0, refresh_s=5.0)
    note_all(source, [0.0, *(0.1 + 0.5 * step for step in range(40))])  # 2 per s for 20 s
    assert source.current == 0.5
    looked_at = [20.0 + 2 * step for step in range(20)]  # then 0.5 per s
    rates = note_all(source, looked_at)
    changes = [now_s for now_s, before, after in zip(looked_at, [0.5, *rates], rates, strict=False) if before != after]
    # At 22 s the window still has 8 s of the faster arrivals: 17 in 10 s. At 28 s it has 2 s of them, then none.
    assert changes == [28.0, 34.0]
    assert rates[-1] == 0.05


def test_the_arrivals_at_both_ends_of_the_window_do_not_count() -> None:
    source = ProfiledImprovementRate(table((0.0, 0.1)), window_s=10.0, refresh_s=10.0)
    for step in range(11):
        source.note_arrival(float(step))
    assert source.arrivals_per_s == 0.9  # 1 to 9 s


def test_after_a_time_without_arrivals_the_load_is_light() -> None:
    source = ProfiledImprovementRate(TABLE)
    note_all(source, [0.4 * step for step in range(300)])
    assert source.current == 0.5
    source.note_arrival(10_000.0)
    assert (source.current, source.arrivals_per_s) == (0.05, 0.0)


def test_a_clock_that_goes_back_does_no_harm() -> None:
    source = ProfiledImprovementRate(TABLE, window_s=10.0, refresh_s=5.0)
    note_all(source, [100.0, 101.0, 50.0, 102.0, 107.0])
    assert source.arrivals_per_s == pytest.approx(3 / 7)


def test_another_table_counts_at_once_for_the_load_last_seen() -> None:
    source = ProfiledImprovementRate(TABLE)
    note_all(source, [0.5 * step for step in range(100)])
    source.replace(table((0.5, 0.3), (2.0, 0.7)))
    assert source.current == 0.7


@given(st.lists(st.floats(0.0, 5.0), min_size=1, max_size=200))
def test_the_window_counts_what_is_in_it(gaps_s: list[float]) -> None:
    source = ProfiledImprovementRate(TABLE, window_s=7.0, refresh_s=3.0)
    arrivals_s: list[float] = []
    looked_s = None
    for gap_s in gaps_s:
        now_s = (arrivals_s[-1] if arrivals_s else 0.0) + gap_s
        if looked_s is None:
            looked_s = now_s
        source.note_arrival(now_s)
        if now_s - looked_s >= 3.0:
            looked_s = now_s
            from_s = max(arrivals_s[0], now_s - 7.0)
            # Others at the very moment of this one count: only this one does not.
            inside = sum(from_s < one_s for one_s in arrivals_s)
            assert source.arrivals_per_s == pytest.approx(inside / (now_s - from_s))
            assert source.current == TABLE.closest(source.arrivals_per_s or 0.0).improvement_rate
        arrivals_s.append(now_s)


@pytest.mark.parametrize("name", ["window_s", "refresh_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_times_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ProfiledImprovementRate(TABLE, **{name: value})


def test_a_fixed_rate_stays() -> None:
    source = FixedImprovementRate(0.4)
    source.note_arrival(1.0)
    assert source.current == 0.4
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        FixedImprovementRate(1.0)
