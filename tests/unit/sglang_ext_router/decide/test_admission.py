"""Order, bounds and bookkeeping of the admission queue."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext_router.decide.admission import AdmissionOutcome, AdmissionQueue, Demand, fair_shares, limit_of
from support.examples import examples

ADMITTED, QUEUED, REFUSED = AdmissionOutcome.ADMITTED, AdmissionOutcome.QUEUED, AdmissionOutcome.REFUSED


def full_queue(queue_size: int = 10, queue_timeout_s: float = 60.0) -> AdmissionQueue[str]:
    queue: AdmissionQueue[str] = AdmissionQueue(1, queue_size, queue_timeout_s)
    assert queue.offer("running", 0.0) is ADMITTED
    return queue


def test_unlimited_admits_everything() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(None, 0, 1.0)
    assert {queue.offer(number, 0.0) for number in range(10_000)} == {ADMITTED}
    assert queue.running == 10_000
    assert queue.release(1.0) == []
    assert queue.running == 9_999


def test_admits_then_queues_then_refuses() -> None:
    queue: AdmissionQueue[int] = AdmissionQueue(2, 1, 60.0)
    assert [queue.offer(number, 0.0) for number in range(4)] == [ADMITTED, ADMITTED, QUEUED, REFUSED]
    assert (queue.running, queue.waiting) == (2, 1)
    assert (queue.admitted, queue.queued, queue.refused) == (2, 1, 1)


def test_earliest_deadline_first_then_first_come() -> None:
    queue = full_queue()
    for item, deadline_s in (("none", None), ("late", 30.0), ("soon", 10.0), ("late too", 30.0)):
        queue.offer(item, 0.0, deadline_s)
    assert [queue.release(1.0) for _ in range(5)] == [["soon"], ["late"], ["late too"], ["none"], []]


def test_a_request_without_deadline_is_not_starved() -> None:
    """None that comes a queue timeout later passes it, however urgent."""
    queue = full_queue(queue_timeout_s=5.0)
    queue.offer("patient", 0.0)
    queue.offer("urgent", 4.5, 5.5)
    assert queue.release(4.6) == ["patient"]


def test_expiry_is_at_the_timeout_or_the_own_deadline() -> None:
    queue = full_queue(queue_timeout_s=5.0)
    queue.offer("timeout", 0.0)
    queue.offer("deadline", 0.0, 2.0)
    queue.offer("far deadline", 0.0, 99.0)
    assert queue.expire(1.9) == []
    assert queue.expire(2.0) == ["deadline"]
    assert queue.expire(5.0) == ["timeout", "far deadline"]
    assert queue.expire(98.0) == []
    assert queue.expired == 3


def test_what_has_expired_is_not_admitted() -> None:
    queue = full_queue(queue_timeout_s=5.0)
    queue.offer("dead", 0.0)
    queue.offer("alive", 3.0)
    assert queue.release(6.0) == ["alive"]
    assert queue.waiting == 1
    assert queue.expire(6.0) == ["dead"]
    assert queue.waiting == 0


def test_a_removed_item_is_neither_admitted_nor_expired() -> None:
    queue = full_queue()
    queue.offer("gone", 0.0)
    queue.offer("next", 0.0)
    assert [queue.remove(item) for item in ("gone", "gone", "running")] == [True, False, False]
    assert queue.release(1.0) == ["next"]
    assert queue.expire(1000.0) == []


def test_a_removed_item_does_not_expire_before_one_that_still_waits() -> None:
    queue = full_queue()
    queue.offer("gone", 0.0, 1.0)
    queue.offer("waiting", 0.0, 2.0)
    queue.remove("gone")
    assert queue.expire(1.5) == []
    assert queue.expire(2.0) == ["waiting"]


def test_an_item_that_expired_at_a_release_can_still_be_removed() -> None:
    queue = full_queue(queue_timeout_s=5.0)
    queue.offer("dead", 0.0)
    queue.release(6.0)
    assert queue.remove("dead")
    assert queue.expire(7.0) == []


def test_an_item_can_come_back() -> None:
    queue = full_queue()
    queue.offer("again", 0.0, 50.0)
    queue.remove("again")
    queue.offer("again", 1.0, 40.0)
    with pytest.raises(ValueError, match="already queued: 'again'"):
        queue.offer("again", 2.0)
    assert queue.expire(39.0) == []
    assert queue.expire(40.0) == ["again"]


def test_many_removals_do_not_pile_up() -> None:
    queue = full_queue(queue_size=10)
    queue.offer("first", 0.0, 0.5)
    for number in range(10_000):
        queue.offer(f"item {number}", 0.0)
        queue.remove(f"item {number}")
    assert len(queue._heap) < 100


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 1, 1.0), "max_concurrent"), ((1, -1, 1.0), "queue_size"), ((1, 1, 0.0), "queue_timeout_s")],
)
def test_nonsense_is_refused_by_name(arguments: tuple[int, int, float], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be"):
        AdmissionQueue[int](*arguments)


def test_a_limit_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_concurrent must be at least 0, got -1"):
        full_queue().set_limit(-1, 0.0)


DEMANDS = st.dictionaries(
    st.integers(1, 99), st.builds(Demand, st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6
)


@pytest.mark.slow
@given(limit=st.integers(1, 60), demands=DEMANDS)
def test_shares_are_max_min_fair(limit: int, demands: dict[int, Demand]) -> None:
    shares = fair_shares(limit, demands)
    assert sum(shares.values()) == limit
    for number, share in shares.items():
        missing = demands[number].total - share
        if missing > 0:
            most = max(shares.values())
            assert share >= most - 1, "it lacks places, and another one has more"
            assert all(shares[other] <= demands[other].total for other in shares), "places that none needs"


@pytest.mark.slow
@given(demands=DEMANDS, spare=st.integers(0, 50))
def test_places_that_none_needs_are_divided_equally(demands: dict[int, Demand], spare: int) -> None:
    shares = fair_shares(sum(one.total for one in demands.values()) + spare, demands)
    extra = [shares[number] - one.total for number, one in demands.items()]
    assert max(extra) - min(extra) <= 1


@pytest.mark.slow
@given(st.data())
def test_together_no_more_than_the_limit_runs(data: st.DataObject) -> None:
    """Routers that know each other's demand admit, finish and queue requests in any order."""
    limit = data.draw(st.integers(1, 12))
    routers = {number: [0, 0] for number in range(1, data.draw(st.integers(1, 5)) + 1)}
    for _ in range(40):
        number = data.draw(st.sampled_from(sorted(routers)))
        state = routers[number]
        kind = data.draw(st.sampled_from(["arrive", "end", "admit"]))
        if kind == "arrive":
            state[1] += data.draw(st.integers(1, 8))
        elif kind == "end" and state[0]:
            state[0] -= 1
        demands = {one: Demand(running, waiting) for one, (running, waiting) in routers.items()}
        admitted = max(0, min(state[1], limit_of(number, limit, demands, {}) - state[0]))
        state[0] += admitted
        state[1] -= admitted
        beyond = len(routers) - 1 if limit < len(routers) else 0  # each may have one
        assert sum(running for running, _ in routers.values()) <= limit + beyond
    # What runs ends, round after round: everybody is served.
    for _ in range(60):
        for number, state in routers.items():
            state[0] = max(0, state[0] - 1)
            demands = {one: Demand(running, waiting) for one, (running, waiting) in routers.items()}
            admitted = max(0, min(state[1], limit_of(number, limit, demands, {}) - state[0]))
            state[0] += admitted
            state[1] -= admitted
    waited = sum(waiting for _, waiting in routers.values())
    assert waited == 0 or all(running for running, waiting in routers.values() if waiting)


