"""The CDSP planner: Algorithms 1-3 of Tetris, with the KV capacity of instances as a constraint.

Importing this module without its C++ core raises ImportError with one line that says how to get it.
"""

from __future__ import annotations

from sglang_ext.policy.cdsp.plan import (
    CdspRequest,
    ChunkPlan,
    NoPlan,
    NoPlanReason,
    PlannedChunk,
    PlannerConfig,
    PrefillSnapshot,
)
from sglang_ext.policy.cdsp.sp_cost import SpCost, TabulatedCost

try:
    from sglang_ext.policy.cdsp._core import Planner
except ImportError as error:
    raise ImportError(
        f"the CDSP planner's C++ core is not usable ({error}): with a C++ compiler run `make env` in a checkout or "
        "install sglang-ext from source"
    ) from None

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
        self._core = Planner(
            [candidate.size for candidate in candidates],
            [_coefficients(candidate.cost) for candidate in candidates],
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


def _coefficients(cost: SpCost | TabulatedCost) -> tuple[float, float, float, float] | tuple[list[float], list[float]]:
    if isinstance(cost, SpCost):
        return cost.a_s, cost.b_s_per_token, cost.c_s_per_token2, cost.d_s_per_token2
    return [float(tokens) for tokens in cost.prompt_tokens], list(cost.duration_s)
