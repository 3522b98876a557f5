"""What a coordinator remembers of its pool for people: members, requests with their steps, and how they ended."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_ext.policy.cdsp.coordination import Collect, DeclineReason, RunChunk
from sglang_ext.policy.cdsp.sharding import count_tokens

_REMEMBERED = 100  # requests that have ended


class StepKind(StrEnum):
    """What is done together."""

    CHUNK = "chunk"
    COLLECT = "collect"


class PrefillEnd(StrEnum):
    """How a request's time in the pool has ended, where it was not declined."""

    COLLECTED = "collected"  # its owner has the KV
    CANCELLED = "cancelled"
    OWNER_LOST = "owner_lost"


Outcome = PrefillEnd | DeclineReason


@dataclass(slots=True)
class StepRecord:
    """A step of a request; times are seconds on the coordinator's clock."""

    kind: StepKind
    members: tuple[int, ...]
    new_tokens: int  # computed
    moved_tokens: int  # of earlier KV, between instances
    ordered_s: float
    ended_s: float | None = None
    has_failed: bool = False


@dataclass(slots=True)
class PrefillRecord:
    """A request that was offered."""

    request: int
    owner: int
    tokens: int
    cached_tokens: int
    offered_s: float
    steps: list[StepRecord] = field(default_factory=list)
    is_cancelled: bool = False
    ended_s: float | None = None
    outcome: Outcome | None = None

    @property
    def chunks(self) -> list[StepRecord]:
        """Those that were computed."""
        return [step for step in self.steps if step.kind is StepKind.CHUNK and not step.has_failed]


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """An instance, now."""

    instance: int
    name: str
    node: str
    backlog_s: float
    free_kv_tokens: int
    held_tokens: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool, now."""

    model: str | None  # None while there is no member
    epoch: int
    is_connected: bool
    members: tuple[MemberStatus, ...]
    requests: tuple[PrefillRecord, ...]  # that have not ended
    recent: tuple[PrefillRecord, ...]  # that have ended, latest last
    requests_collected: int
    requests_declined: int
    members_lost: int
    cost_scale: float


class PoolHistory:
    """Requests under way, the last ones that have ended, and counts of all."""

    def __init__(self) -> None:
        self.running: dict[int, PrefillRecord] = {}
        self.ended: deque[PrefillRecord] = deque(maxlen=_REMEMBERED)
        self.outcomes: Counter[Outcome] = Counter()
        self.chunks: Counter[int] = Counter()  # computed, by SP size
        self.steps_failed = 0
        self.tokens_computed = 0
        self.prefill_s = 0.0  # of requests that were collected, from the offer on
        self.members_lost = 0
        self.meshes_ordered = 0

    def note_order(self, order: RunChunk | Collect, now_s: float) -> StepRecord:
        """A step has been ordered."""
        if isinstance(order, RunChunk):
            layout = order.layout
            moved = sum(move.tokens for move in layout.moves)
            step = StepRecord(StepKind.CHUNK, layout.group, sum(map(count_tokens, layout.new)), moved, now_s)
        else:
            moved = sum(move.tokens for move in order.moves)
            step = StepRecord(StepKind.COLLECT, order.members, 0, moved, now_s)
        if order.request in self.running:
            self.running[order.request].steps.append(step)
        return step

    def note_step_end(self, step: StepRecord) -> None:
        """Everybody has answered for a step."""
        if step.has_failed:
            self.steps_failed += 1
        elif step.kind is StepKind.CHUNK:
            self.chunks[len(step.members)] += 1
            self.tokens_computed += step.new_tokens

    def note_end(self, request: int, outcome: Outcome, now_s: float) -> PrefillRecord:
        """A request has left the pool."""
        record = self.running.pop(request)
        record.ended_s, record.outcome = now_s, outcome
        self.ended.append(record)
        self.outcomes[outcome] += 1
        if outcome is PrefillEnd.COLLECTED:
            self.prefill_s += now_s - record.offered_s
        return record
