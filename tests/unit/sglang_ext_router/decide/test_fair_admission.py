"""Shares of work by weight, no starvation, priorities and deadlines, kept places, and the queue's bookkeeping."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_ext_router.decide.admission import AdmissionOutcome, Claim
from sglang_ext_router.decide.fair_admission import RECENT_S, FairAdmissionQueue
from support.examples import examples

ADMITTED, QUEUED, REFUSED = AdmissionOutcome.ADMITTED, AdmissionOutcome.QUEUED, AdmissionOutcome.REFUSED
NORMAL = 2


def claim(tenant: str, work: float = 1.0, weight: float = 1.0, rank: int = NORMAL, concurrency: int = 0) -> Claim:
    return Claim(tenant, weight, concurrency, rank, work)


def full_queue(limit: int = 1, **options: float) -> FairAdmissionQueue[str]:
    """A queue whose places are taken by requests `busy0` and so on of a tenant of that name."""
    queue: FairAdmissionQueue[str] = FairAdmissionQueue(limit, 1000, options.get("queue_timeout_s", 60.0))
    for number in range(limit):
        assert queue.offer(f"busy{number}", 0.0, None, claim("busy")) is ADMITTED
    return queue


def order_of(queue: FairAdmissionQueue[str], running: str = "busy0") -> list[str]:
    """The order in which what waits is admitted, at a single place."""
    order: list[str] = []
    while True:
        admitted = queue.release(1.0, running)
        if not admitted:
            return order
        (running,) = admitted
        order.append(running)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=5),
    largest=st.integers(1, 1000),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=examples(40), deadline=None)
def test_shares_of_work_converge_to_the_weights(weights: list[float], largest: int, seed: int) -> None:
    """Tenants that always have something waiting get work by their weights, also where requests differ in size."""
    random, queue, done = Random(seed), full_queue(), Counter[str]()
    works = {str(tenant): random.randint(1, largest) for tenant in range(len(weights))}
    costs: dict[str, tuple[str, float]] = {}

    def offer(tenant: str) -> None:
        work = float(random.randint(1, works[tenant]))
        item = f"{tenant}-{len(costs)}"
        costs[item] = tenant, work
        assert queue.offer(item, 0.0, None, claim(tenant, work, weights[int(tenant)])) is QUEUED

    for tenant in works:
        offer(tenant)
        offer(tenant)
    running = "busy0"
    for _ in range(150):
        (running,) = queue.release(1.0, running)
        tenant, work = costs[running]
        done[tenant] += work  # type: ignore[assignment]
        offer(tenant)
        shares = [done[name] / weights[int(name)] for name in works]
        assert max(shares) - min(shares) <= 2 * max(works.values()) / min(weights)


@given(seed=st.integers(0, 10**6), rivals=st.integers(1, 8))
@settings(max_examples=examples(60), deadline=None)
def test_a_waiting_tenant_is_served_before_each_rival_is_twice(seed: int, rivals: int) -> None:
    """However many requests of equal size and weight the others have waiting, and will send."""
    random, queue = Random(seed), full_queue()
    for number in range(random.randint(0, 50)):
        queue.offer(f"{number % rivals}-{number}", 0.0, None, claim(str(number % rivals)))
    running = "busy0"
    for _ in range(random.randint(0, 20)):
        admitted = queue.release(1.0, running)
        running = admitted[0] if admitted else running
        if not admitted:
            assert queue.offer(running, 1.0, None, claim("busy")) is ADMITTED
    for number in range(rivals):
        queue.offer(f"{number}-again", 1.0, None, claim(str(number)))
    assert queue.offer("victim", 1.0, None, claim("victim")) is QUEUED
    served: Counter[str] = Counter()
    while running != "victim":
        (running,) = queue.release(1.0, running)
        tenant = running.split("-")[0]
        served[tenant] += 1
        queue.offer(f"{tenant}-{sum(served.values())}-more", 1.0, None, claim(tenant))
    assert max(served.values()) <= 2


def test_work_counts_and_not_requests() -> None:
    queue = full_queue()
    for number in range(4):
        queue.offer(f"large{number}", 0.0, None, claim("a", 300))
        queue.offer(f"small{number}", 0.0, None, claim("b", 100))
    assert order_of(queue) == [
        *("large0", "small0", "small1", "small2"),
        *("large1", "small3", "large2", "large3"),
    ]


def test_a_tenant_that_paused_has_saved_nothing() -> None:
    queue = full_queue()
    for number in range(20):
        queue.offer(f"a{number}", 0.0, None, claim("a"))
    running = "busy0"
    for _ in range(10):
        (running,) = queue.release(1.0, running)
    for number in range(4):
        queue.offer(f"b{number}", 1.0, None, claim("b"))
    assert order_of(queue, running)[:6] == ["b0", "a10", "b1", "a11", "b2", "a12"]


def test_the_more_urgent_priority_first_and_the_earliest_deadline_within_a_tenant() -> None:
    queue = full_queue()
    for item, rank, deadline_s in (("low", 3, 5.0), ("late", 2, 50.0), ("soon", 2, 10.0), ("high", 1, None)):
        queue.offer(item, 0.0, deadline_s, claim("a", rank=rank))
    queue.offer("other", 0.0, None, claim("b", rank=3))
    assert order_of(queue) == ["high", "soon", "late", "low", "other"]


def test_what_was_used_corrects_what_was_estimated() -> None:
    queue = full_queue()
    first = claim("a", 10)
    queue.offer("a0", 0.0, None, first)
    queue.offer("b0", 0.0, None, claim("b", 10))
    (running,) = queue.release(1.0, "busy0")
    assert running == "a0"
    queue.correct(first, 30)
    for number in (1, 2, 3):
        queue.offer(f"a{number}", 1.0, None, claim("a", 10))
        queue.offer(f"b{number}", 1.0, None, claim("b", 10))
    assert order_of(queue, running) == ["b0", "b1", "b2", "a1", "b3", "a2", "a3"]


def test_a_tenants_concurrency() -> None:
    """Requests above it wait, and other tenants' pass them."""
    queue: FairAdmissionQueue[str] = FairAdmissionQueue(None, 10, 60.0)
    assert [queue.offer(f"a{number}", 0.0, None, claim("a", concurrency=2)) for number in range(4)] == [
        *(ADMITTED, ADMITTED, QUEUED, QUEUED)
    ]
    assert queue.offer("b0", 0.0, None, claim("b", concurrency=2)) is ADMITTED
    assert queue.release(1.0, "b0") == []
    assert queue.release(1.0, "a0") == ["a2"]


