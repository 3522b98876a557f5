"""How often a point runs, in which order, and what happens when the instance cuts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.costs.engine_profile import IterationCost
from sglang_ext.planner.profiling.http_client import InstanceError
from sglang_ext.planner.profiling.instance import CutError, RunTimes
from sglang_ext.planner.profiling.measured_points import BusyRun, MeasuredHandOver, MeasuredPace, Measurements, Notes
from sglang_ext.planner.profiling.measurement import HAND_OVER_ROUNDS, busy_request_s, gap_s, measure
from sglang_ext.planner.profiling.points import Point

A, B, C = Point(0, 8), Point(0, 16), Point(256, 8)


class FakeInstance:
    """Notes what is asked; times come from `times_s` by point, in turn, the last one again and again."""

    def __init__(self, times_s: dict[Point, list[float]] | None = None, cut: dict[Point, int] | None = None) -> None:
        self.times_s = times_s or {}
        self.cut = cut or {}  # so many more times
        self.log: list[object] = []

    def prepare(self, cached_tokens: int) -> None:
        self.log.append(cached_tokens)

    def run(self, point: Point) -> RunTimes:
        self.log.append(point)
        if self.cut.get(point, 0) > 0:
            self.cut[point] -= 1
            raise CutError(f"{point} is cut")
        times_s = self.times_s.get(point, [1.0])
        return RunTimes(times_s.pop(0) if len(times_s) > 1 else times_s[0], 0.1, 0.2)

    def run_counted(self, point: Point) -> RunTimes:
        return self.run(point)

    def run_queued_chunks(self) -> list[float]:
        self.log.append("gaps")
        return [0.01, 0.03]

    def run_with_decode(self, prompt_tokens: int) -> RunTimes:
        self.log.append(f"decode {prompt_tokens}")
        return RunTimes(1.0, 0.1, 0.5)

    def run_busy(self) -> BusyRun:
        self.log.append("busy")
        return BusyRun(16, (1, 3), 3.0)

    def run_pace(self, repeats: int) -> MeasuredPace:
        self.log.append("pace")
        return MeasuredPace(512, (1.0,) * repeats, (0.4, 0.6))


def notes_at(tmp_path: Path) -> Notes:
    return Notes(tmp_path / "partial", {"model": "m"})


def run(
    instance: FakeInstance,
    notes: Notes,
    points: list[Point],
    *,
    hand_overs: list[int] | None = None,
    repeats: int = 2,
    may_skip: bool = False,
) -> tuple[Measurements, list[tuple[int, int]]]:
    shown: list[tuple[int, int]] = []
    measurements = measure(
        instance,
        points,
        hand_overs or [],
        notes,
        repeats,
        may_skip=may_skip,
        on_progress=lambda done, total: shown.append((done, total)),
    )
    return measurements, shown


def test_points_take_turns_and_the_first_run_does_not_count(tmp_path: Path) -> None:
    instance = FakeInstance({A: [9.0, 1.0], B: [9.0, 2.0], C: [9.0, 3.0]})
    measurements, shown = run(instance, notes_at(tmp_path), [A, B, C])
    assert instance.log == [0, A, B, A, B, A, B, 256, C, C, C, "gaps", "gaps", "gaps"]
    assert [one.durations_s for one in measurements.points] == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert measurements.points[0].before_s == (0.1, 0.1)
    assert shown[0] == (0, 3)
    assert shown[-1] == (3, 3)
    assert gap_s(measurements) == pytest.approx(0.02)


def test_an_unsteady_point_runs_more_often_and_the_median_counts(tmp_path: Path) -> None:
    instance = FakeInstance({A: [9.0, 1.0, 2.0, 1.0, 1.0, 1.0]})
    measurements, _ = run(instance, notes_at(tmp_path), [A])
    (one,) = measurements.points
    assert one.durations_s == (1.0, 2.0, 1.0)
    assert one.duration_s == 1.0
    wild = FakeInstance({B: [9.0, *(1.0 + (n % 3) for n in range(20))]})
    measurements, _ = run(wild, notes_at(tmp_path), [B])
    assert len(measurements.points[0].durations_s) == 6  # three times what was asked, and no more
    assert measurements.points[0].spread > 0.4


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    broken = FakeInstance(cut={C: 99})
    with pytest.raises(CutError):
        run(broken, notes_at(tmp_path), [A, B, C])
    instance = FakeInstance({C: [4.0]})
    measurements, shown = run(instance, notes_at(tmp_path), [A, B, C])
    assert set(instance.log) == {256, C, "gaps"}
    assert [one.point for one in measurements.points] == [A, B, C]
    assert shown[0] == (2, 3)
    silent = FakeInstance()
    assert run(silent, notes_at(tmp_path), [A, B, C])[0] == measurements
    assert silent.log == []


def test_one_cut_is_an_accident_two_are_not(tmp_path: Path) -> None:
    measurements, _ = run(FakeInstance(cut={A: 1}), notes_at(tmp_path), [A, B], may_skip=True)
    assert [one.point for one in measurements.points] == [A, B]
    notes = Notes(tmp_path / "other", {"model": "m"})
    measurements, shown = run(FakeInstance(cut={A: 2}), notes, [A, B], may_skip=True)
    assert [one.point for one in measurements.points] == [B]
    assert [(one.point, one.reason) for one in measurements.skipped] == [(A, f"{A} is cut")]
    assert shown[-1] == (2, 2)
    with pytest.raises(InstanceError, match="is cut"):
        run(FakeInstance(cut={A: 2}), Notes(tmp_path / "third", {"model": "m"}), [A, B])


def test_hand_overs_are_noted_too(tmp_path: Path) -> None:
    instance = FakeInstance()
    measurements, shown = run(instance, notes_at(tmp_path), [A], hand_overs=[16, 128])
    assert measurements.hand_overs == (
        MeasuredHandOver(16, (0.1,) * HAND_OVER_ROUNDS, (0.5,) * HAND_OVER_ROUNDS),
        MeasuredHandOver(128, (0.1,) * HAND_OVER_ROUNDS, (0.5,) * HAND_OVER_ROUNDS),
    )
    assert instance.log.count("decode 16") == 1 + HAND_OVER_ROUNDS
    assert shown[-1] == (3, 3)
    again = FakeInstance()
    run(again, notes_at(tmp_path), [A], hand_overs=[16, 128])
    assert again.log == []


def test_of_a_pipeline_the_pace_is_measured_once(tmp_path: Path) -> None:
    instance = FakeInstance()
    found = measure(
        instance, [A], [], notes_at(tmp_path), 2, may_skip=False, on_progress=lambda *_: None, is_pipeline=True
    )
    assert found.pace == MeasuredPace(512, (1.0, 1.0), (0.4, 0.6))
    assert found.pace.share == 0.5
    assert found.gaps_s == found.busy == ()
    assert instance.log.count("pace") == 1
    again = FakeInstance()
    known = measure(
        again, [A], [], notes_at(tmp_path), 2, may_skip=False, on_progress=lambda *_: None, is_pipeline=True
    )
    assert (known, again.log) == (found, [])


def test_what_a_busy_instance_needs_for_a_request_beside_its_iterations(tmp_path: Path) -> None:
    measurements, _ = run(FakeInstance(), notes_at(tmp_path), [A], hand_overs=[8])
    again = FakeInstance()
    assert run(again, notes_at(tmp_path), [A], hand_overs=[8])[0] == measurements
    assert again.log == []
    assert measurements.busy == (BusyRun(16, (1, 3), 3.0),) * 5
    # Two iterations of 1 s, and 0.02 s between them; what is left belongs to four requests.
    fixed = IterationCost(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert busy_request_s(measurements, fixed) == pytest.approx((3.0 - 2.0 - 0.02) / 4)
    assert busy_request_s(measurements, fixed._replace(fixed_s=2.0)) == 0.0
    assert busy_request_s(measurements._replace(busy=()), fixed) == 0.0
