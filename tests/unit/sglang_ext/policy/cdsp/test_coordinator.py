"""The coordinator against instances that answer late, fail and vanish: every request ends, nothing is held twice."""

from __future__ import annotations

import math
import random
from collections import deque
from typing import Any

import pytest

from sglang_ext.policy.cdsp.coordinator import CoordinationSettings, Coordinator
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
from sglang_ext.policy.cdsp.pool_schedule import PoolSchedule
from sglang_ext.policy.cdsp.price_planner import PriceOptions, PricePlanner
from sglang_ext.policy.cdsp.sharding import KvSegment, after_moves, compacted, positions_of
from sglang_ext.policy.cdsp.sp_cost import SpCandidate, SpCost

IDLE = MemberReport(0.0, 100_000)


def schedule(sizes: tuple[int, ...] = (1, 2, 4), min_chunk_tokens: int = 64, start_s: float = 0.001) -> PoolSchedule:
    """Two instances take half the time and a little more."""
    candidates = tuple(
        SpCandidate(size, SpCost(start_s * size, 1e-3 / size, 2e-7 / size, 1e-7 / size)) for size in sizes
    )
    return PoolSchedule(PricePlanner(PriceOptions(candidates, min_chunk_tokens)))


def coordinator(instances: int = 4, **settings: Any) -> Coordinator:
    one = Coordinator(schedule(), CoordinationSettings(layers=2, **settings))
    for instance in range(instances):
        one.join(instance, 0, IDLE)
    for instance in range(instances):
        one.mesh_built(instance, one.epoch, 0.0)
    return one


def offer(request: int = 1, owner: int = 0, tokens: int = 4000, cached: int = 0, arrival_s: float = 0.0) -> Offer:
    return Offer(request, owner, tokens, cached, arrival_s, math.inf)


def chunk_of(orders: list[Order]) -> RunChunk:
    (order,) = [one for one in orders if isinstance(one, RunChunk)]
    return order


def test_a_long_request_on_an_idle_pool_takes_everybody() -> None:
    one = coordinator()
    order = chunk_of(one.offer(offer(), 0.0))
    assert sorted(order.layout.group) == [0, 1, 2, 3]
    assert order.layout.last_token_owner == 0
    for instance in order.layout.group[:-1]:
        assert one.done(instance, order.sequence, 1.0) == []
    (collect,) = one.done(order.layout.group[-1], order.sequence, 1.0)
    assert isinstance(collect, Collect)
    assert collect.owner == 0
    for instance in collect.members[:-1]:
        assert one.done(instance, collect.sequence, 2.0) == []
    assert one.done(collect.members[-1], collect.sequence, 2.0) == [Drop(1, collect.members)]
    assert one.requests == ()


def test_what_the_owner_has_is_not_collected_again() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    one.done(0, order.sequence, 1.0)
    (collect,) = one.done(1, order.sequence, 1.0)
    assert isinstance(collect, Collect)
    one.done(0, collect.sequence, 2.0)
    assert one.lose(1, 2.1)[0] == Drop(1, (0,))
    assert one.requests == ()


def test_a_request_that_is_best_alone_goes_back() -> None:
    one = coordinator()
    assert one.offer(offer(tokens=2), 0.0) == [Drop(1, (0,)), Decline(1, 0, DeclineReason.ALONE_IS_BEST)]
    assert one.requests == ()


def test_strangers_are_declined() -> None:
    assert coordinator().offer(offer(owner=9), 0.0) == [Decline(1, 9, DeclineReason.NOT_A_MEMBER)]


@pytest.mark.parametrize("bad", [offer(tokens=10, cached=10), offer(tokens=0), offer(cached=-1)])
def test_offers_that_make_no_sense(bad: Offer) -> None:
    with pytest.raises(ValueError, match="cached tokens"):
        coordinator().offer(bad, 0.0)


def test_nothing_starts_before_the_mesh_is_there() -> None:
    one = Coordinator(schedule(), CoordinationSettings(layers=2))
    one.join(0, 0, IDLE)
    (mesh,) = one.join(1, 0, IDLE)
    assert mesh == BuildMesh(2, (0, 1))
    assert one.offer(offer(), 0.0) == []
    assert one.mesh_built(0, 2, 0.1) == []
    assert one.mesh_built(0, 1, 0.1) == []
    assert chunk_of(one.mesh_built(1, 2, 0.2)).epoch == 2


def test_a_mesh_that_never_comes_is_not_waited_for() -> None:
    one = Coordinator(schedule(), CoordinationSettings(layers=2, mesh_timeout_s=3.0))
    one.join(0, 0, IDLE)
    one.join(1, 0, IDLE)
    assert one.offer(offer(), 0.0) == []
    assert one.mesh_failed(1, 2) == [BuildMesh(3, (0, 1))]
    assert one.mesh_failed(0, 2) == []
    assert one.plan(2.9) == []
    assert one.plan(3.1)[-1] == Decline(1, 0, DeclineReason.MESH_DOWN)


