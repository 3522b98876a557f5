"""The queue that is kept in order from round to round, against one that is sorted again at each look."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_ext.laps.decide.prefill_queue import Group, PrefillQueue, WholeLimits
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.laps.decide.urgency import aged_class
from sglang_ext.types import LengthClass
from support.examples import examples
from support.prefill_loop import CPU

# No sum of waits is a multiple of it: at the very moment of a lift, rounding decides.
AGE_S, PATIENCE, CHUNK_S = 1.97371234567, 200.0, 0.05
WHOLE = WholeLimits(CPU.prefill_s(1000, 0, CHUNK_S), 1500)


def remaining_s(request: QueuedPrefill) -> float:
    return CPU.prefill_s(request.new_tokens, request.cached_tokens, CHUNK_S)


def total_s(request: QueuedPrefill) -> float:
    computed = request.total_tokens - request.new_tokens
    return CPU.prefill_s(request.total_tokens, max(0, request.cached_tokens - computed), CHUNK_S)


def is_short(request: QueuedPrefill) -> bool:
    return request.length_class is LengthClass.SHORT and not request.is_started


class SortedAnew(RuleBasedStateMachine):
    """Every order is that of the definition, whatever has been put, removed, cut and lifted."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = PrefillQueue(AGE_S, WHOLE)
        self.requests: dict[int, QueuedPrefill] = {}
        self.now_s = 0.0
        self.last_key = 0

    def put(self, request: QueuedPrefill) -> None:
        self.requests[request.key] = request
        self.queue.put(request, self.now_s, CPU, CHUNK_S)

    @rule(
        tokens=st.integers(1, 5000),
        cached=st.sampled_from([0, 0, 16, 4096]),
        waited_s=st.sampled_from([0.0, 0.0, 1.0, 50.0]),
        slack_s=st.sampled_from([0.1, 1.0, 100.0, inf]),
        priority=st.sampled_from(PriorityClass),
    )
    def arrive(self, tokens: int, cached: int, waited_s: float, slack_s: float, priority: PriorityClass) -> None:
        self.last_key += 1
        arrival_s = self.now_s - waited_s
        length_class = LengthClass.SHORT if tokens <= 256 else LengthClass.LONG
        self.put(
            QueuedPrefill(
                self.last_key,
                length_class,
                tokens,
                cached,
                tokens,
                arrival_s,
                arrival_s + slack_s,
                priority,
                is_started=False,
                is_current=False,
            )
        )

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[key]
        self.queue.remove(key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def leave_together(self, data: st.DataObject) -> None:
        for key in data.draw(st.lists(st.sampled_from(sorted(self.requests)), unique=True)):
            del self.requests[key]
            self.queue.remove(key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if request.new_tokens > 1:
            tokens = data.draw(st.integers(1, request.new_tokens - 1))
            self.put(
                replace(
                    request,
                    new_tokens=request.new_tokens - tokens,
                    cached_tokens=request.cached_tokens + tokens,
                    is_started=True,
                )
            )

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), cached=st.sampled_from([0, 64]))
    def match_again(self, data: st.DataObject, cached: int) -> None:
        self.put(replace(self.requests[data.draw(st.sampled_from(sorted(self.requests)))], cached_tokens=cached))

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def is_in_order(self) -> None:
        self.queue.advance(self.now_s)
        assert len(self.queue) == len(self.requests)
        assert set(self.queue.started) == {key for key, request in self.requests.items() if request.is_started}
        for group in Group:
            mine = [one for one in self.requests.values() if isfinite(one.deadline_s) is (group is Group.WITH_DEADLINE)]
            shorts = [one for one in mine if is_short(one)]
            longs = sorted([one for one in mine if not is_short(one)], key=self.long_order)
            assert self.queue.count(group) == len(mine)
            oldest = self.due(mine, 0.0)[:1]
            classes = [*map(self.class_of, [*oldest, *longs]), *[int(one.priority) for one in shorts]]
            assert self.queue.head_class(group, self.now_s) == min(classes, default=inf)
            work_s = self.queue.long_work_s[group]
            assert abs(work_s - sum(map(remaining_s, longs))) < 1e-6
            assert work_s == 0 or longs
            for patience_s, most in ((inf, 1000), (0.7, 1000), (0.7, 2), (0.0, 3)):
                due = self.due(mine, patience_s)[:most]
                in_turn = sorted(due, key=self.class_of)
                looked = self.queue.due(group, self.now_s, patience_s, most)
                assert [ranked.request for ranked in looked] == in_turn
                assert [ranked.urgency.aged_class for ranked in looked] == [self.class_of(one) for one in in_turn]
                for at_most in (1000, 4):
                    expected = [one for one in self.shorts(shorts, at_most) if one not in due]
                    assert [ranked.request for ranked in self.queue.shorts(group, at_most)] == expected
                first = [one for at, one in enumerate(longs) if at < 2]
                first = [one for one in longs if (one in first or one.is_started) and one not in due]
                assert [ranked.request for ranked in self.queue.longs(group, 1000)] == [
                    one for one in longs if one not in due
                ]
                assert [ranked.request for ranked in self.queue.longs(group, 2)] == first

    def due(self, requests: list[QueuedPrefill], patience_s: float) -> list[QueuedPrefill]:
        """The oldest first: overdue, and patient for long enough."""
        overdue = [one for one in requests if self.due_s(one) <= self.now_s]
        overdue.sort(key=lambda one: (one.arrival_s, one.key))
        return [one for one in overdue if one.arrival_s < self.now_s - patience_s]

    def due_s(self, request: QueuedPrefill) -> float:
        if isfinite(request.deadline_s):
            fits = remaining_s(request) <= WHOLE.time_s and request.new_tokens <= WHOLE.tokens
            time_s = request.arrival_s + 2 * (request.deadline_s - request.arrival_s)
            return time_s if is_short(request) or (fits and not request.is_started) else inf
        return request.arrival_s + self.lift_s(request) if is_short(request) else inf

    def shorts(self, shorts: list[QueuedPrefill], most: int) -> list[QueuedPrefill]:
        """Class by class the late ones and those that are not: half of each, or more where there are fewer."""
        late = [one for one in shorts if one.deadline_s - remaining_s(one) < self.now_s]
        punctual = sorted([one for one in shorts if one not in late], key=self.short_order)
        late.sort(key=lambda one: (one.priority, remaining_s(one), one.arrival_s, one.key))
        if len(shorts) > most:
            late = late[: max(most // 2, most - len(punctual))]
            punctual = punctual[: most - len(late)]
        return [
            one
            for priority in PriorityClass
            for waiting in (late, punctual)
            for one in waiting
            if one.priority is priority
        ]

    def lift_s(self, request: QueuedPrefill) -> float:
        return max(AGE_S, PATIENCE * total_s(request))

    def class_of(self, request: QueuedPrefill) -> int:
        return aged_class(request.priority, self.now_s - request.arrival_s, self.lift_s(request))

    def short_order(self, request: QueuedPrefill) -> tuple[int, float, float, int]:
        latest_s = request.deadline_s - remaining_s(request)
        by_s = latest_s if isfinite(latest_s) else request.arrival_s
        return (request.priority, by_s, request.arrival_s, request.key)

    def long_order(self, request: QueuedPrefill) -> tuple[int, float, float, int]:
        return (self.class_of(request), remaining_s(request), request.arrival_s, request.key)


SortedAnew.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
test_orders_are_those_of_a_queue_that_is_sorted_anew = SortedAnew.TestCase


def test_a_long_prefill_that_is_due_goes_with_the_short_ones() -> None:
    """After twice its objective and the patience, if it takes little enough by itself and has not been started."""
    queue = PrefillQueue(10.0, WHOLE)
    for key, tokens, deadline_s, is_started in (
        (1, 300, 1.0, False),
        (2, 1200, 1.0, False),
        (3, 300, 1.0, True),
        (4, 300, 60.0, False),
        (5, 300, inf, False),
    ):
        request = QueuedPrefill(
            key, LengthClass.LONG, tokens, 0, tokens, 0.0, deadline_s, PriorityClass.NORMAL, is_started, False
        )
        queue.put(request, 0.0, CPU, CHUNK_S)

    def due_keys(now_s: float, patience_s: float) -> list[int]:
        queue.advance(now_s)
        return [ranked.request.key for ranked in queue.due(Group.WITH_DEADLINE, now_s, patience_s, 10)]

    assert due_keys(1.9, 0.0) == []
    assert due_keys(2.1, 3.0) == []
    assert due_keys(3.1, 3.0) == [1]
    assert due_keys(121.0, 3.0) == [1, 4]
    queue.remove(1)
    assert due_keys(121.0, 3.0) == [4]
