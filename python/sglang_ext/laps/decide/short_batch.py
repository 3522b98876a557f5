"""Decides which short prefills leave together: as many as can end on time, on a captured shape where that pays.

All members of a batch end with it. In order of urgency they join while there is room; where the batch would then end
after a deadline in it, some are put back: they wait for another batch. Requests that cannot be on time any more use
what room is left, and a request that has been late for long goes first (`form_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter
from typing import Final, NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphGrid, GraphShape
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.on_time import BatchCost, BatchSums, Contender, max_on_time
from sglang_ext.laps.decide.urgency import RankedPrefill

SPARE: Final = 0.25  # of its objective: most time that late prefills add to a batch with others that are on time
_REMAINING_S: Final = attrgetter("remaining_s")


class BatchBounds(NamedTuple):
    """Describes what a batch must fit. The first request is always taken when the memory holds it."""

    max_requests: int
    max_tokens: int
    free_kv_tokens: int
    page_tokens: int  # every request takes whole pages
    budget_s: float
    margin: float = 0.0  # relative: a batch is to be on time even if it takes this much longer than predicted
    keeps_deadlines: bool = True  # or none waits for another batch so that others are on time


class FormedBatch(NamedTuple):
    """A batch that could leave now."""

    members: tuple[RankedPrefill, ...]
    new_tokens: int
    cached_tokens: int
    attention_work: float  # sum over its requests of L (L + 2 H)
    predicted_s: float
    shape: GraphShape | None
    is_full: bool  # at its largest size, or so near to it that a request was left behind or none can follow
    deadline_s: float  # the earliest of the members that end on time; infinite where none has one


def form_batch(
    ranked: Sequence[RankedPrefill],
    now_s: float,
    cost: CostCoefficients,
    grid: GraphGrid,
    bounds: BatchBounds,
    due: Sequence[RankedPrefill] = (),
) -> FormedBatch | None:
    """The batch that should leave at `now_s`; None without candidates, or where the memory does not hold its head.

    `ranked`: the candidates by class, those of one in order of urgency; `due`: others, by class, that have waited so
    long that they go first. The batch is formed class by class (`aged_class`), and what a class takes is fixed for the
    next, which may not make it late. A time that is compared with a deadline counts `margin` more. In a class:

    0. Those that are due join in the order given, and the steps that follow count their time.
    1. Requests that can be on time by themselves join in order of urgency within `bounds`. On captured shapes the
       head's length bucket comes first, then the nearest buckets. Another joins if the batch with it takes no longer
       than the two apart. Where it does not, as the batch would need a larger shape, several may: they join together
       if the batch with all of them takes no longer than the two batches.
    2. If the batch now ends after a deadline in it, some are put back. A request can wait if it would still be on time
       by itself after this batch. Of all subsets of the requests that joined in step 1, and that end before each
       deadline in them, one is kept that has the most requests that cannot wait, and of these one with the most that
       can. (With captured shapes the time of a subset does not only depend on its sum: there it is the best of the
       subsets that a sweep over the deadlines finds which puts back the longest first.)
    3. Late ones join, the shortest first, while no deadline is missed for it and they add at most `SPARE` of
       their objective. If nothing else has joined there are no deadlines left to keep: only `bounds` hold.

    Without `keeps_deadlines` all count as late.
    """
    forming = _Forming(now_s, cost, grid, bounds)
    first = first_due = 0
    while first < len(ranked) or first_due < len(due):
        heads = [*ranked[first : first + 1], *due[first_due : first_due + 1]]
        aged_class = min([head.urgency.aged_class for head in heads])
        last, last_due = _class_end(ranked, first, aged_class), _class_end(due, first_due, aged_class)
        forming.take_class(due[first_due:last_due], ranked[first:last])
        if forming.requests >= forming.max_requests or not forming.members:
            break
        first, first_due = last, last_due
    if not forming.members:
        return None
    return FormedBatch(
        tuple(forming.members),
        forming.new_tokens,
        forming.cached_tokens,
        float(forming.work),
        forming.time_s,
        grid.by_tokens[forming.shape_at] if forming.shape_at >= 0 else None,
        forming.is_full(),
        forming.end_s,
    )


def lone_batch(head: RankedPrefill, cost: CostCoefficients, grid: GraphGrid) -> FormedBatch:
    """Return a batch of a single request, even without room for it."""
    request = head.request
    new_tokens, cached_tokens = request.new_tokens, request.cached_tokens
    work = float(new_tokens * (new_tokens + 2 * cached_tokens))
    at = grid.padded_at(new_tokens, 1, new_tokens, cached_tokens)
    shape = grid.by_tokens[at] if at >= 0 else None
    tokens = new_tokens if shape is None else shape.tokens
    time_s = cost.iteration_s(work, tokens, cached_tokens, 1, shape is not None)
    return FormedBatch((head,), new_tokens, cached_tokens, work, time_s, shape, True, request.deadline_s)


def joined_s(formed: FormedBatch, cost: CostCoefficients, grid: GraphGrid) -> float:
    """Predicted time of the batch with one more request, of its average length."""
    depth = len(formed.members)
    new_tokens, cached_tokens = formed.new_tokens // depth, formed.cached_tokens // depth
    work = formed.attention_work + new_tokens * (new_tokens + 2 * cached_tokens)
    longest_tokens = max([member.request.new_tokens for member in formed.members])
    new_tokens += formed.new_tokens
    cached_tokens += formed.cached_tokens
    at = grid.padded_at(longest_tokens, depth + 1, new_tokens, cached_tokens)
    return cost.iteration_s(work, grid.tokens[at] if at >= 0 else new_tokens, cached_tokens, depth + 1, at >= 0)


def apart_s(members: Sequence[RankedPrefill], cost: CostCoefficients, grid: GraphGrid) -> float:
    """Seconds that these take one after another, each on a captured shape where that is known to take less."""
    has_replayed = cost.replayed is not None
    time_s = 0.0
    for member in members:
        own_s = member.remaining_s
        if has_replayed:
            own_s = min(own_s, lone_batch(member, cost, grid).predicted_s)
        time_s += own_s
    return time_s


def pages(new_tokens: int, page_tokens: int) -> int:
    """KV slots that a prefill takes, in whole pages."""
    return -(-new_tokens // page_tokens) * page_tokens


def _class_end(ranked: Sequence[RankedPrefill], first: int, aged_class: int) -> int:
    """Return where the requests of this class end, of which the one at `first` may be the first."""
    count = len(ranked)
    if first < count and ranked[count - 1].urgency.aged_class == aged_class:
        return count
    while first < count and ranked[first].urgency.aged_class == aged_class:
        first += 1
    return first


class _Forming:
    """A batch while it is formed. An empty one takes no time.

    The sums are plain numbers in local loops, for this runs over every candidate in every iteration.
    """

    __slots__ = (
        "_bounds",
        "_cost",
        "_grid",
        "_now_s",
        "_stretch",
        "cached_tokens",
        "end_s",
        "kv_tokens",
        "lacks_room",
        "longest_tokens",
        "max_requests",
        "members",
        "new_tokens",
        "requests",
        "shape_at",
        "time_s",
        "work",
    )

    def __init__(self, now_s: float, cost: CostCoefficients, grid: GraphGrid, bounds: BatchBounds) -> None:
        self._now_s = now_s
        self._cost = BatchCost(cost, grid)
        self._grid = grid
        self._bounds = bounds
        self._stretch = 1.0 + bounds.margin  # what is compared with a deadline is this many times the prediction
        self.end_s = inf  # the earliest deadline that the batch keeps
        self.max_requests = bounds.max_requests
        self.lacks_room = False  # a request was left behind that did not fit
        self.members: list[RankedPrefill] = []
        self.requests = 0
        self.longest_tokens = 0
        self.new_tokens = 0
        self.cached_tokens = 0
        self.kv_tokens = 0
        self.work = 0  # sum of L (L + 2 H): exact
        self.time_s = 0.0
        self.shape_at = -1  # of its captured shape in the grid; -1: it runs on the ordinary kernels

    def is_full(self) -> bool:
        """Return whether a request was left behind that did not fit, or even one of a single token would not."""
        bounds = self._bounds
        return (
            self.lacks_room
            or self.requests >= self.max_requests
            or self.new_tokens >= bounds.max_tokens
            or self.kv_tokens + bounds.page_tokens > bounds.free_kv_tokens
        )

    def take_class(self, due: Sequence[RankedPrefill], ranked: Sequence[RankedPrefill]) -> None:
        """Let the requests of one class join, in the steps of `form_batch`."""
        now_s, stretch = self._now_s, self._stretch
        keeps_deadlines = self._bounds.keeps_deadlines
        if due:
            self._join(list(due), self.end_s < inf)
        start_s = now_s + stretch * self.time_s
        punctual: list[RankedPrefill] = []
        late: list[RankedPrefill] = []
        for candidate in ranked:
            is_punctual = start_s + stretch * candidate.remaining_s <= candidate.request.deadline_s
            if keeps_deadlines and is_punctual:
                punctual.append(candidate)
            else:
                late.append(candidate)
        if punctual:
            before = self.requests
            base = BatchSums(self.longest_tokens, self.new_tokens, self.cached_tokens, self.kv_tokens, self.work)
            self._join(self._by_bucket(punctual), False)
            end_s = self.end_s
            for member in self.members[before:]:
                end_s = min(end_s, member.request.deadline_s)
            if now_s + stretch * self.time_s > end_s:
                self._put_back(before, base)
            else:
                self.end_s = end_s
            if not self.members:  # as padded as they would run, not even one can end on time
                late = list(ranked)
        if late:
            late.sort(key=_REMAINING_S)
            self._join(self._by_bucket(late), self.end_s < inf)

    def _by_bucket(self, candidates: list[RankedPrefill]) -> list[RankedPrefill]:
        """The length bucket of the batch's head first, then the nearest buckets, each in the order given."""
        grid = self._grid
        lengths = grid.lengths_tokens
        if not lengths or len(candidates) < 2:
            return candidates
        head = self.members[0] if self.members else candidates[0]
        bucket = grid.bucket(head.request.new_tokens)
        by_distance: list[list[RankedPrefill]] = [[] for _ in range(len(lengths) + 1)]
        for candidate in candidates:
            by_distance[abs(grid.bucket(candidate.request.new_tokens) - bucket)].append(candidate)
        if len(by_distance[0]) == len(candidates):
            return candidates
        ordered: list[RankedPrefill] = []
        for bucketful in by_distance:
            ordered.extend(bucketful)
        return ordered

    def _join(self, candidates: list[RankedPrefill], is_spare: bool) -> None:
        """Let those join that fit, in this order, each by itself or several for a larger shape.

        With `is_spare` they use what room is left, at most `SPARE` of their objectives.
        """
        grid, bounds = self._grid, self._bounds
        batch_cost = self._cost
        eager, replayed, has_replayed = batch_cost.eager, batch_cost.replayed, batch_cost.has_replayed
        has_shapes = len(grid.shapes) > 0
        now_s, end_s, stretch = self._now_s, self.end_s, self._stretch
        budget_s, max_tokens, free_tokens = bounds.budget_s, bounds.max_tokens, bounds.free_kv_tokens
        page_tokens = bounds.page_tokens
        max_requests = self.max_requests
        longest, requests = self.longest_tokens, self.requests
        new, cached, kv, work = self.new_tokens, self.cached_tokens, self.kv_tokens, self.work
        time_s = self.time_s
        at = self.shape_at
        shape_length = shape_slots = shape_tokens = 0
        if at >= 0:
            shape_length, shape_slots, shape_tokens = grid.lengths[at], grid.slots[at], grid.tokens[at]
        added_s = 0.0
        members = self.members
        # Waits that have not paid by themselves.
        waiting: list[RankedPrefill] = []
        more_longest = more_new = more_cached = more_kv = more_work = 0
        for candidate in candidates:
            if requests >= max_requests and requests > 0:
                break
            request, remaining_s = candidate.request, candidate.remaining_s
            own = request.new_tokens
            own_cached = request.cached_tokens
            own_kv = own if page_tokens == 1 else -(-own // page_tokens) * page_tokens
            own_work = own * (own + 2 * own_cached)
            if requests == 0:
                if own_kv > free_tokens:
                    return
                if has_shapes:
                    deepest = grid.deepest(own)
                    if deepest is not None and deepest < max_requests:
                        max_requests = self.max_requests = deepest
            elif new + own > max_tokens or kv + own_kv > free_tokens:
                self.lacks_room = True
                continue
            joined_at = -1
            tokens = new + own
            cost = eager
            if has_shapes:
                if own <= shape_length and requests < shape_slots and tokens <= shape_tokens:
                    joined_at = at if cached + own_cached <= grid.max_prefix_tokens else -1
                else:
                    joined_at = grid.padded_at(max(longest, own), requests + 1, tokens, cached + own_cached)
                if joined_at >= 0:
                    tokens = grid.tokens[joined_at]
                    cost = replayed
                if has_replayed and requests > 0:
                    remaining_s = min(remaining_s, self._cost.time_s(own, 1, own, own_cached, own_work))
            joined_s = cost.time_s(work + own_work, tokens, cached + own_cached, requests + 1)
            if requests > 0:
                if has_shapes and joined_s > time_s + remaining_s:
                    if is_spare or requests + len(waiting) + 1 > max_requests:
                        continue
                    if new + more_new + own > max_tokens or kv + more_kv + own_kv > free_tokens:
                        continue
                    waiting.append(candidate)
                    more_longest = max(more_longest, own)
                    more_new += own
                    more_cached += own_cached
                    more_kv += own_kv
                    more_work += own_work
                    both_longest, both_requests = max(longest, more_longest), requests + len(waiting)
                    joined_at = grid.padded_at(both_longest, both_requests, new + more_new, cached + more_cached)
                    tokens = grid.tokens[joined_at] if joined_at >= 0 else new + more_new
                    cost = replayed if joined_at >= 0 else eager
                    joined_s = cost.time_s(work + more_work, tokens, cached + more_cached, both_requests)
                    if joined_s > budget_s or now_s + stretch * joined_s > end_s:
                        continue
                    if joined_s > time_s + self._cost.time_s(
                        more_longest, len(waiting), more_new, more_cached, more_work
                    ):
                        continue
                    members.extend(waiting)
                    requests = both_requests
                    longest = both_longest
                    new += more_new
                    cached += more_cached
                    kv += more_kv
                    work += more_work
                    time_s = joined_s
                    waiting = []
                    more_longest = more_new = more_cached = more_kv = more_work = 0
                    at = joined_at
                    shape_length = shape_slots = shape_tokens = 0
                    if at >= 0:
                        shape_length, shape_slots, shape_tokens = grid.lengths[at], grid.slots[at], grid.tokens[at]
                    continue
                if joined_s > budget_s or now_s + stretch * joined_s > end_s:
                    self.lacks_room = True
                    continue
                if is_spare:
                    spare_s = SPARE * (request.deadline_s - request.arrival_s)
                    if added_s + joined_s - time_s > spare_s:
                        self.lacks_room = True
                        continue
                    added_s += joined_s - time_s
            members.append(candidate)
            requests += 1
            longest = max(longest, own)
            new += own
            cached += own_cached
            kv += own_kv
            work += own_work
            time_s = joined_s
            if joined_at != at:
                at = joined_at
                shape_length = shape_slots = shape_tokens = 0
                if at >= 0:
                    shape_length, shape_slots, shape_tokens = grid.lengths[at], grid.slots[at], grid.tokens[at]
        self.longest_tokens, self.requests = longest, requests
        self.new_tokens, self.cached_tokens, self.kv_tokens, self.work = new, cached, kv, work
        self.time_s, self.shape_at = time_s, at

    def _put_back(self, first: int, base: BatchSums) -> None:
        """Keep of the members from `first` on as many as can end on time; `base` are the sums of those before them.

        First as many as possible of the requests that cannot wait for another batch. All others have deadlines after
        the end of the whole batch, so what time is left is theirs, the shortest first.
        """
        now_s, end_s, stretch = self._now_s, self.end_s, self._stretch
        after_s = now_s + stretch * self.time_s
        joined = self.members[first:]
        must: list[Contender] = []
        may: list[tuple[float, int, Contender]] = []
        for at, candidate in enumerate(joined):
            member = Contender(at, candidate.request, self._cost.eager)
            if after_s + stretch * candidate.remaining_s <= member.deadline_s:
                may.append((member.own_s, at, member))
            else:
                must.append(member)
        is_kept = [False] * len(joined)
        requests = first
        longest, new, cached, work = base.longest_tokens, base.new_tokens, base.cached_tokens, base.work
        for member in max_on_time(must, first, base, self._cost, now_s, stretch, end_s, leaves_time=len(may) > 0):
            is_kept[member.at] = True
            end_s = min(end_s, member.deadline_s)
            requests += 1
            longest = max(longest, member.new_tokens)
            new += member.new_tokens
            cached += member.cached_tokens
            work += member.work
        time_s = self._cost.time_s(longest, requests, new, cached, work)
        may.sort()
        for _, _, member in may:
            both_longest = max(longest, member.new_tokens)
            both_new, both_cached = new + member.new_tokens, cached + member.cached_tokens
            both_s = self._cost.time_s(both_longest, requests + 1, both_new, both_cached, work + member.work)
            if now_s + stretch * both_s > min(end_s, member.deadline_s):
                continue
            is_kept[member.at] = True
            end_s = min(end_s, member.deadline_s)
            requests += 1
            longest, new, cached = both_longest, both_new, both_cached
            work += member.work
            time_s = both_s
        self.end_s = end_s
        self.requests, self.longest_tokens = requests, longest
        self.new_tokens, self.cached_tokens, self.work = new, cached, work
        self.kv_tokens = base.kv_tokens
        del self.members[first:]
        for at, candidate in enumerate(joined):
            if is_kept[at]:
                self.members.append(candidate)
                self.kv_tokens += pages(candidate.request.new_tokens, self._bounds.page_tokens)
        self.time_s, self.shape_at = 0.0, -1
        if requests > 0:
            self.time_s = time_s
            self.shape_at = self._grid.padded_at(longest, requests, new, cached)
        self.lacks_room = True
