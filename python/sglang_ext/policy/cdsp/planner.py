"""The planner of the Tetris paper: its Algorithms 1-3, with the KV capacity of instances as a constraint.

A baseline: what is served is planned by `price_planner.py`.
"""

from __future__ import annotations

from sglang_ext.policy.cdsp.native_core import NativePlanner, core_cost
from sglang_ext.policy.cdsp.plan import (
    CdspRequest,
    ChunkPlan,
    NoPlan,
    NoPlanReason,
    PlannedChunk,
    PlannerConfig,
    PrefillSnapshot,
)

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
        self.config = config
        candidates = sorted(config.candidates, key=lambda candidate: candidate.size)
        self._core = NativePlanner(
            [candidate.size for candidate in candidates],
            [core_cost(candidate.cost) for candidate in candidates],
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
