"""Announced prompts in the pool protocol: bound in their turn, claimed by room, withdrawn, without a pool."""

from __future__ import annotations

from array import array

import pytest

from sglang_ext.identifiers import pool_request
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_protocol import Events, PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import PoolSettings
from sglang_ext.long_pool.coordinator.tickets import (
    Announcement,
    BoundPrompt,
    TicketEnd,
    TicketError,
    TicketProblem,
    TicketTimes,
)
from sglang_ext.long_pool.decide.orders import MemberReport
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from sglang_ext.long_pool.messages import (
    PROTOCOL_VERSION,
    AddressedMessage,
    ChunkOrder,
    DeclineMessage,
    Hello,
    OfferMessage,
    ReportMessage,
    StepDone,
)
from sglang_ext.long_pool.step_clock import StepTimes

IDS = array("i", range(400))
TIMES = StepTimes(1.0, 0.2, 0.1)


class Pool:
    """Members and a clock. A prompt of 400 tokens takes two of them 2.05 s, one of them 4 s."""

    def __init__(self, *names: str, min_tokens: int = 100) -> None:
        costs = PoolCosts([SpCandidate(size, SpCost(0.05 * (size - 1), 0.01 / size, 0.0, 0.0)) for size in (1, 2)])
        self.protocol = PoolProtocol(PoolSettings(min_chunk_tokens=16), costs)
        self.now_s = 100.0
        for instance, name in enumerate(names):
            hello = Hello(PROTOCOL_VERSION, name, "node", "m", 3, 1, MemberReport(0.0, 100_000), min_tokens)
            self.protocol.greet(hello)
            self.protocol.join(instance, hello, self.now_s)

    def wait(self, seconds: float) -> list[AddressedMessage]:
        self.now_s += seconds
        for instance in self.protocol.members:
            self.protocol.take(instance, ReportMessage(MemberReport(0.0, 100_000)), self.now_s)
        return self.protocol.tick(self.now_s)

    def announce(
        self, room: int, tokens: int = 401, cached_tokens: int = 0, slack_s: float | None = None, is_online: bool = True
    ) -> list[BoundPrompt]:
        self.now_s += 0.001
        self.protocol.announce(Announcement(room, tokens, cached_tokens, 0.0, slack_s, is_online), self.now_s)
        return self.events().bound

    def turns(self) -> list[int]:
        """The rooms in the order in which they are bound, each forgotten then."""
        rooms: list[int] = []
        self.wait(0.0)
        while bound := self.events().bound:
            rooms += [one.room for one in bound]
            for one in bound:
                self.protocol.withdraw(one.room, self.now_s)
        return rooms

    def claim(self, owner: int, room: int | None, request: int = 1) -> list[AddressedMessage]:
        offer = OfferMessage(pool_request(owner, request), IDS, 0, 0.0, None, (), room)
        return self.protocol.take(owner, offer, self.now_s)

    def events(self) -> Events:
        return self.protocol.take_events()


def test_two_prompts_of_one_pool_each_bound_in_its_turn() -> None:
    pool = Pool("a", "b")
    assert [one.room for one in pool.announce(70)] == [70]
    first_s = pool.now_s
    assert pool.announce(71) == []  # both members are kept for the first
    second_s = pool.now_s
    assert pool.protocol.status(pool.now_s).tickets_waiting == 1
    pool.now_s += 0.1
    chunks = pool.claim(0, 70)
    assert [(one.instance, type(one.message)) for one in chunks] == [(0, ChunkOrder), (1, ChunkOrder)]
    assert pool.events().bound == [BoundPrompt(70, "a")]  # of the claim; no turn of the other yet
    pool.wait(1.0)
    assert pool.events().bound == []
    order = chunks[0].message
    assert isinstance(order, ChunkOrder)
    pool.now_s += 1.0
    for instance in (0, 1):
        pool.protocol.take(instance, StepDone(order.chunk.sequence, TIMES, 1000), pool.now_s)
    for instance in (1, 0):
        pool.protocol.take(instance, StepDone(order.chunk.sequence + 1, TIMES, 1000), pool.now_s)
    (bound,) = pool.events().bound
    assert bound.room == 71
    status = pool.protocol.status(pool.now_s)
    assert status.tickets_waiting == 0
    assert [one.ticket for one in status.recent] == [TicketTimes(first_s, first_s)]
    assert pool.claim(1, 71)
    (running,) = pool.protocol.status(pool.now_s).requests
    assert running.ticket == TicketTimes(second_s, pool.now_s)
    assert running.offered_s == pool.now_s
    assert pool.protocol.tickets.ends == {TicketEnd.CLAIMED: 2}


