"""Describes what a chunk costs on each SP size (number of instances): Eq. 1 of Tetris or a table, and the fit to
measurements.

The fit is by least squares on the relative error (Tetris, section 5.1).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from sglang_ext.laps.decide.nnls import solve_non_negative


@dataclass(frozen=True, slots=True)
class SpCost:
    """Time of a chunk on one SP size: `T_s(C, L) = a + b L + c C L + d L^2` (Tetris, Eq. 1).

    ValueError for a coefficient that is negative or not finite: time would then not grow with L.
    """

    a_s: float  # constant overhead
    b_s_per_token: float  # fully connected layers
    c_s_per_token2: float  # attention with the tokens before the chunk
    d_s_per_token2: float  # attention within the chunk

    def __post_init__(self) -> None:
        for name in ("a_s", "b_s_per_token", "c_s_per_token2", "d_s_per_token2"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value} is not a finite number of at least 0")

    def predict_s(self, cached_tokens: int, new_tokens: int) -> float:
        """Return T_s(C, L)."""
        per_token_s = self.b_s_per_token + self.c_s_per_token2 * cached_tokens + self.d_s_per_token2 * new_tokens
        return self.a_s + new_tokens * per_token_s


@dataclass(frozen=True, slots=True)
class TabulatedCost:
    """Time of a chunk on one SP size, from whole prompts that were measured without a cached prefix.

    `T_s(0, n)` is an entry, or on the straight line between two; below the first entry the first two are continued,
    not below zero. With a cached prefix `T_s(C, L) = T_s(0, C + L) - T_s(0, C) + T_s(0, 0)`, what Eq. 1 says where
    c = 2d. Beyond the last entry nothing is known, and the planner does not use the size there.

    ValueError unless there are two entries or more, lengths rise from at least 0, and times are finite, at least 0
    and never fall.
    """

    prompt_tokens: tuple[int, ...]
    duration_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.prompt_tokens) < 2 or len(self.prompt_tokens) != len(self.duration_s):
            raise ValueError("prompt_tokens: two entries or more are needed, as many as in duration_s")
        if self.prompt_tokens[0] < 0 or any(x >= y for x, y in pairwise(self.prompt_tokens)):
            raise ValueError("prompt_tokens: lengths must rise, from at least 0")
        if not all(math.isfinite(value) and value >= 0 for value in self.duration_s):
            raise ValueError("duration_s: finite numbers of at least 0 are needed")
        if any(x > y for x, y in pairwise(self.duration_s)):
            raise ValueError("duration_s: a longer prompt cannot take less time")

    def predict_s(self, cached_tokens: int, new_tokens: int) -> float:
        """Return T_s(C, L); infinity beyond the last entry."""
        total_tokens = cached_tokens + new_tokens
        if total_tokens > self.prompt_tokens[-1]:
            return math.inf
        if cached_tokens == 0:
            return self._prompt_s(new_tokens)
        return self._prompt_s(total_tokens) - self._prompt_s(cached_tokens) + self._prompt_s(0)

    def _prompt_s(self, tokens: int) -> float:
        upper = max(1, bisect_left(self.prompt_tokens, tokens))
        (x0, x1), (y0, y1) = self.prompt_tokens[upper - 1 : upper + 1], self.duration_s[upper - 1 : upper + 1]
        return y1 if tokens == x1 else max(0.0, y0 + (tokens - x0) * ((y1 - y0) / (x1 - x0)))


@dataclass(frozen=True, slots=True)
class SpCandidate:
    """An SP size that a chunk may run on. ValueError for a size below 1."""

    size: int  # instances
    cost: SpCost | TabulatedCost

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size: {self.size} instances are less than 1")


def check_candidates(candidates: Sequence[SpCandidate]) -> None:
    """ValueError for none, or a size given twice."""
    if not candidates:
        raise ValueError("candidates: at least one SP size is needed")
    sizes = [candidate.size for candidate in candidates]
    for size in sizes:
        if sizes.count(size) > 1:
            raise ValueError(f"candidates: SP size {size} is there twice")


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


def _features(sample: ChunkSample, has_cached: bool) -> list[float]:
    cached, new = float(sample.cached_tokens), float(sample.new_tokens)
    return [1.0, new, cached * new, new * new] if has_cached else [1.0, new, new * new]


CoreCost = tuple[float, float, float, float] | tuple[list[float], list[float]]


def core_candidates(candidates: Sequence[SpCandidate]) -> tuple[list[int], list[CoreCost]]:
    """Return SP sizes, ascending, and their costs as C++ takes them: coefficients of Eq. 1, or tokens and seconds."""
    ascending = sorted(candidates, key=lambda candidate: candidate.size)
    return [candidate.size for candidate in ascending], [_core_cost(candidate.cost) for candidate in ascending]


def _core_cost(cost: SpCost | TabulatedCost) -> CoreCost:
    if isinstance(cost, SpCost):
        return cost.a_s, cost.b_s_per_token, cost.c_s_per_token2, cost.d_s_per_token2
    return [float(tokens) for tokens in cost.prompt_tokens], list(cost.duration_s)