def test_what_a_lost_instance_held_is_computed_again_and_nothing_else() -> None:
    one = Coordinator(schedule((1, 2), 64), CoordinationSettings(layers=2))
    for instance in range(3):
        one.join(instance, 0, IDLE)
    for instance in range(3):
        one.mesh_built(instance, one.epoch, 0.0)
    order = chunk_of(one.offer(offer(), 0.0))
    other = next(instance for instance in order.layout.group if instance != 0)
    for instance in order.layout.group:
        orders = one.done(instance, order.sequence, 1.0)
    (collect,) = orders
    assert isinstance(collect, Collect)
    # It goes while its part is on the way.
    assert [type(item) for item in one.lose(other, 1.1)] == [BuildMesh]
    for instance in one.members:
        one.mesh_built(instance, one.epoch, 1.2)
    again = one.failed(0, collect.sequence, 1.3)
    again += [item for instance in one.members for item in one.mesh_built(instance, one.epoch, 1.4)]
    repair = chunk_of(again)
    lost = {p for part in order.layout.new[order.layout.group.index(other)] for p in part}
    assert {p for positions in repair.layout.new for part in positions for p in part} == lost


def test_a_request_that_keeps_failing_goes_home() -> None:
    one = coordinator(2, max_attempts=2)
    orders = one.offer(offer(), 0.0)
    for attempt in range(2):
        order = chunk_of(orders)
        one.done(0, order.sequence, 1.0)
        orders = one.failed(1, order.sequence, 1.0)
        assert RollBack(order.sequence, 1, (0,)) in orders
        if attempt == 0:
            orders = [item for i in (0, 1) for item in one.mesh_built(i, one.epoch, 1.0)]
    assert Decline(1, 0, DeclineReason.FAILURES) in orders
    assert one.requests == ()


def test_answers_that_come_late_or_twice_change_nothing() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    one.done(0, order.sequence, 1.0)
    assert one.done(0, order.sequence, 1.0) == []
    assert one.failed(0, order.sequence, 1.0) == []
    assert one.done(1, 999, 1.0) == []
    assert one.done(7, order.sequence, 1.0) == []


def test_cancelled_while_it_runs() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    assert one.cancel(1, 0.5) == []
    one.done(0, order.sequence, 1.0)
    assert one.done(1, order.sequence, 1.0) == [Drop(1, (0, 1))]
    assert one.cancel(1, 2.0) == []


def test_what_the_owner_has_computed_is_not_thrown_away() -> None:
    """The second instance was busy when the first chunk began, and is lost before the second."""
    one = coordinator(2)
    one.report(1, MemberReport(3.0, 100_000), 0.0)
    order = chunk_of(one.offer(offer(tokens=6000), 0.0))
    assert order.layout.group == (0,)
    computed = sum(len(part) for part in order.layout.new[0])
    assert computed < 6000
    one.lose(1, 1.0)
    assert one.done(0, order.sequence, 2.0) == []
    (collect,) = one.mesh_built(0, one.epoch, 2.0)
    assert isinstance(collect, Collect)
    assert (collect.members, collect.moves) == ((0,), ())
    assert one.done(0, collect.sequence, 3.0) == [Drop(1, (0,))]


def test_an_instance_that_says_nothing_works_on_what_it_has() -> None:
    """The report was of the beginning of a long iteration, which has ended when the prompt comes."""
    one = coordinator(2)
    one.report(1, MemberReport(3.0, 100_000), 10.0)
    order = chunk_of(one.offer(offer(tokens=6000), 13.0))
    assert order.layout.group == (0, 1)


def test_the_mesh_timeout_begins_anew_with_every_step() -> None:
    """A long chunk is no reason to give up while members connect after it."""
    one = coordinator(2, mesh_timeout_s=3.0)
    order = chunk_of(one.offer(offer(), 0.0))
    one.done(0, order.sequence, 10.0)
    assert RollBack(order.sequence, 1, (0,)) in one.failed(1, order.sequence, 10.0)
    assert one.plan(12.9) == []
    assert one.plan(13.1)[-1] == Decline(1, 0, DeclineReason.MESH_DOWN)


def test_a_collection_is_not_waited_for_for_ever() -> None:
    one = coordinator(2, mesh_timeout_s=3.0)
    order = chunk_of(one.offer(offer(), 0.0))
    one.mesh_failed(1, one.epoch)
    one.done(0, order.sequence, 10.0)
    assert one.done(1, order.sequence, 10.0) == []
    assert one.plan(12.9) == []
    assert one.plan(13.1) == [Drop(1, (0, 1)), Decline(1, 0, DeclineReason.MESH_DOWN)]


