"""What the LAPS policy of a prefill instance is asked and what it answers, once per scheduler iteration.

The engine and the simulator build a `RoundSnapshot`, `Laps.choose` returns a `RoundPlan`, and the one that
asked carries out the first action of the plan that its memory admits.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

from sglang_ext.policy.laps.cost_model import FitReport
from sglang_ext.policy.laps.graph_grid import GraphShape
from sglang_ext.types import LengthClass


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


class InstanceLimits(NamedTuple):
    """What the engine of an instance admits, whatever a policy wants. All of them are at least 1."""

    page_tokens: int  # a chunk that is not a prompt's last is a multiple of this
    max_chunk_tokens: int  # new tokens of one long chunk
    max_batch_tokens: int  # new tokens of a short batch
    max_requests: int  # requests of a short batch


class ClassReport(NamedTuple):
    """The work of one length class on this instance."""

    requests: int  # with prefill work left
    new_tokens: int
    backlog_s: float  # predicted time of that work
    oldest_wait_s: float
    slo_violation_rate: float  # of the prefills that ended lately: share that ended after their deadline
    tardiness: float  # and by how much, relative to the time that they had; mean


class LapsReport(NamedTuple):
    """The state of a LAPS policy, for metrics and for the controller."""

    mode: LapsMode
    window_s: float  # W that a batch of the present queue gets
    depth: int  # D
    short_rate_per_s: float  # estimated arrivals of short prefills
    short_share: float  # of the time used lately while both classes waited
    round_s: float  # time budget of a round
    boundary_tokens: int  # most new tokens of a short prefill
    boundary_is_fitted: bool  # to what iterations cost; else it was given, or nothing is known yet
    parked: int  # started long prefills other than the current one
    short: ClassReport
    long: ClassReport
    fit: FitReport
