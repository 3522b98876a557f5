"""The order in which waiting long prefills take instances: by deadline; a prompt that costs others theirs is put back.

Moore's and Hodgson's rule: in the order of deadlines, while all prefills so far would be on time; where one would not,
the longest so far is put back. The number of prefills put back is a share of the arrivals. Behind those that can be on
time come the others, late or put back, the one with the least work left first: then a queue that cannot be on time as
a whole ends soonest, and most that arrive next are on time again. Late ones with so little work that all the others are
still on time come before these: a short question about a long document does not wait for other documents.

So that no prefill pays for that without bound, one that has waited for ten deadlines, which grow with its work, comes
first. Without a deadline it comes last, until it has waited for a minute: then it comes first in its turn among its
like, one of them for every fifty arrivals.

What is late on any group is placed only by the price, as if it had no deadline: if each of several such took its
fastest group, which takes the most instance-seconds, the queue would grow by that, and more would be late. A lone one
may hurry.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import NamedTuple

from sglang_ext.long_pool.decide.price_planner import Holder

_BY_DEADLINE = attrgetter("deadline_s", "arrival_s", "key")
_BY_WORK = attrgetter("work_s")
_PASSING_WORK = 0.1  # of the mean of the passed ones


@dataclass(frozen=True, slots=True)
class OnTimeOptions:
    """ValueError naming the field."""

    put_back_share: float = 0.02  # of the arrivals, at most, with
    put_back_burst: int = 50  # this many at once
    planned_share: float = 0.9  # of the time to a deadline that may be planned with
    work_factor: float = (
        1.1  # what a queue takes, over the least work in it: groups are not always of the cheapest size
    )
    due_share: float = 0.95  # of the time to a deadline: later ends cost
    put_back_due_share: float = 2.85  # the same for a prefill that is put back
    promoted_after: float = 10.0  # deadlines: then it comes first
    max_hurrying: int = 1  # late on any group, of which each still takes its fastest one
    age_s: float = 60.0  # after which one without a deadline comes first,
    arrivals_per_aged: int = 50  # one for this many arrivals

    def __post_init__(self) -> None:
        if not 0 <= self.put_back_share <= 1:
            raise ValueError(f"put_back_share: {self.put_back_share} is not from 0 to 1")
        for name, least in (("put_back_burst", 0), ("max_hurrying", 0), ("arrivals_per_aged", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is less than {least}")
        for name in ("planned_share", "work_factor", "due_share", "put_back_due_share", "promoted_after", "age_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}: {getattr(self, name)} is not a finite number above 0")


class PendingPrefill(NamedTuple):
    """A prefill of which nothing runs and something is left."""

    key: int  # unique; decides among equals
    new_tokens: int  # L that are left
    cached_tokens: int  # C cached or computed
    owner: int  # position in the snapshot; -1: not known yet
    holders: tuple[Holder, ...]
    arrival_s: float
    deadline_s: float  # absolute, of the first token; infinity where there is none
    total_s: float  # `fastest_s` when it arrived; above 0
    fastest_s: float  # of what is left, on the best size
    work_s: float  # of what is left, the least instance-seconds
    is_started: bool  # a chunk of it has been computed: it is not put back any more


class OrderedPrefill(NamedTuple):
    """A prefill at its place in the order, and when its first token is due."""

    prefill: PendingPrefill
    due_s: float  # absolute: a margin before the deadline, or later where it is put back; infinity: the price decides


class OnTimeOrder:
    """Keeps the prefills that are put back or have aged, and the number that may still be put back."""

    def __init__(self, options: OnTimeOptions) -> None:
        self._options = options
        self._allowance = float(options.put_back_burst)
        self._put_back: set[int] = set()
        self._aged: set[int] = set()  # without a deadline, and now first
        self._arrivals = options.arrivals_per_aged  # since the last one of them

    @property
    def put_back(self) -> Collection[int]:
        """Return the prompts that are put back now although they could be on time."""
        return self._put_back

    def record_arrival(self) -> None:
        """One more prefill: a share of one more may be put back, and of an aged one may come first."""
        options = self._options
        self._allowance = min(float(options.put_back_burst), self._allowance + options.put_back_share)
        self._arrivals += 1

    def order(
        self, now_s: float, waiting: Sequence[PendingPrefill], instances: int, running_s: float
    ) -> list[OrderedPrefill]:
        """Return all of `waiting` in their order. `running_s`: instance-seconds until all that runs has ended."""
        options = self._options
        # A prefill that waits no more has started, or its client has gone: what it was allowed is used.
        keys = {waiting_prompt.key for waiting_prompt in waiting}
        self._put_back &= keys
        self._aged &= keys
        by_deadline = sorted(waiting, key=_BY_DEADLINE)
        self._record_aged(now_s, by_deadline)
        first: list[PendingPrefill] = []
        late: list[PendingPrefill] = []
        timely: list[PendingPrefill] = []
        behind: set[int] = set()  # late, or put back
        for prefill in by_deadline:
            if now_s + prefill.fastest_s > prefill.deadline_s:
                behind.add(prefill.key)
                may_wait_s = options.promoted_after * (prefill.deadline_s - prefill.arrival_s)
                (first if now_s - prefill.arrival_s > may_wait_s else late).append(prefill)
            else:
                (first if prefill.key in self._aged else timely).append(prefill)
        first.sort(key=lambda prefill: not prefill.is_started)
        per_work = options.work_factor / instances
        ahead_s = running_s / instances + sum([prefill.work_s for prefill in first]) * per_work
        put_back = self._choose(now_s, timely, ahead_s, per_work)
        self._allowance += len(self._put_back - put_back) - len(put_back - self._put_back)
        self._put_back = put_back
        on_time = [prefill for prefill in timely if prefill.key not in put_back] if put_back else timely
        passing = self._passing(now_s, late, on_time, ahead_s, per_work)
        behind |= put_back
        left = put_back.union([prefill.key for prefill in late]).difference([prefill.key for prefill in passing])
        left_behind = [prefill for prefill in by_deadline if prefill.key in left] if left else []
        turns = [*first, *passing, *on_time, *sorted(left_behind, key=_BY_WORK)]
        shares = options.due_share, options.put_back_due_share
        due_s = [turn.arrival_s + shares[turn.key in behind] * (turn.deadline_s - turn.arrival_s) for turn in turns]
        is_lost = [now_s + turn.fastest_s > due for turn, due in zip(turns, due_s, strict=True)]
        may_hurry = sum(is_lost) <= options.max_hurrying
        return [
            OrderedPrefill(turn, due if may_hurry or not lost else math.inf)
            for turn, due, lost in zip(turns, due_s, is_lost, strict=True)
        ]

    def _passing(
        self,
        now_s: float,
        late: Sequence[PendingPrefill],
        on_time: Sequence[PendingPrefill],
        ahead_s: float,
        per_work: float,
    ) -> list[PendingPrefill]:
        """Return the late prefills that come before those which can be on time, and leave them on time: the least work
        first."""
        spare_s, end_s = math.inf, now_s + ahead_s
        for prefill in on_time:
            end_s += prefill.work_s * per_work
            spare_s = min(spare_s, self._planned_s(prefill) - end_s)
        passing: list[PendingPrefill] = []
        max_work_s = _PASSING_WORK * sum(prefill.work_s for prefill in on_time) / max(1, len(on_time))
        for prefill in sorted(late, key=_BY_WORK):
            spare_s -= prefill.work_s * per_work
            if spare_s < 0 or prefill.work_s > max_work_s:
                break
            passing.append(prefill)
        return passing

    def _planned_s(self, prefill: PendingPrefill) -> float:
        """Return until when it is planned to end, to be on time."""
        return prefill.arrival_s + self._options.planned_share * (prefill.deadline_s - prefill.arrival_s)

    def _record_aged(self, now_s: float, by_deadline: Sequence[PendingPrefill]) -> None:
        """The oldest of those without a deadline comes first, where it has waited this long and it is its turn."""
        options = self._options
        if self._arrivals >= options.arrivals_per_aged:
            for prefill in by_deadline:
                has_aged = prefill.deadline_s == math.inf and now_s - prefill.arrival_s > options.age_s
                if has_aged and prefill.key not in self._aged:
                    self._arrivals = 0
                    self._aged.add(prefill.key)
                    return

    def _choose(self, now_s: float, timely: Sequence[PendingPrefill], ahead_s: float, per_work: float) -> set[int]:
        """Return who of these is put back so that the others are on time."""
        put_back: set[int] = set()
        allowance = self._allowance + len(self._put_back)
        longest: list[tuple[float, float, int]] = []
        end_s = now_s + ahead_s
        for prefill in timely:
            takes_s = prefill.work_s * per_work
            end_s += takes_s
            if not prefill.is_started and prefill.deadline_s < math.inf:
                heappush(longest, (-takes_s, -prefill.arrival_s, prefill.key))
            if end_s > self._planned_s(prefill) and longest and len(put_back) + 1 <= allowance:
                saved_s, _, key = heappop(longest)
                end_s += saved_s
                put_back.add(key)
        return put_back
