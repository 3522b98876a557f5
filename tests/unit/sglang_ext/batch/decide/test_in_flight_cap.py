"""The cap on what is in flight: bounds, growth, one decrease per round trip, the gate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.batch.decide.in_flight_cap import CapSettings, InFlightCap

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["ok", "overload", "load", "unknown"]),
        st.floats(0, 5),  # time that passes
        st.floats(0, 3),  # round trip, wait
        st.floats(0, 10),  # backlog
        st.booleans(),
    ),
    max_size=200,
)


def drive(cap: InFlightCap, events: list[tuple[str, float, float, float, bool]]) -> list[tuple[float, int]]:
    now_s = 0.0
    history = []
    for kind, passed_s, value_s, backlog_s, flag in events:
        now_s += passed_s
        if kind == "ok":
            cap.on_ok(now_s - value_s, now_s, was_full=flag)
        elif kind == "overload":
            cap.on_overload(now_s - value_s, now_s)
        elif kind == "load":
            cap.on_load(value_s if flag else None, backlog_s, now_s, 0 if flag else 10**6)
        else:
            cap.on_load_unknown()
        history.append((now_s, cap.cap))
    return history


@pytest.mark.slow
@given(EVENTS, st.integers(1, 500), st.integers(1, 64))
def test_never_below_one_and_never_above_the_most(
    events: list[tuple[str, float, float, float, bool]], most: int, start: int
) -> None:
    cap = InFlightCap(CapSettings(max_in_flight=most, start=start))
    assert 1 <= cap.cap <= most
    assert all(1 <= value <= most for _, value in drive(cap, events))


@pytest.mark.slow
@given(EVENTS, st.integers(1, 100))
def test_recovers_to_the_most_once_requests_succeed(
    events: list[tuple[str, float, float, float, bool]], most: int
) -> None:
    cap = InFlightCap(CapSettings(max_in_flight=most))
    history = drive(cap, events)
    now_s = (history[-1][0] if history else 0.0) + 100.0
    cap.on_load(None, 0.0, now_s, 0)
    for _ in range(most * most + most):
        now_s += 0.1
        cap.on_ok(now_s - 0.05, now_s, was_full=True)
    assert cap.cap == most


@given(st.integers(2, 200), st.integers(2, 400))
def test_refusals_of_one_round_trip_decrease_it_once(start: int, refusals: int) -> None:
    cap = InFlightCap(CapSettings(max_in_flight=1000, start=start))
    for index in range(refusals):  # all sent before the first answer
        cap.on_overload(sent_at_s=index / 1000, now_s=1.0 + index / 1000)
    assert cap.decreases == 1
    assert cap.cap == max(1, start // 2)
    cap.on_overload(sent_at_s=1.5, now_s=2.0)
    assert cap.decreases == 2


def test_doubles_per_round_trip_until_the_first_congestion_then_grows_by_one() -> None:
    cap = InFlightCap(CapSettings(max_in_flight=1000, start=8))
    for round_trip in (1, 2, 3):
        for _ in range(cap.cap):
            cap.on_ok(round_trip - 0.5, float(round_trip), was_full=True)
        assert cap.cap == 8 * 2**round_trip
    cap.on_overload(3.5, 4.0)
    assert cap.cap == 32
    for round_trip in (5, 6, 7):
        for _ in range(cap.cap):
            cap.on_ok(round_trip - 0.5, float(round_trip), was_full=True)
        assert 32 + (round_trip - 5) <= cap.cap <= 33 + (round_trip - 5)


def test_idle_prefill_instances_double_it_until_the_first_congestion() -> None:
    cap = InFlightCap(CapSettings(max_in_flight=200, start=16))
    cap.on_load(None, 0.1, 0.5, 15)
    assert cap.cap == 16, "more would not be sent anyway"
    cap.on_load(None, 1.0, 1.0, cap.cap)
    assert cap.cap == 16, "they have work"
    for wanted in (32, 64, 128, 200):
        cap.on_load(None, 0.1, 1.5, cap.cap)
        assert cap.cap == wanted
    cap.on_overload(2.0, 3.0)
    cap.on_load(None, 0.0, 4.0, cap.cap)
    assert cap.cap == 100


def test_does_not_grow_when_it_is_not_used_up() -> None:
    cap = InFlightCap(CapSettings(start=8))
    for index in range(100):
        cap.on_ok(index, index + 0.5, was_full=False)
    assert cap.cap == 8


def test_a_backlog_holds_it_and_a_long_one_decreases_it() -> None:
    cap = InFlightCap(CapSettings(start=16, max_backlog_s=2.0))
    cap.on_load(0.01, 2.5, 1.0, 0)
    for index in range(50):
        cap.on_ok(1.0 + index, 1.5 + index, was_full=True)
    assert cap.cap == 16
    cap.on_load(0.01, 4.0, 60.0, 0)
    assert cap.cap == 8
    cap.on_load(0.01, 1.0, 62.0, 0)
    cap.on_ok(62.0, 62.5, was_full=True)
    assert cap.cap == 8
    for _ in range(8):
        cap.on_ok(62.0, 62.5, was_full=True)
    assert cap.cap == 9


def test_without_online_requests_more_may_wait() -> None:
    cap = InFlightCap(CapSettings(start=16, max_backlog_s=2.0, max_offline_backlog_s=10.0))
    cap.on_load(None, 6.0, 1.0, 0)
    cap.on_ok(1.0, 1.5, was_full=True)
    assert cap.cap == 17
    cap.on_load(None, 20.0, 2.0, 0)
    assert cap.cap == 8


def test_waiting_online_requests_decrease_it_once_per_round_trip() -> None:
    cap = InFlightCap(CapSettings(start=64, online_wait_target_s=0.2, settle_s=1.0))
    for tick in range(20):  # readings every 0.1 s
        cap.on_load(0.5, 0.0, 10 + tick / 10, 0)
    assert cap.decreases == 2
    assert cap.cap == 16
    slow = InFlightCap(CapSettings(start=64, online_wait_target_s=0.2, settle_s=1.0))
    slow.on_ok(0.0, 5.0, was_full=False)  # a round trip of 5 s
    for tick in range(49):
        slow.on_load(0.5, 0.0, 10 + tick / 10, 64)
    assert slow.decreases == 1, "what was sent before is still under way"
    slow.on_load(0.5, 0.0, 14.9, 32)
    assert slow.decreases == 2


def test_online_requests_that_wait_less_than_the_target_change_nothing() -> None:
    cap = InFlightCap(CapSettings(start=64, online_wait_target_s=0.2))
    cap.on_load(0.19, 0.0, 1.0, 0)
    assert cap.cap == 64
    ungated = InFlightCap(CapSettings(start=64, online_wait_target_s=None))
    ungated.on_load(100.0, 0.0, 1.0, 0)
    assert ungated.cap == 64


@pytest.mark.parametrize(
    ("setting", "value"), [("max_in_flight", 0), ("start", 0), ("online_wait_target_s", 0.0), ("max_backlog_s", -1.0)]
)
def test_a_setting_that_cannot_be_is_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        CapSettings(**{setting: value})  # type: ignore[arg-type]