def test_each_tenant_has_a_queue_of_its_own() -> None:
    queue = full_queue()
    queue.queue_size = 2
    assert [queue.offer(f"a{number}", 0.0, None, claim("a")) for number in range(3)] == [QUEUED, QUEUED, REFUSED]
    assert queue.offer("b0", 0.0, None, claim("b")) is QUEUED


def test_places_are_kept_for_a_tenant_that_had_some_lately() -> None:
    queue: FairAdmissionQueue[str] = FairAdmissionQueue(8, 1000, 60.0)
    queue.refresh(0.0)
    for number in range(2):
        assert queue.offer(f"light{number}", 0.0, None, claim("light")) is ADMITTED
    for number in range(2):
        queue.release(0.1, f"light{number}")
    outcomes = [queue.offer(f"flood{number}", 0.2, None, claim("flood")) for number in range(20)]
    assert Counter(outcomes) == {ADMITTED: 6, QUEUED: 14}
    assert queue.release(0.3, "flood0") == ["flood6"]
    assert [queue.offer(f"light{number}", 0.4, None, claim("light")) for number in range(3)] == [
        *(ADMITTED, ADMITTED, QUEUED)
    ]
    for number in range(2):
        assert queue.release(0.5, f"light{number}") == (["light2"] if number == 0 else [])
    assert queue.release(0.6, "light2") == []
    assert queue.refresh(RECENT_S) == []  # three at once are remembered, and kept
    assert queue.running == 5 + 1
    admitted = [item for time_s in (2 * RECENT_S, 3 * RECENT_S) for item in queue.refresh(time_s)]
    assert admitted == ["flood7", "flood8"]
    assert queue.running == 8


def test_no_place_is_kept_beyond_a_tenants_share() -> None:
    queue: FairAdmissionQueue[str] = FairAdmissionQueue(8, 1000, 60.0)
    for number in range(8):
        assert queue.offer(f"a{number}", 0.0, None, claim("a")) is ADMITTED
    for number in range(8):
        queue.release(0.1, f"a{number}")
    outcomes = Counter(queue.offer(f"b{number}", 0.2, None, claim("b", weight=3.0)) for number in range(8))
    assert outcomes == {ADMITTED: 6, QUEUED: 2}  # the share of `a` is a quarter


@pytest.mark.parametrize(("places", "at_once"), [(2, 1), (4, 1), (4, 2), (8, 3)])
def test_a_flood_leaves_free_what_more_tenants_than_places_want_at_once(places: int, at_once: int) -> None:
    """Nine tenants send now and then, `at_once` requests at a time; the tenth always has something waiting."""
    queue: FairAdmissionQueue[str] = FairAdmissionQueue(places, 1000, 1e9)
    queue.refresh(0.0)

    def send_lightly(turn: int, now_s: float) -> Counter[AdmissionOutcome]:
        names = [f"light{(turn + number) % 9}-{turn}" for number in range(at_once)]
        outcomes = Counter(queue.offer(name, now_s, None, claim(name.split("-")[0])) for name in names)
        for name in names:
            queue.release(now_s, name) if outcomes[QUEUED] == 0 else None
        return outcomes

    for turn in range(9):
        send_lightly(turn, 0.1 * turn)
    floods = Counter(queue.offer(f"flood{number}", 1.0, None, claim("flood")) for number in range(50))
    assert floods[ADMITTED] == places - at_once
    for turn in range(9, 60):
        now_s = turn * 0.3
        assert send_lightly(turn, now_s) == {ADMITTED: at_once}
        queue.refresh(now_s)
        assert queue.running == places - at_once


