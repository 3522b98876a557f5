"""What waits on one prefill instance, kept in the order in which it should run, so that a decision looks at few of it.

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
from typing import NamedTuple

from sglang_ext.policy.laps.cost_model import CostCoefficients
from sglang_ext.policy.laps.round_plan import QueuedPrefill
from sglang_ext.policy.laps.slack import RankedPrefill, Urgency, aged_class
from sglang_ext.types import LengthClass

_URGENT = 160  # a batch is formed of fewer


class Group(IntEnum):
    """Requests that may share a batch: a deadline is not put at risk by work that has none."""

    WITH_DEADLINE = 0
    WITHOUT_DEADLINE = 1


class _Waiting(NamedTuple):
    ranked: RankedPrefill
    lift_s: float  # waiting this long lifts it by one class
    next_lift_s: float
    group: Group
    is_batched: bool  # it runs whole with other short ones


# An urgency with every number negated: ascending, the most urgent is last, where taking it moves nothing.
_Turn = tuple[int, float, float, int]


class _Lists:
    """The requests of one group in their orders."""

    __slots__ = ("longs", "shorts")

    def __init__(self) -> None:
        self.shorts: list[_Turn] = []
        self.longs: list[_Turn] = []


class PrefillQueue:
    """All requests of an instance that have prefill work left.

    `age_s` and `stretch`: a request is lifted by a class every `age_s`, or `stretch` times its own length if that is
    more.
    """

    __slots__ = ("_age_s", "_lifts", "_lists", "_stretch", "_waiting", "long_work_s", "started")

    def __init__(self, age_s: float, stretch: float) -> None:
        self._age_s = age_s
        self._stretch = stretch
        self._waiting: dict[int, _Waiting] = {}
        self._lists = (_Lists(), _Lists())
        self._lifts: list[tuple[float, int]] = []  # a heap of (when, key); those of earlier events mean nothing
        self.started: dict[int, RankedPrefill] = {}  # those that hold KV
        self.long_work_s = [0.0, 0.0]  # predicted time of the long prefills of each group

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[RankedPrefill]:
        """All of them, in no order."""
        return iter([waiting.ranked for waiting in self._waiting.values()])

    def get(self, key: int) -> RankedPrefill:
        """KeyError for one that is not in the queue."""
        return self._waiting[key].ranked

    def put(self, request: QueuedPrefill, now_s: float, cost: CostCoefficients, chunk_s: float) -> None:
        """Take a request in, or what has become of it: a chunk has run, or its prefix was matched anew.

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
        lift_s = max(self._age_s, self._stretch * total_s)
        lifted = aged_class(request.priority, now_s - request.arrival_s, lift_s)
        self._insert(request, remaining_s, total_s, lift_s, lifted)

    def remove(self, key: int) -> None:
        """It has ended, or was aborted. KeyError for one that is not in the queue."""
        self._unlist(self._waiting.pop(key))
        self.started.pop(key, None)

    def remove_all(self, keys: Sequence[int]) -> None:
        """These leave in one batch. KeyError for one that is not in the queue."""
        batched: tuple[dict[int, _Waiting], ...] = ({}, {})
        for key in keys:
            waiting = self._waiting.pop(key)
            self.started.pop(key, None)
            if waiting.is_batched:
                batched[waiting.group][-key] = waiting
            else:
                self._unlist(waiting)
        for lists, leaving in zip(self._lists, batched, strict=True):
            if leaving:  # most of them are among the most urgent
                last = lists.shorts[-_URGENT:]
                left = [turn for turn in last if turn[3] not in leaving]
                if len(left) < len(last):
                    lists.shorts[-_URGENT:] = left
                if len(last) - len(left) < len(leaving):
                    done = {turn[3] for turn in last}
                    for key, waiting in leaving.items():
                        if key not in done:
                            self._unlist(waiting)

    def lift(self, now_s: float) -> None:
        """Raise the class of everything that has waited long enough since the last call."""
        lifts = self._lifts
        while lifts and lifts[0][0] <= now_s:
            lift_at_s, key = heappop(lifts)
            waiting = self._waiting.get(key)
            if waiting is None or waiting.next_lift_s != lift_at_s:
                continue
            request, lift_s = waiting.ranked.request, waiting.lift_s
            lifted = aged_class(request.priority, now_s - request.arrival_s, lift_s)
            self.remove(key)
            lifted = min(lifted, waiting.ranked.urgency.aged_class - 1)
            self._insert(request, waiting.ranked.remaining_s, waiting.ranked.total_s, lift_s, lifted)
        if len(lifts) > 64 + 2 * len(self._waiting):  # mostly of requests that have left
            self._lifts = [(waiting.next_lift_s, key) for key, waiting in self._waiting.items()]
            heapify(self._lifts)

    def count(self, group: Group) -> int:
        return len(self._lists[group].shorts) + len(self._lists[group].longs)

    def has_longs(self) -> bool:
        """Whether a long prefill waits, with a deadline or without."""
        return bool(self._lists[0].longs or self._lists[1].longs)

    def shorts(self, group: Group, most: int) -> list[RankedPrefill]:
        """The first short prefills, most urgent first."""
        waiting = self._waiting
        return [waiting[-turn[3]].ranked for turn in reversed(self._lists[group].shorts[-most:])]

    def candidates(self, group: Group, most: int, now_s: float) -> list[RankedPrefill]:
        """Short prefills for a batch at `now_s`, most urgent first: where more wait, not only those that are late.

        So many late ones may wait that they are the first `most`, and those that could be on time would be looked at
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
        chosen = [waiting[-turn[3]].ranked for turn in reversed(self._lists[group].longs[-most:])]
        extra = [
            ranked
            for ranked in self.started.values()
            if waiting[ranked.request.key].group is group and ranked not in chosen
        ]
        return sorted([*chosen, *extra]) if extra else chosen

    def _insert(self, request: QueuedPrefill, remaining_s: float, total_s: float, lift_s: float, lifted: int) -> None:
        has_deadline = isfinite(request.deadline_s)
        is_batched = request.length_class is LengthClass.SHORT and not request.is_started
        by_s = remaining_s
        if is_batched:
            by_s = request.deadline_s - remaining_s if has_deadline else request.arrival_s
        waiting = _Waiting(
            RankedPrefill(Urgency(lifted, by_s, request.arrival_s, request.key), request, remaining_s, total_s),
            lift_s,
            request.arrival_s + (int(request.priority) - lifted + 1) * lift_s,
            Group.WITH_DEADLINE if has_deadline else Group.WITHOUT_DEADLINE,
            is_batched,
        )
        self._waiting[request.key] = waiting
        heappush(self._lifts, (waiting.next_lift_s, request.key))
        if request.is_started:
            self.started[request.key] = waiting.ranked
        lists = self._lists[waiting.group]
        if is_batched:
            insort(lists.shorts, _turn(waiting.ranked.urgency))
        else:
            insort(lists.longs, _turn(waiting.ranked.urgency))
            self.long_work_s[waiting.group] += remaining_s

    def _unlist(self, waiting: _Waiting) -> None:
        lists, ranked = self._lists[waiting.group], waiting.ranked
        if waiting.is_batched:
            del lists.shorts[bisect_left(lists.shorts, _turn(ranked.urgency))]
            return
        del lists.longs[bisect_left(lists.longs, _turn(ranked.urgency))]
        # Without longs, exactly 0: what is left of adding and taking away would grow.
        self.long_work_s[waiting.group] = self.long_work_s[waiting.group] - ranked.remaining_s if lists.longs else 0.0


def _turn(urgency: Urgency) -> _Turn:
    return (-urgency.aged_class, -urgency.relative_slack, -urgency.arrival_s, -urgency.key)
