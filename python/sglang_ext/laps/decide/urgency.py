"""The urgency of a queued request, within priority classes that waiting lifts, and the deadlines missed."""

from __future__ import annotations

from collections import deque
from math import floor, isfinite
from typing import Final, NamedTuple

from sglang_ext.laps.decide.round_plan import QueuedPrefill

_DUE_AFTER: Final = 2.0  # times its objective; with less, prompts are late that can be on time


class Urgency(NamedTuple):
    """Sorts most urgent first."""

    aged_class: int  # priority class less one for each lift; below REAL_TIME for the longest waiting
    sort_value: float  # orders a class, ascending: a latest start or a remaining time, s
    arrival_s: float  # decides among requests without deadlines
    key: int


class RankedPrefill:
    """A queued request, how urgent it is, and its predicted times on an idle instance. Sorts most urgent first."""

    __slots__ = ("remaining_s", "request", "total_s", "urgency")

    def __init__(self, urgency: Urgency, request: QueuedPrefill, remaining_s: float, total_s: float) -> None:
        self.urgency = urgency
        self.request = request
        self.remaining_s = remaining_s
        self.total_s = total_s

    def __lt__(self, other: RankedPrefill) -> bool:
        return self.urgency < other.urgency


def aged_class(priority: int, waited_s: float, lift_s: float) -> int:
    """The priority class after `waited_s`, one less for every `lift_s`.

    There is no most urgent class: a request can be preceded only by requests that arrive at most
    (classes between them + 1) * lift_s after it, so that none starves, with or without a deadline.
    """
    return priority - floor(max(0.0, waited_s) / lift_s)


def due_s(request: QueuedPrefill) -> float:
    """Return when a request has waited twice its objective: from then on it may be due (`PrefillQueue.due`)."""
    return request.arrival_s + _DUE_AFTER * (request.deadline_s - request.arrival_s)


class SlaDeviation:
    """Over the prefills that ended within the last `horizon_s`, at most the latest `prefills` of them."""

    __slots__ = ("_ended", "horizon_s")

    def __init__(self, horizon_s: float = 30.0, prefills: int = 1024) -> None:
        if not horizon_s > 0:
            raise ValueError(f"horizon_s must be above 0, got {horizon_s}")
        self.horizon_s = horizon_s
        self._ended: deque[tuple[float, float]] = deque(maxlen=prefills)  # when, and tardiness

    def add(self, now_s: float, arrival_s: float, deadline_s: float) -> None:
        """A prefill has ended. One without a deadline (infinity) is never late."""
        tardiness = 0.0
        if isfinite(deadline_s) and now_s > deadline_s:
            tardiness = (now_s - deadline_s) / max(deadline_s - arrival_s, 1e-3)
        self._ended.append((now_s, tardiness))

    def slo_violation_rate(self, now_s: float) -> float:
        """Share of them that ended after their deadline; 0 when none ended."""
        recent = self._recent(now_s)
        return sum(tardiness > 0 for tardiness in recent) / len(recent) if recent else 0.0

    def tardiness(self, now_s: float) -> float:
        """Mean of max(0, end - deadline) / (deadline - arrival); 0 when none ended."""
        recent = self._recent(now_s)
        return sum(recent) / len(recent) if recent else 0.0

    def _recent(self, now_s: float) -> list[float]:
        return [tardiness for ended_s, tardiness in self._ended if ended_s > now_s - self.horizon_s]
