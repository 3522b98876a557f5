"""The requests of a long pool: prompts that are announced, prefills that are offered, and the step that runs of one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix, PromptText
from sglang_ext.long_pool.decide.on_time_order import PendingPrefill
from sglang_ext.long_pool.decide.orders import Collect, Offer, PromptTicket, RunChunk
from sglang_ext.long_pool.decide.pool_schedule import fastest_s, min_work_s
from sglang_ext.long_pool.decide.price_planner import Holder
from sglang_ext.long_pool.decide.sharding import KvSegment, Positions, count_tokens
from sglang_ext.long_pool.decide.sp_cost import SpCandidate

_NO_ROWS: Mapping[int, tuple[KvSegment, ...]] = {}
_TAG_SPACE = 2**31 - 1


@dataclass(slots=True)
class RunningStep:
    """An ordered step that not all of its members have answered for."""

    order: RunChunk | Collect
    before: dict[int, tuple[KvSegment, ...]]  # what was held when it was ordered
    after: dict[int, tuple[KvSegment, ...]]
    waiting: set[int]
    ordered_s: float
    compute_s: float  # predicted
    has_failed: bool = False
    is_unsent: bool = True  # nothing of it has gone to where it is wanted, as far as has been answered
    done: set[int] = field(default_factory=set)
    shortest_s: float = math.inf  # that a member which is done has taken since it began

    def meeting_s(self, now_s: float) -> float:
        """Return how long a step that ends now has taken beyond its computing: its members have met. The member that
        came last has said what it took from then on, where any has."""
        computed_s = self.shortest_s if self.shortest_s < math.inf else self.compute_s
        return max(0.0, now_s - self.ordered_s - computed_s)

    def new_tokens(self, instance: int) -> int:
        """Return how many it computes."""
        if isinstance(self.order, Collect):
            return 0
        return count_tokens(self.order.layout.new[self.order.layout.group.index(instance)])

    def lose(self, instance: int) -> None:
        """An instance has gone, with what it held."""
        if instance in self.waiting | self.done:
            self.has_failed, self.is_unsent = True, False
        self.waiting.discard(instance)
        self.done.discard(instance)
        self.before.pop(instance, None)
        self.after.pop(instance, None)


@dataclass(frozen=True, slots=True)
class NextChunk:
    """Describes what a prompt's next chunk is to be, as it was decided last: decided again whenever something ends."""

    new_tokens: int
    members: tuple[int, ...]


