"""Short batches formed the plain way, from lists and whole sums at every step: what `form_batch` must decide."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from sglang_ext.graphs.decide.graph_grid import GraphGrid, GraphShape
from sglang_ext.laps.decide.cost_model import CostCoefficients
from sglang_ext.laps.decide.short_batch import SPARE, BatchBounds, FormedBatch, apart_s
from sglang_ext.laps.decide.urgency import RankedPrefill


class PlainBatch:
    """A batch while it is formed, by the rules that `form_batch` states."""

    def __init__(self, now_s: float, cost: CostCoefficients, grid: GraphGrid, bounds: BatchBounds) -> None:
        self.now_s, self.cost, self.grid, self.bounds = now_s, cost, grid, bounds
        self.members: list[RankedPrefill] = []
        self.kept_s = inf  # the earliest deadline to be kept
        self.max_requests = bounds.max_requests
        self.lacks_room = False
        self.stretch = 1 + bounds.margin

    # -- what a list of requests is ---------------------------------------------------------------------------------

    def work(self, members: Sequence[RankedPrefill]) -> float:
        return float(
            sum(one.request.new_tokens * (one.request.new_tokens + 2 * one.request.cached_tokens) for one in members)
        )

    def shape(self, members: Sequence[RankedPrefill]) -> GraphShape | None:
        lengths = [one.request.new_tokens for one in members]
        if not members or not self.grid.shapes:
            return None
        cached_tokens = sum(one.request.cached_tokens for one in members)
        choice = self.grid.choose(max(lengths), len(lengths), sum(lengths), cached_tokens)
        return choice if isinstance(choice, GraphShape) else None

    def time_s(self, members: Sequence[RankedPrefill]) -> float:
        if not members:
            return 0.0
        shape = self.shape(members)
        tokens = sum(one.request.new_tokens for one in members) if shape is None else shape.tokens
        cached_tokens = sum(one.request.cached_tokens for one in members)
        is_replayed = shape is not None
        return self.cost.iteration_s(self.work(members), tokens, cached_tokens, len(members), is_replayed)

    def kv_tokens(self, members: Sequence[RankedPrefill]) -> int:
        page = self.bounds.page_tokens
        return sum(-(-one.request.new_tokens // page) * page for one in members)

    def has_room(self, members: Sequence[RankedPrefill]) -> bool:
        tokens = sum(one.request.new_tokens for one in members)
        return tokens <= self.bounds.max_tokens and self.kv_tokens(members) <= self.bounds.free_kv_tokens

    def has_room_for_a_token(self) -> bool:
        tokens = sum(one.request.new_tokens for one in self.members)
        page = self.bounds.page_tokens
        return tokens < self.bounds.max_tokens and self.kv_tokens(self.members) + page <= self.bounds.free_kv_tokens

    def is_in_time(self, members: Sequence[RankedPrefill]) -> bool:
        time_s = self.time_s(members)
        return time_s <= self.bounds.budget_s and self.now_s + self.stretch * time_s <= self.kept_s

    def own_s(self, one: RankedPrefill) -> float:
        cost, request = self.cost, one.request
        return (
            cost.alpha_s * int(self.work([one]))
            + cost.token_s * request.new_tokens
            + cost.read_s * request.cached_tokens
        )

    def by_bucket(self, candidates: list[RankedPrefill]) -> list[RankedPrefill]:
        if not self.grid.shapes or not candidates:
            return candidates
        lengths = self.grid.lengths_tokens
        head = self.members[0] if self.members else candidates[0]

        def bucket(one: RankedPrefill) -> int:
            return sum(length < one.request.new_tokens for length in lengths)

        return sorted(candidates, key=lambda one: abs(bucket(one) - bucket(head)))

    # -- the steps --------------------------------------------------------------------------------------------------

    def take_class(self, due: list[RankedPrefill], ranked: list[RankedPrefill]) -> None:
        if due:
            self.join(due, is_spare=self.kept_s < inf)
        before_s = self.time_s(self.members) if self.members else 0.0
        late = [one for one in ranked if not self.is_punctual(one, before_s)]
        punctual = [one for one in ranked if one not in late]
        if punctual:
            base = list(self.members)
            self.join(self.by_bucket(punctual), is_spare=False)
            joined = self.members[len(base) :]
            kept_s = min([self.kept_s, *(one.request.deadline_s for one in joined)])
            if self.now_s + self.stretch * self.time_s(self.members) > kept_s:
                self.put_back(base, joined)
            else:
                self.kept_s = kept_s
            if not self.members:
                late = ranked
        if late:
            late = sorted(late, key=lambda one: one.remaining_s)
            self.join(self.by_bucket(late), is_spare=self.kept_s < inf)

    def is_punctual(self, one: RankedPrefill, before_s: float) -> bool:
        end_s = self.now_s + self.stretch * before_s + self.stretch * one.remaining_s
        return self.bounds.keeps_deadlines and end_s <= one.request.deadline_s

    def join(self, candidates: list[RankedPrefill], *, is_spare: bool) -> None:
        waiting: list[RankedPrefill] = []
        added_s = 0.0
        for one in candidates:
            if self.members and len(self.members) >= self.max_requests:
                break
            if not self.members:
                if self.kv_tokens([one]) > self.bounds.free_kv_tokens:
                    return
                deepest = self.grid.deepest(one.request.new_tokens)
                self.max_requests = min(self.max_requests, deepest or self.max_requests)
                self.members.append(one)
                continue
            joined = [*self.members, one]
            if not self.has_room(joined):
                self.lacks_room = True
                continue
            before_s, joined_s = self.time_s(self.members), self.time_s(joined)
            if not self.grid.shapes or joined_s <= before_s + apart_s([one], self.cost, self.grid):
                if not self.is_in_time(joined):
                    self.lacks_room = True
                    continue
                if is_spare:
                    if added_s + joined_s - before_s > SPARE * (one.request.deadline_s - one.request.arrival_s):
                        self.lacks_room = True
                        continue
                    added_s += joined_s - before_s
                self.members = joined
                continue
            both = [*self.members, *waiting, one]
            if is_spare or len(both) > self.max_requests or not self.has_room(both):
                continue
            waiting.append(one)
            if self.is_in_time(both) and self.time_s(both) <= before_s + self.time_s(waiting):
                self.members, waiting = both, []

    def put_back(self, base: list[RankedPrefill], joined: list[RankedPrefill]) -> None:
        after_s = self.now_s + self.stretch * self.time_s(base + joined)
        may = [one for one in joined if after_s + self.stretch * one.remaining_s <= one.request.deadline_s]
        must = [one for one in joined if one not in may]
        kept = self.max_on_time(base, must, leaves_time=bool(may))
        kept_s = min([self.kept_s, *(one.request.deadline_s for one in kept)])
        for one in sorted(may, key=self.own_s):
            end_s = self.now_s + self.stretch * self.time_s([*base, *kept, one])
            if end_s <= min(kept_s, one.request.deadline_s):
                kept.append(one)
                kept_s = min(kept_s, one.request.deadline_s)
        self.members = base + [one for one in joined if one in kept]
        self.kept_s = kept_s
        self.lacks_room = True

    def max_on_time(
        self, base: list[RankedPrefill], must: list[RankedPrefill], *, leaves_time: bool
    ) -> list[RankedPrefill]:
        best: list[RankedPrefill] = []
        best_left_s = -inf
        kept: list[RankedPrefill] = []
        for one in sorted(must, key=lambda one: -one.request.deadline_s):
            end_s = min(one.request.deadline_s, self.kept_s)
            kept.append(one)
            while kept and self.now_s + self.stretch * self.time_s(base + kept) > end_s:
                longest = max(kept, key=lambda other: (self.own_s(other), must.index(other)))
                kept.remove(longest)
            left_s = end_s - self.now_s - self.stretch * self.time_s(base + kept)
            left_s = left_s if leaves_time else 0.0
            if kept and (len(kept) > len(best) or (len(kept) == len(best) and left_s >= best_left_s)):
                best, best_left_s = list(kept), left_s
        return best


def plain_form_batch(
    ranked: Sequence[RankedPrefill],
    now_s: float,
    cost: CostCoefficients,
    grid: GraphGrid,
    bounds: BatchBounds,
    due: Sequence[RankedPrefill] = (),
) -> FormedBatch | None:
    """What `form_batch` is to return."""
    batch = PlainBatch(now_s, cost, grid, bounds)
    for aged_class in sorted({one.urgency.aged_class for one in (*ranked, *due)}):
        batch.take_class(
            *([one for one in waiting if one.urgency.aged_class == aged_class] for waiting in (due, ranked))
        )
        if not batch.members:
            return None
    members = batch.members
    if not members:
        return None
    return FormedBatch(
        tuple(members),
        sum(one.request.new_tokens for one in members),
        sum(one.request.cached_tokens for one in members),
        batch.work(members),
        batch.time_s(members),
        batch.shape(members),
        batch.lacks_room or len(members) >= batch.max_requests or not batch.has_room_for_a_token(),
        batch.kept_s,
    )