@pytest.mark.parametrize("places", [4, 12, 32])
def test_shares_hold_where_places_are_kept_and_do_not_divide_evenly(places: int) -> None:
    """Ten tenants always have something waiting; requests of the first take four times as long and as much work."""
    random, now_s, done = Random(places), 0.0, Counter[str]()
    queue: FairAdmissionQueue[str] = FairAdmissionQueue(places, 1000, 1e9)
    works = {str(tenant): 4.0 if tenant == 0 else 1.0 for tenant in range(10)}
    ends: dict[str, float] = {}
    count = 0

    def offer(tenant: str) -> None:
        nonlocal count
        count += 1
        item = f"{tenant}-{count}"
        if queue.offer(item, now_s, None, claim(tenant, works[tenant])) is ADMITTED:
            begin(item)

    def begin(item: str) -> None:
        ends[item] = now_s + works[item.split("-")[0]] * random.uniform(0.9, 1.1)

    for tenant in works:
        for _ in range(places + 2):
            offer(tenant)
    for number in range(6000):
        item = min(ends, key=ends.__getitem__)
        now_s = ends.pop(item)
        tenant = item.split("-")[0]
        if number >= 1000:
            done[tenant] += int(works[tenant])
        for admitted in queue.release(now_s, item):
            begin(admitted)
        offer(tenant)
        if number % 20 == 0:
            for admitted in queue.refresh(now_s):
                begin(admitted)
    mean = sum(done.values()) / len(works)
    assert max(abs(done[tenant] / mean - 1) for tenant in works) < 0.05, done


@pytest.mark.parametrize("count", [1, 3])
def test_an_item_needs_one_claim(count: int) -> None:
    queue = full_queue()
    with pytest.raises(ValueError, match="no claim"):
        queue.offer("x", 0.0)
    for _ in range(count):
        queue.offer(f"x{count}", 0.0, None, claim("a")) if not queue.waiting else None
        with pytest.raises(ValueError, match="already offered"):
            queue.offer(f"x{count}", 0.0, None, claim("a"))


class Bookkeeping(RuleBasedStateMachine):
    """Every item is admitted once or leaves the queue once, and no place stays free that may be had."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairAdmissionQueue[int] = FairAdmissionQueue(4, 5, 20.0)
        self.now_s = 0.0
        self.count = 0
        self.tenants: dict[int, str] = {}
        self.running: set[int] = set()
        self.waiting: set[int] = set()

    def admit(self, items: list[int]) -> None:
        for item in items:
            self.waiting.remove(item)
            self.running.add(item)

    @rule(
        tenant=st.sampled_from("abc"),
        rank=st.integers(0, 3),
        work=st.floats(1, 100),
        deadline_s=st.none() | st.floats(0, 30),
    )
    def offer(self, tenant: str, rank: int, work: float, deadline_s: float | None) -> None:
        self.count += 1
        item = self.count
        deadline_s = None if deadline_s is None else self.now_s + deadline_s
        given_claim = claim(tenant, work, "abc".index(tenant) + 1.0, rank, concurrency=3 if tenant == "a" else 0)
        outcome = self.queue.offer(item, self.now_s, deadline_s, given_claim)
        self.tenants[item] = tenant
        if outcome is ADMITTED:
            self.running.add(item)
        elif outcome is QUEUED:
            self.waiting.add(item)
        else:
            assert sum(self.tenants[one] == tenant for one in self.waiting) == 5

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.running:
            item = data.draw(st.sampled_from(sorted(self.running)))
            self.running.remove(item)
            self.admit(self.queue.release(self.now_s, item))

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(sorted(self.tenants) or [0]))
        assert self.queue.remove(known) == (known in self.waiting)
        self.waiting.discard(known)

    @rule(pause_s=st.floats(0, 15))
    def wait(self, pause_s: float) -> None:
        self.now_s += pause_s
        late = self.queue.expire(self.now_s)
        assert set(late) <= self.waiting
        self.waiting -= set(late)
        self.admit(self.queue.refresh(self.now_s))

    @rule(limit=st.integers(0, 6))
    def limit(self, limit: int) -> None:
        self.admit(self.queue.set_limit(limit, self.now_s))

    @invariant()
    def is_consistent(self) -> None:
        queue = self.queue
        assert (queue.running, queue.waiting) == (len(self.running), len(self.waiting))
        assert set(queue.queue) == self.waiting
        assert sum(self.tenants[item] == "a" for item in self.running) <= 3
        assert queue._kept == sum(places.kept for places in queue._tenants.values())
        for name, places in queue._tenants.items():
            assert places.running == sum(self.tenants[item] == name for item in self.running)
            assert places.waiting == sum(self.tenants[item] == name for item in self.waiting)

    def teardown(self) -> None:
        """Let time pass without further arrivals: everything is served or expires."""
        self.admit(self.queue.set_limit(4, self.now_s))
        for _ in range(3):
            self.wait(RECENT_S)
        while self.running:
            item = min(self.running)
            self.running.remove(item)
            self.admit(self.queue.release(self.now_s, item))
        assert not self.waiting


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=examples(40), stateful_step_count=30, deadline=None)
