"""Busy time and bubbles of pipeline stages, with a clock and events that the test moves."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.laps.sglang.stage_times import (
    BatchSize,
    EventTimer,
    HostTimer,
    StageFile,
    StageMonitor,
    StageRound,
    StageTimes,
    read_stages,
)

SIZE = BatchSize(1, 32, 64)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


@dataclass
class Relay:
    """Two stages in one process: the second one gets the numbers that the first one has passed on, in order."""

    passed: list[int] = field(default_factory=list)
    is_first: bool = True

    def agree_number(self, number: int) -> int:
        if self.is_first:
            self.passed.append(number)
            return number
        return self.passed.pop(0)


class Outlet:
    """Keeps what was published."""

    def __init__(self) -> None:
        self.published: list[tuple[float, float, int]] = []

    def publish(self, times: StageTimes) -> None:
        self.published.append((times.busy_s, times.bubble_s, times.under_way))


def test_a_single_batch_leaves_both_stages_a_bubble() -> None:
    """2 s on the first stage, 3 s on the second; each idles while the other one computes."""
    clock, relay = Clock(), Relay()
    outlets = Outlet(), Outlet()
    first = StageMonitor(relay, HostTimer(clock), [outlets[0]], clock)  # type: ignore[arg-type]
    second = StageMonitor(Relay(relay.passed, is_first=False), HostTimer(clock), [outlets[1]], clock)  # type: ignore[arg-type]
    for monitor in (first, second):
        monitor.begin_round()
    assert relay.passed == []  # nothing is passed on while there is nothing to do
    for monitor, seconds in ((first, 2.0), (second, 3.0)):
        monitor.record_launch()
        clock.s += seconds
        monitor.record_launched([32], [64])
        assert monitor.times.under_way == 1
    for monitor in (first, second):
        monitor.record_result()
    clock.s += 10.0  # idle
    for _ in range(3):
        for monitor in (first, second):
            monitor.begin_round()
        clock.s += 1.0
    assert relay.passed == []
    assert outlets[0].published[-1] == (2.0, pytest.approx(3.0), 0)
    assert outlets[1].published[-1] == (3.0, pytest.approx(2.0), 0)
    assert [len(outlet.published) for outlet in outlets] == [1, 1]  # nothing new since


def test_batches_that_follow_each_other_are_one_time_with_work() -> None:
    times = StageTimes()
    times.record_launch(0.0)
    times.record_computed(StageRound(0.0, 1.0, SIZE))
    times.record_launch(1.0)
    assert times.under_way == 2
    assert times.work_s(1.5) == 1.5
    times.record_result(2.0)
    times.record_computed(StageRound(1.0, 2.0, SIZE))
    times.record_result(3.0)
    assert times.work_s(100.0) == 3.0
    times.record_launch(100.0)
    assert times.work_s(101.0) == 4.0
    times.record_work(times.work_s(101.0))
    assert (times.busy_s, times.bubble_s) == (2.0, 2.0)


def test_a_bubble_never_shrinks() -> None:
    """What a stage computed after the first one had looked at its clock is not taken from it."""
    times = StageTimes()
    times.record_work(5.0)
    times.record_computed(StageRound(5.0, 9.0, SIZE))
    times.record_work(6.0)
    assert times.bubble_s == 5.0
    times.record_work(11.0)
    assert times.bubble_s == 7.0


class Event:
    """An event of a stream, as torch has them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.at_s: float | None = None
        self.is_passed = False

    def record(self) -> None:
        self.at_s = self._clock()

    def synchronize(self) -> None:
        self.is_passed = True

    def query(self) -> bool:
        return self.is_passed

    def elapsed_time(self, other: Event) -> float:
        assert self.at_s is not None
        assert other.at_s is not None
        return (other.at_s - self.at_s) * 1e3


def test_a_gpu_s_batches_are_timed_by_their_events() -> None:
    host, device = Clock(), Clock()
    host.s, device.s = 500.0, 20.0
    events: list[Event] = []

    def new_event() -> Event:
        events.append(Event(device))
        return events[-1]

    timer = EventTimer(host, new_event)
    for seconds in (1.0, 2.0):
        timer.begin()
        device.s += seconds
        timer.end(SIZE)
        device.s += 0.5
    assert list(timer.ended()) == []  # they still run
    events[2].is_passed = True
    assert list(timer.ended()) == [StageRound(500.0, 501.0, SIZE)]
    events[4].is_passed = True
    assert list(timer.ended()) == [StageRound(501.5, 503.5, SIZE)]


def test_stages_meet_in_their_instance_s_folder(tmp_path: Path) -> None:
    clock = Clock()
    for stage in (1, 0):
        times = StageTimes(kept_rounds=2)
        for number in range(3 + stage):
            times.record_computed(StageRound(float(number), number + 0.25, BatchSize(1, 10 + number, number)))
        StageFile(tmp_path, stage, clock).publish(times)
    first, second = read_stages(str(tmp_path))
    assert [one["pp_rank"] for one in (first, second)] == [0, 1]
    assert [one["number"] for one in first["rounds"]] == [1, 2]
    assert [one["number"] for one in second["rounds"]] == [2, 3]
    assert first["busy_s"] == pytest.approx(0.75)
    shown: dict[str, Any] = second["rounds"][-1]
    assert (shown["requests"], shown["new_tokens"], shown["prefix_tokens"]) == (1, 13, 3)
    assert shown["end_s"] - shown["start_s"] == pytest.approx(0.25, abs=1e-4)
    assert json.dumps(first)
    assert read_stages(None) == read_stages(str(tmp_path / "nothing")) == []


def test_a_folder_that_is_gone_is_not_an_error(tmp_path: Path) -> None:
    StageFile(tmp_path / "gone", 0, Clock()).publish(StageTimes())
    assert read_stages(str(tmp_path)) == []