@dataclass(slots=True)
class SharedPrefill:
    """A long prefill that an instance has offered: who holds what of it, and what is left."""

    offer: Offer
    total_s: float
    held: dict[int, tuple[KvSegment, ...]]
    todo: Positions
    group: tuple[int, ...]  # of its last chunk
    involved: set[int]  # instances that may know of it: its owner, and all that were given a step of it
    fastest_s: float  # of what is left
    work_s: float
    is_streamed: bool  # nothing of it has failed that is on its way to where it is wanted
    is_finishing: bool = False  # its owner knows that all is computed
    running: RunningStep | None = None
    attempts: int = 0  # that have failed since its last chunk that was done
    is_cancelled: bool = False
    no_room_s: float | None = None  # since when no group can hold it
    planned: NextChunk | None = None
    prefix: tuple[KeptPrefix, ...] = ()  # kept by the pool, that it began behind; in parts
    text: PromptText | None = None  # where a router had announced it

    @classmethod
    def of(
        cls,
        offer: Offer,
        candidates: Sequence[SpCandidate],
        prefix: tuple[KeptPrefix, ...] = (),
        rows: Mapping[int, tuple[KvSegment, ...]] = _NO_ROWS,
    ) -> SharedPrefill:
        """A new one. With a `prefix` that the pool has kept, it begins behind that: `rows` are where."""
        cached_tokens = prefix[-1].tokens if prefix else offer.cached_tokens
        if not prefix and cached_tokens:
            rows = {offer.owner: (KvSegment((range(cached_tokens),), is_borrowed=True),)}
        new_tokens = offer.tokens - cached_tokens
        whole_s = fastest_s(candidates, cached_tokens, new_tokens)
        return cls(
            offer,
            max(1e-9, whole_s),
            dict(rows),
            (range(cached_tokens, offer.tokens),),
            (),
            {offer.owner, *rows},
            whole_s,
            min_work_s(candidates, cached_tokens, new_tokens),
            offer.is_streamed,
            prefix=prefix,
        )

    def lose_rows(self, instance: int, prompts: Collection[int]) -> bool:
        """Forget what it has borrowed there of these kept prompts; return whether there was any."""
        start, lost = 0, []
        for part in self.prefix:
            if part.prompt in prompts:
                lost.append(range(start, part.tokens))
            start = part.tokens
        before = self.held.get(instance, ())
        for held in (self.held, *(() if self.running is None else (self.running.before, self.running.after))):
            if instance in held:
                held[instance] = tuple(
                    segment
                    for segment in held[instance]
                    if not (segment.is_borrowed and any(segment.positions[0][0] in part for part in lost))
                )
        return self.held.get(instance, ()) != before

    def stop_streaming(self) -> None:
        """Stop streaming: the rows sent so far cannot be relied upon, and the owner has to get everything."""
        self.is_streamed = self.is_finishing = False

    @property
    def tokens(self) -> int:
        """Return the length of the prompt in tokens."""
        return self.offer.tokens

    @property
    def fits_owner(self) -> bool:
        """Return whether its owner could compute it by itself."""
        return self.offer.fits_owner

    @property
    def promised_tokens(self) -> int:
        """Slots that its owner needs in addition to its own, if all of it shall come there."""
        owned = sum(segment.tokens for segment in self.held.get(self.offer.owner, ()) if not segment.is_borrowed)
        return max(0, self.offer.tokens - self.offer.cached_tokens - owned)

    def reserved_tokens(self, page_tokens: int) -> dict[int, int]:
        """Return the slots, by instance, that a prompt which has begun needs in addition to its own.

        A streamed one needs an equal share of itself on every member of its group, in whole pages and one more. Others
        must not take them: two that wait for each other's room would never end.
        """
        if not self.group:
            return {}
        if not self.is_streamed:
            return {self.offer.owner: self.promised_tokens}
        held, left = self.held, count_tokens(self.todo)
        running = self.running
        if running is not None and isinstance(running.order, RunChunk):  # what it takes is claimed already
            held = running.after
            left -= sum(count_tokens(part) for part in running.order.layout.new)
        if left <= 0:
            return {}
        share = -(-self.offer.tokens // len(self.group))
        more = {instance: share - tokens_held(held, instance) for instance in self.group}
        return {
            instance: -(-tokens // page_tokens) * page_tokens + page_tokens
            for instance, tokens in more.items()
            if tokens > 0
        }

    @property
    def is_shared(self) -> bool:
        """Return whether another instance than its owner holds something of it."""
        return any(segments for instance, segments in self.held.items() if instance != self.offer.owner)

    @property
    def kv_group(self) -> tuple[int, ...]:
        """Return the instances that hold a part of the prompt, those of its last chunk first."""
        holding = {instance for instance, segments in self.held.items() if segments}
        return *(instance for instance in self.group if instance in holding), *sorted(holding - {*self.group})

    def holders(self) -> tuple[int, ...]:
        """Return the owner and all other instances that hold a part of the prompt."""
        owner = self.offer.owner
        return owner, *sorted(instance for instance, segments in self.held.items() if segments and instance != owner)

    def estimate(self, candidates: Sequence[SpCandidate]) -> None:
        """Estimate the request again after its remaining tokens, or their costs, have changed."""
        left = count_tokens(self.todo)
        if left:
            self.fastest_s = fastest_s(candidates, self.offer.tokens - left, left)
            self.work_s = min_work_s(candidates, self.offer.tokens - left, left)

    def pending(self, positions: Mapping[int, int], kept: Mapping[int, int]) -> PendingPrefill:
        """Return the record that the schedule takes; `positions` maps instances to their positions in the snapshot,
        `kept` to the tokens that are kept free there for this prompt."""
        offer = self.offer
        left = count_tokens(self.todo)
        return PendingPrefill(
            offer.request,
            left,
            offer.tokens - left,
            positions[offer.owner],
            tuple(
                Holder(positions[instance], tokens_held(self.held, instance) + kept.get(instance, 0))
                for instance in self.kv_group
            ),
            offer.arrival_s,
            offer.deadline_s,
            self.total_s,
            self.fastest_s,
            self.work_s,
            bool(self.group),
        )


@dataclass(slots=True)
class AnnouncedPrompt:
    """A long prompt that no instance has offered yet."""

    ticket: PromptTicket
    fastest_s: float
    work_s: float
    owner: int | None = None  # that it has been given to
    bound_s: float = math.inf
    no_room_s: float | None = None
    fits_owner: bool = True  # as far as is known
    deadline_s: float = math.inf
    matched: KeptPrefix | None = None  # kept by the pool, as was found last, and
    matched_version: int = -1  # what was kept then
    prefix: KeptPrefix | None = None  # the same where it is to begin behind it
    holders: tuple[tuple[int, int], ...] = ()  # of that: instance and tokens
    pull: int | None = None  # that brings kept rows of it to one instance: it waits for that
    was_pulled: bool = False  # once is enough

    @property
    def tokens(self) -> int:
        """Return the length of the prompt in tokens."""
        return self.ticket.tokens

    @property
    def cached_tokens(self) -> int:
        """Return how many tokens of it need not be computed, as far as is known."""
        return self.ticket.cached_tokens if self.prefix is None else self.prefix.tokens

    @property
    def kv_group(self) -> tuple[int, ...]:
        """Return the instances on which the pool has kept rows of the prompt."""
        return tuple(instance for instance, _ in self.holders)

    @classmethod
    def of(
        cls, ticket: PromptTicket, candidates: Sequence[SpCandidate], settings: CoordinationSettings
    ) -> AnnouncedPrompt:
        """A new one."""
        prompt = cls(ticket, 0.0, 0.0)
        prompt.estimate(candidates, settings)
        return prompt

    def estimate(self, candidates: Sequence[SpCandidate], settings: CoordinationSettings) -> None:
        """Estimate the costs of the request, and its objective where that is the pool's."""
        cached, new = self.cached_tokens, self.ticket.tokens - self.cached_tokens
        self.fastest_s = fastest_s(candidates, cached, new)
        self.work_s = min_work_s(candidates, cached, new)
        deadline_s = self.ticket.deadline_s
        if deadline_s is None:
            deadline_s = self.ticket.arrival_s + max(settings.ttft_slo_s, settings.slo_stretch * self.fastest_s)
        self.deadline_s = deadline_s

    def pending(self, positions: Mapping[int, int]) -> PendingPrefill:
        """Return the record that the schedule takes; `positions` maps instances to their positions in the snapshot."""
        ticket = self.ticket
        return PendingPrefill(
            ticket.ticket,
            ticket.tokens - self.cached_tokens,
            self.cached_tokens,
            -1 if self.owner is None else positions[self.owner],
            tuple(Holder(positions[instance], tokens) for instance, tokens in self.holders),
            ticket.arrival_s,
            self.deadline_s,
            max(1e-9, self.fastest_s),
            self.fastest_s,
            self.work_s,
            False,
        )


class StepNumbers:
    """Describes what steps are called."""

    def __init__(self) -> None:
        self._next_sequence = 1
        self._next_tag = 0

    def sequence(self) -> int:
        """Unique, rising."""
        self._next_sequence += 1
        return self._next_sequence - 1

    def tags(self, count: int) -> int:
        """The first of `count` tags; numbers come round long after the last message that used them."""
        if self._next_tag + count > _TAG_SPACE:
            self._next_tag = 0
        self._next_tag += count
        return self._next_tag - count


def reserved_tokens(requests: Iterable[SharedPrefill], page_tokens: int) -> dict[int, int]:
    """Return the slots, by instance, that those which have begun will need; see `SharedPrefill.reserved_tokens`."""
    reserved: dict[int, int] = {}
    for request in requests:
        for instance, tokens in request.reserved_tokens(page_tokens).items():
            reserved[instance] = reserved.get(instance, 0) + tokens
    return reserved


def promised_tokens(requests: Iterable[SharedPrefill]) -> dict[int, int]:
    """Tokens that will come to instances from others, by instance: of prefills that have begun and are not streamed."""
    promised: dict[int, int] = {}
    for request in requests:
        if request.group and not request.is_streamed:
            owner = request.offer.owner
            promised[owner] = promised.get(owner, 0) + request.promised_tokens
    return promised


def tokens_held(held: Mapping[int, tuple[KvSegment, ...]], instance: int) -> int:
    """Tokens of a request that an instance holds."""
    return sum(segment.tokens for segment in held.get(instance, ()))


def without_head(positions: Positions, tokens: int) -> Positions:
    """All but the first `tokens` of them."""
    kept: list[range] = []
    for part in positions:
        if tokens < len(part):
            kept.append(part[max(0, tokens) :])
        tokens -= len(part)
    return tuple(kept)
