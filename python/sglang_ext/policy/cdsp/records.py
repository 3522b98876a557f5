"""What the CDSP planner is told and what it answers.

An instance is named by its position in the snapshot. Tokens are positions of the prompt: C cached or computed before,
L to compute.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


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


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What does not change from request to request. Candidates may come in any order.

    ValueError naming the field for no candidate, a size given twice, or a number below 1.
    """

    candidates: tuple[SpCandidate, ...]
    min_chunk_tokens: int = 512  # a chunk and what is left after it are at least this long
    page_tokens: int = 1  # KV slots are taken in pages of this size on each instance
    is_chunking: bool = True  # off: Algorithm 2 alone, one chunk per request

    def __post_init__(self) -> None:
        if not self.candidates:
            raise ValueError("candidates: at least one SP size is needed")
        sizes = [candidate.size for candidate in self.candidates]
        for size in sizes:
            if sizes.count(size) > 1:
                raise ValueError(f"candidates: SP size {size} is there twice")
        for name in ("min_chunk_tokens", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


class PrefillSnapshot(NamedTuple):
    """The prefill instances at the moment of a decision: three lists or tuples of one length.

    A delay is the time until the instance has done all it is committed to. Free KV is what will be free by then; what
    the request itself already holds there counts as free.
    """

    node_ids: Sequence[int]  # instances of one node share a number; at least 0, below 2**20
    queue_delays_s: Sequence[float]
    free_kv_tokens: Sequence[int]


class CdspRequest(NamedTuple):
    """What is left of a request."""

    new_tokens: int  # L, at least 1
    cached_tokens: int = 0  # C: cached before, or computed by earlier chunks
    group: tuple[int, ...] = ()  # the instances that earlier chunks ran on: every further group contains them
    waited_s: float = 0.0  # since it arrived


class PlannedChunk(NamedTuple):
    """Run `tokens` tokens from position `start_token` of the prompt on `instances` together."""

    start_token: int  # the first chunk starts behind the cached prefix
    tokens: int
    instances: tuple[int, ...]  # in the order in which they joined: the earlier group is a prefix
    start_s: float  # after the moment of the snapshot, when all of them are free
    compute_s: float


class ChunkPlan(NamedTuple):
    """All chunks of a request, in order."""

    chunks: tuple[PlannedChunk, ...]
    ttft_s: float  # end of the last chunk, after the moment of the snapshot


class NoPlanReason(StrEnum):
    """Why a request cannot be planned. Bounded: these are metric labels."""

    TOO_FEW_INSTANCES = "too_few_instances"  # every SP size wants more than there are, or less than the group
    KV_CAPACITY = "kv_capacity"  # no group of any size has room for the request's KV
    COST_UNKNOWN = "cost_unknown"  # longer than every table of measured times


class NoPlan(NamedTuple):
    """The answer where no plan is possible: not an error, the request waits or is refused."""

    reason: NoPlanReason


def queue_delays_after(plan: ChunkPlan, queue_delays_s: Sequence[float]) -> tuple[float, ...]:
    """Return the delays (s, from the same moment) once `plan` is committed.

    All instances of a plan are members of its last group, so all of them are busy until it ends.
    """
    delays = list(queue_delays_s)
    for instance in plan.chunks[-1].instances:
        delays[instance] = plan.ttft_s
    return tuple(delays)
