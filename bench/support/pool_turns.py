"""A load that turns, the moves of a controller, and how long each turn went unanswered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Phase(NamedTuple):
    """Offered load of each class, in instances, and the seconds that it lasts."""

    name: str
    short: float
    long: float
    duration_s: float


class Move(NamedTuple):
    """A finished move: when it ended after the first arrival, at the machine's first speed."""

    at_s: float
    source: str
    target: str
    outcome: str


def turns_s(phases: Sequence[Phase]) -> list[float]:
    """Return when each phase begins."""
    return [sum(phase.duration_s for phase in phases[:number]) for number in range(len(phases))]


def unanswered(phases: Sequence[Phase], moves: Sequence[Move]) -> list[float]:
    """For each phase, how long its load went unanswered (s): at most the whole phase, and 0 where nothing had to move.

    Phase and moves on one clock; at first each class has one instance. A class whose load is above one instance must
    have both.
    """
    members = {"short": 1, "long": 1}
    ahead = sorted(moves)
    result = []
    for start_s, phase in zip(turns_s(phases), phases, strict=True):
        end_s = start_s + phase.duration_s
        wanted = {"short": math.ceil(phase.short), "long": math.ceil(phase.long)}
        heavy = [name for name, count in wanted.items() if count > 1]
        answered_s: float | None = None
        now_s = start_s
        while True:
            if answered_s is None and all(members[name] >= wanted[name] for name in heavy):
                answered_s = now_s
            if not ahead or ahead[0].at_s >= end_s:
                break
            move = ahead.pop(0)
            members[move.source] -= 1
            members[move.target] += 1
            now_s = max(start_s, move.at_s)
        result.append(phase.duration_s if answered_s is None else answered_s - start_s)
    return result
