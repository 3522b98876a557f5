"""Which short prefills leave together: those of the head's length bucket first, then others while padding pays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.policy.laps.cost_model import CostCoefficients
from sglang_ext.policy.laps.graph_grid import GraphGrid, GraphShape
from sglang_ext.policy.laps.slack import RankedPrefill


class BatchBounds(NamedTuple):
    """What a batch must fit. The first request is always taken when the memory holds it."""

    max_requests: int
    max_tokens: int
    free_kv_tokens: int
    page_tokens: int  # every request takes whole pages
    budget_s: float


class FormedBatch(NamedTuple):
    """A batch that could leave now."""

    members: tuple[RankedPrefill, ...]
    new_tokens: int
    predicted_s: float
    shape: GraphShape | None
    is_full: bool  # at its largest size, or a request was left behind that did not fit


class BatchCost(NamedTuple):
    """The time of a short batch, which grows one request at a time: on a captured shape, or ragged."""

    cost: CostCoefficients
    grid: GraphGrid
    longest_tokens: int = 0
    requests: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    attention_work: float = 0.0

    def joined_by(self, new_tokens: int, cached_tokens: int) -> BatchCost:
        """With one more request."""
        return BatchCost(
            self.cost,
            self.grid,
            max(self.longest_tokens, new_tokens),
            self.requests + 1,
            self.new_tokens + new_tokens,
            self.cached_tokens + cached_tokens,
            self.attention_work + new_tokens * (new_tokens + 2.0 * cached_tokens),
        )

    def merged_with(self, other: BatchCost) -> BatchCost:
        """Both batches as one."""
        return BatchCost(
            self.cost,
            self.grid,
            max(self.longest_tokens, other.longest_tokens),
            self.requests + other.requests,
            self.new_tokens + other.new_tokens,
            self.cached_tokens + other.cached_tokens,
            self.attention_work + other.attention_work,
        )

    def shape(self) -> GraphShape | None:
        """The captured shape that the batch will be padded to; None: it runs on the ordinary kernels."""
        if not self.grid.shapes:
            return None
        choice = self.grid.choose(self.longest_tokens, self.requests, self.new_tokens, self.cached_tokens)
        return choice if isinstance(choice, GraphShape) else None

    def time_s(self) -> float:
        """Seconds; on a captured shape all of its tokens are computed, but attention only for those of requests."""
        shape = self.shape()
        tokens = self.new_tokens if shape is None else shape.tokens
        return self.cost.iteration_s(
            self.attention_work, tokens, self.cached_tokens, self.requests, is_replayed=shape is not None
        )


class _Members(NamedTuple):
    """A batch while it is formed. An empty one takes no time."""

    batch: BatchCost
    ranked: tuple[RankedPrefill, ...] = ()
    kv_tokens: int = 0
    time_s: float = 0.0

    def joined_by(self, candidate: RankedPrefill, bounds: BatchBounds) -> _Members:
        request = candidate.request
        batch = self.batch.joined_by(request.new_tokens, request.cached_tokens)
        return _Members(batch, (*self.ranked, candidate), self.kv_tokens + pages(candidate, bounds), batch.time_s())

    def merged_with(self, other: _Members) -> _Members:
        batch = self.batch.merged_with(other.batch)
        return _Members(batch, self.ranked + other.ranked, self.kv_tokens + other.kv_tokens, batch.time_s())

    def fits(self, bounds: BatchBounds) -> bool:
        return (
            self.batch.requests <= bounds.max_requests
            and self.batch.new_tokens <= bounds.max_tokens
            and self.kv_tokens <= bounds.free_kv_tokens
        )


def form_batch(
    ranked: Sequence[RankedPrefill], cost: CostCoefficients, grid: GraphGrid, bounds: BatchBounds
) -> FormedBatch | None:
    """The batch of the most urgent request, `ranked` being in order of urgency; None if its head fits no memory.

    Another request joins if the batch with it takes no longer than the two apart. Where it does not, as the batch would
    need a larger shape, several may: they join together if the batch with all of them takes no longer than the two
    batches. Without captured shapes nothing is padded, and urgency alone decides.
    """
    if not ranked or pages(ranked[0], bounds) > bounds.free_kv_tokens:
        return None
    head = ranked[0]
    if grid.shapes:
        deepest = min(bounds.max_requests, grid.deepest(head.request.new_tokens) or bounds.max_requests)
        bounds = bounds._replace(max_requests=deepest)
    members = _Members(BatchCost(cost, grid)).joined_by(head, bounds)
    waiting = _Members(BatchCost(cost, grid))  # those that have not paid by themselves
    lacks_room = False
    for candidate in _by_bucket(head, ranked, grid):
        if len(members.ranked) >= bounds.max_requests:
            break
        joined = members.joined_by(candidate, bounds)
        if not joined.fits(bounds):
            lacks_room = True
            continue
        if joined.time_s <= members.time_s + alone_s(candidate, cost, grid):
            if joined.time_s > bounds.budget_s:
                lacks_room = True
                continue
            members = joined
            continue
        more = waiting.joined_by(candidate, bounds)
        both = members.merged_with(more)
        if not both.fits(bounds):
            continue
        waiting = more
        if both.time_s <= min(members.time_s + waiting.time_s, bounds.budget_s):
            members, waiting = both, _Members(BatchCost(cost, grid))
    is_full = lacks_room or len(members.ranked) >= bounds.max_requests
    batch = members.batch
    return FormedBatch(members.ranked, batch.new_tokens, members.time_s, batch.shape(), is_full)


def lone_batch(head: RankedPrefill, cost: CostCoefficients, grid: GraphGrid) -> FormedBatch:
    """A request by itself, whatever room there is."""
    batch = BatchCost(cost, grid).joined_by(head.request.new_tokens, head.request.cached_tokens)
    return FormedBatch((head,), batch.new_tokens, batch.time_s(), batch.shape(), is_full=True)


def alone_s(ranked: RankedPrefill, cost: CostCoefficients, grid: GraphGrid) -> float:
    """Seconds that a request takes by itself, on a captured shape where that is known to take less."""
    if cost.replayed is None:
        return ranked.remaining_s
    request = ranked.request
    return min(ranked.remaining_s, BatchCost(cost, grid).joined_by(request.new_tokens, request.cached_tokens).time_s())


def pages(ranked: RankedPrefill, bounds: BatchBounds) -> int:
    """KV slots that a prefill takes, in whole pages."""
    return -(-ranked.request.new_tokens // bounds.page_tokens) * bounds.page_tokens


def joined_s(formed: FormedBatch, cost: CostCoefficients, grid: GraphGrid) -> float:
    """Predicted time of the batch with one more request, of its average length."""
    batch = BatchCost(cost, grid)
    for member in formed.members:
        batch = batch.joined_by(member.request.new_tokens, member.request.cached_tokens)
    depth = len(formed.members)
    return batch.joined_by(batch.new_tokens // depth, batch.cached_tokens // depth).time_s()


def _by_bucket(head: RankedPrefill, ranked: Sequence[RankedPrefill], grid: GraphGrid) -> Sequence[RankedPrefill]:
    """All but the head: its length bucket first, then the nearest buckets, each in order of urgency."""
    others = ranked[1:]
    if not grid.shapes:
        return others
    lengths = grid.lengths_tokens
    bucket = bisect_left(lengths, head.request.new_tokens)
    return sorted(others, key=lambda other: abs(bisect_left(lengths, other.request.new_tokens) - bucket))
