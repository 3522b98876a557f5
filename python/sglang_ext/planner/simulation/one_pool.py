"""One pool in simulation: every instance batches short prefills, takes part in shared long ones, and keeps a prefix
cache.

    arrive ──short──▶ the instance where it costs least ────▶ batches of LAPS
           ──long───▶ Coordinator ──RunChunk──▶ all members of a group, each when its batch has ended
                                  ──Decline───▶ batches of LAPS on a single instance

The coordinator and the queues are the serving ones. A turn of a member is at most one chunk and then one batch, as it
is in an engine. A member that waits for its group computes batches that end before the others come. History that
changes hands is hidden behind computing as far as the bandwidth allows; kept rows that are pulled share each instance's
link, one pull after the other; they are asked for, sent and taken between a batch and a chunk. Messages take no time.

A failed instance loses its caches, its queue and its part of shared prompts. What it had is announced or queued again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.kept_prompts import PromptBlocks, PromptText
from sglang_ext.long_pool.decide.late_binding import ends_much_sooner
from sglang_ext.long_pool.decide.on_time_order import OnTimeOptions, OnTimeOrder
from sglang_ext.long_pool.decide.orders import (
    Bind,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    DropKept,
    Finish,
    Keep,
    MemberReport,
    Offer,
    Order,
    PromptTicket,
    RunChunk,
)
from sglang_ext.long_pool.decide.pool_load import ROUTED_WINDOW_S, PoolLoad
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule
from sglang_ext.long_pool.decide.price_planner import PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.row_pulls import Pull
from sglang_ext.long_pool.decide.sharding import KvMove, count_tokens
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.planner.simulation.cluster_spec import Failure
from sglang_ext.planner.simulation.events import (
    BusyInterval,
    EventLoop,
    PlannedChunks,
    PrefillListener,
    ServedPrefill,
    SimRequest,
)
from sglang_ext.planner.simulation.instances import InstancesSpec
from sglang_ext.planner.simulation.iteration_policies import Iteration, LapsPolicy, Slice, WorkItem
from sglang_ext.planner.simulation.iterations import advance, iteration_sample
from sglang_ext.planner.simulation.long_pool import PlanLog
from sglang_ext.planner.simulation.pool_instances import (
    KvHoldings,
    OnePoolOptions,
    OrderedChunk,
    PoolTimes,
    RunningBatch,
    SimulatedMember,
)
from sglang_ext.planner.simulation.prefix_caches import PrefixCaches
from sglang_ext.types import LengthClass, Role


@dataclass(slots=True, eq=False)
class _SharedPrompt:
    """A prompt that the coordinator has, until its first token or until one instance goes on with it."""

    request: SimRequest
    owner: int | None = None
    ticket: int | None = None
    start_s: float | None = None
    borrowed: dict[int, int] = field(default_factory=dict)  # kept rows that it reads, by member


class OnePool:
    """A prefill stage. `coordinator` and the figures are there to be read."""

    def __init__(
        self,
        loop: EventLoop,
        spec: InstancesSpec,
        candidates: Sequence[SpCandidate],
        policy: Callable[[Role], LapsPolicy],
        options: OnePoolOptions,
        listener: PrefillListener,
        is_recorded: bool,
    ) -> None:
        """`candidates` are the SP sizes that the pool has instances for. ValueError for a role other than `both`."""
        if any(role is not Role.BOTH for role in spec.roles):
            raise ValueError("roles: every instance of one pool serves both classes")
        self._loop = loop
        self._options = options
        self._listener = listener
        self._boundary_tokens = spec.boundary_tokens
        self._kv_tokens = spec.max_kv_tokens(Role.BOTH)
        self._max_group = max(candidate.size for candidate in candidates)
        self._own_costs = spec.costs(Role.BOTH)
        costs = {candidate.size: candidate.cost for candidate in candidates}
        self._times = PoolTimes(options, costs, self._own_costs.coefficients, spec.boundary_tokens)
        planner = PricePlanner(
            PriceOptions(tuple(candidates), options.min_chunk_tokens, cross_node_factor=options.cross_node_factor)
        )
        settings = CoordinationSettings(
            layers=1,
            chunk_s=options.chunk_s,
            bind_ahead_s=0.0,
            ttft_slo_s=options.slo_s,
            slo_stretch=options.slo_stretch,
            keeps_rows=options.keeps_rows,
            kv_token_bytes=options.kv_bytes_per_token,
            pulls_rows=options.pulls_rows,
            gathers_rows=options.gathers_rows,
        )
        self.coordinator = Coordinator(PoolSchedule(planner, OnTimeOrder(OnTimeOptions())), settings)
        self._load = PoolLoad(ROUTED_WINDOW_S)  # of batches
        self._caches = PrefixCaches(self._kv_tokens)
        self._members = [
            SimulatedMember(number, policy(role), self._kv_tokens) for number, role in enumerate(spec.roles)
        ]
        self._holdings = KvHoldings(self._members)
        self._shared: dict[int, _SharedPrompt] = {}  # by request
        self._tickets: dict[int, int] = {}  # request by ticket, before it is bound
        self._next_ticket = 0
        self._collects: dict[int, Collect] = {}  # on their way, by sequence
        self._stranded: dict[int, SimRequest] = {}  # no instance is there for them
        self._keeps_kv = False
        self.gang_wait_s = 0.0  # of members that were ready, until their group was
        self.group_s = 0.0  # of members in chunks
        self.chunks_by_size: dict[int, int] = {}
        self.pulled_prompts = self.pulled_tokens = 0
        self.moved: set[int] = set()  # requests that left an instance which got a chunk
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []
        self._plan_log = PlanLog(self.coordinator)
        for member in self._members:
            self._join(member)

    @property
    def plans(self) -> list[PlannedChunks]:
        """Return what was planned for shared prompts when, where the run is recorded."""
        return self._plan_log.plans

    @property
    def gang_wait_share(self) -> float:
        """Return how long members waited for their groups, as a share of the time of groups."""
        return self.gang_wait_s / self.group_s if self.group_s else 0.0

    # ---- arrivals ----

    def arrive(self, request: SimRequest) -> None:
        if request.prompt_tokens > self._max_group * self._kv_tokens:
            self._listener.on_refused(request)  # no group can ever hold it
            return
        alive = [member for member in self._members if member.is_alive]
        if not alive:
            self._stranded[request.key] = request
            return
        cached = self._caches.cached_tokens(request, [member.number for member in alive])
        if self._is_shared(request, max(cached)):
            self._announce(request)
        else:
            price = self._batch_price(alive)
            member, tokens = min(
                zip(alive, cached, strict=True), key=lambda choice: self._cost_s(choice[0], request, choice[1], price)
            )
            self._load.record_arrival(self._loop.now_s, self._times.item_s(request.prompt_tokens - tokens, tokens))
            self._queue(request._replace(cached_tokens=tokens), member)
            self._plan()

    def unfinished(self) -> Iterable[SimRequest]:
        return [
            *(item.request for member in self._members for item in member.items),
            *(shared.request for shared in self._shared.values()),
            *self._stranded.values(),
        ]

    def keep_until_transferred(self) -> None:
        """Hold the KV of a prompt that has its first token until `transferred`, from now on."""
        self._keeps_kv = True

    def transferred(self, request: SimRequest) -> None:
        """Decode has the KV of a prompt that has its first token."""
        if request.key in self.coordinator.requests:
            self._carry_out(self.coordinator.transferred(request.key, self._loop.now_s))
        else:
            self._free(request.key)
        self._plan()

    def schedule_failure(self, failure: Failure) -> None:
        """ValueError for an instance that does not exist."""
        if not 0 <= failure.instance < len(self._members):
            raise ValueError(f"instance {failure.instance} does not exist, there are {len(self._members)}")
        self._loop.schedule(failure.at_s, self._fail, failure)

    def _is_shared(self, request: SimRequest, cached_tokens: int) -> bool:
        """Return whether the coordinator gets a prompt of which one instance has `cached_tokens`: a long one, unless
        that instance has most of it, and more than the pool has kept."""
        if request.prompt_tokens > self._kv_tokens:
            return True
        if request.prompt_tokens - cached_tokens <= self._boundary_tokens:
            return False
        blocks = _blocks_of(request)
        kept = None if blocks is None else self.coordinator.kept.match(blocks, request.prompt_tokens - 1)
        return 2 * cached_tokens < request.prompt_tokens or (kept is not None and kept.tokens > cached_tokens)

    def _batch_price(self, alive: Sequence[SimulatedMember]) -> float:
        """Return what a second of an instance's time costs the prompts that arrive until what is queued has gone."""
        left_s = sum(self._left_s(member) for member in alive)
        return self._load.price(self._loop.now_s, left_s, len(alive))

    def _cost_s(self, member: SimulatedMember, request: SimRequest, cached_tokens: int, price: float) -> float:
        """Return when a member would have computed a prompt behind what it has, from now, and what that costs others.

        Where a prefix is cached a prompt takes less of the time that others wait for.
        """
        own_s = self._times.item_s(request.prompt_tokens - cached_tokens, cached_tokens)
        return self._left_s(member) + (1 + price) * own_s

    def _queue(self, request: SimRequest, member: SimulatedMember) -> None:
        item = WorkItem(request, request.new_tokens, request.cached_tokens, member.computed_tokens)
        member.items.append(item)
        member.policy.record_arrival(item, self._loop.now_s)
        self._go_on(member)

    def _left_s(self, member: SimulatedMember) -> float:
        """Return how long all that a member has takes from now on."""
        return self._busy_s(member) + self._times.queued_s(member, self._holdings)

    def _busy_s(self, member: SimulatedMember) -> float:
        """Return how long the batch and the chunk of a member take from now on."""
        now_s = self._loop.now_s
        free_s = now_s if member.batch is None else member.batch.end_s
        if member.chunk is not None:
            free_s = max(free_s, self._meet_s(member.chunk)) + member.chunk.compute_s
            if member.chunk.is_running:
                free_s = member.chunk.end_s
        return max(0.0, free_s - now_s)

    def _meet_s(self, chunk: OrderedChunk) -> float:
        """Return when the batches of the members that are missing have ended."""
        batches = [batch for number in chunk.missing if (batch := self._members[number].batch) is not None]
        return max((batch.end_s for batch in batches), default=self._loop.now_s)

    # ---- a member's turn ----

    def _go_on(self, member: SimulatedMember) -> None:
        """Begin what a member does next, where it does nothing: a batch, or waiting for the group of its chunk."""
        chunk, now_s = member.chunk, self._loop.now_s
        if not member.is_alive or member.batch is not None or (chunk is not None and chunk.is_running):
            return
        member.generation += 1
        meet_s = math.inf if chunk is None else self._meet_s(chunk)
        has_time = member.owes_batch or meet_s > now_s
        if member.items and has_time:
            longest_s = math.inf if member.owes_batch else meet_s - now_s
            iteration = self._choose(member, longest_s)
            if iteration.slices:
                self._run(member, iteration)
                return
            if iteration.wake_s < math.inf:
                self._loop.schedule(iteration.wake_s, self._wake, (member, member.generation))
        member.owes_batch = False
        if chunk is not None and member.number in chunk.missing:
            chunk.missing.discard(member.number)
            chunk.ready_s[member.number] = now_s
            if not chunk.missing:
                self._begin(chunk)

    def _wake(self, awaited: tuple[SimulatedMember, int]) -> None:
        member, generation = awaited
        if member.generation == generation:
            self._go_on(member)

    # ---- batches ----

    def _choose(self, member: SimulatedMember, longest_s: float) -> Iteration:
        """Return what the policy would run, without prompts that have not begun and do not fit as a whole: what has
        begun never waits for memory."""
        holdings, room = self._holdings, member.free_tokens
        begun = [item for item in member.items if item.request.key in holdings]
        reserved = sum(item.new_tokens for item in begun)
        iteration = member.policy.choose_within(member.items, max(0, room) + reserved, self._loop.now_s, longest_s)
        fitting = []
        for chosen in iteration.slices:
            if chosen.item.request.key not in holdings:
                if chosen.item.new_tokens > room:
                    member.policy.correct(chosen.item, 0, self._loop.now_s)
                    continue
                room -= chosen.item.new_tokens
            fitting.append(chosen)
        if iteration.slices and not fitting and begun:
            tokens = min(begun[0].new_tokens, sum(chosen.tokens for chosen in iteration.slices))
            member.policy.correct(begun[0], tokens, self._loop.now_s)
            fitting.append(Slice(begun[0], tokens))
        # What waits for memory is looked at again when some is given back.
        wake_s = math.inf if iteration.slices else iteration.wake_s
        return iteration._replace(slices=tuple(fitting), wake_s=wake_s)

    def _run(self, member: SimulatedMember, iteration: Iteration) -> None:
        now_s = self._loop.now_s
        expected = iteration_sample(iteration, self._own_costs)
        sample = expected._replace(duration_s=expected.duration_s * self._times.draw_pace())
        member.owes_batch = False
        if member.chunk is not None and member.number in member.chunk.ready_s:
            member.chunk.waited_s += now_s - member.chunk.ready_s.pop(member.number)
            member.chunk.missing.add(member.number)
        batch = member.batch = RunningBatch(iteration, sample, now_s, now_s + sample.duration_s)
        for item, _ in iteration.slices:
            if item.request.key not in self._holdings:
                self._holdings.take(item.request.key, member, item.new_tokens)
            if item.start_s is None:
                item.start_s = now_s
        self._loop.schedule(batch.end_s, self._end_batch, (member, batch))

    def _end_batch(self, awaited: tuple[SimulatedMember, RunningBatch]) -> None:
        member, batch = awaited
        if batch.is_void:
            return
        now_s = self._loop.now_s
        member.batch = None
        self._record_batch(member, batch)
        member.computed_tokens += sum(tokens for _, tokens in batch.iteration.slices)
        ended = advance(member.items, batch.iteration)
        member.policy.note_end(batch.sample, ended, now_s)
        for item in ended:
            self._caches.record(member.number, item.request)
            assert item.start_s is not None
            if not self._keeps_kv:
                self._free(item.request.key)
            self._listener.on_first_token(ServedPrefill(item.request, item.start_s, now_s, Role.BOTH))
        self._go_on(member)
        self._plan()

    # ---- the coordinator ----

    def _announce(self, request: SimRequest) -> None:
        self._next_ticket -= 1
        self._shared[request.key] = _SharedPrompt(request, ticket=self._next_ticket)
        self._tickets[self._next_ticket] = request.key
        ticket = PromptTicket(self._next_ticket, request.prompt_tokens, 0, request.arrival_s, None, _text_of(request))
        self._report_all()
        self._carry_out(self.coordinator.announce(ticket, self._loop.now_s))

    def _offer(self, request: SimRequest, owner: int) -> Offer:
        return Offer(
            *(request.key, owner, request.prompt_tokens, 0, request.arrival_s, math.inf),
            is_streamed=True,
            fits_owner=request.prompt_tokens <= self._kv_tokens,
            blocks=_blocks_of(request),
        )

    def _report_of(self, member: SimulatedMember) -> MemberReport:
        # The time of a chunk is the coordinator's own to know.
        busy_s = 0.0 if member.chunk is not None else self._busy_s(member)
        short_slo_s = self._options.short_slo_s
        return MemberReport(
            # What has no memory does not run before others have ended.
            busy_s + self._times.queued_s(member, self._holdings, member.free_tokens),
            max(0, member.free_tokens - self.coordinator.kept.locked_on(member.number)),
            short_per_s=member.policy.laps.short_per_s(self._loop.now_s),
            short_slo_s=short_slo_s if short_slo_s < math.inf else None,
            short_work_s=member.policy.laps.short_work_s(self._loop.now_s),
            running_s=busy_s,
            short_backlog_s=self._times.shorts_s(member),
        )

    def _report_all(self) -> None:
        for member in self._members:
            if member.is_alive:
                self.coordinator.report(member.number, self._report_of(member), self._loop.now_s)

    def _plan(self) -> None:
        if self._shared:
            self._report_all()
            self._carry_out(self.coordinator.plan(self._loop.now_s))

    def _carry_out(self, orders: Iterable[Order]) -> None:
        waiting = deque(orders)
        while waiting:
            waiting.extend(self._carry_out_one(waiting.popleft()))
        if self._is_recorded:
            self._plan_log.record(self._loop.now_s, self._shared)

    def _carry_out_one(self, order: Order) -> Sequence[Order]:
        now_s = self._loop.now_s
        match order:
            case Bind(ticket, owner, members, chunk_s):
                shared = self._shared[self._tickets.pop(ticket)]
                shared.owner, shared.ticket = owner, None
                if chunk_s:
                    self._take_back(members, chunk_s)
                return self.coordinator.claim(ticket, self._offer(shared.request, owner), now_s)
            case RunChunk():
                self._order(order)
            case Collect():
                self._collects[order.sequence] = order
                self._loop.schedule(now_s + self._times.move_s(order.moves), self._end_collect, order)
            case Finish(key):
                self._end_shared(key)
                return () if self._keeps_kv else self.coordinator.transferred(key, now_s)
            case Decline(key, owner, reason):
                return self._compute_alone(self._shared.pop(key).request, owner, reason)
            case Keep(key) | Drop(key):
                self._free(key)
                self._share_room()
                if self.coordinator.waits_for_room:
                    self._report_all()
                    return self.coordinator.plan(now_s)
            case Pull():
                turn_s = max(map(self._turn_in_s, order.members))
                sent_s = now_s + turn_s + self._times.move_s(self._pull_moves(order))
                self._loop.schedule(sent_s, self._receive_pull, order)
            case DropKept():
                self._share_room()
        return ()

    def _compute_alone(self, request: SimRequest, owner: int, reason: DeclineReason) -> Sequence[Order]:
        """Queue a prompt at the instance that it is left to, or treat it as a new one where that instance has gone."""
        member = self._members[owner]
        if request.prompt_tokens > self._kv_tokens and reason in (DeclineReason.NO_PLAN, DeclineReason.NO_ROOM):
            self._listener.on_refused(request)
        elif not member.is_alive or request.prompt_tokens > self._kv_tokens:
            self._loop.schedule(self._loop.now_s, self.arrive, request)
        else:
            (cached,) = self._caches.cached_tokens(request, [owner])
            self._queue(request._replace(cached_tokens=cached), member)
            self.coordinator.report(owner, self._report_of(member), self._loop.now_s)
        return ()

    def _take_back(self, members: Sequence[int], chunk_s: float) -> None:
        """Move short prompts that wait at these members, which get a chunk, where they end much sooner elsewhere."""
        others = [member for member in self._members if member.is_alive and member.number not in members]
        if not others:
            return
        for number in members:
            member = self._members[number]
            wait_s = self._busy_s(member) + chunk_s
            for item in tuple(member.items):
                is_short = item.new_tokens <= self._boundary_tokens
                if item.start_s is not None or item.request.key in self.moved or not is_short:
                    continue
                cached = self._caches.cached_tokens(item.request, [other.number for other in others])
                tokens = item.request.prompt_tokens
                elsewhere_s, best = min(
                    (self._left_s(other) + self._times.item_s(tokens - held, held), at)
                    for at, (other, held) in enumerate(zip(others, cached, strict=True))
                )
                if ends_much_sooner(elsewhere_s, wait_s + self._times.item_s(item.new_tokens, item.cached_tokens)):
                    member.items.remove(item)
                    self.moved.add(item.request.key)
                    self._queue(item.request._replace(cached_tokens=cached[best]), others[best])

    # ---- chunks ----

    def _order(self, order: RunChunk) -> None:
        shared, layout = self._shared[order.request], order.layout
        cached = sum(map(count_tokens, layout.history))
        new = sum(map(count_tokens, layout.new))
        if shared.start_s is None and not shared.borrowed and cached:
            self._borrow(shared, order)
        chunk_s = self._times.chunk_s(layout.group, cached, new) * self._times.draw_pace()
        compute_s = max(chunk_s, self._times.move_s(layout.moves))
        held_before = dict(self._holdings.of(order.request))
        chunk = OrderedChunk(order, compute_s, set(layout.group), held_before)
        for number, history, part in zip(layout.group, layout.history, layout.new, strict=True):
            owned = count_tokens(history) + count_tokens(part) - shared.borrowed.get(number, 0)
            self._holdings.take(order.request, self._members[number], max(0, owned) - held_before.get(number, 0))
            self._members[number].chunk = chunk
        if shared.start_s is None and shared.borrowed and cached + new == shared.request.prompt_tokens:
            self._count_follow_up(layout.group, new, cached)
        for number in layout.group:
            self._go_on(self._members[number])

    def _count_follow_up(self, group: Sequence[int], new_tokens: int, cached_tokens: int) -> None:
        """Record a prompt that is computed in one step behind kept rows as short work of its members, if it is."""
        if new_tokens <= self._boundary_tokens:
            now_s = self._loop.now_s
            for number in group:
                laps = self._members[number].policy.laps
                deadline_s = laps.deadline_s(LengthClass.SHORT, new_tokens, cached_tokens, now_s, None)
                laps.record_arrival(now_s, LengthClass.SHORT, new_tokens, cached_tokens, deadline_s)

    def _borrow(self, shared: _SharedPrompt, order: RunChunk) -> None:
        """Record which kept rows a prompt reads that begins behind them: its history before anything has moved."""
        layout = order.layout
        held = {number: count_tokens(history) for number, history in zip(layout.group, layout.history, strict=True)}
        for move in layout.moves:
            held[move.target] -= move.tokens
        shared.borrowed = held
        shared.request = shared.request._replace(cached_tokens=sum(map(count_tokens, layout.history)))

    def _pull_moves(self, order: Pull) -> list[KvMove]:
        """Return what every source sends; the coordinator has one pull at a time on each link."""
        rows = self.coordinator.kept.rows(order.parts[-1])
        sent = {source: sum(segment.tokens for segment in rows[source]) for source in order.sources}
        moves = [KvMove(source, order.target, 0, tokens, ()) for source, tokens in sent.items()]
        return [move for move in moves if move.source != order.target]

    def _turn_in_s(self, number: int) -> float:
        """Return how long the batch or chunk that runs at a member takes from now on: it follows orders behind that."""
        return max(0.0, self._members[number].turn_end_s() - self._loop.now_s)

    def _receive_pull(self, order: Pull) -> None:
        """All rows have come; the target looks for them between a batch and a chunk."""
        self._loop.schedule(self._loop.now_s + self._turn_in_s(order.target), self._end_pull, order)

    def _end_pull(self, order: Pull) -> None:
        self.pulled_prompts += 1
        self.pulled_tokens += order.tokens
        self._report_all()
        self._carry_out(self.coordinator.pulled(order.target, order.pull, self._loop.now_s))
        self._share_room()

    def _begin(self, chunk: OrderedChunk) -> None:
        now_s = self._loop.now_s
        size = len(chunk.ready_s)
        chunk.start_s = now_s
        self.chunks_by_size[size] = self.chunks_by_size.get(size, 0) + 1
        self.gang_wait_s += chunk.waited_s + sum(now_s - ready_s for ready_s in chunk.ready_s.values())
        self.group_s += size * chunk.compute_s
        shared = self._shared[chunk.order.request]
        if shared.start_s is None:
            shared.start_s = now_s
        self._loop.schedule(chunk.end_s, self._end_chunk, chunk)

    def _end_chunk(self, chunk: OrderedChunk) -> None:
        if chunk.is_void:
            return
        group = chunk.order.layout.group
        self._record_chunk(chunk)
        for number in group:
            self._members[number].chunk = None
            self._members[number].owes_batch = True
        self._report_all()
        self._carry_out(self.coordinator.done_together(group, chunk.order.sequence, self._loop.now_s))
        for number in group:
            self._go_on(self._members[number])

    def _end_collect(self, order: Collect) -> None:
        """End a collection: the computed rows of a prompt are with its owner, which continues the prompt."""
        if self._collects.pop(order.sequence, None) is None:
            return  # a member has failed meanwhile
        owner = self._members[order.owner]
        shared = self._shared.pop(order.request)
        request = shared.request
        held = self._holdings.of(order.request)
        computed = sum(held.values()) + sum(shared.borrowed.values())
        for number, tokens in list(held.items()):
            self._holdings.take(order.request, self._members[number], -tokens)
        # The last token is computed again, for its logits.
        cached = min(computed, request.prompt_tokens - 1)
        self._holdings.take(order.request, owner, request.prompt_tokens)
        self._carry_out(self.coordinator.done_together(order.members, order.sequence, self._loop.now_s))
        self._queue(request._replace(cached_tokens=cached), owner)
        for number in held:
            self._go_on(self._members[number])

    def _end_shared(self, key: int) -> None:
        shared = self._shared.pop(key)
        assert shared.start_s is not None
        self._listener.on_first_token(ServedPrefill(shared.request, shared.start_s, self._loop.now_s, None))

    # ---- KV ----

    def _free(self, key: int) -> None:
        """Give back all that a request holds; members may have waited for it."""
        for member in self._holdings.free(key):
            self._go_on(member)

    def _share_room(self) -> None:
        """Leave the instances' own caches what the rows that the pool keeps do not take."""
        for member in self._members:
            if member.is_alive:
                self._caches.set_room(member.number, self._kv_tokens - self.coordinator.kept.tokens_on(member.number))

    # ---- what was busy ----

    def _record_batch(self, member: SimulatedMember, batch: RunningBatch) -> None:
        if self._is_recorded:
            first, *others = (item.request.key for item, _ in batch.iteration.slices)
            tokens = sum(tokens for _, tokens in batch.iteration.slices)
            self.timeline.append(
                BusyInterval(member.number, batch.start_s, self._loop.now_s, first, tuple(others), tokens)
            )

    def _record_chunk(self, chunk: OrderedChunk) -> None:
        if self._is_recorded:
            layout, shared = chunk.order.layout, self._shared[chunk.order.request]
            self.timeline += [
                BusyInterval(
                    *(number, chunk.start_s, self._loop.now_s, chunk.order.request),
                    tokens=sum(map(count_tokens, layout.new)),
                    group=layout.group,
                    owner=shared.owner,
                )
                for number in layout.group
            ]

    # ---- instances that come and go ----

    def _join(self, member: SimulatedMember) -> None:
        member.is_alive = True
        self._caches.add(member.number)
        node = member.number // self._options.per_node
        self._carry_out(self.coordinator.join(member.number, node, self._report_of(member), self._loop.now_s))
        stranded = list(self._stranded.values())
        self._stranded.clear()
        for request in stranded:
            self.arrive(request)

    def _fail(self, failure: Failure) -> None:
        lost, now_s = self._members[failure.instance], self._loop.now_s
        if not lost.is_alive:
            return
        lost.is_alive = False
        lost.generation += 1
        self._caches.remove(lost.number)
        orphans = [item.request for item in lost.items]
        if lost.batch is not None:
            self._record_batch(lost, lost.batch)
            lost.batch.is_void = True
        lost.items, lost.batch, lost.owes_batch, lost.free_tokens = [], None, False, self._kv_tokens
        owned = [shared.request for shared in self._shared.values() if shared.owner == lost.number]
        gone = {request.key for request in owned}
        chunks = {id(member.chunk): member.chunk for member in self._members if member.chunk is not None}
        broken = [
            chunk for chunk in chunks.values() if lost.number in chunk.order.layout.group or chunk.order.request in gone
        ]
        collects = [order for order in self._collects.values() if lost.number in order.members]
        for order in collects:
            del self._collects[order.sequence]
        for chunk in broken:
            self._break(chunk)
        orders: list[Order] = []
        # Decode gets what has its first token all the same: only the KV is lost here.
        for key in self.coordinator.requests:
            if key not in self._shared and lost.number in self._holdings.of(key):
                orders += self.coordinator.cancel(key, now_s)
        self._holdings.lose(lost)
        orders += self.coordinator.lose(lost.number, now_s)
        steps = [(chunk.order.sequence, chunk.order.layout.group) for chunk in broken]
        steps += [(order.sequence, order.members) for order in collects]
        for sequence, members in steps:
            for number in members:
                if number != lost.number:
                    orders += self.coordinator.failed(number, sequence, now_s)
        for request in owned:
            del self._shared[request.key]
        self._report_all()
        self._carry_out(orders)
        for request in owned:
            self._free(request.key)
        for request in sorted((*orphans, *owned), key=lambda request: request.key):
            self.arrive(request._replace(cached_tokens=0) if request.prefix is not None else request)
        for member in self._members:
            self._go_on(member)
        self._plan()
        self._loop.schedule(now_s + failure.down_s, self._join, lost)

    def _break(self, chunk: OrderedChunk) -> None:
        """Take a chunk that cannot end from its members; they hold what they did before."""
        if chunk.is_running:
            self._record_chunk(chunk)
        chunk.is_void = True
        for number in chunk.order.layout.group:
            member = self._members[number]
            member.chunk = None
            if member.is_alive:
                key = chunk.order.request
                taken = self._holdings.of(key).get(number, 0) - chunk.held_before.get(number, 0)
                self._holdings.take(key, member, -taken)


def _blocks_of(request: SimRequest) -> PromptBlocks | None:
    prefix = request.prefix
    return None if prefix is None else PromptBlocks(prefix.block_tokens, prefix.blocks)


def _text_of(request: SimRequest) -> PromptText | None:
    prefix = request.prefix
    if prefix is None:
        return None
    count, block_tokens = len(prefix.blocks), prefix.block_tokens
    return PromptText(prefix.blocks, tuple(range(block_tokens, (count + 1) * block_tokens, block_tokens)))
