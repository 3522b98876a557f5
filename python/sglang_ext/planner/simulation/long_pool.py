"""A long pool in simulation: the coordinator that serves, with instances that take as long as the costs say.

    arrive ──ticket──▶ Coordinator ──Bind──▶ an instance offers it ──▶ RunChunk … Collect, or computed by itself

The orders are the same as members of a real pool get; what is left out is the network between them, unless a bandwidth
is given. Chunks may take longer or shorter than predicted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from sglang_ext.long_pool.decide.coordination_settings import CoordinationSettings
from sglang_ext.long_pool.decide.coordinator import Coordinator
from sglang_ext.long_pool.decide.on_time_order import OnTimeOptions, OnTimeOrder
from sglang_ext.long_pool.decide.orders import (
    Bind,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    Finish,
    MemberReport,
    Offer,
    Order,
    PromptTicket,
    RunChunk,
)
from sglang_ext.long_pool.decide.pool_requests import NextChunk
from sglang_ext.long_pool.decide.pool_schedule import PoolSchedule, PrefillOrder, fastest_s
from sglang_ext.long_pool.decide.price_planner import PriceOptions, PricePlanner
from sglang_ext.long_pool.decide.sharding import count_tokens
from sglang_ext.long_pool.decide.sp_cost import SpCandidate
from sglang_ext.planner.simulation.cluster_spec import ClusterSpec, Failure
from sglang_ext.planner.simulation.events import (
    BusyInterval,
    EventLoop,
    PlannedChunks,
    PrefillListener,
    ServedPrefill,
    SimRequest,
)


def new_on_time_order() -> PrefillOrder:
    """Return the order that serves."""
    return OnTimeOrder(OnTimeOptions())


OrderFactory = Callable[[], PrefillOrder]


@dataclass(frozen=True, slots=True)
class LongPoolOptions:
    """ValueError for a time or factor that is not above 0."""

    slo_s: float = 1.0  # TTFT objective of a prompt, or
    slo_stretch: float = 5.0  # this many times its time on an idle pool if that is more
    min_chunk_tokens: int = 512
    chunk_s: float | None = None  # longest time of a chunk
    cross_node_factor: float = 1.1  # of a group over more nodes than it needs; inf: there is none
    noise: float = 0.0  # standard deviation of a chunk's time over the predicted one
    noise_seed: int = 0
    is_announced: bool = True  # a prompt gets its instance in its turn; False: on arrival, round robin, which offers it
    order: OrderFactory = new_on_time_order  # whose turn it is

    def __post_init__(self) -> None:
        for name in ("slo_s", "slo_stretch", "chunk_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}: {value} is not above 0")
        if not 0 <= self.noise < 1:
            raise ValueError(f"noise: {self.noise} is not at least 0 and below 1")


def usable_candidates(candidates: Sequence[SpCandidate], instances: int) -> list[SpCandidate]:
    """Return the SP sizes that a pool has instances for. ValueError where there is none."""
    usable = [candidate for candidate in candidates if candidate.size <= instances]
    if not usable:
        smallest = min(candidate.size for candidate in candidates)
        raise ValueError(f"the engine's smallest SP size is {smallest}, the cluster has {instances} instances")
    return usable


@dataclass(slots=True, eq=False)
class _Progress:
    """A request that has no first token yet."""

    request: SimRequest
    owner: int | None = None
    start_s: float | None = None


@dataclass(slots=True, eq=False)
class _RunningGroup:
    """Describes what an instance or a group computes, until `end_s`; void once a member is lost."""

    key: int
    group: tuple[int, ...]
    order: RunChunk | None  # None: computed by a single instance
    is_void: bool = False


class PlanLog:
    """Records the chunks of shared prompts that are planned and not begun."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._planned: dict[int, tuple[NextChunk, ...]] = {}  # by request, as recorded last
        self.plans: list[PlannedChunks] = []

    def record(self, now_s: float, keys: Iterable[int]) -> None:
        """Record what is planned now of these requests, where that has changed."""
        planned = {key: chunks for key in keys if (chunks := self._coordinator.planned(key))}
        for key in planned | self._planned:
            if planned.get(key) != self._planned.get(key):
                left = tuple((chunk.new_tokens, chunk.members) for chunk in planned.get(key, ()))
                self.plans.append(PlannedChunks(now_s, key, left))
        self._planned = planned