def test_the_pool_sets_the_objective_by_what_a_prompt_takes_and_clients_their_own() -> None:
    pool = Pool("a", "b")
    for instance in (0, 1):
        pool.protocol.take(instance, ReportMessage(MemberReport(0.8, 100_000)), pool.now_s)
    # On both members they take 10, 2 and 10 s: the pool's deadlines are after 50 and 10 s, the client's after 30 s.
    assert pool.announce(72, 2000, is_online=False) == []
    assert pool.announce(70, 2000) == []
    assert pool.announce(73, 2000, slack_s=30.0) == []
    assert pool.announce(71, 400) == []
    assert pool.turns() == [71, 73, 70, 72]


def test_a_tick_binds_what_waits_though_nothing_runs() -> None:
    pool = Pool("a", "b")
    for instance in (0, 1):
        pool.protocol.take(instance, ReportMessage(MemberReport(0.8, 100_000)), pool.now_s)
    assert pool.announce(70) == []
    pool.wait(1.0)
    assert [one.room for one in pool.events().bound] == [70]


def test_without_a_known_ticket_an_offer_is_an_offer() -> None:
    pool = Pool("a", "b")
    assert pool.claim(0, 70)
    (running,) = pool.protocol.status(pool.now_s).requests
    assert running.ticket is None
    assert pool.events().bound == []


def test_one_that_is_offered_before_its_turn_is_answered() -> None:
    pool = Pool("a", "b")
    pool.announce(70)
    assert pool.announce(71) == []
    pool.claim(1, 71)
    assert pool.events().bound == [BoundPrompt(71, "b")]
    assert pool.protocol.status(pool.now_s).tickets_waiting == 0


def test_one_that_is_left_to_its_instance_is_as_old_as_its_ticket() -> None:
    for room, waited_s in ((70, 1.5), (None, 0.0)):
        pool = Pool("a")
        if room is not None:
            pool.announce(room)
        pool.wait(1.5)
        (answer,) = (one.message for one in pool.claim(0, room) if isinstance(one.message, DeclineMessage))
        assert answer.waited_s == pytest.approx(waited_s)


def test_one_that_is_withdrawn_frees_its_group() -> None:
    pool = Pool("a", "b")
    pool.announce(70)
    pool.announce(71)
    pool.protocol.withdraw(70, pool.now_s)
    assert [one.room for one in pool.events().bound] == [71]
    pool.protocol.withdraw(70, pool.now_s)
    pool.protocol.withdraw(12, pool.now_s)
    assert pool.events() == Events()
    assert pool.protocol.tickets.ends == {TicketEnd.WITHDRAWN: 1}


def test_the_last_member_takes_them_with_it() -> None:
    pool = Pool("a", "b")
    pool.announce(70)
    pool.announce(71)
    pool.protocol.lose(0, "gone", pool.now_s)
    events = pool.events()
    assert events.unserved == []
    assert [one.room for one in events.bound] in ([], [71])
    pool.protocol.lose(1, "gone", pool.now_s)
    assert pool.events().unserved == ([] if events.bound else [71])
    with pytest.raises(TicketError) as caught:
        pool.announce(72)
    assert caught.value.problem is TicketProblem.NO_POOL


def test_what_the_members_would_not_offer_is_refused() -> None:
    pool = Pool("a", "b", min_tokens=300)
    for tokens, cached_tokens in ((299, 0), (500, 201)):
        with pytest.raises(TicketError, match="members share 300 or more") as caught:
            pool.announce(70, tokens, cached_tokens)
        assert caught.value.problem is TicketProblem.TOO_SHORT
    assert pool.announce(70, 500, 200)
    with pytest.raises(TicketError, match="already"):
        pool.announce(70, 500)
