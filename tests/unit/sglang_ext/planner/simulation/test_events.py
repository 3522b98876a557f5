"""The clock: order of time, then of scheduling; stops where it is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.planner.simulation.events import EventLoop


@given(st.lists(st.floats(0, 10, allow_nan=False)))
def test_events_run_by_time_and_equal_times_by_order_of_scheduling(times_s: list[float]) -> None:
    loop = EventLoop()
    seen: list[tuple[float, int]] = []
    for number, at_s in enumerate(times_s):
        loop.schedule(at_s, lambda one: seen.append((loop.now_s, one)), number)
    loop.run()
    assert seen == sorted((at_s, number) for number, at_s in enumerate(times_s))


def test_an_event_for_the_past_runs_now() -> None:
    loop = EventLoop()
    seen: list[float] = []
    loop.schedule(5.0, lambda _: loop.schedule(1.0, lambda _: seen.append(loop.now_s), None), None)
    loop.run()
    assert seen == [5.0]


def test_until_is_included_and_what_is_later_stays() -> None:
    loop = EventLoop()
    seen: list[int] = []
    for at_s in (1, 2, 3):
        loop.schedule(at_s, seen.append, at_s)
    loop.run(until_s=2.0)
    assert seen == [1, 2]
    assert loop.has_events
    loop.run()
    assert seen == [1, 2, 3]
    assert not loop.has_events


def test_stop_ends_the_run_after_the_event() -> None:
    loop = EventLoop()
    seen: list[int] = []

    def handle(number: int) -> None:
        seen.append(number)
        if number == 2:
            loop.stop()

    for number in (1, 2, 3):
        loop.schedule(float(number), handle, number)
    loop.run()
    assert seen == [1, 2]
