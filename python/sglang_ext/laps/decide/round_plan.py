"""Describes what the LAPS policy of a prefill instance is asked and what it answers, once per scheduler iteration.

The engine and the simulator build a `RoundSnapshot`, `Laps.choose` returns a `RoundPlan`, and the caller that
asked carries out the first batch of the plan that its memory admits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext.laps.decide.cost_model import FitReport
from sglang_ext.types import LengthClass


class LapsMode(StrEnum):
    """Describes what an instance prefers. Every mode serves every request: a stray one is late, never lost."""

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
    """Describes why a short batch left, or a long chunk ran. Bounded: these are metric labels."""

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
    MIXED = "mixed"  # both classes share the iteration


@dataclass(slots=True)  # not a tuple, and not frozen: compiled, its fields are read and set several times as fast
class QueuedPrefill:
    """One request that has prefill work left on this instance. Nobody changes it."""

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

    def after_chunk(self, tokens: int) -> QueuedPrefill:
        """Return what is left once this many of its tokens have run: from now on it is the current long prefill."""
        return self._with(self.new_tokens - tokens, self.cached_tokens + tokens, is_started=True, is_current=True)

    def overtaken(self) -> QueuedPrefill:
        """Another long prefill is the current one now."""
        return self._with(self.new_tokens, self.cached_tokens, is_started=self.is_started, is_current=False)

    def of_class(self, length_class: LengthClass) -> QueuedPrefill:
        """Return the same of another class."""
        return self._with(
            self.new_tokens,
            self.cached_tokens,
            is_started=self.is_started,
            is_current=self.is_current,
            length_class=length_class,
        )

    def _with(
        self,
        new_tokens: int,
        cached_tokens: int,
        *,
        is_started: bool,
        is_current: bool,
        length_class: LengthClass | None = None,
    ) -> QueuedPrefill:
        return QueuedPrefill(
            self.key,
            self.length_class if length_class is None else length_class,
            new_tokens,
            cached_tokens,
            self.total_tokens,
            self.arrival_s,
            self.deadline_s,
            self.priority,
            is_started,
            is_current,
        )


class RoundSnapshot(NamedTuple):
    """A prefill instance at the moment of a decision. The queue may be in any order."""

    now_s: float
    queue: tuple[QueuedPrefill, ...]
    free_kv_tokens: int  # free or evictable


class Cut(NamedTuple):
    """The next tokens of one request, which has more left after them."""

    key: int
    tokens: int


class PrefillBatch(NamedTuple):
    """Run these requests together: all whole, but for at most one."""

    whole: tuple[int, ...]  # keys of requests that end with it: short prefills first
    cut: Cut | None
    reason: DispatchReason
    shape: GraphShape | None  # the captured graph that it is padded to
    short_requests: int  # of `whole`: short prefills
    new_tokens: int
    predicted_s: float

    @property
    def keys(self) -> tuple[int, ...]:
        """Return the keys of all requests in the batch."""
        return self.whole if self.cut is None else (*self.whole, self.cut.key)

    @property
    def is_short(self) -> bool:
        """Return whether it holds only short prefills."""
        return self.cut is None and self.short_requests == len(self.whole)


class RoundPlan(NamedTuple):
    """Batches in order of preference; the first that fits in memory is carried out.

    Without one, nothing should run before `wake_s` (absolute), unless something arrives or ends.
    """

    batches: tuple[PrefillBatch, ...]
    wake_s: float


class InstanceLimits(NamedTuple):
    """Describes what the engine of an instance admits, independent of the policy. All of them are at least 1."""

    page_tokens: int  # a chunk that is not a prompt's last is a multiple of this
    max_chunk_tokens: int  # new tokens of one long prefill in a batch
    max_batch_tokens: int  # new tokens of a batch
    max_requests: int  # requests of a batch
    stages: int = 1  # of its pipeline: a batch ends after this many times what an iteration takes


class ClassReport(NamedTuple):
    """The work of one length class on this instance."""

    requests: int  # with prefill work left
    new_tokens: int
    backlog_s: float  # predicted time of that work
    oldest_wait_s: float
    slo_violation_rate: float  # of the prefills that ended recently: share that ended after their deadline
    tardiness: float  # and by how much, relative to the time that they had; mean


class LapsReport(NamedTuple):
    """The state of a LAPS policy, for metrics and for the controller."""

    mode: LapsMode
    window_s: float  # W that a batch of the present queue gets
    depth: int  # D
    short_rate_per_s: float  # estimated arrivals of short prefills
    short_share: float  # of the time used recently while both classes waited
    round_s: float  # time budget of a round
    boundary_tokens: int  # most new tokens of a short prefill
    boundary_is_fitted: bool  # to what iterations cost; else it was given, or nothing is known yet
    parked: int  # started long prefills other than the current one
    short: ClassReport
    long: ClassReport
    fit: FitReport
