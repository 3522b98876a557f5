"""Fit the cost model of an SP size to measurements, by least squares on the relative error (Tetris, section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.policy.cdsp.records import SpCost
from sglang_ext.policy.nnls import solve_non_negative


class ChunkSample(NamedTuple):
    """One measured chunk."""

    cached_tokens: int  # C
    new_tokens: int  # L
    duration_s: float


def fit_sp_cost(samples: Sequence[ChunkSample]) -> SpCost:
    """Return the non-negative coefficients that minimise the sum of squared relative errors.

    Samples without any cached prefix do not determine c; c = 2d is taken then, which counts attention within and
    before the chunk alike.

    ValueError for fewer samples than coefficients, or a sample without a positive length and duration.
    """
    has_cached = any(sample.cached_tokens > 0 for sample in samples)
    needed = 4 if has_cached else 3
    if len(samples) < needed:
        raise ValueError(f"samples: {len(samples)} do not determine {needed} coefficients")
    for sample in samples:
        if not (sample.new_tokens > 0 and sample.cached_tokens >= 0 and 0 < sample.duration_s < math.inf):
            raise ValueError(f"samples: {tuple(sample)} is not a chunk with a positive length and duration")
    rows = [[feature / sample.duration_s for feature in _features(sample, has_cached)] for sample in samples]
    # Each row times the coefficients should be 1: the prediction over the measured time.
    gram = [[sum(row[i] * row[j] for row in rows) for j in range(needed)] for i in range(needed)]
    moment = [sum(row[i] for row in rows) for i in range(needed)]
    a, b, *quadratic = solve_non_negative(gram, moment)
    c, d = quadratic if has_cached else (2 * quadratic[0], quadratic[0])
    return SpCost(a, b, c, d)


def relative_error(cost: SpCost, sample: ChunkSample) -> float:
    """Return by which share of the measured time the prediction is above it."""
    return cost.predict_s(sample.cached_tokens, sample.new_tokens) / sample.duration_s - 1


def _features(sample: ChunkSample, has_cached: bool) -> list[float]:
    cached, new = float(sample.cached_tokens), float(sample.new_tokens)
    return [1.0, new, cached * new, new * new] if has_cached else [1.0, new, new * new]
