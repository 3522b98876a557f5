"""Measures every point several times and notes it; what has been noted before is not measured again.

The runs of points with the same cached tokens take turns, so that a slower minute of the machine reaches all of them.
The first run of each warms up and does not count; a point whose runs differ much is run more often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import median
from typing import Protocol

from sglang_ext.costs.engine_profile import IterationCost
from sglang_ext.planner.profiling.instance import CutError, RunTimes
from sglang_ext.planner.profiling.measured_points import (
    BusyRun,
    MeasuredHandOver,
    MeasuredPace,
    MeasuredPoint,
    Measurements,
    Notes,
    SkippedPoint,
    spread,
)
from sglang_ext.planner.profiling.points import Point

STEADY_SPREAD = 0.05
MOST_ROUNDS = 3  # times the repeats that were asked for
HAND_OVER_ROUNDS = 15  # at least: it takes a few milliseconds over several processes, each of which may have slept
_GAP_ROUNDS = 3
_BUSY_ROUNDS = 5

OnProgress = Callable[[int, int], None]  # done, total


class MeasuredInstance(Protocol):
    """Describes what `HttpInstance` does."""

    def prepare(self, cached_tokens: int) -> None: ...

    def run(self, point: Point) -> RunTimes: ...

    def run_counted(self, point: Point) -> RunTimes: ...

    def run_queued_chunks(self) -> list[float]: ...

    def run_with_decode(self, prompt_tokens: int) -> RunTimes: ...

    def run_busy(self) -> BusyRun: ...

    def run_pace(self, repeats: int) -> MeasuredPace: ...


def measure(
    instance: MeasuredInstance,
    points: Sequence[Point],
    hand_overs: Sequence[int],
    notes: Notes,
    repeats: int,
    *,
    may_skip: bool,
    on_progress: OnProgress,
    is_pipeline: bool = False,
) -> Measurements:
    """Measure what the notes lack: `points` in groups of equal cached tokens, and hand-overs of this many tokens.

    Of a pipeline of several stages the times of points are those of the passage, and its pace is measured, too.
    With `may_skip` a point that the instance cuts is noted as skipped, else its CutError is raised; other errors of
    the instance are raised as they come, and what has been noted stays.
    """
    total = len(points) + len(hand_overs)
    done = sum(point in notes.points or point in notes.skipped for point in points)
    done += sum(tokens in notes.hand_overs for tokens in hand_overs)
    on_progress(done, total)
    for cached_tokens, group in groupby(points, lambda point: point.cached_tokens):
        missing = [point for point in group if point not in notes.points and point not in notes.skipped]
        if missing:
            instance.prepare(cached_tokens)
            for _ in _in_turns(instance, missing, notes, repeats, may_skip=may_skip):
                done += 1
                on_progress(done, total)
    for tokens in hand_overs:
        if tokens not in notes.hand_overs:
            rounds = 1 + max(repeats, HAND_OVER_ROUNDS)
            runs = [instance.run_with_decode(tokens) for _ in range(rounds)][1:]
            before_s, after_s = tuple(run.before_s for run in runs), tuple(run.after_s for run in runs)
            notes.add_hand_over(MeasuredHandOver(tokens, before_s, after_s))
            done += 1
            on_progress(done, total)
    if is_pipeline:
        if notes.pace is None:
            notes.add_pace(instance.run_pace(repeats))
    elif notes.gaps_s is None:
        notes.add_gaps(tuple(gap for _ in range(_GAP_ROUNDS) for gap in instance.run_queued_chunks()))
    if hand_overs and notes.busy is None and not is_pipeline:
        instance.prepare(0)
        notes.add_busy(tuple(instance.run_busy() for _ in range(_BUSY_ROUNDS + 1))[1:])
    return Measurements(
        tuple(notes.points[point] for point in points if point in notes.points),
        tuple(notes.hand_overs[tokens] for tokens in hand_overs),
        notes.gaps_s or (),
        tuple(notes.skipped[point] for point in points if point in notes.skipped),
        notes.busy or (),
        notes.pace,
    )


def _in_turns(
    instance: MeasuredInstance, points: Sequence[Point], notes: Notes, repeats: int, *, may_skip: bool
) -> Iterable[Point]:
    """Measure these points and note them; yields each when it is done."""
    runs: dict[Point, list[RunTimes]] = {}
    for point in points:
        try:
            _twice(instance.run_counted, point)
        except CutError as error:
            if not may_skip:
                raise
            notes.add_skipped(SkippedPoint(point, str(error)))
            yield point
        else:
            runs[point] = []
    for rounds in range(1, MOST_ROUNDS * repeats + 1):
        for point in list(runs):
            runs[point].append(_twice(instance.run, point))
            if rounds >= repeats and _is_steady(runs[point]):
                notes.add_point(_measured(point, runs.pop(point)))
                yield point
    for point, unsteady in runs.items():
        notes.add_point(_measured(point, unsteady))
        yield point


def _twice(run: Callable[[Point], RunTimes], point: Point) -> RunTimes:
    """CutError only if it happens twice: a health check may have come between."""
    try:
        return run(point)
    except CutError:
        return run(point)


def _is_steady(runs: Sequence[RunTimes]) -> bool:
    return spread(tuple(run.duration_s for run in runs)) <= STEADY_SPREAD


def _measured(point: Point, runs: Sequence[RunTimes]) -> MeasuredPoint:
    return MeasuredPoint(
        point,
        tuple(run.duration_s for run in runs),
        tuple(run.before_s for run in runs),
        tuple(run.after_s for run in runs),
    )


def gap_s(measurements: Measurements) -> float:
    """Median time between two iterations while work waits; 0 where it was not measured."""
    return median(measurements.gaps_s) if measurements.gaps_s else 0.0


def busy_request_s(measurements: Measurements, iteration: IterationCost) -> float:
    """Return what a request costs an instance that has more of them, in addition to its share of iterations: taking it
    in, agreeing with decode, sending. Median over the runs of what their iterations do not explain; 0 where it was not
    measured."""
    gap = gap_s(measurements)
    rest_s = [
        (
            run.span_s
            - gap * (len(run.batches) - 1)
            - sum(iteration.iteration_s([(run.prompt_tokens, 0)] * count) for count in run.batches)
        )
        / sum(run.batches)
        for run in measurements.busy
    ]
    return max(0.0, median(rest_s)) if rest_s else 0.0
