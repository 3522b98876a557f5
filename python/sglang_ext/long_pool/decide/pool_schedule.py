"""Describes what a long pool computes next: an order, a price, and a group for each prompt whose turn has come.

    arrivals ──▶ PoolLoad ──price──▶ PricePlanner.place ──▶ what starts now, what is reserved
    waiting  ──▶ on_time_order ──┘

Nothing is decided before it starts, and what runs is never touched.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sglang_ext.long_pool.decide.chunk_length import (
    NO_SHORT_LOAD,
    ShortLoad,
    longest_chunk_s,
    shorts_delayed,
    should_wait,
)
from sglang_ext.long_pool.decide.chunked_costs import ChunkedPlanner
from sglang_ext.long_pool.decide.on_time_order import OnTimeOptions, OnTimeOrder, OrderedPrefill, PendingPrefill
from sglang_ext.long_pool.decide.pool_load import PoolLoad
from sglang_ext.long_pool.decide.price_planner import Placement, PrefillSnapshot, PricePlanner, WaitingPrompt
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost, TabulatedCost

_MEETINGS = 64  # chunks
_LONGEST_WAIT_S = 60.0  # of a begun prefill without a deadline, for short ones


class PrefillOrder(Protocol):
    """Whose turn it is."""

    def record_arrival(self) -> None:
        """A prefill has arrived."""

    def order(
        self, now_s: float, waiting: Sequence[PendingPrefill], instances: int, running_s: float
    ) -> list[OrderedPrefill]:
        """Return all of `waiting` in their order. `running_s`: instance-seconds until all that runs has ended."""
        ...


class OrdinaryWork(NamedTuple):
    """Work of the instances besides chunks, by their position in the snapshot; empty lists: there is none."""

    begin_in_s: Sequence[float]  # when a chunk could begin there between two batches, from now; infinity: it could not
    shorts_s: Sequence[float]  # what the short prefills take that wait there


NO_ORDINARY_WORK = OrdinaryWork((), ())


class PlacedPrefill(NamedTuple):
    """A pending prefill and its place; without a group where no group can hold it now."""

    key: int
    placement: Placement


def fastest_s(candidates: Sequence[SpCandidate], cached_tokens: int, new_tokens: int) -> float:
    """Return the time of the fastest SP size without a queue, as one chunk; infinity where no cost is known."""
    return min(candidate.cost.predict_s(cached_tokens, new_tokens) for candidate in candidates)


def min_work_s(candidates: Sequence[SpCandidate], cached_tokens: int, new_tokens: int) -> float:
    """Return the instance-seconds of the SP size that takes the fewest; infinity where no cost is known."""
    return min(candidate.size * candidate.cost.predict_s(cached_tokens, new_tokens) for candidate in candidates)


def tokens_within(cost: SpCost | TabulatedCost, cached_tokens: int, new_tokens: int, budget_s: float) -> int:
    """Return how many of `new_tokens` a chunk computes within the budget, by binary search; at least 1."""
    low, high = 1, new_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if cost.predict_s(cached_tokens, middle) <= budget_s:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(slots=True)
class PoolSchedule:
    """Decides what to compute next, from what is pending at each event."""

    planner: PricePlanner
    order: PrefillOrder = field(default_factory=lambda: OnTimeOrder(OnTimeOptions()))
    load: PoolLoad = field(default_factory=PoolLoad)
    price: float = 0.0  # of an instance-second at the last decision, to the first prompt
    waits_for_shorts: bool = False  # at the last decision a begun prefill waited for short ones
    _latest: list[int] = field(default_factory=list)  # keys in the order of the latest decision
    _expected: ChunkedPlanner | None = None
    _meetings_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEETINGS))

    def record_arrival(self, now_s: float, work_s: float) -> None:
        """A prefill of this many instance-seconds has arrived."""
        self.load.record_arrival(now_s, work_s)
        self.order.record_arrival()

    def record_meeting(self, meeting_s: float) -> None:
        """A chunk has ended that has taken this long beyond its computing."""
        self._meetings_s.append(meeting_s)

    def cut(
        self, placement: Placement, cached_tokens: int, shorts: ShortLoad, chunk_s: float | None
    ) -> tuple[int, float]:
        """Return tokens and time of what is run of a chunk: all of it, or the first of as many equal parts as fit the
        longest time of one. What is left of a chunk costs its group a turn, however short it is.

        `chunk_s`: a bound besides that of `chunk_length`; where every chunk costs a quarter of it, that counts.
        """
        options = self.planner.options
        size = len(placement.group)
        cost = next(candidate.cost for candidate in options.candidates if candidate.size == size)
        overhead_s = cost.predict_s(0, 0)
        budget_s = self._longest_s(size, overhead_s, shorts)
        if chunk_s is not None:
            budget_s = min(budget_s, longest_chunk_s(overhead_s, size, self.price, ShortLoad(0.0, 2 * chunk_s)))
        if placement.compute_s <= budget_s:
            return placement.tokens, placement.compute_s
        factor = placement.compute_s / cost.predict_s(cached_tokens, placement.tokens)
        # Without a fixed cost nothing bounds how short a chunk may be but its least length.
        part_s = placement.compute_s / math.ceil(placement.compute_s / budget_s) if budget_s else 0.0
        fitting = tokens_within(cost, cached_tokens, placement.tokens, part_s / factor)
        tokens = min(placement.tokens, max(options.min_chunk_tokens, fitting))
        return tokens, cost.predict_s(cached_tokens, tokens) * factor

    def _longest_s(self, size: int, overhead_s: float, shorts: ShortLoad) -> float:
        """Return the longest time of a chunk that takes `overhead_s` to launch."""
        are_known = size > 1 and self._meetings_s
        meeting_s = sum(self._meetings_s) / len(self._meetings_s) if are_known else 0.0
        return longest_chunk_s(overhead_s, size, self.price, shorts, meeting_s)

    def turns(
        self,
        now_s: float,
        snapshot: PrefillSnapshot,
        pending: Sequence[PendingPrefill],
        running_s: float,
        shorts: ShortLoad = NO_SHORT_LOAD,
        work: OrdinaryWork = NO_ORDINARY_WORK,
    ) -> list[PlacedPrefill]:
        """Return what starts now and what is reserved, in the order of the prefills, until no instance is idle.

        `running_s`: instance-seconds until all that runs has ended. ValueError as `PricePlanner.place`.
        """
        self.waits_for_shorts = False
        options, instances = self.planner.options, len(snapshot.node_ids)
        ordered = self.order.order(now_s, pending, instances, running_s)
        self._latest = [prefill.key for prefill, _ in ordered]
        left_s = running_s + sum([prompt.work_s for prompt in pending])
        waiting = [
            WaitingPrompt(prefill.new_tokens, prefill.cached_tokens, due_s - now_s, prefill.owner, prefill.holders)
            for prefill, due_s in ordered[: options.max_considered]
        ]
        behind = len(ordered) - len(waiting)
        others = behind + self.load.arrivals_until_empty(now_s, left_s, instances, shorts.work_s)
        others += instances * shorts_delayed(shorts)
        self.price = max(options.min_price, (len(waiting) - 1 + others) / instances)
        if self._expected is None or self._expected.of_chunks is not self.planner:
            self._expected = ChunkedPlanner(self.planner)
        overheads_s = {candidate.size: candidate.cost.predict_s(0, 0) for candidate in options.candidates}
        self._expected.bound(
            {size: self._longest_s(size, overhead_s, shorts) for size, overhead_s in overheads_s.items()}
        )
        placements = self._expected.place(snapshot, waiting, others)
        turns = [PlacedPrefill(ordered[placed.prompt].prefill.key, placed) for placed in placements]
        if shorts == NO_SHORT_LOAD:
            return turns
        first = [prefill for prefill, _ in ordered[: len(waiting)]]
        continued = self._continued(now_s, first, placements, snapshot, shorts, work)
        keys = {turn.key for turn in continued}
        return [*(turn for turn in turns if turn.key not in keys), *continued]

    def next_of(self, waiting: Collection[int], arrivals: Sequence[int]) -> int | None:
        """Return the key of `waiting` that comes first by the latest decision; later `arrivals` come behind, in
        their order."""
        known = next((key for key in self._latest if key in waiting), None)
        return next(iter(arrivals), None) if known is None else known

    def _continued(
        self,
        now_s: float,
        ordered: Sequence[PendingPrefill],
        placements: Sequence[Placement],
        snapshot: PrefillSnapshot,
        shorts: ShortLoad,
        work: OrdinaryWork,
    ) -> list[PlacedPrefill]:
        """Return the prefills that go on where they have KV, although these instances have ordinary work: begun
        ones, and those behind kept rows for which nothing better is planned.

        Members compute a chunk and then a batch, in turn. There may be ordinary work at one of them all the time: the
        group would never be idle as a whole, and the prefill would keep its KV there. It goes on in its turn, and in
        that of a prefill before it in the order only where it has ended before that one may begin. It waits where short
        prefills would be late (`chunk_length.should_wait`).
        """
        placed = {placement.prompt: placement for placement in placements if placement.group}
        taken = {instance for placement in placed.values() if placement.start_s == 0.0 for instance in placement.group}
        wanted_s = [math.inf] * len(snapshot.node_ids)  # when the first of those before may begin, by position
        continued: list[PlacedPrefill] = []
        for at, prefill in enumerate(ordered):
            place = placed.get(at)
            if place is not None and place.start_s == 0.0:
                continue
            group = tuple(holder.instance for holder in prefill.holders)
            begins_s = [work.begin_in_s[instance] if work.begin_in_s else 0.0 for instance in group]
            chunk = None
            if group and taken.isdisjoint(group):
                if max(begins_s) == math.inf:  # it is in a step, or waits for one
                    taken.update(group)
                    continue
                chunk = self._chunk_at_holders(at, prefill, group, begins_s, place, snapshot)
                if chunk is not None and self._yields(now_s, prefill, chunk, shorts, work):
                    chunk, self.waits_for_shorts = None, True
            if chunk is None or max(begins_s) + chunk.compute_s > min(wanted_s[instance] for instance in group):
                # It waits for its place; without one it takes whichever instance is idle first.
                for instance in range(len(wanted_s)) if place is None else place.group:
                    may_begin_s = snapshot.queue_delays_s[instance] if place is None else place.start_s
                    wanted_s[instance] = min(wanted_s[instance], may_begin_s)
                continue
            taken.update(group)
            continued.append(PlacedPrefill(prefill.key, chunk))
        return continued

    def _yields(
        self, now_s: float, prefill: PendingPrefill, chunk: Placement, shorts: ShortLoad, work: OrdinaryWork
    ) -> bool:
        """Return whether a begun prefill waits until its members have computed the short ones that wait there."""
        if not (prefill.is_started and work.shorts_s):
            return False
        busy_s = max(work.begin_in_s[instance] + work.shorts_s[instance] for instance in chunk.group)
        _, chunk_s = self.cut(chunk, prefill.cached_tokens, shorts, None)
        due_s = min(prefill.deadline_s, prefill.arrival_s + _LONGEST_WAIT_S)
        return should_wait(chunk_s, busy_s, shorts, chunk.compute_s, due_s - now_s)

    def _chunk_at_holders(
        self,
        at: int,
        prefill: PendingPrefill,
        group: tuple[int, ...],
        begins_s: Sequence[float],
        place: Placement | None,
        snapshot: PrefillSnapshot,
    ) -> Placement | None:
        """Return all that is left of a prefill as a chunk where it has KV; None where it had better wait.

        `begins_s`: when each of the group could begin, from now.
        """
        costs = {candidate.size: candidate.cost for candidate in self.planner.options.candidates}
        if len(group) not in costs:
            return None
        compute_s = costs[len(group)].predict_s(prefill.cached_tokens, prefill.new_tokens)
        if not prefill.is_started:
            idle_s = sum(max(begins_s) - begin_s for begin_s in begins_s)
            here_s = max(begins_s) + compute_s + self.price * (len(group) * compute_s + idle_s)
            if here_s > self._later_s(prefill, place, snapshot):
                return None
        return Placement(at, prefill.new_tokens, group, 0.0, compute_s, compute_s)

    def _later_s(self, prefill: PendingPrefill, placed: Placement | None, snapshot: PrefillSnapshot) -> float:
        """Return when a prefill ends, from now, and what it costs others, where it waits for its place.

        Without a place, as none is idle: at best it gets the size that suits it, once those who hold KV of it are idle.
        """
        if placed is not None:
            return placed.end_s + self.price * len(placed.group) * (placed.end_s - placed.start_s)
        holders = [holder.instance for holder in prefill.holders]
        best_s = min(
            (1 + self.price * candidate.size) * candidate.cost.predict_s(prefill.cached_tokens, prefill.new_tokens)
            for candidate in self.planner.options.candidates
            if candidate.size >= len(holders)
        )
        return max(snapshot.queue_delays_s[instance] for instance in holders) + best_s
