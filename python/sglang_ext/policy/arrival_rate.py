"""How often requests arrive, from the latest arrivals: follows a burst at once and falls by itself in the silence."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

_LEAST_SPAN_S = 1e-3  # arrivals of one instant are a burst, not an infinite rate


class ArrivalRate:
    """Rate over at most `arrivals` latest arrivals, none of them older than `horizon_s`."""

    __slots__ = ("_arrivals_s", "horizon_s")

    def __init__(self, arrivals: int = 64, horizon_s: float = 10.0) -> None:
        if arrivals < 2:
            raise ValueError(f"arrivals must be at least 2, got {arrivals}")
        if not horizon_s > 0:
            raise ValueError(f"horizon_s must be above 0, got {horizon_s}")
        self.horizon_s = horizon_s
        self._arrivals_s: deque[float] = deque(maxlen=arrivals)

    def add(self, now_s: float) -> None:
        """A request has arrived. A time before the latest arrival counts as that one's."""
        if self._arrivals_s:
            now_s = max(now_s, self._arrivals_s[-1])
        self._arrivals_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Arrivals per second: n arrivals since (and without) the first one that is remembered, over that time."""
        arrivals_s = self._arrivals_s
        first = bisect_right(arrivals_s, now_s - self.horizon_s)
        count = len(arrivals_s) - first
        if count < 2:
            return count / self.horizon_s
        return (count - 1) / max(now_s - arrivals_s[first], _LEAST_SPAN_S)
