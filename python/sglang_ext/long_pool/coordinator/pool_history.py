"""Describes what a coordinator remembers of its pool for people: members, requests with their steps, and how they
ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sglang_ext.identifiers import BootstrapRoom
from sglang_ext.long_pool.coordinator.tickets import TicketTimes
from sglang_ext.long_pool.decide.orders import Borrow, Collect, DeclineReason, RunChunk
from sglang_ext.long_pool.decide.pool_requests import NextChunk
from sglang_ext.long_pool.decide.sharding import count_tokens
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.long_pool.step_clock import StepTimes

_REMEMBERED = 100  # requests that have ended, and members that have gone


class StepKind(StrEnum):
    """Describes what is done together."""

    CHUNK = "chunk"
    COLLECT = "collect"


class PrefillEnd(StrEnum):
    """Describes how a request's time in the pool has ended, where it was not declined."""

    COLLECTED = "collected"  # its owner has the KV
    STREAMED = "streamed"  # all of it went straight to decode
    CANCELLED = "cancelled"
    OWNER_LOST = "owner_lost"


Outcome = PrefillEnd | DeclineReason


@dataclass(frozen=True, slots=True)
class MemberTimes:
    """Describes where one member's time in a step went, s; see `StepTimes`. Of its beginning and end the network is a
    part."""

    instance: int
    began_s: float  # on the coordinator's clock
    ended_s: float
    compute_s: float
    ring_s: float
    rebalance_s: float


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
    member_times: list[MemberTimes] = field(default_factory=list)  # of members that have done their part, in that order

    def record_times(self, instance: int, times: StepTimes, now_s: float) -> None:
        """A member has done its part."""
        began_s = max(self.ordered_s, now_s - times.total_s)
        self.member_times.append(
            MemberTimes(instance, began_s, now_s, times.compute_s, times.ring_s, times.rebalance_s)
        )

    @property
    def took_s(self) -> float:
        """Return the time from the order to the last answer, in seconds; 0 while the step runs."""
        return 0.0 if self.ended_s is None else self.ended_s - self.ordered_s

    @property
    def together_s(self) -> float:
        """Return how long the member that began last has taken, in seconds: the others waited for it, or for its
        batch, before. 0 where no member has answered."""
        return min((times.ended_s - times.began_s for times in self.member_times), default=0.0)


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Describes where a request's time in the pool went, s. Of members that work at the same time the mean counts."""

    wait_s: float | None  # from the offer to its first step; None while it has none
    compute_s: float
    ring_s: float
    rebalance_s: float  # between its chunks, as far as computing did not hide it
    collect_s: float  # until its own instance had all KV
    failed_s: float  # in steps that came to nothing
    # From the offer until all KV was at decode; None before, and where it is not reported.
    transfer_s: float | None = None
    exposed_transfer_s: float | None = None  # of that, after its last token had been computed


@dataclass(slots=True)
class PrefillRecord:
    """A request that was offered."""

    request: int
    owner: int
    tokens: int
    cached_tokens: int
    offered_s: float
    room: BootstrapRoom | None = None  # under which its router knows it
    steps: list[StepRecord] = field(default_factory=list)
    planned: tuple[NextChunk, ...] = ()  # and not begun; only in a status
    is_cancelled: bool = False
    computed_s: float | None = None  # when its own instance was informed that all is computed and on its way to decode
    ended_s: float | None = None
    outcome: Outcome | None = None
    transfer_s: float | None = None
    exposed_transfer_s: float | None = None
    ticket: TicketTimes | None = None  # where a router had announced it
    kept_tokens: int = 0  # of its cached ones, that the pool had kept

    @property
    def chunks(self) -> list[StepRecord]:
        """Return the steps in which a chunk was computed."""
        return [step for step in self.steps if step.kind is StepKind.CHUNK and not step.has_failed]

    @property
    def times(self) -> PrefillTimes:
        """Return the times of the steps so far."""
        done = [step for step in self.steps if step.ended_s is not None and not step.has_failed]
        chunks = [step for step in done if step.kind is StepKind.CHUNK]
        return PrefillTimes(
            self.steps[0].ordered_s - self.offered_s if self.steps else None,
            sum(_mean([part.compute_s for part in step.member_times]) for step in chunks),
            sum(_mean([part.ring_s for part in step.member_times]) for step in chunks),
            sum(_mean([part.rebalance_s for part in step.member_times]) for step in chunks),
            sum(step.took_s for step in done if step.kind is StepKind.COLLECT),
            sum(step.took_s for step in self.steps if step.has_failed),
            self.transfer_s,
            self.exposed_transfer_s,
        )


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """An instance, now."""

    instance: int
    name: str
    node: str
    backlog_s: float
    free_kv_tokens: int
    held_tokens: int
    kept_tokens: int  # rows of prompts that have ended, as a prefix cache of the pool
    silent_s: float  # its last message is so old
    is_ready: bool  # it is counted upon for new chunks