def test_a_step_of_an_earlier_epoch_breaks_no_later_mesh() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(), 0.0))
    one.join(2, 0, IDLE)
    for instance in range(3):
        one.mesh_built(instance, one.epoch, 1.0)
    one.done(0, order.sequence, 2.0)
    orders = one.failed(1, order.sequence, 2.0)
    assert not [item for item in orders if isinstance(item, BuildMesh)]
    assert chunk_of(orders).epoch == one.epoch


def test_who_fails_takes_part_in_nothing_before_it_is_connected_anew() -> None:
    one = coordinator(2)
    order = chunk_of(one.offer(offer(1), 0.0))
    one.offer(offer(2, owner=1), 0.0)
    assert one.failed(0, order.sequence, 1.0) == [BuildMesh(3, (0, 1))]
    assert one.failed(1, order.sequence, 1.5) == []
    assert one.mesh_built(0, 3, 2.0) == []
    assert chunk_of(one.mesh_built(1, 3, 2.0)).epoch == 3


def test_epochs_that_have_not_begun_are_not_believed() -> None:
    one = Coordinator(schedule(), CoordinationSettings(layers=2), first_epoch=7)
    assert one.join(0, 0, IDLE) == [BuildMesh(8, (0,))]
    one.mesh_built(0, 9, 0.0)
    assert not one.is_connected
    one.mesh_built(0, 8, 0.0)
    assert one.is_connected


def test_other_costs_from_now_on() -> None:
    one = coordinator(2)
    one.use_planner(PricePlanner(PriceOptions((SpCandidate(1, SpCost(0.0, 1e-3, 0.0, 0.0)),), 64)))
    assert one.offer(offer(), 0.0)[-1] == Decline(1, 0, DeclineReason.ALONE_IS_BEST)


