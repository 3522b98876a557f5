"""Histograms as plain lists, and their buckets: SGLang's own where it measures the same, and finer below.

A bound that only one side has makes differences between the router's and the engines' quantiles wrong, so SGLang's are
all here. `metrics_collector.py` of SGLang is where they come from; a test holds them against it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

_FINE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05)  # below SGLang's first bound
_TTFT_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)
_DURATION_S = (*_TTFT_S, 600.0, 1200.0, 1800.0, 2400.0)
_QUEUE_S = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0),
    *(1200.0, 1400.0, 1600.0, 1800.0, 2000.0, 2500.0, 3000.0),
)
TOKEN_TIME_BUCKETS_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1),
    *(0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0),
)
LOOP_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
TOKEN_BUCKETS = (
    *(1.0, 10.0, 30.0, 50.0),  # below SGLang's first bound
    *(100.0, 300.0, 500.0, 700.0, 1e3, 1.5e3, 2e3, 3e3, 4e3, 5e3, 6e3, 7e3, 8e3, 9e3, 1e4, 1.25e4, 1.5e4, 1.75e4),
    *(2e4, 2.25e4, 2.5e4, 2.75e4, 3e4, 3.5e4, 4e4, 6e4, 8e4, 1e5, 2e5, 3e5, 4e5, 6e5, 8e5, 1e6, 1.1e6),
)
_LONGER_S = (600.0, 1200.0, 1800.0, 2400.0, 3600.0, 7200.0, 14400.0, 43200.0, 86400.0)


def ttft_bounds_s(limit_s: float) -> tuple[float, ...]:
    """Buckets of times to first token, the last of at least `limit_s` (a day at most)."""
    return _extended((*_FINE_S, *_TTFT_S), limit_s)


def duration_bounds_s(limit_s: float) -> tuple[float, ...]:
    """Buckets of whole requests, as above."""
    return _extended((*_FINE_S, *_DURATION_S), limit_s)


def queue_bounds_s(limit_s: float) -> tuple[float, ...]:
    """Buckets of waits in a queue, as above."""
    return _extended(_QUEUE_S, limit_s)


def _extended(bounds: tuple[float, ...], limit_s: float) -> tuple[float, ...]:
    for further in _LONGER_S:
        if bounds[-1] >= limit_s:
            break
        if further > bounds[-1]:
            bounds = (*bounds, further)
    return bounds


class Histogram:
    """Counts per bucket (upper bounds inclusive), their sum, as plain lists."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        """Take over what another histogram of the same bounds has counted; ValueError if it has others."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.total += total

    def cumulative(self) -> list[tuple[float, int]]:
        """Buckets as Prometheus wants them: upper bound, the last infinite, and number of observations up to it."""
        running = 0
        buckets: list[tuple[float, int]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append((bound, running))
        return buckets
