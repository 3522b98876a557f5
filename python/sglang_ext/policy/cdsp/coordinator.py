"""Which instances compute which chunk next: the coordinator of a long pool as a state machine.

Events come in (an instance joins, is lost, has done a chunk; a request is offered, cancelled), orders go out. Nothing
waits here and nothing is sent: a driver does both.

- An instance has at most one chunk at a time, and a chunk is ordered from all its members at once. So no two instances
  can wait for each other: there is no deadlock to avoid.
- What has not been ordered is planned again at every event (`replanning`).
- Whatever fails, positions that a member holds are kept, and only lost ones are computed again. A request that keeps
  failing goes back to the instance that it came to, which can always compute it alone.

Membership is counted in epochs. Every change starts one, in which the mesh between the instances is built anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.policy.cdsp.orders import (
    BuildMesh,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    MemberReport,
    Offer,
    Order,
    RollBack,
    RunChunk,
)
from sglang_ext.policy.cdsp.plan import ChunkPlan, NoPlan, PlannedChunk, PrefillSnapshot
from sglang_ext.policy.cdsp.planner import CdspPlanner
from sglang_ext.policy.cdsp.replanning import PendingPrefill, ReplanMode, ideal_prefill_s, replan
from sglang_ext.policy.cdsp.sharding import (
    Interleaving,
    KvSegment,
    Positions,
    count_tokens,
    gather,
    head,
    lay_out,
    positions_of,
    without,
)

_TAG_SPACE = 2**31 - 1


class CoordinationSettings(NamedTuple):
    """What does not change while a pool is served."""

    layers: int  # of the model: every layer of a transfer has a tag
    page_tokens: int = 1
    interleaving: Interleaving = Interleaving.ZIGZAG
    mode: ReplanMode = ReplanMode.LARS
    improvement_rate: float = 0.05
    max_attempts: int = 3  # failed chunks of a request before its own instance computes it alone
    mesh_timeout_s: float = 5.0  # so long a request waits for a mesh; then its own instance computes it alone


@dataclass(slots=True)
class _RunningStep:
    """An ordered step that not all of its members have answered for."""

    order: RunChunk | Collect
    before: dict[int, tuple[KvSegment, ...]]  # what was held when it was ordered
    after: dict[int, tuple[KvSegment, ...]]
    ends_s: float  # predicted
    waiting: set[int]
    has_failed: bool = False
    done: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _SharedPrefill:
    offer: Offer
    total_s: float
    held: dict[int, tuple[KvSegment, ...]]
    todo: Positions
    group: tuple[int, ...]
    idle_s: float  # since when no step of it runs
    involved: set[int]  # instances that may know of it: its owner, and all that were given a step of it
    running: _RunningStep | None = None
    attempts: int = 0
    is_cancelled: bool = False


@dataclass(slots=True)
class _PoolInstance:
    node: int
    report: MemberReport
    step: int | None = None  # sequence of the step that it is in
    mesh_epoch: int = 0
    reported_s: float | None = None

    def backlog_s(self, now_s: float) -> float:
        """Ordinary work that is left: an instance that sends no report works on what it has reported."""
        since_s = 0.0 if self.reported_s is None else now_s - self.reported_s
        return max(0.0, self.report.backlog_s - since_s)


class Coordinator:
    """One long pool. Every method takes an event and returns the orders that follow from it, in their order."""

    def __init__(self, planner: CdspPlanner, settings: CoordinationSettings, first_epoch: int = 0) -> None:
        """Epochs begin above `first_epoch`: a pool that takes another's place does not repeat its epochs."""
        self._planner = planner
        self._settings = settings
        self._improvement_rate = settings.improvement_rate
        self._members: dict[int, _PoolInstance] = {}
        self._requests: dict[int, _SharedPrefill] = {}
        self._steps: dict[int, _SharedPrefill] = {}  # by sequence
        self._epoch = first_epoch
        self._next_sequence = 1
        self._next_tag = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self._members))

    @property
    def requests(self) -> tuple[int, ...]:
        return tuple(self._requests)

    @property
    def is_connected(self) -> bool:
        """Whether all members have the mesh of this epoch."""
        return all(member.mesh_epoch == self._epoch for member in self._members.values())

    def use_planner(self, planner: CdspPlanner) -> None:
        """Plan with other costs from now on."""
        self._planner = planner

    def use_improvement_rate(self, improvement_rate: float) -> None:
        """Plan with another improvement rate from now on, 0 to below 1."""
        self._improvement_rate = improvement_rate

    def held_by(self, instance: int) -> int:
        """Tokens that requests hold there, as far as is known."""
        return sum(count_tokens(positions_of(one.held.get(instance, ()))) for one in self._requests.values())

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, instance: int, node: int, report: MemberReport) -> list[Order]:
        """An instance has come, or has come back and knows nothing of what it held."""
        orders = self.lose(instance, 0.0) if instance in self._members else []
        self._members[instance] = _PoolInstance(node, report)
        return [*[one for one in orders if not isinstance(one, BuildMesh)], self._new_epoch()]

    def lose(self, instance: int, now_s: float) -> list[Order]:
        """An instance has gone: killed, unreachable, or moved to another pool. What it held is lost."""
        if self._members.pop(instance, None) is None:
            return []
        orders: list[Order] = []
        for one in list(self._requests.values()):
            running = one.running
            one.involved.discard(instance)
            if running is not None:
                running.has_failed |= instance in running.waiting | running.done
                running.waiting.discard(instance)
                running.done.discard(instance)
                running.before.pop(instance, None)
                running.after.pop(instance, None)
            if one.offer.owner == instance:
                one.is_cancelled = True
            else:
                one.held.pop(instance, None)
                one.group = tuple(member for member in one.group if member != instance)
            if running is None:
                orders += self._settle(one)
            elif not running.waiting:
                orders += self._end_step(one, now_s)
        return [*orders, self._new_epoch(), *self.plan(now_s)]

    def report(self, instance: int, report: MemberReport, now_s: float) -> None:
        """An instance's newest report. `plan` follows when it matters."""
        if instance in self._members:
            self._members[instance].report = report
            self._members[instance].reported_s = now_s

    def mesh_built(self, instance: int, epoch: int, now_s: float) -> list[Order]:
        """An instance is connected to all members of this epoch."""
        if instance not in self._members or epoch > self._epoch:
            return []
        self._members[instance].mesh_epoch = max(self._members[instance].mesh_epoch, epoch)
        return self.plan(now_s)

    def mesh_failed(self, instance: int, epoch: int) -> list[Order]:
        """An instance could not connect to all members of this epoch: once more, unless that has been ordered."""
        return [self._new_epoch()] if epoch == self._epoch and instance in self._members else []

    # -- requests ----------------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now_s: float) -> list[Order]:
        """A long prefill could be shared. ValueError for numbers that make no sense or a request that is there."""
        if offer.request in self._requests or not 0 <= offer.cached_tokens < offer.tokens:
            raise ValueError(f"request {offer.request} is offered twice, or with {offer.cached_tokens} cached tokens")
        if offer.owner not in self._members:
            return [Decline(offer.request, offer.owner, DeclineReason.NOT_A_MEMBER)]
        costs = [candidate.cost for candidate in self._planner.config.candidates]
        cached: Positions = (range(offer.cached_tokens),) if offer.cached_tokens else ()
        self._requests[offer.request] = _SharedPrefill(
            offer,
            max(1e-9, ideal_prefill_s(costs, offer.cached_tokens, offer.tokens - offer.cached_tokens)),
            {offer.owner: (KvSegment(cached, is_borrowed=True),)} if cached else {},
            (range(offer.cached_tokens, offer.tokens),),
            (offer.owner,),
            now_s,
            {offer.owner},
        )
        return self.plan(now_s)

    def cancel(self, request: int, now_s: float) -> list[Order]:
        """The client has gone, or the owner has given the request up."""
        one = self._requests.get(request)
        if one is None:
            return []
        one.is_cancelled = True
        return [*self._settle(one), *self.plan(now_s)] if one.running is None else []

    def done(self, instance: int, sequence: int, now_s: float) -> list[Order]:
        """A member has done its part of a step."""
        return self._answer(instance, sequence, now_s, is_done=True)

    def failed(self, instance: int, sequence: int, now_s: float) -> list[Order]:
        """A member could not do its part, and is as before it: its KV pool is full, or a peer did not answer."""
        return self._answer(instance, sequence, now_s, is_done=False)

    def plan(self, now_s: float) -> list[Order]:
        """Order whatever can start now. Called by every event; call it also when reports have changed."""
        orders: list[Order] = []
        idle = [one for one in self._requests.values() if one.running is None]
        for one in idle:
            if not one.todo:
                orders += self._collect_to_owner(one, DeclineReason.NO_PLAN, now_s)
        pending = [one for one in idle if one.todo]
        if not pending:
            return orders
        indices = {instance: index for index, instance in enumerate(self.members)}
        snapshot = self._snapshot(now_s)
        planned = replan(
            self._planner,
            self._settings.mode,
            now_s,
            snapshot,
            [self._as_pending(one, indices) for one in pending],
            self._improvement_rate,
        )
        for entry in planned:
            orders += self._start(self._requests[entry.key], entry.plan, now_s)
        return orders

    # -- steps -------------------------------------------------------------------------------------------------------

    def _start(self, one: _SharedPrefill, plan: ChunkPlan | NoPlan, now_s: float) -> list[Order]:
        """The first chunk of a plan, if all it needs is there."""
        if isinstance(plan, NoPlan):
            return self._collect_to_owner(one, DeclineReason.NO_PLAN, now_s)
        members = self.members
        chunk = plan.chunks[0]
        group = tuple(members[index] for index in chunk.instances)
        if len(plan.chunks) == 1 and group == (one.offer.owner,) and not self._is_shared(one):
            return self._collect_to_owner(one, DeclineReason.ALONE_IS_BEST, now_s)
        if self._has_timed_out(one, group, now_s):
            return self._decline(one, DeclineReason.MESH_DOWN)
        backlog_s = max(self._members[instance].backlog_s(now_s) for instance in group)
        if chunk.start_s > backlog_s + 1e-9 or not self._are_ready(group):
            return []
        return [self._order_chunk(one, chunk, group, now_s)]

    def _order_chunk(self, one: _SharedPrefill, chunk: PlannedChunk, group: tuple[int, ...], now_s: float) -> Order:
        settings = self._settings
        positions = head(one.todo, chunk.tokens)
        layout, after = lay_out(one.held, positions, group, settings.interleaving, settings.page_tokens)
        tags = settings.layers * (len(layout.group) + len(layout.moves))
        order = RunChunk(self._sequence(), self._epoch, one.offer.request, layout, self._tags(tags))
        one.group = group
        self._run(one, order, group, after, now_s + chunk.compute_s)
        return order

    def _collect_to_owner(self, one: _SharedPrefill, reason: DeclineReason, now_s: float) -> list[Order]:
        """Nothing is left to compute here: what has been computed goes to the owner, once the holders are free."""
        if all(segment.is_borrowed for segments in one.held.values() for segment in segments):
            return self._decline(one, reason)
        owner = one.offer.owner
        members = (
            owner,
            *sorted(instance for instance, segments in one.held.items() if segments and instance != owner),
        )
        if self._has_timed_out(one, members, now_s):
            return self._decline(one, DeclineReason.MESH_DOWN)
        if not self._are_ready(members):
            return []
        moves = gather(one.held, owner)
        tag = self._tags(self._settings.layers * len(moves))
        order = Collect(self._sequence(), self._epoch, one.offer.request, owner, members, moves, tag)
        self._run(one, order, members, {}, 0.0)
        return [order]

    def _run(
        self,
        one: _SharedPrefill,
        order: RunChunk | Collect,
        members: Sequence[int],
        after: dict[int, tuple[KvSegment, ...]],
        ends_s: float,
    ) -> None:
        one.running = _RunningStep(order, dict(one.held), after, ends_s, set(members))
        self._steps[order.sequence] = one
        one.involved.update(members)
        for instance in members:
            self._members[instance].step = order.sequence

    def _answer(self, instance: int, sequence: int, now_s: float, *, is_done: bool) -> list[Order]:
        one = self._steps.get(sequence)
        running = None if one is None else one.running
        if one is None or running is None or instance not in running.waiting:
            return []  # late, twice, or from before the instance was lost
        running.waiting.discard(instance)
        self._members[instance].step = None
        if one.offer.owner == instance and is_done and isinstance(running.order, Collect):
            # From here on the request is its owner's again.
            one.is_cancelled = False
        if is_done:
            running.done.add(instance)
        else:
            running.has_failed = True
        orders = [] if running.waiting else self._end_step(one, now_s)
        if not is_done and running.order.epoch == self._epoch:
            # A member that fails has closed its connections, or broken them at a timeout; a later epoch has others.
            orders.append(self._new_epoch())
        return [*orders, *self.plan(now_s)]

    def _end_step(self, one: _SharedPrefill, now_s: float) -> list[Order]:
        running = one.running
        assert running is not None
        order = running.order
        one.running, one.idle_s = None, now_s
        del self._steps[order.sequence]
        for member in self._members.values():
            if member.step == order.sequence:
                member.step = None
        if isinstance(order, Collect) and order.owner in running.done:
            # Copies of what the owner has got do not matter, nor how their holders fared.
            return self._forget(one)
        if not running.has_failed:
            assert isinstance(order, RunChunk)
            one.held = running.after
            one.todo = without_head(one.todo, sum(count_tokens(part) for part in order.layout.new))
            return self._settle(one)
        orders: list[Order] = []
        back = tuple(sorted(running.done))
        if back:
            orders.append(RollBack(order.sequence, order.request, back))
        one.held = running.before
        one.attempts += 1
        return [*orders, *self._settle(one)]

    def _settle(self, one: _SharedPrefill) -> list[Order]:
        """A request of which no step runs: end it, or find anew what is left of it to compute."""
        if one.is_cancelled:
            return self._forget(one)
        if one.attempts >= self._settings.max_attempts:
            return self._decline(one, DeclineReason.FAILURES)
        held = tuple(part for segments in one.held.values() for part in positions_of(segments))
        expected = one.offer.tokens - count_tokens(one.todo)
        if count_tokens(held) != expected:
            one.todo = without((range(one.offer.tokens),), held)
            one.group = (
                one.offer.owner,
                *sorted(i for i, segments in one.held.items() if segments and i != one.offer.owner),
            )
        return []

    def _decline(self, one: _SharedPrefill, reason: DeclineReason) -> list[Order]:
        return [*self._forget(one), Decline(one.offer.request, one.offer.owner, reason)]

    def _forget(self, one: _SharedPrefill) -> list[Order]:
        # Also those that hold nothing any more: they may still be sending of it.
        del self._requests[one.offer.request]
        members = tuple(sorted(one.involved & self._members.keys()))
        return [Drop(one.offer.request, members)] if members else []

    # -- what is so --------------------------------------------------------------------------------------------------

    def _snapshot(self, now_s: float) -> PrefillSnapshot:
        nodes, delays_s, free = [], [], []
        for instance in self.members:
            member = self._members[instance]
            one = None if member.step is None else self._steps[member.step]
            left_s = max(0.0, one.running.ends_s - now_s) if one is not None and one.running is not None else 0.0
            nodes.append(member.node)
            delays_s.append(left_s + member.backlog_s(now_s))
            free.append(member.report.free_kv_tokens)
        return PrefillSnapshot(nodes, delays_s, free)

    def _as_pending(self, one: _SharedPrefill, indices: dict[int, int]) -> PendingPrefill:
        offer = one.offer
        left = count_tokens(one.todo)
        group = tuple(indices[instance] for instance in one.group if instance in indices)
        return PendingPrefill(
            offer.request, left, offer.tokens - left, group, offer.arrival_s, offer.deadline_s, one.total_s
        )

    def _is_shared(self, one: _SharedPrefill) -> bool:
        return any(segments for instance, segments in one.held.items() if instance != one.offer.owner)

    def _has_timed_out(self, one: _SharedPrefill, group: Sequence[int], now_s: float) -> bool:
        """Whether it has waited long enough for these to be connected."""
        is_connected = all(self._members[instance].mesh_epoch == self._epoch for instance in group)
        return not is_connected and now_s > one.idle_s + self._settings.mesh_timeout_s

    def _are_ready(self, group: Sequence[int]) -> bool:
        members = [self._members[instance] for instance in group]
        return all(member.step is None and member.mesh_epoch == self._epoch for member in members)

    def _new_epoch(self) -> BuildMesh:
        self._epoch += 1
        return BuildMesh(self._epoch, self.members)

    def _sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1

    def _tags(self, count: int) -> int:
        """The first of `count` tags; numbers come round long after the last message that used them."""
        if self._next_tag + count > _TAG_SPACE:
            self._next_tag = 0
        self._next_tag += count
        return self._next_tag - count


def without_head(positions: Positions, tokens: int) -> Positions:
    """All but the first `tokens` of them."""
    kept: list[range] = []
    for part in positions:
        if tokens < len(part):
            kept.append(part[max(0, tokens) :])
        tokens -= len(part)
    return tuple(kept)
