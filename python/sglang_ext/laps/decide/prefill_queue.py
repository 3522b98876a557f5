"""Describes what waits on one prefill instance, kept in the order in which it should run, so that a decision looks at
few of it.

Every order is fixed between two events of a request (its arrival, a chunk of it, a lift of its class), so lists stay
sorted and a decision costs the same with ten requests as with ten thousand:

* short prefills by class, then by the latest time at which they can start and end in time;
* long ones by class, then by remaining time, shortest first;
* requests without a deadline apart from the others, each kind in its own two lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from typing import Any, NamedTuple

from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.round_plan import QueuedPrefill
from sglang_ext.laps.decide.urgency import RankedPrefill, Urgency, aged_class, due_s
from sglang_ext.types import LengthClass

_PATIENCE = 200.0  # under high load less turns the order of remaining times into that of arrival
_NEAR = 4  # of requests that leave together, those so near each other in the list are cut out at once


class Group(IntEnum):
    """Requests that may share a batch: a deadline is not put at risk by work that has none."""

    WITH_DEADLINE = 0
    WITHOUT_DEADLINE = 1


# An urgency with every number negated: ascending, the most urgent is last, where taking it moves nothing.
_Turn = tuple[Any, ...]


class _Waiting:
    __slots__ = ("group", "is_batched", "lift_s", "next_lift_s", "ranked", "turn")

    def __init__(self, ranked: RankedPrefill, lift_s: float, group: Group, is_batched: bool) -> None:
        self.lift_s = lift_s  # waiting this long lifts it by one class
        self.group = group
        self.is_batched = is_batched  # it runs whole with other short ones
        self.rank(ranked)

    def rank(self, ranked: RankedPrefill) -> None:
        """Put it at its place in the order."""
        urgency, request = ranked.urgency, ranked.request
        self.ranked = ranked
        self.next_lift_s = request.arrival_s + (int(request.priority) - urgency.aged_class + 1) * self.lift_s
        self.turn: _Turn = (-urgency.aged_class, -urgency.sort_value, -urgency.arrival_s, -urgency.key)


class WholeLimits(NamedTuple):
    """Describes what one prefill takes at most to run whole in a short batch."""

    time_s: float
    tokens: int


NONE_WHOLE = WholeLimits(0.0, 0)


class _Lists:
    """The requests of one group in their orders."""

    __slots__ = ("longs", "shorts")

    def __init__(self) -> None:
        self.shorts: list[_Turn] = []
        self.longs: list[_Turn] = []


class PrefillQueue:
    """All requests of an instance that have prefill work left.

    A request is lifted by a class whenever it has waited `age_s`, or 200 times what it takes by itself if that is more.
    """

    __slots__ = ("_age_s", "_lifts", "_lists", "_overdue", "_waiting", "_whole", "long_work_s", "started")

    def __init__(self, age_s: float, whole: WholeLimits = NONE_WHOLE) -> None:
        self._age_s = age_s
        self._whole = whole  # of long prefills that go with short ones when they are due
        self._waiting: dict[int, _Waiting] = {}
        self._lists = (_Lists(), _Lists())
        self._lifts: list[tuple[float, int]] = []  # a heap of (when, key); those of earlier events mean nothing
        self._overdue: list[tuple[float, int]] = []  # when they have waited twice their objective, and keys; sorted
        self.started: dict[int, RankedPrefill] = {}  # requests that hold KV
        self.long_work_s = [0.0, 0.0]  # predicted time of the long prefills of each group

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[RankedPrefill]:
        """All of them, in no order."""
        return iter([waiting.ranked for waiting in self._waiting.values()])

    def get(self, key: int) -> RankedPrefill:
        """Return the request. KeyError where it is not in the queue."""
        return self._waiting[key].ranked

    def put(self, request: QueuedPrefill, now_s: float, cost: CostCoefficients, chunk_s: float) -> None:
        """Take a request in, or what has become of it: a chunk has run, or its prefix was matched again.

        `chunk_s` is the time of the chunks that its total time is predicted with.
        """
        if request.key in self._waiting:
            self.remove(request.key)
        remaining_s = cost.prefill_s(request.new_tokens, request.cached_tokens, chunk_s)
        total_s = remaining_s
        computed_tokens = request.total_tokens - request.new_tokens
        if computed_tokens > 0:
            total_s = cost.prefill_s(request.total_tokens, max(0, request.cached_tokens - computed_tokens), chunk_s)
        total_s = max(total_s, 1e-9)
        lift_s = max(self._age_s, _PATIENCE * total_s)
        lifted = aged_class(request.priority, now_s - request.arrival_s, lift_s)
        self._insert(request, remaining_s, total_s, lift_s, lifted)

    def remove(self, key: int) -> None:
        """It has ended, or was aborted. KeyError where it is not in the queue."""
        self._unlist(self._waiting.pop(key))
        self.started.pop(key, None)

    def remove_all(self, keys: Sequence[int]) -> None:
        """Remove the requests of one batch. KeyError for a key that is not in the queue."""
        batched: tuple[list[_Turn], list[_Turn]] = ([], [])
        for key in keys:
            waiting = self._waiting.pop(key)
            if waiting.is_batched:
                batched[waiting.group].append(waiting.turn)
            else:
                self.started.pop(key, None)
                self._unlist(waiting)
        for lists, leaving in zip(self._lists, batched, strict=True):
            if leaving:
                _cut_out(lists.shorts, leaving)

    def lift(self, now_s: float) -> None:
        """Raise the class of everything that has waited long enough since the last call."""
        lifts = self._lifts
        while lifts and lifts[0][0] <= now_s:
            lift_at_s, key = heappop(lifts)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.next_lift_s != lift_at_s:
                continue
            self._lift(waiting, now_s)
        if len(lifts) > 64 + 2 * len(self._waiting):  # mostly of requests that have left
            self._lifts = [(waiting.next_lift_s, key) for key, waiting in self._waiting.items()]
            heapify(self._lifts)

    def due_longs(self, now_s: float, patience_s: float, most: int) -> list[RankedPrefill]:
        """Long prefills that are due and can go with the short ones, those that have been so for longest first."""
        due: list[RankedPrefill] = []
        for when_s, key in self._overdue:
            if when_s >= now_s or len(due) >= most:
                break
            ranked = self._waiting[key].ranked
            if ranked.request.arrival_s < now_s - patience_s:
                due.append(ranked)
        return due

    def count(self, group: Group) -> int:
        return len(self._lists[group].shorts) + len(self._lists[group].longs)

    def head_class(self, group: Group) -> float:
        """The most urgent class of a group's requests; infinite without any."""
        lists = self._lists[group]
        short_class = -lists.shorts[-1][0] if lists.shorts else inf
        return min(short_class, -lists.longs[-1][0]) if lists.longs else short_class

    def has_longs(self) -> bool:
        """Return whether a long prefill waits, with a deadline or without."""
        return bool(self._lists[0].longs or self._lists[1].longs)

    def shorts(self, group: Group, most: int) -> list[RankedPrefill]:
        """The first short prefills, most urgent first."""
        waiting = self._waiting
        return [waiting[-turn[3]].ranked for turn in reversed(self._lists[group].shorts[-most:])]

    def candidates(self, group: Group, most: int, now_s: float) -> list[RankedPrefill]:
        """Short prefills for a batch at `now_s`, most urgent first: where more wait, not only late ones.

        If late ones fill the first `most`, requests that could be on time would be looked at
        once they are late as well. Then half of the candidates are those of the most urgent class that are not late.
        """
        turns = self._lists[group].shorts
        if len(turns) <= most:
            return self.shorts(group, most)
        urgent = -turns[-1][0]
        late_from = bisect_right(turns, (-urgent, -now_s, inf, 0))
        late = turns[max(late_from, len(turns) - max(most // 2, most - late_from)) :]
        rest = turns[max(0, late_from - (most - len(late))) : late_from]
        waiting = self._waiting
        return [waiting[-turn[3]].ranked for turn in (*reversed(late), *reversed(rest))]

    def longs(self, group: Group, most: int) -> list[RankedPrefill]:
        """Long prefills in the order in which they should run: the first `most`, and all that have been started."""
        waiting = self._waiting
        turns = self._lists[group].longs[-most:]
        chosen = [waiting[-turn[3]].ranked for turn in reversed(turns)]
        if self.started:
            keys = {ranked.request.key for ranked in chosen}
            extra = [
                started_prefill
                for key, started_prefill in self.started.items()
                if waiting[key].group is group and key not in keys
            ]
            if extra:
                return sorted([*chosen, *extra])
        return chosen

    def _insert(self, request: QueuedPrefill, remaining_s: float, total_s: float, lift_s: float, lifted: int) -> None:
        has_deadline = isfinite(request.deadline_s)
        runs_whole = is_batched(request)
        by_s = remaining_s
        if runs_whole:
            by_s = request.deadline_s - remaining_s if has_deadline else request.arrival_s
        waiting = _Waiting(
            RankedPrefill(Urgency(lifted, by_s, request.arrival_s, request.key), request, remaining_s, total_s),
            lift_s,
            Group.WITH_DEADLINE if has_deadline else Group.WITHOUT_DEADLINE,
            runs_whole,
        )
        self._waiting[request.key] = waiting
        heappush(self._lifts, (waiting.next_lift_s, request.key))
        if request.is_started:
            self.started[request.key] = waiting.ranked
        lists = self._lists[waiting.group]
        if runs_whole:
            insort(lists.shorts, waiting.turn)
        else:
            insort(lists.longs, waiting.turn)
            self.long_work_s[waiting.group] += remaining_s
            if self._can_be_due(waiting.ranked):
                insort(self._overdue, (due_s(request), request.key))

    def _lift(self, waiting: _Waiting, now_s: float) -> None:
        ranked = waiting.ranked
        request, urgency = ranked.request, ranked.urgency
        lifted = aged_class(request.priority, now_s - request.arrival_s, waiting.lift_s)
        lifted = min(lifted, urgency.aged_class - 1)
        lists = self._lists[waiting.group]
        turns = lists.shorts if waiting.is_batched else lists.longs
        del turns[bisect_left(turns, waiting.turn)]
        urgency = Urgency(lifted, urgency.sort_value, urgency.arrival_s, urgency.key)
        waiting.rank(RankedPrefill(urgency, request, ranked.remaining_s, ranked.total_s))
        insort(turns, waiting.turn)
        if request.is_started:
            self.started[request.key] = waiting.ranked
        heappush(self._lifts, (waiting.next_lift_s, request.key))

    def _can_be_due(self, long: RankedPrefill) -> bool:
        request = long.request
        fits = long.remaining_s <= self._whole.time_s and request.new_tokens <= self._whole.tokens
        return fits and not request.is_started and isfinite(request.deadline_s)

    def _unlist(self, waiting: _Waiting) -> None:
        lists, ranked = self._lists[waiting.group], waiting.ranked
        if waiting.is_batched:
            del lists.shorts[bisect_left(lists.shorts, waiting.turn)]
            return
        del lists.longs[bisect_left(lists.longs, waiting.turn)]
        if self._can_be_due(ranked):
            del self._overdue[bisect_left(self._overdue, (due_s(ranked.request), ranked.request.key))]
        # Without longs, exactly 0: what is left of adding and taking away would grow.
        self.long_work_s[waiting.group] = self.long_work_s[waiting.group] - ranked.remaining_s if lists.longs else 0.0


def is_batched(request: QueuedPrefill) -> bool:
    """Return whether it runs in a short batch. A short prefill that the engine has cut goes on as a long one."""
    return request.length_class is LengthClass.SHORT and not request.is_started


def _cut_out(turns: list[_Turn], leaving: list[_Turn]) -> None:
    """Take these out: neighbours at once, as what is behind them moves each time."""
    leaving.sort()
    end = len(leaving)
    while end > 0:
        last = bisect_left(turns, leaving[end - 1])
        first, start = last, end - 1
        while start > 0:
            at = bisect_left(turns, leaving[start - 1], max(0, first - _NEAR), first)
            if at == first or turns[at] != leaving[start - 1]:
                break
            first, start = at, start - 1
        if last - first < end - start:
            del turns[first : last + 1]
        else:
            gone = set(leaving[start:end])
            turns[first : last + 1] = [turn for turn in turns[first : last + 1] if turn not in gone]
        end = start
