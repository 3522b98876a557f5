"""The planner of the Tetris paper: its Algorithms 1-3, with the KV capacity of instances as a constraint.

What is served is decided by `price_planner.py`. An instance is named by its position in the snapshot.
Tokens are positions of the prompt: C cached or computed before, L to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, check_candidates, core_candidates


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """Describes what does not change from request to request. Candidates may come in any order.

    ValueError naming the field for no candidate, a size given twice, or a number below 1.
    """

    candidates: tuple[SpCandidate, ...]
    min_chunk_tokens: int = 512  # a chunk and what is left after it are at least this long
    page_tokens: int = 1  # KV slots are taken in pages of this size on each instance
    is_chunking: bool = True  # off: only Algorithm 2, one chunk per request

    def __post_init__(self) -> None:
        check_candidates(self.candidates)
        for name in ("min_chunk_tokens", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


class CdspRequest(NamedTuple):
    """Describes what is left of a request."""

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
    """Describes why a request cannot be planned. Bounded: these are metric labels."""

    TOO_FEW_INSTANCES = "too_few_instances"  # every SP size wants more than there are, or less than the group
    KV_CAPACITY = "kv_capacity"  # no group of any size can hold the request's KV
    COST_UNKNOWN = "cost_unknown"  # longer than every table of measured times


class NoPlan(NamedTuple):
    """The answer where no plan is possible: not an error, the request waits or is refused."""

    reason: NoPlanReason


# By the number that the core gives.
_REASONS = {
    1: NoPlan(NoPlanReason.TOO_FEW_INSTANCES),
    2: NoPlan(NoPlanReason.KV_CAPACITY),
    3: NoPlan(NoPlanReason.COST_UNKNOWN),
}


class CdspPlanner:
    """Plans one request at a time; keeps nothing from one plan to the next.

    Equal inputs give equal plans. Ties are broken by the smaller SP size, the plan with fewer or earlier chunks, the
    smaller node id and the earlier position in the snapshot.
    """

    def __init__(self, config: PlannerConfig) -> None:
        """Raises ImportError where the C++ search is not built: there is no other one."""
        from baselines._tetris import Planner

        self.config = config
        self._core = Planner(
            *core_candidates(config.candidates),
            config.min_chunk_tokens,
            config.page_tokens,
            config.is_chunking,
            PlannedChunk,
            ChunkPlan,
        )

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest, improvement_rate: float) -> ChunkPlan | NoPlan:
        """Return the plan with the lowest time to first token that the algorithm finds.

        A larger SP size is taken for what is left of a request if it shortens the time to first token, from the
        arrival on, by more than the share `improvement_rate` (0 to below 1; Tetris searches 0.05-0.75) against the
        best smaller one. For what follows a chunk of the plan, time counts from the end of that chunk (Algorithm 1).

        ValueError names the field that is wrong: no instance, lists of different lengths, a delay that is negative or
        not finite, a token count or node id out of range, a group with a position that does not exist. TypeError where
        something is not a sequence or a number.
        """
        node_ids, queue_delays_s, free_kv_tokens = snapshot
        new_tokens, cached_tokens, group, waited_s = request
        answer = self._core.plan(
            node_ids, queue_delays_s, free_kv_tokens, new_tokens, cached_tokens, group, waited_s, improvement_rate
        )
        return answer if isinstance(answer, ChunkPlan) else _REASONS[answer]
