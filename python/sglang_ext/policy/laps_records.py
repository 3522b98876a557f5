"""What the LAPS policy of a prefill instance is asked and what it answers, once per scheduler iteration.

The engine and the simulator build a `RoundSnapshot`, `Laps.choose` returns a `RoundPlan`, and whoever asked
carries out the first action of the plan that its memory admits.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

from sglang_ext.types import LengthClass

_SLOTS_FACTOR = 4  # requests of a quarter of the length, on average
_SLOT_TOKENS = 16


class LapsMode(StrEnum):
    """What an instance prefers. Every mode serves every request: a stray one is late, never lost."""

    SHORT = "short"
    LONG = "long"
    BOTH = "both"


class PriorityClass(IntEnum):
    """Lower is more urgent. Waiting long enough lifts a request by one class, and again (ageing)."""

    REAL_TIME = 0
    HIGH = 1
    NORMAL = 2
    LOW = 3


class DispatchReason(StrEnum):
    """Why a short batch left, or a long chunk ran. Bounded: these are metric labels."""

    DEPTH = "depth"  # the target depth D is reached
    WINDOW = "window"  # the window W is over
    SLACK = "slack"  # a deadline is near (sigma)
    HEAD_WAIT = "head_wait"  # the oldest has waited T_max
    TOKENS = "tokens"  # token-max: enough tokens are there
    NO_GAIN = "no_gain"  # waiting for one more costs more than it saves
    FULL_SHAPE = "full_shape"  # the batch fills the largest shape, or the memory
    SHARE = "share"  # the other class has used its share of the round
    URGENT = "urgent"  # lowest relative slack
    ALONE = "alone"  # nothing of the other class waits


class QueuedPrefill(NamedTuple):
    """One request that has prefill work left on this instance."""

    key: int  # what a plan names; unique within a snapshot, kept for the request's life
    length_class: LengthClass  # fixed on arrival
    new_tokens: int  # still to compute
    cached_tokens: int  # cached or computed before: H of its next chunk
    total_tokens: int  # new tokens when it arrived
    arrival_s: float
    deadline_s: float  # absolute; infinity where there is none
    priority: PriorityClass
    is_started: bool  # a chunk of it has run: it holds KV until it ends
    is_current: bool  # its chunk was the last long chunk


class RoundSnapshot(NamedTuple):
    """A prefill instance at the moment of a decision. The queue may be in any order."""

    now_s: float
    queue: tuple[QueuedPrefill, ...]
    free_kv_tokens: int  # free or evictable


class GraphShape(NamedTuple):
    """A captured prefill graph, large enough for `requests` of `length_tokens` new tokens each.

    Tokens are packed, so it also holds more requests than that, shorter ones, up to `slots`.
    """

    length_tokens: int
    requests: int

    @property
    def tokens(self) -> int:
        """What a replay computes, padding included."""
        return self.length_tokens * self.requests

    @property
    def slots(self) -> int:
        """Most requests: an empty one costs the start of its attention in each layer, so there are not many."""
        return min(_SLOTS_FACTOR * self.requests, max(self.requests, self.tokens // _SLOT_TOKENS))


class ShortBatch(NamedTuple):
    """Run these short prefills together, whole."""

    keys: tuple[int, ...]
    reason: DispatchReason
    shape: GraphShape | None  # the captured graph that they are padded to
    new_tokens: int
    predicted_s: float


class LongChunk(NamedTuple):
    """Run the next tokens of one long prefill, alone."""

    key: int
    chunk_tokens: int
    reason: DispatchReason
    predicted_s: float


class RoundPlan(NamedTuple):
    """Actions in order of preference; the first that fits in memory is carried out.

    Without actions, nothing should run before `wake_s` (absolute), unless something arrives or ends.
    """

    actions: tuple[ShortBatch | LongChunk, ...]
    wake_s: float


class IterationSample(NamedTuple):
    """One forward iteration as it was measured: the features of the cost model and its duration."""

    attention_work: float  # sum over requests of L * (L + 2 H)
    new_tokens: int  # sum of L
    cached_tokens: int  # sum of H
    requests: int
    duration_s: float


class InstanceLimits(NamedTuple):
    """What the engine of an instance admits, whatever a policy wants. All of them are at least 1."""

    page_tokens: int  # a chunk that is not a prompt's last is a multiple of this
    max_chunk_tokens: int  # new tokens of one long chunk
    max_batch_tokens: int  # new tokens of a short batch
    max_requests: int  # requests of a short batch


class FitReport(NamedTuple):
    """What the online fit of the cost model knows."""

    samples: int  # taken in so far
    alpha_s: float
    token_s: float  # beta + gamma_w
    read_s: float  # gamma_r
    kappa_s: float
    alpha_determined: bool  # whether the samples determine it; where not, it is the prior's
    token_determined: bool
    read_determined: bool
    kappa_determined: bool
    error_p50: float | None  # relative error of the latest predictions, before they were learned from
    error_p90: float | None


class ClassReport(NamedTuple):
    """The work of one length class on this instance."""

    requests: int  # with prefill work left
    new_tokens: int
    backlog_s: float  # predicted time of that work
    oldest_wait_s: float
    late_share: float  # of the prefills that ended lately: share that ended after their deadline
    lateness: float  # and by how much, relative to the time that they had; mean


class LapsReport(NamedTuple):
    """The state of a LAPS policy, for metrics and for the controller."""

    mode: LapsMode
    window_s: float  # W that a batch of the present queue gets
    depth: int  # D
    short_rate_per_s: float  # estimated arrivals of short prefills
    short_share: float  # of the time used lately while both classes waited
    round_s: float  # time budget of a round
    boundary_tokens: int  # most new tokens of a short prefill without cached tokens
    parked: int  # started long prefills other than the current one
    short: ClassReport
    long: ClassReport
    fit: FitReport
