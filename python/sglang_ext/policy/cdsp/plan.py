"""Input and output of the CDSP planner: a request, a snapshot of the instances, and the plan.

An instance is named by its position in the snapshot. Tokens are positions of the prompt: C cached or computed before,
L to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.policy.cdsp.sp_cost import SpCandidate


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
    KV_CAPACITY = "kv_capacity"  # no group of any size can hold the request's KV
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
