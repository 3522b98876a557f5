"""Routers that divide budgets: together never more than the budget, and what one does not need another may spend."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext_router.decide.budget_exchange import BudgetExchange
from sglang_ext_router.decide.budgets import Bucket
from support.examples import examples

NAME = "a tokens"


class Group:
    """Routers with one budget, and what their requests have taken of it."""

    def __init__(self, count: int, per_minute: float) -> None:
        self.buckets = [Bucket(per_minute, 0.0, count) for _ in range(count)]
        self.exchanges = [BudgetExchange(f"start {number}") for number in range(count)]
        self.taken = 0.0

    def ask(self, router: int, units: float, now_s: float) -> bool:
        is_taken = self.buckets[router].take(units, now_s)
        self.taken += units if is_taken else 0.0
        return is_taken

    def exchange(self, now_s: float, arrives: list[bool] | None = None) -> None:
        """Each sends its message to each other; those arrive for which `arrives` says so."""
        count = len(self.buckets)
        fates = iter(arrives or [True] * count * count)
        messages = [
            exchange.message({NAME: bucket}, now_s)
            for exchange, bucket in zip(self.exchanges, self.buckets, strict=True)
        ]
        for receiver in range(count):
            for sender in range(count):
                if receiver != sender and next(fates, True):
                    self.exchanges[receiver].take(sender, messages[sender], {NAME: self.buckets[receiver]})
            peers = [number for number in range(count) if number != receiver]
            self.exchanges[receiver].share({NAME: self.buckets[receiver]}, peers, now_s)


@given(seed=st.integers(0, 10**6), count=st.integers(2, 4))
@settings(max_examples=examples(60), deadline=None)
def test_together_they_never_let_in_more_than_the_budget(seed: int, count: int) -> None:
    """Whatever is asked where, and whichever messages are lost."""
    random, group = Random(seed), Group(count, 600)
    now_s = 0.0
    for _ in range(100):
        now_s += random.random()
        for _ in range(random.randint(0, 5)):
            group.ask(random.randrange(count), random.randint(1, 200), now_s)
        group.exchange(now_s, [random.random() < 0.7 for _ in range(count * count)])
        assert group.taken <= 600 * (1 + now_s / 60) + 1e-3


@pytest.mark.parametrize("loads", [(1, 0, 0), (5, 1, 0), (1, 1, 1), (10, 1, 1)])
def test_the_whole_budget_is_let_in_wherever_it_is_asked_for(loads: tuple[int, ...]) -> None:
    """Within 1% of a minute's worth and what fills in two minutes."""
    group = Group(len(loads), 60_000)
    for step in range(600):
        now_s = step * 0.2
        for router, load in enumerate(loads):
            for _ in range(20 * load):
                group.ask(router, 50, now_s)
        group.exchange(now_s)
    budget = 60_000 * (1 + 599 * 0.2 / 60)
    assert 0.99 * budget <= group.taken <= budget + 1e-3


def test_a_repeated_message_is_credited_once() -> None:
    giver, taker = BudgetExchange("giver"), BudgetExchange("taker")
    rich, poor = {NAME: Bucket(100, 0.0, 2)}, {NAME: Bucket(100, 0.0, 2)}
    assert poor[NAME].take(50, 0.0)
    assert not poor[NAME].take(20, 0.0)
    giver.take(1, taker.message(poor, 0.0), rich)
    giver.share(rich, [1], 0.0)
    assert rich[NAME].level == 30
    message = giver.message(rich, 0.0)
    for _ in range(3):
        taker.take(0, {**message, "handed": {key: dict(sums) for key, sums in message["handed"].items()}}, poor)
    assert poor[NAME].level == 20


def test_a_router_that_starts_again_has_handed_over_and_received_nothing() -> None:
    giver, taker = BudgetExchange("giver"), BudgetExchange("taker")
    rich, poor = {NAME: Bucket(100, 0.0, 2)}, {NAME: Bucket(100, 0.0, 2, level=0.0)}

    def hand(giver: BudgetExchange, taker: BudgetExchange) -> float:
        """Let the taker ask for 20 units, and return what it is given."""
        assert not poor[NAME].take(20, 0.0)
        giver.take(1, taker.message(poor, 0.0), rich)
        giver.share(rich, [1], 0.0)
        taker.take(0, giver.message(rich, 0.0), poor)
        given, poor[NAME].level = poor[NAME].level, 0.0
        return given

    assert hand(giver, taker) == 20
    taker = BudgetExchange("taker, again")
    taker.take(0, giver.message(rich, 0.0), poor)  # the giver has not heard of its new start
    assert poor[NAME].level == 0
    rich[NAME].level = 50
    first = hand(giver, taker)
    assert first > 0
    rich[NAME].level = 50
    assert hand(BudgetExchange("giver, again"), taker) == pytest.approx(first)


def test_what_is_refused_nowhere_stays_where_it_is() -> None:
    group = Group(3, 600)
    assert group.ask(0, 200, 0.0)
    for step in range(10):
        group.exchange(step * 0.01)
    assert [round(bucket.level, -1) for bucket in group.buckets] == [0, 200, 200]


@pytest.mark.parametrize(
    "message",
    [{}, {"start": "x", "levels": {"a": 1}, "handed": {}}, {"start": "x", "levels": {}, "handed": {"own": {"a": "x"}}}],
)
def test_a_message_of_another_version_changes_nothing(message: dict[str, object]) -> None:
    bucket = Bucket(100, 0.0, 2)
    with pytest.raises((ValueError, TypeError, LookupError)):
        BudgetExchange("own").take(1, message, {"a": bucket})
    assert bucket.level == 50
