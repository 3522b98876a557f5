"""The order of deadlines: as many on time as possible, no prefill forgotten, no more put back than allowed."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.on_time_order import OnTimeOptions, OnTimeOrder, PendingPrefill
from support.examples import examples

EXACT = {"planned_share": 1.0, "work_factor": 1.0, "put_back_burst": 100}


def prefill(key: int, work_s: float, deadline_s: float, arrival_s: float = 0.0, **fields: Any) -> PendingPrefill:
    one = PendingPrefill(key, 1, 0, -1, (), arrival_s, deadline_s, work_s, work_s, work_s, False)
    return one._replace(**fields)


def keys(order: OnTimeOrder, now_s: float, *waiting: PendingPrefill, running_s: float = 0.0) -> list[int]:
    return [one.prefill.key for one in order.order(now_s, waiting, 1, running_s)]


def on_time(jobs: list[PendingPrefill]) -> bool:
    end_s = 0.0
    for one in sorted(jobs, key=lambda job: job.deadline_s):
        end_s += one.work_s
        if end_s > one.deadline_s:
            return False
    return True


@pytest.mark.slow
@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 20)), min_size=1, max_size=7))
def test_no_order_has_more_on_time(jobs: list[tuple[int, int]]) -> None:
    """One instance, all there at 0: against every subset."""
    waiting = [prefill(key, float(work), float(deadline)) for key, (work, deadline) in enumerate(jobs)]
    ordered = OnTimeOrder(OnTimeOptions(**EXACT)).order(0.0, waiting, 1, 0.0)  # type: ignore[arg-type]
    end_s, punctual = 0.0, 0
    for one, _ in ordered:
        end_s += one.work_s
        punctual += end_s <= one.deadline_s
    possible = max(
        count for count in range(len(jobs) + 1) if any(on_time([*some]) for some in combinations(waiting, count))
    )
    assert punctual == possible


@pytest.mark.slow
@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(
            st.floats(0, 50), st.floats(0.1, 20), st.one_of(st.just(math.inf), st.floats(0.1, 40)), st.booleans()
        ),
        max_size=20,
    ),
    st.integers(0, 4),
    st.floats(0, 60),
)
def test_all_are_there_once_and_no_more_are_put_back_than_allowed(
    jobs: list[tuple[float, float, float, bool]], burst: int, now_s: float
) -> None:
    waiting = [
        prefill(key, work_s, arrival_s + slo_s, arrival_s, is_started=is_started)
        for key, (arrival_s, work_s, slo_s, is_started) in enumerate(jobs)
        if arrival_s <= now_s
    ]
    order = OnTimeOrder(OnTimeOptions(put_back_burst=burst, put_back_share=0.0))
    for _ in range(2):
        assert sorted(keys(order, now_s, *waiting)) == [one.key for one in waiting]
        assert len(order.put_back) <= burst
        assert not {one.key for one in waiting if one.is_started} & {*order.put_back}


def test_in_time_it_is_the_order_of_deadlines() -> None:
    order = OnTimeOrder(OnTimeOptions())
    assert keys(order, 0.0, prefill(1, 1.0, 50.0), prefill(2, 1.0, 20.0), prefill(3, 1.0, math.inf)) == [2, 1, 3]


def test_the_longest_makes_way_and_comes_first_after_ten_deadlines() -> None:
    order = OnTimeOrder(OnTimeOptions())
    long, shorts = prefill(0, 9.0, 10.0), [prefill(key, 2.0, 10.0, 0.5) for key in (1, 2, 3)]
    assert keys(order, 0.5, long, *shorts) == [1, 2, 3, 0]
    assert {*order.put_back} == {0}
    (*_, last) = order.order(0.5, [long, *shorts], 1, 0.0)
    assert last.due_s == pytest.approx(28.5)
    assert keys(order, 99.9, long, prefill(4, 2.0, 140.0, 99.0)) == [4, 0]
    assert keys(order, 100.1, long, prefill(4, 2.0, 140.0, 99.0)) == [0, 4]


def test_of_those_that_cannot_be_on_time_the_one_with_the_least_work_left_comes_first() -> None:
    order = OnTimeOrder(OnTimeOptions())
    late = [prefill(0, 9.0, 10.0), prefill(1, 3.0, 11.0), prefill(2, 5.0, 12.0, is_started=True)]
    assert keys(order, 20.0, *late, prefill(3, 8.0, 60.0, 15.0)) == [3, 1, 2, 0]
    # One that is put back is among them.
    order = OnTimeOrder(OnTimeOptions())
    timely = [prefill(3, 8.0, 60.0, 15.0), prefill(4, 45.0, 61.0, 15.0)]
    assert keys(order, 20.0, *late, *timely) == [3, 1, 2, 0, 4]


def test_a_late_one_with_little_work_passes_those_that_stay_on_time() -> None:
    late = prefill(1, 0.5, 11.0)
    calm, tight = prefill(3, 8.0, 60.0, 15.0), prefill(3, 8.0, 30.5, 15.0)
    assert keys(OnTimeOrder(OnTimeOptions()), 20.0, late, calm) == [1, 3]
    assert keys(OnTimeOrder(OnTimeOptions()), 20.0, late, tight) == [3, 1]
    # Of several the shortest, as far as there is time; and none with more than a tenth of their work.
    more = [late._replace(key=key, work_s=work_s) for key, work_s in ((4, 0.7), (5, 0.6), (6, 0.9))]
    assert keys(OnTimeOrder(OnTimeOptions()), 20.0, *more, late, calm) == [1, 5, 4, 3, 6]
    some = prefill(3, 8.0, 32.0, 15.0)
    assert keys(OnTimeOrder(OnTimeOptions()), 20.0, *more, late, some) == [1, 5, 3, 4, 6]


def test_what_has_started_is_not_put_back() -> None:
    order = OnTimeOrder(OnTimeOptions())
    started, other = prefill(0, 7.0, 10.0, is_started=True), prefill(1, 2.0, 9.9, 0.5)
    assert keys(order, 0.5, started, other) == [0, 1]
    assert {*order.put_back} == {1}
    shorter = started._replace(fastest_s=6.0, work_s=6.0)
    assert keys(OnTimeOrder(OnTimeOptions()), 0.5, shorter, prefill(2, 1.0, 4.0, 0.0)) == [2, 0]


def dues_s(order: OnTimeOrder, now_s: float, *waiting: PendingPrefill) -> dict[int, float]:
    return {one.prefill.key: one.due_s for one in order.order(now_s, waiting, 1, 0.0)}


def test_one_that_is_late_on_any_group_hurries_alone_and_several_go_by_the_price() -> None:
    order = OnTimeOrder(OnTimeOptions())
    lost, other, timely = prefill(0, 4.0, 10.0), prefill(1, 4.0, 10.2), prefill(9, 1.0, 60.0)
    assert dues_s(order, 4.0, lost, timely) == pytest.approx({0: 9.5, 9: 57.0})
    # Its deadline cannot be met any more, that of one that is put back can.
    assert dues_s(order, 20.0, lost, timely) == pytest.approx({0: 28.5, 9: 57.0})
    assert dues_s(order, 25.0, lost, timely) == pytest.approx({0: 28.5, 9: 57.0})
    # Alone that is late on any group: only now it is one of two.
    assert dues_s(order, 25.0, lost, other, timely) == pytest.approx({0: 28.5, 1: 29.07, 9: 57.0})
    assert dues_s(order, 26.0, lost, other, timely) == pytest.approx({0: math.inf, 1: math.inf, 9: 57.0})
    more = OnTimeOrder(OnTimeOptions(max_hurrying=2))
    assert dues_s(more, 26.0, lost, other, timely) == pytest.approx({0: 28.5, 1: 29.07, 9: 57.0})


def test_those_without_a_deadline_come_first_after_a_minute_one_for_fifty_arrivals() -> None:
    order = OnTimeOrder(OnTimeOptions())
    waiting = [prefill(key, 1.0, math.inf, 0.1 * key) for key in range(3)]
    timely = prefill(9, 1.0, 300.0, 50.0)
    assert keys(order, 60.0, timely, *waiting) == [9, 0, 1, 2]
    assert keys(order, 60.5, timely, *waiting) == [0, 9, 1, 2]
    assert keys(order, 61.0, timely, *waiting) == [0, 9, 1, 2]
    assert dues_s(order, 61.0, timely, *waiting)[0] == math.inf
    for _ in range(49):
        order.record_arrival()
    assert keys(order, 61.0, timely, *waiting[1:]) == [9, 1, 2]
    order.record_arrival()
    assert keys(order, 61.0, timely, *waiting[1:]) == [1, 9, 2]


def test_one_that_has_aged_takes_its_time_from_the_others() -> None:
    order = OnTimeOrder(OnTimeOptions())
    waiting = [prefill(0, 30.0, math.inf), prefill(1, 40.0, 150.0, 65.0), prefill(2, 20.0, 151.0, 66.0)]
    assert keys(order, 67.0, *waiting) == [0, 2, 1]
    assert {*order.put_back} == {1}


def test_the_allowance_comes_back_with_arrivals_and_with_those_that_did_not_need_it() -> None:
    order = OnTimeOrder(OnTimeOptions(put_back_burst=1, put_back_share=0.5))
    first, second = [prefill(key, 6.0, 10.0) for key in (0, 1)], [prefill(key, 6.0, 10.0) for key in (2, 3)]
    order.order(0.0, first, 1, 0.0)
    assert len(order.put_back) == 1
    # It has started in the meantime, so that its allowance is gone.
    order.order(0.0, second, 1, 0.0)
    assert not order.put_back
    order.record_arrival()
    order.record_arrival()
    order.order(0.0, second, 1, 0.0)
    assert len(order.put_back) == 1
    # The other one has been cancelled: it is on time again, and another may be put back.
    (put_back,) = order.put_back
    order.order(0.0, [one for one in second if one.key == put_back], 1, 0.0)
    assert not order.put_back
    order.order(0.0, first, 1, 0.0)
    assert len(order.put_back) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("put_back_share", 1.5),
        ("put_back_burst", -1),
        ("max_hurrying", -1),
        ("arrivals_per_aged", 0),
        ("planned_share", 0.0),
        ("promoted_after", math.inf),
        ("age_s", 0.0),
    ],
)
def test_an_option_that_makes_no_sense_is_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        OnTimeOptions(**{field: value})  # type: ignore[arg-type]