class LongPool:
    """A prefill stage."""

    def __init__(
        self,
        loop: EventLoop,
        spec: ClusterSpec,
        candidates: Sequence[SpCandidate],
        options: LongPoolOptions,
        listener: PrefillListener,
        is_recorded: bool,
    ) -> None:
        self._loop = loop
        self._spec = spec
        self._options = options
        self._listener = listener
        self._candidates = tuple(candidates)
        self._costs = {candidate.size: candidate.cost for candidate in candidates}
        planner = PricePlanner(
            PriceOptions(self._candidates, options.min_chunk_tokens, cross_node_factor=options.cross_node_factor)
        )
        settings = CoordinationSettings(
            layers=1,
            chunk_s=options.chunk_s,
            bind_ahead_s=0.0,
            ttft_slo_s=options.slo_s,
            slo_stretch=options.slo_stretch,
        )
        self.coordinator = Coordinator(PoolSchedule(planner, options.order()), settings)
        self._held_tokens = [0] * spec.instances
        self._holds: dict[int, dict[int, int]] = {}  # by request: tokens by instance
        self._alone_s = [0.0] * spec.instances  # until an instance has computed what it computes by itself
        self._progress: dict[int, _Progress] = {}
        self._running: dict[int, _RunningGroup] = {}  # by request
        self._tickets: dict[int, int] = {}  # request by ticket, before it is bound
        self._next_ticket = 0
        self._keeps_kv = False
        self._waiting_alone: list[tuple[_Progress, int, int]] = []  # for room at their owner: prompt, owner, cached
        self._noise = Random(f"noise {options.noise_seed}")
        self._is_recorded = is_recorded
        self.timeline: list[BusyInterval] = []
        self._plan_log = PlanLog(self.coordinator)
        for instance in range(spec.instances):
            self._join(instance)

    @property
    def plans(self) -> list[PlannedChunks]:
        """Return what was planned when, where the run is recorded."""
        return self._plan_log.plans

    def arrive(self, request: SimRequest) -> None:
        if request.prompt_tokens > max(self._costs) * self._spec.kv_tokens:
            self._listener.on_refused(request)  # no group can ever hold it
            return
        self._announce(_Progress(request))

    def schedule_failure(self, failure: Failure) -> None:
        """ValueError for an instance that does not exist."""
        if not 0 <= failure.instance < self._spec.instances:
            raise ValueError(f"instance {failure.instance} does not exist, there are {self._spec.instances}")
        self._loop.schedule(failure.at_s, self._fail, failure)

    def unfinished(self) -> Iterable[SimRequest]:
        return [progress.request for progress in self._progress.values()]

    def keep_until_transferred(self) -> None:
        """Hold the KV of a prompt that has its first token until `transferred`, from now on."""
        self._keeps_kv = True

    def transferred(self, request: SimRequest) -> None:
        """Decode has the KV of a prompt that has its first token."""
        now_s = self._loop.now_s
        if request.key in self.coordinator.requests:
            self._carry_out(self.coordinator.transferred(request.key, now_s))
        else:
            self._carry_out([*self._free(request.key), *self.coordinator.plan(now_s)])
        waiting, self._waiting_alone = self._waiting_alone, []
        for waiting_prompt in waiting:
            self._start_alone(*waiting_prompt)

    # ---- orders ----

    def _announce(self, progress: _Progress) -> None:
        request, now_s = progress.request, self._loop.now_s
        tokens, cached = request.prompt_tokens, request.cached_tokens
        self._next_ticket -= 1
        self._progress[request.key] = progress
        members = self.coordinator.members
        if members and not self._options.is_announced:
            progress.owner = members[-self._next_ticket % len(members)]
            ideal_s = fastest_s(self._candidates, cached, request.new_tokens)
            deadline_s = request.arrival_s + max(self._options.slo_s, self._options.slo_stretch * ideal_s)
            self._carry_out(self.coordinator.offer(self._offer(request, progress.owner, deadline_s), now_s))
            return
        progress.owner = None
        self._tickets[self._next_ticket] = request.key
        ticket = PromptTicket(self._next_ticket, tokens, cached, request.arrival_s, None)
        self._carry_out(self.coordinator.announce(ticket, now_s))

    def _offer(self, request: SimRequest, owner: int, deadline_s: float = math.inf) -> Offer:
        return Offer(
            *(request.key, owner, request.prompt_tokens, request.cached_tokens, request.arrival_s, deadline_s),
            is_streamed=True,
            fits_owner=request.prompt_tokens <= self._spec.kv_tokens,
        )

    def _carry_out(self, orders: Iterable[Order]) -> None:
        waiting = deque(orders)
        while waiting:
            waiting.extend(self._carry_out_one(waiting.popleft()))
        if self._is_recorded:
            self._plan_log.record(self._loop.now_s, self._progress)

    def _carry_out_one(self, order: Order) -> Sequence[Order]:
        now_s = self._loop.now_s
        match order:
            case Bind(ticket, owner):
                progress = self._progress[self._tickets.pop(ticket)]
                progress.owner = owner
                return self.coordinator.claim(ticket, self._offer(progress.request, owner), now_s)
            case RunChunk():
                self._run_chunk(order)
            case Collect():
                return self._end_collect(order)
            case Finish(key):
                # Decode gets the KV from where it was computed, while it is.
                self._end(self._progress.pop(key))
                return () if self._keeps_kv else self.coordinator.transferred(key, now_s)
            case Decline(key, owner, reason):
                self._compute_alone(self._progress[key], owner, reason)
            case Drop(key):
                return self._free(key)
        return ()

    def _run_chunk(self, order: RunChunk) -> None:
        progress, layout = self._progress[order.request], order.layout
        cached = sum(map(count_tokens, layout.history))
        new = sum(map(count_tokens, layout.new))
        for instance, history, part in zip(layout.group, layout.history, layout.new, strict=True):
            self._hold(order.request, instance, count_tokens(history) + count_tokens(part))
        running = _RunningGroup(order.request, layout.group, order)
        # Each member ends the ordinary work that it has begun.
        delay_s = max(0.0, max(self._alone_s[instance] for instance in layout.group) - self._loop.now_s)
        self._begin(progress, running, self._duration_s(layout.group, cached, new), new, self._end_chunk, delay_s)

    def _end_chunk(self, running: _RunningGroup) -> None:
        if running.is_void:
            return
        order, now_s = running.order, self._loop.now_s
        assert order is not None
        del self._running[running.key]
        for instance in running.group:
            self._report(instance)
        self._carry_out(self.coordinator.done_together(running.group, order.sequence, now_s))

    def _end_collect(self, order: Collect) -> Sequence[Order]:
        """Only what is not computed to its end comes to an owner; the time for that is not simulated."""
        progress = self._progress[order.request]
        computed = sum(self._holds[order.request].values())
        if computed < progress.request.prompt_tokens:
            self._start_alone(progress, order.owner, computed)
        else:
            self._end(self._progress.pop(order.request))
        return self.coordinator.done_together(order.members, order.sequence, self._loop.now_s)

    def _compute_alone(self, progress: _Progress, owner: int, reason: DeclineReason) -> None:
        request = progress.request
        alone_s = self._costs[1].predict_s(request.cached_tokens, request.new_tokens) if 1 in self._costs else math.inf
        cannot = alone_s == math.inf or request.prompt_tokens > self._spec.kv_tokens
        if cannot and reason in (DeclineReason.NO_PLAN, DeclineReason.NO_ROOM):
            del self._progress[request.key]
            self._listener.on_refused(request)
            return
        self._start_alone(progress, owner, request.cached_tokens)

    def _start_alone(self, progress: _Progress, owner: int, cached_tokens: int) -> None:
        request = progress.request
        free_tokens = self._spec.kv_tokens - self._held_tokens[owner]
        if self._keeps_kv and free_tokens < request.prompt_tokens - self._holds.get(request.key, {}).get(owner, 0):
            self._waiting_alone.append((progress, owner, cached_tokens))
            return
        new_tokens = request.prompt_tokens - cached_tokens
        duration_s = self._duration_s((owner,), cached_tokens, new_tokens)
        self._hold(request.key, owner, request.prompt_tokens)
        self._alone_s[owner] = max(self._alone_s[owner], self._loop.now_s) + duration_s
        self._report(owner)
        delay_s = self._alone_s[owner] - duration_s - self._loop.now_s
        running = _RunningGroup(request.key, (owner,), None)
        self._begin(progress, running, duration_s, new_tokens, self._end_alone, delay_s)

    def _end_alone(self, running: _RunningGroup) -> None:
        if running.is_void:
            return
        del self._running[running.key]
        self._end(self._progress.pop(running.key))
        freed = () if self._keeps_kv else self._free(running.key)
        self._carry_out([*freed, *self.coordinator.plan(self._loop.now_s)])

    def _begin(
        self,
        progress: _Progress,
        running: _RunningGroup,
        duration_s: float,
        new_tokens: int,
        handler: Callable[[_RunningGroup], None],
        delay_s: float = 0.0,
    ) -> None:
        start_s = self._loop.now_s + delay_s
        end_s = start_s + duration_s
        if progress.start_s is None:
            progress.start_s = start_s
        self._running[running.key] = running
        if self._is_recorded:
            self.timeline += [
                BusyInterval(
                    *(instance, start_s, end_s, running.key),
                    tokens=new_tokens,
                    group=() if running.order is None else running.group,
                    owner=progress.owner,
                )
                for instance in running.group
            ]
        self._loop.schedule(end_s, handler, running)

    def _end(self, progress: _Progress) -> None:
        assert progress.start_s is not None
        self._listener.on_first_token(ServedPrefill(progress.request, progress.start_s, self._loop.now_s))

    # ---- instances ----

    def _duration_s(self, group: Sequence[int], cached_tokens: int, new_tokens: int) -> float:
        """Return the predicted duration, with noise where the run has some."""
        spec = self._spec
        predicted_s = self._costs[len(group)].predict_s(cached_tokens, new_tokens)
        nodes = {instance // spec.instances_per_node for instance in group}
        factor = self._options.cross_node_factor
        if len(nodes) > 1 and len(group) <= spec.instances_per_node and factor < math.inf:
            predicted_s *= factor
        if self._options.noise:
            predicted_s *= max(0.1, self._noise.gauss(1.0, self._options.noise))
        return predicted_s

    def _hold(self, key: int, instance: int, tokens: int) -> None:
        holds = self._holds.setdefault(key, {})
        self._held_tokens[instance] += tokens - holds.get(instance, 0)
        holds[instance] = tokens

    def _free(self, key: int) -> Sequence[Order]:
        holds = self._holds.pop(key, {})
        for instance, tokens in holds.items():
            self._held_tokens[instance] -= tokens
            self._report(instance)
        return self.coordinator.plan(self._loop.now_s) if self.coordinator.waits_for_room else ()

    def _report(self, instance: int) -> None:
        self.coordinator.report(instance, self._report_of(instance), self._loop.now_s)

    def _report_of(self, instance: int) -> MemberReport:
        backlog_s = max(0.0, self._alone_s[instance] - self._loop.now_s)
        return MemberReport(backlog_s, self._spec.kv_tokens - self._held_tokens[instance])

    def _join(self, instance: int) -> None:
        self._alone_s[instance] = 0.0
        node = instance // self._spec.instances_per_node
        self._carry_out(self.coordinator.join(instance, node, self._report_of(instance), self._loop.now_s))

    def _fail(self, failure: Failure) -> None:
        """Fail an instance: its KV is gone, and the prompts that it was given have to be planned again."""
        lost, now_s = failure.instance, self._loop.now_s
        if lost not in self.coordinator.members:
            return
        self._alone_s[lost] = 0.0
        for holds in self._holds.values():
            self._held_tokens[lost] -= holds.pop(lost, 0)
        orphans = [progress for progress in self._progress.values() if progress.owner == lost]
        gone = {progress.request.key for progress in orphans}
        broken = [running for running in self._running.values() if lost in running.group or running.key in gone]
        for running in broken:
            running.is_void = True
            del self._running[running.key]
            self._cut_timeline(running.key, now_s)
        self._waiting_alone = [entry for entry in self._waiting_alone if entry[1] != lost]
        self._carry_out(self.coordinator.lose(lost, now_s))
        for running in broken:
            for instance in running.group:
                if running.order is not None and instance != lost:
                    self._carry_out(self.coordinator.failed(instance, running.order.sequence, now_s))
        for progress in orphans:
            self._announce(progress)
        self._loop.schedule(now_s + failure.down_s, self._join, lost)

    def _cut_timeline(self, key: int, now_s: float) -> None:
        self.timeline = [
            busy._replace(end_s=now_s) if busy.key == key and busy.end_s > now_s else busy for busy in self.timeline
        ]
