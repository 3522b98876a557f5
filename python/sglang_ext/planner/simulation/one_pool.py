"""One pool in simulation: every instance batches short prefills, takes part in shared long ones, and keeps a prefix
cache.

    arrive ──short──▶ the instance that would end it first ──▶ LAPS's batches
           ──long───▶ Coordinator ──RunChunk──▶ all members of a group, each when its batch has ended
                                  ──Decline───▶ LAPS's batches of one instance

The coordinator and the queues are those that serve. A member that waits for the others of its group computes what ends
before they are there. What the network between them takes is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_ext.costs.engine_profile import PipelineCosts
from sglang_ext.costs.flow_shop import Stages
from sglang_ext.laps.decide.cost_model import IterationSample
from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.on_time_order import OnTimeOptions, OnTimeOrder
from sglang_ext.long_pool.decide.orders import (
    Bind,
    Collect,
    Decline,
    Drop,
    Finish,
    MemberReport,
    Offer,
    Order,
    PromptTicket,
    RunChunk,
)
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule
from sglang_ext.long_pool.decide.price_planner import PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.sharding import count_tokens
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.planner.simulation.events import (
    BusyInterval,
    EventLoop,
    PrefillListener,
    ServedPrefill,
    SimRequest,
)
from sglang_ext.planner.simulation.instances import InstancesSpec, _sample
from sglang_ext.planner.simulation.iteration_policies import Iteration, LapsPolicy, WorkItem
from sglang_ext.planner.simulation.long_pool import LongPoolOptions
from sglang_ext.types import Role
from sglang_ext_router.decide.prefix_index import PrefixIndex


@dataclass(slots=True, eq=False)
class _Chunk:
    """A chunk that is ordered, until it has ended."""

    order: RunChunk
    missing: set[int]
    arrived_s: dict[int, float]
    ends_s: float = math.inf
    predicted_s: float = 0.0


@dataclass(slots=True, eq=False)
class _PoolInstance:
    number: int
    policy: LapsPolicy
    kv_tokens: int  # free
    items: list[WorkItem] = field(default_factory=list)
    batch: Iteration | None = None
    sample: IterationSample | None = None
    batch_ends_s: float = 0.0
    chunk: _Chunk | None = None
    is_waiting: bool = False  # for the others of the chunk's group
    owes_batch: bool = False  # a chunk has ended, and no batch has run since
    computed_tokens: int = 0
    generation: int = 0


class OnePool:
    """A prefill stage."""

    def __init__(
        self,
        loop: EventLoop,
        spec: InstancesSpec,
        candidates: Sequence[SpCandidate],
        policy: Callable[[Role], LapsPolicy],
        options: LongPoolOptions,
        listener: PrefillListener,
        is_recorded: bool,
        per_node: int = 8,
        order_ahead_s: float = 0.05,
        short_slo_s: float = 0.4,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._listener = listener
        self._costs = {candidate.size: candidate.cost for candidate in candidates}
        self._coefficients = spec.coefficients
        self._pipeline = PipelineCosts(Stages(), spec.coefficients, spec.iteration)
        planner = PricePlanner(
            PriceOptions(tuple(candidates), options.min_chunk_tokens, cross_node_factor=options.cross_node_factor)
        )
        settings = CoordinationSettings(
            layers=1,
            chunk_s=options.chunk_s,
            bind_ahead_s=0.0,
            ttft_slo_s=options.slo_s,
            slo_stretch=options.slo_stretch,
            short_backlog_s=order_ahead_s,
        )
        self.coordinator = Coordinator(PoolSchedule(planner, OnTimeOrder(OnTimeOptions())), settings)
        self._short_slo_s = short_slo_s
        self._caches: dict[int, PrefixIndex] = {}
        self._members = [_PoolInstance(number, policy(role), spec.kv_tokens) for number, role in enumerate(spec.roles)]
        self._tickets: dict[int, SimRequest] = {}
        self._shared: dict[int, SimRequest] = {}
        self._start_s: dict[int, float] = {}
        self._chunks: dict[int, _Chunk] = {}
        self._holds: dict[int, dict[int, int]] = {}
        self._next_ticket = 0
        self.gang_wait_s = self.group_s = 0.0
        self.chunks = 0
        self.sizes: dict[int, int] = {}
        self.timeline: list[BusyInterval] = []
        self._is_planning = False
        for member in self._members:
            self._carry_out(
                self.coordinator.join(member.number, member.number // per_node, self._report_of(member), 0.0)
            )

    # ---- arrivals ----

    def arrive(self, request: SimRequest) -> None:
        cached = self._cached_tokens(request)
        best = max(cached)
        if request.prompt_tokens - best <= self._spec.boundary_tokens or 2 * best >= request.prompt_tokens:
            self._queue(request, self._choose(request, cached), cached)
            return
        self._next_ticket -= 1
        self._tickets[self._next_ticket] = request
        ticket = PromptTicket(self._next_ticket, request.prompt_tokens, 0, request.arrival_s, None)
        self._report_all()
        self._carry_out(self.coordinator.announce(ticket, self._loop.now_s))

    def unfinished(self) -> Iterable[SimRequest]:
        return [
            *(item.request for member in self._members for item in member.items),
            *self._tickets.values(),
            *self._shared.values(),
        ]

    def _choose(self, request: SimRequest, cached: Sequence[int]) -> int:
        def end_s(number: int) -> float:
            member = self._members[number]
            own_s = self._item_s(request.prompt_tokens - cached[number], cached[number]) + self._coefficients.kappa_s
            return self._busy_s(member) + self._queued_s(member) + own_s

        return min(range(len(self._members)), key=end_s)

    def _queue(self, request: SimRequest, number: int, cached: Sequence[int]) -> None:
        member = self._members[number]
        request = request._replace(cached_tokens=cached[number])
        item = WorkItem(request, request.new_tokens, request.cached_tokens, member.computed_tokens)
        member.items.append(item)
        member.policy.record_arrival(item, self._loop.now_s)
        self._go_on(member)

    def _item_s(self, new: int, cached: int) -> float:
        c = self._coefficients
        return c.alpha_s * new * (new + 2 * cached) + c.token_s * new

    def _queued_s(self, member: _PoolInstance) -> float:
        if not member.items:
            return 0.0
        done = {} if member.batch is None else {id(item): tokens for item, tokens in member.batch.slices}
        left = [
            (item.new_tokens - done.get(id(item), 0), item.cached_tokens + done.get(id(item), 0))
            for item in member.items
        ]
        s = sum(self._item_s(new, cached) for new, cached in left if new)
        return s + self._coefficients.kappa_s if s else 0.0

    def _busy_s(self, member: _PoolInstance) -> float:
        """Until its batch and its chunk have ended."""
        now_s = self._loop.now_s
        at_s = now_s if member.batch is None else member.batch_ends_s
        if member.chunk is not None:
            chunk = member.chunk
            if chunk.ends_s < math.inf:
                at_s = chunk.ends_s
            else:
                at_s = (
                    max(at_s, *(self._members[other].batch_ends_s for other in chunk.order.layout.group))
                    + chunk.predicted_s
                )
        return max(0.0, at_s - now_s)

    # ---- prefix caches ----

    def _cached_tokens(self, request: SimRequest) -> list[int]:
        prefix = request.prefix
        if prefix is None:
            return [request.cached_tokens] * len(self._members)
        matched = self._cache(prefix.block_tokens).matched(prefix.blocks)
        most = request.prompt_tokens - 1
        return [min(matched.get(member.number, 0) * prefix.block_tokens, most) for member in self._members]

    def _cache(self, block_tokens: int) -> PrefixIndex:
        cache = self._caches.get(block_tokens)
        if cache is None:
            cache = self._caches[block_tokens] = PrefixIndex(max(1, self._spec.kv_tokens // block_tokens))
            for member in self._members:
                cache.add_worker(member.number)
        return cache

    # ---- batches ----

    def _go_on(self, member: _PoolInstance) -> None:
        """What a member does next, where it does nothing."""
        if member.batch is not None or (member.chunk is not None and member.chunk.ends_s < math.inf):
            return
        now_s = self._loop.now_s
        member.generation += 1
        chunk = member.chunk
        until_s = math.inf
        if chunk is not None:
            # when the last of the others is there, as it seems
            until_s = max(
                (self._members[other].batch_ends_s for other in chunk.missing if other != member.number), default=now_s
            )
        if member.items and (chunk is None or until_s > now_s or member.owes_batch):
            longest_s = math.inf if member.owes_batch else until_s - now_s
            iteration = member.policy.choose_within(member.items, member.kv_tokens, now_s, longest_s)
            if iteration.slices:
                self._run(member, iteration, _sample(iteration, self._pipeline))
                return
            if iteration.wake_s < math.inf:
                self._loop.schedule(iteration.wake_s, self._wake, (member, member.generation))
        if chunk is not None and member.number in chunk.missing:
            chunk.missing.discard(member.number)
            chunk.arrived_s[member.number] = now_s
            if not chunk.missing:
                self._begin(chunk)

    def _wake(self, what: tuple[_PoolInstance, int]) -> None:
        member, generation = what
        if member.generation == generation:
            self._go_on(member)

    def _run(self, member: _PoolInstance, iteration: Iteration, sample: IterationSample) -> None:
        now_s = self._loop.now_s
        member.owes_batch = False
        member.batch, member.sample, member.batch_ends_s = iteration, sample, now_s + sample.duration_s
        for item, tokens in iteration.slices:
            member.kv_tokens -= tokens
            if item.start_s is None:
                item.start_s = now_s
        self._loop.schedule(member.batch_ends_s, self._end_batch, member)

    def _end_batch(self, member: _PoolInstance) -> None:
        iteration, sample, now_s = member.batch, member.sample, self._loop.now_s
        assert iteration is not None
        assert sample is not None
        member.batch = member.sample = None
        if any(tokens < item.new_tokens or item.length_class.value == "long" for item, tokens in iteration.slices):
            for item in member.items:
                item.is_current = False
        ended = []
        for item, tokens in iteration.slices:
            item.new_tokens -= tokens
            item.cached_tokens += tokens
            item.is_current = item.new_tokens > 0
            member.computed_tokens += tokens
            if item.new_tokens == 0:
                ended.append(item)
                member.items.remove(item)
                member.kv_tokens += item.request.new_tokens
        member.policy.note_end(sample, ended, now_s)
        for item in ended:
            prefix = item.request.prefix
            if prefix is not None:
                self._cache(prefix.block_tokens).record(member.number, prefix.blocks)
            assert item.start_s is not None
            self._listener.on_first_token(ServedPrefill(item.request, item.start_s, now_s, Role.BOTH))
        self._go_on(member)
        self._plan()

    # ---- chunks ----

    def _report_of(self, member: _PoolInstance) -> MemberReport:
        busy_s = 0.0 if member.chunk is not None else self._busy_s(member)
        rate = member.policy.laps.short_per_s(self._loop.now_s)
        return MemberReport(busy_s + self._queued_s(member), member.kv_tokens, None, rate, self._short_slo_s)

    def _report_all(self) -> None:
        for member in self._members:
            self.coordinator.report(member.number, self._report_of(member), self._loop.now_s)

    def _plan(self) -> None:
        if self._tickets or self._shared:
            self._report_all()
            self._carry_out(self.coordinator.plan(self._loop.now_s))

    def _carry_out(self, orders: Iterable[Order]) -> None:
        waiting = deque(orders)
        while waiting:
            waiting.extend(self._carry_out_one(waiting.popleft()))

    def _carry_out_one(self, order: Order) -> Sequence[Order]:
        now_s = self._loop.now_s
        match order:
            case Bind(ticket, owner):
                request = self._tickets.pop(ticket)
                self._shared[request.key] = request
                offer = Offer(request.key, owner, request.prompt_tokens, 0, request.arrival_s, math.inf, True, True)
                return self.coordinator.claim(ticket, offer, now_s)
            case RunChunk():
                self._order(order)
            case Collect():
                return self._end_collect(order)
            case Finish(key, owner):
                request = self._shared.pop(key)
                self._listener.on_first_token(ServedPrefill(request, self._start_s.pop(key), now_s, None))
                return self.coordinator.transferred(key, now_s)
            case Decline(key, owner, _):
                request = self._shared.pop(key)
                self._queue(request, owner, self._cached_tokens(request))
                self.coordinator.report(owner, self._report_of(self._members[owner]), now_s)
            case Drop(key):
                for number, tokens in self._holds.pop(key, {}).items():
                    self._members[number].kv_tokens += tokens
        return ()

    def _order(self, order: RunChunk) -> None:
        layout = order.layout
        cached = sum(map(count_tokens, layout.history))
        new = sum(map(count_tokens, layout.new))
        chunk = _Chunk(order, set(layout.group), {}, predicted_s=self._costs[len(layout.group)].predict_s(cached, new))
        self._chunks[order.request] = chunk
        holds = self._holds.setdefault(order.request, {})
        for number, history, part in zip(layout.group, layout.history, layout.new, strict=True):
            tokens = count_tokens(history) + count_tokens(part)
            self._members[number].kv_tokens -= tokens - holds.get(number, 0)
            holds[number] = tokens
        for number in layout.group:
            assert self._members[number].chunk is None
            self._members[number].chunk = chunk
        for number in layout.group:
            self._go_on(self._members[number])

    def _begin(self, chunk: _Chunk) -> None:
        now_s = self._loop.now_s
        self.chunks += 1
        size = len(chunk.arrived_s)
        self.sizes[size] = self.sizes.get(size, 0) + 1
        self.gang_wait_s += sum(now_s - at_s for at_s in chunk.arrived_s.values())
        self.group_s += size * chunk.predicted_s
        chunk.ends_s = now_s + chunk.predicted_s
        self._start_s.setdefault(chunk.order.request, now_s)
        self._loop.schedule(chunk.ends_s, self._end_chunk, chunk)

    def _end_chunk(self, chunk: _Chunk) -> None:
        group = chunk.order.layout.group
        for number in group:
            self._members[number].chunk = None
            self._members[number].owes_batch = True
        del self._chunks[chunk.order.request]
        self._report_all()
        self._carry_out(self.coordinator.done_together(group, chunk.order.sequence, self._loop.now_s))
        for number in group:
            self._go_on(self._members[number])

    def _end_collect(self, order: Collect) -> Sequence[Order]:
        """What is computed of a prompt comes to its owner, which goes on with it; that takes no simulated time."""
        request, holds = self._shared.pop(order.request), self._holds.pop(order.request, {})
        for number, tokens in holds.items():
            self._members[number].kv_tokens += tokens
        cached = [sum(holds.values()) if number == order.owner else 0 for number in range(len(self._members))]
        self._queue(request, order.owner, cached)
        return self.coordinator.done_together(order.members, order.sequence, self._loop.now_s)
