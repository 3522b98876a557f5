"""TTFT on an idle instance by prompt length, and the objective that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from support.mixed_load import Arrival, Replayer

SHORT_SLO_S = 0.4
SLO_STRETCH = 5.0
LENGTHS_TOKENS = (16, 128, 512, 1024, 2048)


class IdleTtft:
    """Between measured points linear."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._points = sorted(points)

    def __call__(self, tokens: int) -> float:
        points = self._points
        for (low, low_s), (high, high_s) in pairwise(points):
            if tokens <= high:
                return low_s + (high_s - low_s) * max(0, tokens - low) / (high - low)
        return points[-1][1]

    def __str__(self) -> str:
        return ", ".join(f"{tokens} tokens {ttft_s:.2f} s" for tokens, ttft_s in self._points)

    def objective_s(self, tokens: int, slowdown: float) -> float:
        """The TTFT that a prompt of this length must keep on a machine that has become slower by that factor."""
        return max(SHORT_SLO_S, SLO_STRETCH * self(tokens) * slowdown)


def measure_idle_ttft(replayer: Replayer) -> IdleTtft:
    """The faster of two measurements at each length; nothing else may run meanwhile."""
    points = []
    for tokens in LENGTHS_TOKENS:
        arrival = [Arrival(0.0, True, tokens)]
        times = [replayer.run(arrival, seed=1000 + tokens + attempt)[0].ttft_s for attempt in range(2)]
        points.append((tokens, min(time_s for time_s in times if time_s is not None)))
    return IdleTtft(points)
