"""Describes what was measured of an instance: points, the hand-over to decode, busy runs; and the notes from which it
goes on.

An interrupted measurement leaves its notes, one JSON line each, and the same command goes on from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import NamedTuple

from sglang_ext.planner.profiling.facts import Scalar
from sglang_ext.planner.profiling.points import Point

_FORMAT = "sglang-ext engine measurements"
_VERSION = 1


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


class MeasuredPace(NamedTuple):
    """Chunks of one length in a pipeline of several stages: by themselves, and one behind the other."""

    chunk_tokens: int
    passages_s: tuple[float, ...]  # through the empty pipeline
    intervals_s: tuple[float, ...]  # between results: what the slowest stage takes

    @property
    def share(self) -> float:
        """Return what the slowest stage takes of a passage."""
        return min(1.0, median(self.intervals_s) / median(self.passages_s))


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
    pace: MeasuredPace | None = None  # of an instance of several stages


def spread(values: tuple[float, ...]) -> float:
    """A robust relative standard deviation: 1.48 times the median distance from the median, over the median."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values) / middle if middle > 0 else 0.0


class NotesError(RuntimeError):
    """The partial file cannot be continued; the text is one line for the user."""


def partial_path(profile: Path) -> Path:
    """Return where the measurements of an unfinished profile are."""
    return profile.with_name(profile.name + ".partial")


class Notes:
    """Measurements so far. Every `add_…` is on disk when it returns."""

    def __init__(self, path: Path, identity: Mapping[str, Scalar]) -> None:
        """Continue the file at `path`, or begin it. NotesError if it is of something else."""
        self.points: dict[Point, MeasuredPoint] = {}
        self.skipped: dict[Point, SkippedPoint] = {}
        self.hand_overs: dict[int, MeasuredHandOver] = {}
        self.gaps_s: tuple[float, ...] | None = None
        self.busy: tuple[BusyRun, ...] | None = None
        self.pace: MeasuredPace | None = None
        self._path = path
        self._identity = dict(identity)
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # cut off
        if not lines:
            self._write("w", {"format": _FORMAT, "version": _VERSION, "identity": self._identity})
            return
        self._check(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            self._take_in(number, line)
        if "".join(lines) != text:
            path.write_text("".join(lines), encoding="utf-8")

    def add_point(self, measured: MeasuredPoint) -> None:
        self.points[measured.point] = measured
        times = {"durations_s": measured.durations_s, "before_s": measured.before_s, "after_s": measured.after_s}
        self._write("a", {"point": measured.point, **times})

    def add_skipped(self, skipped: SkippedPoint) -> None:
        self.skipped[skipped.point] = skipped
        self._write("a", {"skipped": skipped.point, "reason": skipped.reason})

    def add_hand_over(self, measured: MeasuredHandOver) -> None:
        self.hand_overs[measured.prompt_tokens] = measured
        times = {"before_s": measured.before_s, "after_s": measured.after_s}
        self._write("a", {"hand_over": measured.prompt_tokens, **times})

    def add_gaps(self, gaps_s: tuple[float, ...]) -> None:
        self.gaps_s = gaps_s
        self._write("a", {"gaps_s": gaps_s})

    def add_busy(self, runs: tuple[BusyRun, ...]) -> None:
        self.busy = runs
        self._write("a", {"busy": runs})

    def add_pace(self, pace: MeasuredPace) -> None:
        self.pace = pace
        self._write("a", {"pace": pace})

    def remove(self) -> None:
        """The profile has been written."""
        self._path.unlink(missing_ok=True)

    def _write(self, mode: str, content: Mapping[str, object]) -> None:
        with self._path.open(mode, encoding="utf-8") as file:
            file.write(json.dumps(content, allow_nan=False) + "\n")

    def _check(self, line: str) -> None:
        try:
            head = json.loads(line)
            is_ours = head["format"] == _FORMAT and head["version"] == _VERSION
            identity = dict(head["identity"])
        except (ValueError, KeyError, TypeError):
            is_ours, identity = False, {}
        if not is_ours:
            raise NotesError(f"{self._path} is no partial measurement of this version: remove it")
        names = sorted({*identity, *self._identity})
        other = next((name for name in names if identity.get(name) != self._identity.get(name)), None)
        if other is not None:
            raise NotesError(
                f"{self._path} was measured with {other} {identity.get(other)}, the instance has "
                f"{self._identity.get(other)}: remove it or choose another --out"
            )

    def _take_in(self, number: int, line: str) -> None:
        try:
            entry = json.loads(line)
            if "point" in entry:
                point = Point(*entry["point"])
                times = (tuple(map(float, entry[name])) for name in ("durations_s", "before_s", "after_s"))
                self.points[point] = MeasuredPoint(point, *times)
            elif "skipped" in entry:
                point = Point(*entry["skipped"])
                self.skipped[point] = SkippedPoint(point, str(entry["reason"]))
            elif "hand_over" in entry:
                tokens = int(entry["hand_over"])
                times = (tuple(map(float, entry[name])) for name in ("before_s", "after_s"))
                self.hand_overs[tokens] = MeasuredHandOver(tokens, *times)
            elif "busy" in entry:
                self.busy = tuple(
                    BusyRun(int(tokens), tuple(map(int, batches)), float(span_s))
                    for tokens, batches, span_s in entry["busy"]
                )
            elif "pace" in entry:
                tokens, passages_s, intervals_s = entry["pace"]
                self.pace = MeasuredPace(int(tokens), tuple(map(float, passages_s)), tuple(map(float, intervals_s)))
            else:
                self.gaps_s = tuple(map(float, entry["gaps_s"]))
        except (ValueError, KeyError, TypeError):
            raise NotesError(f"{self._path}, line {number}, is no measurement: remove the file") from None
