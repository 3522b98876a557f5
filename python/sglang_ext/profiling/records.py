"""What was measured: points, the way through the front end, the hand-over to decode."""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from sglang_ext.profiling.points import Point


class MeasuredPoint(NamedTuple):
    """All runs of a point but the first, which warms up."""

    point: Point
    durations_s: tuple[float, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]

    @property
    def duration_s(self) -> float:
        return median(self.durations_s)

    @property
    def spread(self) -> float:
        return spread(self.durations_s)


class MeasuredHandOver(NamedTuple):
    """Runs of a prompt without cached tokens over prefill and decode, as `MeasuredPoint` has them around iterations.

    The instances agree on a place for the KV before its first iteration; the KV and the first token travel after the
    last one.
    """

    prompt_tokens: int
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]


class BusyRun(NamedTuple):
    """Short prompts that were sent over prefill and decode all at once."""

    prompt_tokens: int
    batches: tuple[int, ...]  # prompts in each iteration
    span_s: float  # from the start of the first iteration to the end of the last one


class SkippedPoint(NamedTuple):
    """A point of the defaults that the instance does not run in one iteration."""

    point: Point
    reason: str


class Measurements(NamedTuple):
    """Everything that a profile is made from."""

    points: tuple[MeasuredPoint, ...]
    hand_overs: tuple[MeasuredHandOver, ...]  # empty without a decode instance
    gaps_s: tuple[float, ...]  # between iterations while work waits
    skipped: tuple[SkippedPoint, ...]
    busy: tuple[BusyRun, ...] = ()  # empty without a decode instance


def spread(values: tuple[float, ...]) -> float:
    """A robust relative standard deviation: 1.48 times the median distance from the median, over the median."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values) / middle if middle > 0 else 0.0