def test_what_waited_when_a_router_reported_may_run_by_now() -> None:
    """It had the share of 6 then; that it has 3 since this router's own requests came, it learns later."""
    demands = {0: Demand(2, 7), 1: Demand(0, 9), 2: Demand(0, 0)}
    assert fair_shares(6, demands)[1] == 3
    assert limit_of(1, 6, demands, {0: 6, 2: 2}) == 0
    assert limit_of(1, 6, demands, {0: 3, 2: 0}) == 3
    assert limit_of(1, 6, {**demands, 0: Demand(3, 6)}, {0: 3}) == 3
    assert limit_of(1, 6, {**demands, 0: Demand(2, 0)}, {0: 6}) == 4, "as many as it reported"


class AgainstNaiveModel(RuleBasedStateMachine):
    """Any history; the model sorts a list."""

    SIZE, TIMEOUT_S = 4, 10.0
    LIMIT = 2

    def __init__(self) -> None:
        super().__init__()
        self.limit = self.LIMIT
        self.queue: AdmissionQueue[int] = AdmissionQueue(self.limit, self.SIZE, self.TIMEOUT_S)
        self.now_s = 0.0
        self.next_item = 0
        self.running = 0
        self.waiting: list[tuple[float, int]] = []  # effective deadline, item (in order of arrival)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(slack_s=st.none() | st.sampled_from([-1.0, 0.0, 2.0, 50.0]))
    def offer(self, slack_s: float | None) -> None:
        item, self.next_item = self.next_item, self.next_item + 1
        result = self.queue.offer(item, self.now_s, None if slack_s is None else self.now_s + slack_s)
        if self.running < self.limit:
            assert result is ADMITTED
            self.running += 1
        elif len(self.waiting) < self.SIZE:
            assert result is QUEUED
            own_s = self.TIMEOUT_S if slack_s is None else min(slack_s, self.TIMEOUT_S)
            self.waiting.append((self.now_s + own_s, item))
        else:
            assert result is REFUSED

    @precondition(lambda self: self.running)
    @rule()
    def release(self) -> None:
        self.running -= 1
        self.admit(self.queue.release(self.now_s))

    @rule(limit=st.integers(0, 4))
    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.admit(self.queue.set_limit(limit, self.now_s))

    def admit(self, given: list[int]) -> None:
        alive = sorted(entry for entry in self.waiting if entry[0] > self.now_s)
        admitted = alive[: max(0, self.limit - self.running)]
        assert given == [item for _, item in admitted]
        self.running += len(admitted)
        self.waiting = [entry for entry in self.waiting if entry not in admitted]

    @rule()
    def expire(self) -> None:
        late = sorted(entry for entry in self.waiting if entry[0] <= self.now_s)
        assert sorted(self.queue.expire(self.now_s)) == sorted(item for _, item in late)
        self.waiting = [entry for entry in self.waiting if entry[0] > self.now_s]

    @rule(back=st.integers(1, 6))
    def remove(self, back: int) -> None:
        item = self.next_item - back
        assert self.queue.remove(item) == any(item == waiting for _, waiting in self.waiting)
        self.waiting = [entry for entry in self.waiting if entry[1] != item]

    @invariant()
    def counts_agree(self) -> None:
        queue = self.queue
        assert queue.running == self.running
        assert queue.waiting == len(self.waiting) <= self.SIZE
        assert queue.queued == queue.waiting + queue.expired + queue.removed + (
            queue.admitted - self.direct_admissions()
        )

    def direct_admissions(self) -> int:
        return self.next_item - self.queue.queued - self.queue.refused


AgainstNaiveModel.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestAgainstNaiveModel = pytest.mark.slow(AgainstNaiveModel.TestCase)
