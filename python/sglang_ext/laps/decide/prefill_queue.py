"""Describes what waits on one prefill instance, kept in the order in which it should run, so that a decision looks at
few of it.

Every order is fixed between two events of a request (its arrival, its latest start, a chunk of it, a lift of its
class), so lists stay sorted and a decision costs the same with ten requests as with ten thousand:

* short prefills by class; if they can still be on time, by the latest time at which they can start, otherwise by
  remaining time, shortest first;
* late and overdue ones by arrival as well;
* long ones by class, then by remaining time, shortest first;
* requests without a deadline apart from the others, each kind in its own lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, NamedTuple

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.round_plan import PriorityClass, QueuedPrefill
from sglang_ext.laps.decide.urgency import RankedPrefill, Urgency, aged_class, due_s
from sglang_ext.types import LengthClass

_PATIENCE: Final = 200.0  # under high load less turns the order of remaining times into that of arrival
_SPARE_TURNS: Final = 64  # of requests that have left, in a list that is not cleared of them
_SHORT: Final = LengthClass.SHORT  # looking a member up in its class takes longer than comparing it


class Group(IntEnum):
    """Requests that may share a batch: a deadline is not put at risk by work that has none."""

    WITH_DEADLINE = 0
    WITHOUT_DEADLINE = 1


# What a list is sorted by and, last, the request.
_Turn = tuple[Any, ...]
_GONE: _Turn = ()


class _Waiting(RankedPrefill):
    __slots__ = ("age", "due_s", "group", "is_batched", "lift_s", "looked_at", "next_s", "order", "turn")

    def __init__(
        self,
        urgency: Urgency,
        request: QueuedPrefill,
        remaining_s: float,
        total_s: float,
        lift_s: float,
        is_batched: bool,
        order: _Order,
    ) -> None:
        super().__init__(urgency, request, remaining_s, total_s)
        self.lift_s = lift_s  # waiting this long lifts it by one class
        self.group = 0 if request.deadline_s < inf else 1
        self.is_batched = is_batched  # it runs whole with other short ones
        self.due_s = inf  # when it is overdue, if it goes with short ones then
        self.next_s = inf  # its next event
        self.looked_at = 0  # the last look at due requests that found it so
        self.order = order
        self.turn = _GONE  # its place in that order
        self.age = _GONE  # its place among the old


class _Order:
    """Turns in ascending order of what is negative for the most urgent, which is last: taking it moves nothing.

    The turn of a request that leaves stays until it is met.
    """

    __slots__ = ("count", "turns")

    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self.count = 0  # of requests that wait

    def add(self, waiting: _Waiting, turn: _Turn) -> None:
        """Take a request in."""
        turns = self.turns
        if len(turns) > _SPARE_TURNS + 2 * self.count:
            turns[:] = [kept for kept in turns if _is_here(kept)]
        waiting.turn = turn
        insort(turns, turn)
        self.count += 1

    def first(self, most: int, chosen: list[RankedPrefill], look: int) -> None:
        """Append the first ones to `chosen`, most urgent first: up to `most`, less those found due in this look."""
        turns = self.turns
        while turns and not _is_here(turns[-1]):
            turns.pop()
        at = last = len(turns)
        count = 0
        while at > 0 and count < most:
            at -= 1
            waiting: _Waiting = turns[at][-1]
            if waiting.turn is turns[at]:
                count += 1
                if waiting.looked_at != look:
                    chosen.append(waiting)
        if last - at > count:
            turns[at:] = [kept for kept in turns[at:] if _is_here(kept)]


def _is_here(turn: _Turn) -> bool:
    waiting: _Waiting = turn[-1]
    return waiting.turn is turn


class WholeLimits(NamedTuple):
    """Describes what one prefill takes at most to run whole in a short batch."""

    time_s: float
    tokens: int


NONE_WHOLE = WholeLimits(0.0, 0)


class _Lists:
    """The requests of one group in their orders."""

    __slots__ = ("count", "late", "longs", "old", "punctual")

    def __init__(self) -> None:
        self.count = 0
        self.punctual = [_Order() for _ in PriorityClass]
        self.late = [_Order() for _ in PriorityClass]
        self.longs = _Order()
        self.old: list[_Turn] = []  # by arrival, the oldest first: late and overdue ones, and some that have left


class PrefillQueue:
    """All requests of an instance that have prefill work left.

    A request is lifted by a class whenever it has waited `age_s`, or 200 times what it takes by itself if that is more;
    a short one with a deadline is so from when it is overdue.
    """

    __slots__ = ("_age_s", "_events", "_lists", "_looks", "_waiting", "_whole", "long_work_s", "started")

    def __init__(self, age_s: float, whole: WholeLimits = NONE_WHOLE) -> None:
        self._age_s = age_s
        self._whole = whole  # of long prefills that go with short ones when they are due
        self._waiting: dict[int, _Waiting] = {}
        self._lists = (_Lists(), _Lists())
        self._events: list[tuple[float, int]] = []  # a heap of (when, key); those of earlier states mean nothing
        self._looks = 0  # at due requests
        self.started: dict[int, RankedPrefill] = {}  # requests that hold KV
        self.long_work_s = [0.0, 0.0]  # predicted time of the long prefills of each group

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[RankedPrefill]:
        """All of them, in no order."""
        return iter(list(self._waiting.values()))

    def get(self, key: int) -> RankedPrefill:
        """Return the request. KeyError where it is not in the queue."""
        return self._waiting[key]

    def put(self, request: QueuedPrefill, now_s: float, cost: CostCoefficients, chunk_s: float) -> None:
        """Take a request in, or what has become of it: a chunk has run, or its prefix was matched again.

        `chunk_s` is the time of the chunks that a long one's times are predicted with. A short one runs whole.
        """
        if request.key in self._waiting:
            self.remove(request.key)
        if is_batched(request):
            chunk_s = inf
        remaining_s = cost.prefill_s(request.new_tokens, request.cached_tokens, chunk_s)
        total_s = remaining_s
        computed_tokens = request.total_tokens - request.new_tokens
        if computed_tokens > 0:
            total_s = cost.prefill_s(request.total_tokens, max(0, request.cached_tokens - computed_tokens), chunk_s)
        total_s = max(total_s, 1e-9)
        if is_batched(request):
            self._put_short(request, remaining_s, total_s)
        else:
            self._put_long(request, remaining_s, total_s, now_s)
        self._lists[0 if request.deadline_s < inf else 1].count += 1

    def replace(self, request: QueuedPrefill) -> None:
        """Put a request in place of its former self, which differs from it in nothing that an order depends on."""
        self._waiting[request.key].request = request

    def remove(self, key: int) -> None:
        """It has ended, or was aborted. KeyError where it is not in the queue."""
        waiting = self._waiting.pop(key)
        waiting.turn = waiting.age = _GONE
        waiting.order.count -= 1
        self._lists[waiting.group].count -= 1
        if not waiting.is_batched:
            self.started.pop(key, None)
            # Without longs, exactly 0: what is left of adding and taking away would grow.
            work_s = self.long_work_s[waiting.group] - waiting.remaining_s
            self.long_work_s[waiting.group] = work_s if waiting.order.count else 0.0

    def advance(self, now_s: float) -> None:
        """Put everything at its place of `now_s`: what cannot be on time any more, is overdue, or has been lifted."""
        lists = self._lists[0]
        for punctual, late in zip(lists.punctual, lists.late, strict=True):
            turns = punctual.turns
            while turns and turns[-1][0] > -now_s:
                turn = turns.pop()
                waiting: _Waiting = turn[-1]
                if _is_here(turn):  # it moves once
                    punctual.count -= 1
                    waiting.order = late
                    late.add(waiting, (-waiting.remaining_s, turn[1], turn[2], waiting))
                    self._grow_old(waiting, (-turn[1], -turn[2], waiting))
        events = self._events
        while events and events[0][0] <= now_s:
            when_s, key = heappop(events)
            request = self._waiting.get(key)
            if request is not None and request.next_s == when_s:
                self._advance(request, now_s)
        bound = _SPARE_TURNS + 2 * len(self._waiting)  # more are mostly of requests that have left
        if len(events) > bound:
            self._events = [(request.next_s, key) for key, request in self._waiting.items() if request.next_s < inf]
            heapify(self._events)
        for lists in self._lists:
            if len(lists.old) > bound:
                lists.old = [age for age in lists.old if _is_old(age)]

    def due(self, group: Group, now_s: float, patience_s: float, most: int) -> list[RankedPrefill]:
        """Return the overdue requests that have waited for longer than `patience_s`, of these the `most` oldest: those
        of the first class first, then the oldest.

        Until the next call `shorts` and `longs` are those without these.
        """
        old = self._lists[group].old
        self._looks += 1
        due: list[RankedPrefill] = []
        classes = set()
        at, count = 0, len(old)
        while at < count and len(due) < most and old[at][0] < now_s - patience_s:
            waiting: _Waiting = old[at][-1]
            if waiting.age is old[at]:
                if waiting.due_s > now_s:
                    waiting.age = _GONE
                    self._expect(waiting, waiting.due_s)
                else:
                    if waiting.is_batched:  # no list is sorted by its class
                        _set_class(waiting, _class_of(waiting, now_s))
                    waiting.looked_at = self._looks
                    classes.add(waiting.urgency.aged_class)
                    due.append(waiting)
            at += 1
        if at > len(due):
            old[:at] = [age for age in old[:at] if _is_old(age)]
        if len(classes) > 1:
            due.sort(key=_aged_class)
        return due

    def count(self, group: Group) -> int:
        return self._lists[group].count

    def head_class(self, group: Group, now_s: float) -> float:
        """Return the most urgent class of a group's requests; infinite without any. Of the overdue ones the oldest
        counts."""
        lists = self._lists[group]
        heads = self.due(group, now_s, 0.0, 1)
        self._looks += 1  # a due one may be the first of the long ones
        lists.longs.first(1, heads, self._looks)
        classes = [head.urgency.aged_class for head in heads]
        classes += [at for at in PriorityClass if lists.late[at].count or lists.punctual[at].count]
        return min(classes, default=inf)

    def has_longs(self) -> bool:
        """Return whether a long prefill waits, with a deadline or without."""
        return self._lists[0].longs.count + self._lists[1].longs.count > 0

    def shorts(self, group: Group, most: int) -> list[RankedPrefill]:
        """Return short prefills for a batch: class by class the late ones, the shortest first, then the others, the
        most urgent first.

        Where more than `most` wait, at most half of them are late ones, unless there are too few others: requests that
        could be on time would be looked at once they are late as well.
        """
        lists = self._lists[group]
        late_left = punctual_left = 0
        for late, punctual in zip(lists.late, lists.punctual, strict=True):
            late_left += late.count
            punctual_left += punctual.count
        if late_left + punctual_left > most:
            late_left = min(late_left, max(most // 2, most - punctual_left))
            punctual_left = most - late_left
        chosen: list[RankedPrefill] = []
        for late, punctual in zip(lists.late, lists.punctual, strict=True):
            if late.count and late_left > 0:
                late.first(late_left, chosen, self._looks)
                late_left -= late.count
            if punctual.count and punctual_left > 0:
                punctual.first(punctual_left, chosen, self._looks)
                punctual_left -= punctual.count
        return chosen

    def longs(self, group: Group, most: int) -> list[RankedPrefill]:
        """Long prefills in the order in which they should run: the first `most`, and all that have been started."""
        chosen: list[RankedPrefill] = []
        self._lists[group].longs.first(most, chosen, self._looks)
        if self.started:
            keys = {ranked.request.key for ranked in chosen}
            extra = [
                started_prefill
                for key, started_prefill in self.started.items()
                if key not in keys and self._waiting[key].group == group
            ]
            if extra:
                return sorted([*chosen, *extra])
        return chosen

    def _put_short(self, request: QueuedPrefill, remaining_s: float, total_s: float) -> None:
        key, arrival_s, deadline_s = request.key, request.arrival_s, request.deadline_s
        has_deadline = deadline_s < inf
        by_s = deadline_s - remaining_s if has_deadline else arrival_s
        aged = int(request.priority)
        lift_s = max(self._age_s, _PATIENCE * total_s)
        order = self._lists[0 if has_deadline else 1].punctual[aged]
        urgency = Urgency(aged, by_s, arrival_s, key)
        waiting = self._waiting[key] = _Waiting(urgency, request, remaining_s, total_s, lift_s, True, order)
        order.add(waiting, (-by_s, -arrival_s, -key, waiting))
        waiting.due_s = due_s(request) if has_deadline else arrival_s + lift_s
        if not has_deadline:
            self._expect(waiting, waiting.due_s)

    def _put_long(self, request: QueuedPrefill, remaining_s: float, total_s: float, now_s: float) -> None:
        key, arrival_s = request.key, request.arrival_s
        lift_s = max(self._age_s, _PATIENCE * total_s)
        aged = aged_class(request.priority, now_s - arrival_s, lift_s)
        order = self._lists[0 if request.deadline_s < inf else 1].longs
        urgency = Urgency(aged, remaining_s, arrival_s, key)
        waiting = self._waiting[key] = _Waiting(urgency, request, remaining_s, total_s, lift_s, False, order)
        order.add(waiting, (-aged, -remaining_s, -arrival_s, -key, waiting))
        self.long_work_s[waiting.group] += remaining_s
        if request.is_started:
            self.started[key] = waiting
        elif remaining_s <= self._whole.time_s and request.new_tokens <= self._whole.tokens:
            waiting.due_s = due_s(request)
        self._expect(waiting, min(_next_lift_s(waiting), waiting.due_s))

    def _expect(self, waiting: _Waiting, when_s: float) -> None:
        """Have its next event at this time."""
        waiting.next_s = when_s
        heappush(self._events, (when_s, waiting.request.key))

    def _advance(self, waiting: _Waiting, now_s: float) -> None:
        """Its event is here: it is overdue, or lifted."""
        waiting.next_s = inf
        if waiting.due_s <= now_s and waiting.age is _GONE:
            self._grow_old(waiting, (waiting.request.arrival_s, waiting.request.key, waiting))
        if waiting.is_batched:
            return
        if _next_lift_s(waiting) <= now_s:
            _set_class(waiting, min(_class_of(waiting, now_s), waiting.urgency.aged_class - 1))
            waiting.order.count -= 1
            waiting.order.add(waiting, (-waiting.urgency.aged_class, *waiting.turn[1:]))
        next_s = _next_lift_s(waiting)
        self._expect(waiting, next_s if waiting.due_s <= now_s else min(next_s, waiting.due_s))

    def _grow_old(self, waiting: _Waiting, age: _Turn) -> None:
        """Look at it by how long it has waited from now on."""
        old = self._lists[waiting.group].old
        waiting.age = age
        if not old or old[-1] < age:  # as most are
            old.append(age)
        else:
            old.insert(bisect_left(old, age), age)


def is_batched(request: QueuedPrefill) -> bool:
    """Return whether it runs in a short batch. A short prefill that the engine has cut goes on as a long one."""
    return request.length_class is _SHORT and not request.is_started


def _is_old(age: _Turn) -> bool:
    waiting: _Waiting = age[-1]
    return waiting.age is age


def _class_of(waiting: _Waiting, now_s: float) -> int:
    """Return its class after what it has waited."""
    request = waiting.request
    return aged_class(request.priority, now_s - request.arrival_s, waiting.lift_s)


def _set_class(waiting: _Waiting, aged: int) -> None:
    urgency = waiting.urgency
    if aged != urgency.aged_class:
        waiting.urgency = Urgency(aged, urgency.sort_value, urgency.arrival_s, urgency.key)


def _next_lift_s(waiting: _Waiting) -> float:
    request = waiting.request
    return request.arrival_s + (int(request.priority) - waiting.urgency.aged_class + 1) * waiting.lift_s


def _aged_class(ranked: RankedPrefill) -> int:
    return ranked.urgency.aged_class