class SimulatedCluster:
    """Instances with mailboxes; whatever they hold they really hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.coordinator = Coordinator(
            schedule((1, 2, 3), 1, 1e-4), CoordinationSettings(layers=2, page_tokens=self.random.choice((1, 16)))
        )
        self.mail: dict[int, deque[Order]] = {}
        self.held: dict[tuple[int, int], tuple[KvSegment, ...]] = {}  # instance, request
        self.before: dict[tuple[int, int], tuple[KvSegment, ...]] = {}
        self.offers: dict[int, Offer] = {}
        self.ended: dict[int, str] = {}
        self.broken: set[int] = set()  # steps in which a peer has failed
        self.arrived: set[int] = set()  # collecting steps whose owner has everything
        for instance in range(4):
            self.join(instance)

    def join(self, instance: int) -> None:
        if instance in self.mail:
            self.forget(instance)
        self.mail[instance] = deque()
        self.deliver(self.coordinator.join(instance, 0, IDLE))

    def deliver(self, orders: list[Order]) -> None:
        for order in orders:
            if isinstance(order, Decline):
                self.end(order.request, order.reason)
                continue
            to = order.layout.group if isinstance(order, RunChunk) else order.members
            for instance in to:
                if instance in self.mail:
                    if isinstance(order, RunChunk | Collect):
                        waiting = [one for one in self.mail[instance] if isinstance(one, RunChunk | Collect)]
                        assert not waiting, "an instance has two chunks"
                    self.mail[instance].append(order)

    def end(self, request: int, how: str) -> None:
        assert request not in self.ended, "a request ends twice"
        self.ended[request] = how

    def offer(self, request: int) -> None:
        owner = self.random.choice(list(self.mail))
        tokens = self.random.choice((self.random.randrange(2, 8), self.random.randrange(200, 3000)))
        one = Offer(request, owner, tokens, self.random.choice((0, 0, tokens // 3)), self.now_s, math.inf)
        self.offers[request] = one
        if one.cached_tokens:
            self.held[owner, request] = (KvSegment((range(one.cached_tokens),), is_borrowed=True),)
        self.deliver(self.coordinator.offer(one, self.now_s))

    def kill(self, instance: int) -> None:
        self.forget(instance)
        self.deliver(self.coordinator.lose(instance, self.now_s))

    def forget(self, instance: int) -> None:
        del self.mail[instance]
        for key in [key for key in self.held if key[0] == instance]:
            del self.held[key]
        for request, one in self.offers.items():
            if one.owner == instance and request not in self.ended:
                self.ended[request] = "owner lost"

    def work(self, instance: int, may_fail: bool) -> None:
        order = self.mail[instance].popleft()
        core = self.coordinator
        if isinstance(order, BuildMesh):
            if may_fail and self.random.random() < 0.1:
                self.deliver(core.mesh_failed(instance, order.epoch))
            else:
                self.deliver(core.mesh_built(instance, order.epoch, self.now_s))
        elif isinstance(order, RollBack):
            if (instance, order.request) in self.held:  # an owner that has gone on does not look back
                self.held[instance, order.request] = self.before[instance, order.request]
        elif isinstance(order, Drop):
            self.held.pop((instance, order.request), None)
        elif isinstance(order, RunChunk | Collect):
            self.step(instance, order, may_fail)

    def step(self, instance: int, order: RunChunk | Collect, may_fail: bool) -> None:
        key = instance, order.request
        group = order.layout.group if isinstance(order, RunChunk) else order.members
        is_alone = any(member not in self.mail for member in group) and order.sequence not in self.arrived
        if (
            isinstance(order, Collect)
            and instance == order.owner
            and not is_alone
            and order.sequence not in self.broken
        ):
            if any(self.is_waiting(member, order.sequence) for member in group if member != instance):
                self.mail[instance].appendleft(order)  # it blocks until everything has come
                return
            self.arrived.add(order.sequence)
        if order.sequence in self.broken or is_alone or (may_fail and self.random.random() < 0.1):
            self.broken.add(order.sequence)
            self.deliver(self.coordinator.failed(instance, order.sequence, self.now_s))
            return
        self.before[key] = self.held.get(key, ())
        moves = order.layout.moves if isinstance(order, RunChunk) else order.moves
        mine = [move for move in moves if instance in (move.source, move.target)]
        moved = compacted(after_moves({instance: self.held.get(key, ())}, [m for m in mine if m.source == instance]))
        segments = [*moved[instance], *(KvSegment(move.positions) for move in mine if move.target == instance)]
        if isinstance(order, RunChunk):
            new = order.layout.new[group.index(instance)]
            segments += [KvSegment(new)] if new else []
            assert positions_of(segments) == (*order.layout.history[group.index(instance)], *new)
        self.held[key] = tuple(segments)
        self.deliver(self.coordinator.done(instance, order.sequence, self.now_s))
        if isinstance(order, Collect) and instance == order.owner and order.request not in self.ended:
            self.finish(order)

    def is_waiting(self, instance: int, sequence: int) -> bool:
        waiting = [order for order in self.mail.get(instance, ()) if isinstance(order, RunChunk | Collect)]
        return any(order.sequence == sequence for order in waiting)

    def finish(self, order: Collect) -> None:
        one = self.offers[order.request]
        have = sorted(p for part in positions_of(self.held[one.owner, order.request]) for p in part)
        assert have == sorted(set(have)), "a position is held twice"
        self.end(order.request, "whole" if have == list(range(one.tokens)) else "in part")
        del self.held[one.owner, order.request]

    def quiet_down(self) -> None:
        for _ in range(3000):
            self.now_s += 0.05
            busy = [instance for instance, mail in self.mail.items() if mail]
            if busy:
                self.work(self.random.choice(busy), may_fail=False)
            elif self.coordinator.requests:
                self.deliver(self.coordinator.plan(self.now_s))
            else:
                return
        raise AssertionError(f"requests {self.coordinator.requests} never end")


@pytest.mark.parametrize("seed", range(150))
def test_any_history_ends(seed: int) -> None:
    cluster = SimulatedCluster(seed)
    for request in range(1, 13):
        for _ in range(cluster.random.randrange(1, 25)):
            cluster.now_s += 0.02
            busy = [instance for instance, mail in cluster.mail.items() if mail]
            if busy:
                cluster.work(cluster.random.choice(busy), may_fail=True)
        chance = cluster.random.random()
        if chance < 0.1 and len(cluster.mail) > 1:
            cluster.kill(cluster.random.choice(list(cluster.mail)))
        elif chance < 0.2:
            cluster.join(cluster.random.randrange(6))
        elif chance < 0.3 and cluster.coordinator.requests:
            victim = cluster.random.choice(cluster.coordinator.requests)
            cluster.ended.setdefault(victim, "cancelled")
            cluster.deliver(cluster.coordinator.cancel(victim, cluster.now_s))
        if cluster.mail:
            cluster.offer(request)
    cluster.quiet_down()
    assert set(cluster.ended) == set(cluster.offers)
    # A member that holds nothing any more gets the end, too.
    assert not cluster.held


def test_most_requests_are_shared_when_nothing_fails() -> None:
    cluster = SimulatedCluster(7)
    for request in range(1, 10):
        cluster.offer(request)
        cluster.quiet_down()
    assert {how for request, how in cluster.ended.items() if cluster.offers[request].tokens >= 200} == {"whole"}
