"""Medha's relative slack: its own example, classes that waiting lifts, and the order that follows."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.laps_compositions import rank
from baselines.prefill_orders import relative_slack
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.laps.decide.urgency import RankedPrefill
from sglang_ext.types import LengthClass

COST = CostCoefficients(0.0, 1e-3, 0.0, 0.0)  # a token takes a millisecond


def queued(
    key: int = 0,
    new_tokens: int = 1000,
    *,
    computed_tokens: int = 0,
    arrival_s: float = 0.0,
    deadline_s: float = inf,
    priority: PriorityClass = PriorityClass.NORMAL,
) -> QueuedPrefill:
    return QueuedPrefill(
        key,
        LengthClass.LONG,
        new_tokens,
        computed_tokens,
        new_tokens + computed_tokens,
        arrival_s,
        deadline_s,
        priority,
        computed_tokens > 0,
        False,
    )


def ranked(request: QueuedPrefill, now_s: float = 0.0) -> RankedPrefill:
    return rank(request, now_s, COST, round_s=1e6, age_s=10.0, stretch=5.0)


def test_the_papers_example() -> None:
    assert relative_slack(16.0, 0.0, 10.0, 10.0) == pytest.approx(0.6)
    assert relative_slack(6.0, 5.0, 0.5, 0.5) == pytest.approx(1.0)


def test_running_keeps_the_slack_and_waiting_costs_it() -> None:
    waiting = ranked(queued(new_tokens=10_000, deadline_s=20.0), now_s=5.0)
    served = ranked(queued(new_tokens=5000, computed_tokens=5000, deadline_s=20.0), now_s=5.0)
    assert waiting.urgency.sort_value == pytest.approx(0.5)
    assert served.urgency.sort_value == pytest.approx(1.0)
    assert served.total_s == pytest.approx(10.0)
    assert served.remaining_s == pytest.approx(5.0)


def test_the_total_is_that_of_the_whole_prompt_as_it_arrived() -> None:
    cost = CostCoefficients(1e-6, 1e-3, 1e-4, 0.01)
    request = replace(queued(new_tokens=600, computed_tokens=400), cached_tokens=700)  # 300 came from the cache
    item = rank(request, 0.0, cost, round_s=1e6, age_s=10.0, stretch=5.0)
    assert item.total_s == pytest.approx(cost.chunk_s(1000, 300))
    assert item.remaining_s == pytest.approx(cost.chunk_s(600, 700))


def test_without_deadline_the_longest_waiting_is_first_and_after_those_with_one() -> None:
    with_deadline = ranked(queued(1, deadline_s=1000.0), 5.0)
    old, young = ranked(queued(2), 5.0), ranked(queued(3, arrival_s=4.0), 5.0)
    assert sorted([young, old, with_deadline]) == [with_deadline, old, young]


def test_classes_come_first_and_waiting_lifts() -> None:
    urgent = ranked(queued(1, new_tokens=100, deadline_s=1.0), 0.5)
    real_time = ranked(queued(2, new_tokens=100, priority=PriorityClass.REAL_TIME), 0.5)
    assert sorted([urgent, real_time])[0] == real_time


def test_a_long_prefill_is_lifted_by_its_own_measure() -> None:
    assert ranked(queued(new_tokens=10_000), 49.0).urgency.aged_class == PriorityClass.NORMAL
    assert ranked(queued(new_tokens=10_000), 51.0).urgency.aged_class == PriorityClass.NORMAL - 1
    assert ranked(queued(new_tokens=10), 11.0).urgency.aged_class == PriorityClass.NORMAL - 1


@given(
    old=st.sampled_from(PriorityClass),
    young=st.sampled_from(PriorityClass),
    gap_s=st.floats(0, 100),
    waited_s=st.floats(0, 1000),
    deadline_s=st.floats(-1000, 1000),
)
def test_none_that_arrives_late_enough_goes_first(
    old: PriorityClass, young: PriorityClass, gap_s: float, waited_s: float, deadline_s: float
) -> None:
    """The bound of `aged_class`: after (classes between them + 1) lifts, a later request cannot precede."""
    late_s = (max(0, old - young) + 1) * 10.0 + gap_s
    now_s = late_s + waited_s
    first = ranked(queued(1, new_tokens=100, priority=old), now_s)
    second = ranked(queued(2, new_tokens=100, arrival_s=late_s, deadline_s=deadline_s, priority=young), now_s)
    assert first.urgency.aged_class <= second.urgency.aged_class
    third = ranked(queued(3, new_tokens=100, arrival_s=late_s + 10.0, priority=young), now_s + 10.0)
    assert ranked(first.request, now_s + 10.0).urgency.aged_class < third.urgency.aged_class
