"""Which instances of a sequence-parallel cluster a new prompt gets: CDSP, its parts, and what it is compared with.

All of them plan on arrival, first come first served, behind what is committed already. A plan is for the snapshot that
it was made from, as `sglang_ext.policy.cdsp` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_ext.policy.cdsp.improvement_rate import FixedImprovementRate, ImprovementRateSource
from sglang_ext.policy.cdsp.plan import (
    CdspRequest,
    ChunkPlan,
    NoPlan,
    NoPlanReason,
    PlannedChunk,
    PlannerConfig,
    PrefillSnapshot,
)
from sglang_ext.policy.cdsp.planner import CdspPlanner
from sglang_ext.policy.cdsp.sp_cost import SpCandidate

GREEDY_RATE = 0.0


class ClusterPolicy(Protocol):
    """Plans a prompt. Only `note_arrival` changes something."""

    def note_arrival(self, now_s: float) -> None:
        """A request has arrived that is to be planned."""
        ...

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest) -> ChunkPlan | NoPlan: ...


class CdspPolicy:
    """Tetris: Algorithms 1-3; without chunking, Algorithm 2 alone."""

    def __init__(
        self,
        candidates: Sequence[SpCandidate],
        rates: ImprovementRateSource,
        *,
        is_chunking: bool = True,
        min_chunk_tokens: int = 512,
    ) -> None:
        self.planner = CdspPlanner(
            PlannerConfig(tuple(candidates), min_chunk_tokens=min_chunk_tokens, is_chunking=is_chunking)
        )
        self._rates = rates

    def note_arrival(self, now_s: float) -> None:
        self._rates.note_arrival(now_s)

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest) -> ChunkPlan | NoPlan:
        return self.planner.plan(snapshot, request, self._rates.current)


def greedy_esp(candidates: Sequence[SpCandidate]) -> CdspPolicy:
    """LoongServe's prefill scheduler with one request per batch, disaggregated (Tetris, sections 2.4 and 7.1).

    The size with the lowest time to first token of this request, queues counted, however small the gain: Algorithm 2
    with an improvement rate of 0. So it takes SP 16 in the example of section 2.4, as printed there.
    """
    return CdspPolicy(candidates, FixedImprovementRate(GREEDY_RATE), is_chunking=False)


class FixedSp:
    """Independent groups of a fixed size, consecutive instances; the one with the lowest queue delay (section 7.1).

    Instances that do not fill a group stay idle. ValueError for a size that has no cost.
    """

    def __init__(self, candidates: Sequence[SpCandidate], size: int) -> None:
        costs = {candidate.size: candidate.cost for candidate in candidates}
        if size not in costs:
            raise ValueError(
                f"SP size {size} has no cost; there are {', '.join(str(known) for known in sorted(costs))}"
            )
        self.size = size
        self._cost = costs[size]

    def note_arrival(self, now_s: float) -> None:
        """The load does not matter."""

    def plan(self, snapshot: PrefillSnapshot, request: CdspRequest) -> ChunkPlan | NoPlan:
        size = self.size
        delays_s = snapshot.queue_delays_s
        if len(delays_s) < size:
            return NoPlan(NoPlanReason.TOO_FEW_INSTANCES)
        share_tokens = -(-(request.cached_tokens + request.new_tokens) // size)
        choices = [
            _Group(max(delays_s[first : first + size]), first)
            for first in range(0, len(delays_s) - size + 1, size)
            if min(snapshot.free_kv_tokens[first : first + size]) >= share_tokens
        ]
        if not choices:
            return NoPlan(NoPlanReason.KV_CAPACITY)
        delay_s, first = min(choices)
        compute_s = self._cost.predict_s(request.cached_tokens, request.new_tokens)
        if compute_s == float("inf"):
            return NoPlan(NoPlanReason.COST_UNKNOWN)
        members = tuple(range(first, first + size))
        chunk = PlannedChunk(request.cached_tokens, request.new_tokens, members, delay_s, compute_s)
        return ChunkPlan((chunk,), delay_s + compute_s)


class _Group(NamedTuple):
    delay_s: float
    first: int
