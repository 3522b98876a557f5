"""How many prefills of a class ended after their deadline lately, and by how much: the controller's e."""

from __future__ import annotations

from collections import deque
from math import isfinite


class SlaDeviation:
    """Over the prefills that ended within the last `horizon_s`, at most the latest `prefills` of them."""

    __slots__ = ("_ended", "horizon_s")

    def __init__(self, horizon_s: float = 30.0, prefills: int = 1024) -> None:
        if not horizon_s > 0:
            raise ValueError(f"horizon_s must be above 0, got {horizon_s}")
        self.horizon_s = horizon_s
        self._ended: deque[tuple[float, float]] = deque(maxlen=prefills)  # when, and lateness

    def add(self, now_s: float, arrival_s: float, deadline_s: float) -> None:
        """A prefill has ended. One without a deadline (infinity) is never late."""
        lateness = 0.0
        if isfinite(deadline_s) and now_s > deadline_s:
            lateness = (now_s - deadline_s) / max(deadline_s - arrival_s, 1e-3)
        self._ended.append((now_s, lateness))

    def late_share(self, now_s: float) -> float:
        """Share of them that ended after their deadline; 0 when none ended."""
        recent = self._recent(now_s)
        return sum(lateness > 0 for lateness in recent) / len(recent) if recent else 0.0

    def lateness(self, now_s: float) -> float:
        """Mean of max(0, end - deadline) / (deadline - arrival); 0 when none ended."""
        recent = self._recent(now_s)
        return sum(recent) / len(recent) if recent else 0.0

    def _recent(self, now_s: float) -> list[float]:
        return [lateness for ended_s, lateness in self._ended if ended_s > now_s - self.horizon_s]
