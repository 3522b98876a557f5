"""How many prefills arrive at a set of instances and how much work they bring: what an instance's time is worth."""

from __future__ import annotations

import math
from collections import deque

ROUTED_WINDOW_S = 10.0  # of the load by which prompts are routed, of which many come
_LEAST_ARRIVALS = 32  # in the window: it is longer where fewer have come
_DOUBTED_ARRIVALS = 8
_HIGHEST_LOAD = 0.8  # beyond that the queue's end is no estimate, and its price would outweigh every gain


class PoolLoad:
    """Describes how many prefills arrive and how much work they bring: of the last minute, or of more where few
    arrive."""

    def __init__(self, window_s: float = 60.0) -> None:
        """`window_s`: the least time that is looked back."""
        self.window_s = window_s
        self._arrivals: deque[tuple[float, float]] = deque()  # when, instance-seconds
        self._work = 0.0  # of all these

    def record_arrival(self, now_s: float, work_s: float) -> None:
        """A prefill of this many instance-seconds; infinity where its cost is not known, which counts as none."""
        work_s = work_s if work_s < math.inf else 0.0
        self._arrivals.append((now_s, work_s))
        self._work += work_s
        self._forget_before(now_s - self.window_s)

    def arrivals_per_s(self, now_s: float) -> float:
        """Prefills a second, now."""
        self._forget_before(now_s - self.window_s)
        return len(self._arrivals) / self._span_s(now_s)

    def _trust(self) -> float:
        """A few arrivals say little of those to come: one long prompt would look like a full pool."""
        return len(self._arrivals) / (len(self._arrivals) + _DOUBTED_ARRIVALS)

    def arrivals_until_empty(self, now_s: float, left_s: float, instances: float, others_load: float = 0.0) -> float:
        """Return how many of these prefills will have arrived before their queue has gone: all of them wait for it.

        `left_s`: instance-seconds of all that is here. `others_load`: the share of each instance's time that other
        prefills take, which do not wait for these.
        """
        self._forget_before(now_s - self.window_s)
        trust = self._trust()
        load = min(_HIGHEST_LOAD, trust * self._work / self._span_s(now_s) / instances + others_load)
        return trust * self.arrivals_per_s(now_s) * left_s / instances / (1 - load)

    def price(self, now_s: float, left_s: float, instances: float) -> float:
        """Return the seconds by which a second of an instance's time delays these prefills, all together."""
        return self.arrivals_until_empty(now_s, left_s, instances) / instances

    def _forget_before(self, at_s: float) -> None:
        while len(self._arrivals) > _LEAST_ARRIVALS and self._arrivals[0][0] < at_s:
            self._work -= self._arrivals.popleft()[1]

    def _span_s(self, now_s: float) -> float:
        return max(self.window_s, now_s - self._arrivals[0][0]) if self._arrivals else self.window_s