@dataclass(frozen=True, slots=True)
class FormerMember:
    """An instance that has gone; it gets another number if it comes again."""

    instance: int
    name: str
    lost_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool, now."""

    now_s: float  # on the coordinator's clock, as all times
    model: str | None  # None while there is no member
    members: tuple[MemberStatus, ...]
    requests: tuple[PrefillRecord, ...]  # that have not ended
    recent: tuple[PrefillRecord, ...]  # that have ended, latest last
    requests_collected: int
    requests_streamed: int
    requests_declined: int
    members_lost: int
    cost_scale: float
    arrivals_per_s: float  # of offers and announced prompts, in the last minute or so
    former_members: tuple[FormerMember, ...]  # latest last
    tickets_waiting: int = 0  # prompts that a router has announced, and that no instance has been named for
    prompts_kept: int = 0  # whose rows are kept where they were computed, or where they have been pulled to
    prompts_pulled: int = 0  # ever, to one instance
    costs: tuple[SpCandidate, ...] = ()  # of chunks, that are planned with


class PoolHistory:
    """Requests under way, the last ones that have ended, and counts of all."""

    def __init__(self) -> None:
        self.running: dict[int, PrefillRecord] = {}
        self.ended: deque[PrefillRecord] = deque(maxlen=_REMEMBERED)
        self.outcomes: Counter[Outcome] = Counter()
        self.chunks: Counter[int] = Counter()  # computed, by SP size
        self.steps_failed = 0
        self.tokens_computed = 0
        self.prefill_s = 0.0  # of requests that were collected or streamed, from the offer on
        self.first_wait_s = 0.0  # of requests with a step that have ended, from the offer to the first one
        self.first_waits = 0
        self.member_s = {"compute": 0.0, "ring": 0.0, "rebalance": 0.0}  # of members in chunks
        self.collect_s = 0.0
        self.transfers = 0
        self.transfer_s = {"hidden": 0.0, "exposed": 0.0}
        self.prefix_hits = 0  # requests that began behind rows that the pool had kept
        self.prefix_hit_tokens = 0
        self.pulls_done = self.pulls_given_up = 0
        self.pulled_tokens = 0
        self._open_pulls: dict[int, int] = {}  # tokens
        self.members_lost = 0
        self.former_members: deque[FormerMember] = deque(maxlen=_REMEMBERED)

    def record_lost(self, instance: int, name: str, reason: str, now_s: float) -> None:
        """A member has gone."""
        self.members_lost += 1
        self.former_members.append(FormerMember(instance, name, now_s, reason))

    def record_order(self, order: RunChunk | Collect, now_s: float) -> StepRecord:
        """A step has been ordered."""
        if isinstance(order, RunChunk):
            layout = order.layout
            moved = sum(move.tokens for move in layout.moves)
            kind = StepKind.CHUNK
            step = StepRecord(kind, layout.group, sum(map(count_tokens, layout.new)), moved, now_s)
        else:
            moved = sum(move.tokens for move in order.moves)
            step = StepRecord(StepKind.COLLECT, order.members, 0, moved, now_s)
        record = self.running.get(order.request)
        if record is not None:
            record.steps.append(step)
        return step

    def record_step_end(self, step: StepRecord) -> None:
        """All members have answered for a step."""
        if step.has_failed:
            self.steps_failed += 1
        elif step.kind is StepKind.CHUNK:
            self.chunks[len(step.members)] += 1
            self.tokens_computed += step.new_tokens
            for part in step.member_times:
                self.member_s["compute"] += part.compute_s
                self.member_s["ring"] += part.ring_s
                self.member_s["rebalance"] += part.rebalance_s
        elif step.kind is StepKind.COLLECT:
            self.collect_s += step.took_s

    def note_end(self, request: int, outcome: Outcome, now_s: float) -> PrefillRecord:
        """A request has left the pool."""
        record = self.running.pop(request)
        record.ended_s, record.outcome = now_s, outcome
        self.ended.append(record)
        self.outcomes[outcome] += 1
        wait_s = record.times.wait_s
        if wait_s is not None:
            self.first_wait_s += wait_s
            self.first_waits += 1
        if outcome in {PrefillEnd.COLLECTED, PrefillEnd.STREAMED}:
            self.prefill_s += now_s - record.offered_s
        return record

    def record_pull(self, pull: int, tokens: int) -> None:
        """Kept rows are on their way to one instance."""
        self._open_pulls[pull] = tokens

    def record_pull_end(self, pull: int, *, is_done: bool) -> None:
        """They have come, or do not; ignored where that is known."""
        tokens = self._open_pulls.pop(pull, None)
        if tokens is not None and is_done:
            self.pulls_done += 1
            self.pulled_tokens += tokens
        elif tokens is not None:
            self.pulls_given_up += 1

    def record_borrow(self, order: Borrow) -> None:
        """A request begins behind rows that the pool has kept."""
        record = self.running[order.request]
        record.cached_tokens = record.kept_tokens = order.parts[-1].tokens
        self.prefix_hits += 1
        self.prefix_hit_tokens += record.kept_tokens

    def record_transferred(self, request: int, transfer_s: float, exposed_s: float) -> None:
        """KV of a request that has left the pool is at decode."""
        self.transfers += 1
        self.transfer_s["hidden"] += max(0.0, transfer_s - exposed_s)
        self.transfer_s["exposed"] += exposed_s
        for record in (*self.running.values(), *reversed(self.ended)):
            if record.request == request:
                record.transfer_s, record.exposed_transfer_s = transfer_s, exposed_s
                return


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
