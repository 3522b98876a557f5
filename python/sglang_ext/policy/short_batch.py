"""Which short prefills leave together: those of the head's length bucket first, then others while padding pays."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from sglang_ext.policy.graph_grid import GraphGrid
from sglang_ext.policy.laps_records import GraphShape
from sglang_ext.policy.prefill_cost import CostCoefficients
from sglang_ext.policy.relative_slack import RankedPrefill


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
    is_full: bool  # at its largest size, or somebody was left behind for lack of room


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
        return BatchCost(
            self.cost,
            self.grid,
            max(self.longest_tokens, new_tokens),
            self.requests + 1,
            self.new_tokens + new_tokens,
            self.cached_tokens + cached_tokens,
            self.attention_work + new_tokens * (new_tokens + 2.0 * cached_tokens),
        )

    def shape(self) -> GraphShape | None:
        """The captured shape that the batch will be padded to; None: it runs on the ordinary kernels."""
        if not self.grid.shapes:
            return None
        choice = self.grid.choose(self.longest_tokens, self.requests, self.new_tokens, self.cached_tokens)
        return choice if isinstance(choice, GraphShape) else None

    def time_s(self) -> float:
        """Seconds; on a captured shape every slot of it is computed at its full length."""
        shape = self.shape()
        if shape is None:
            return self.cost.iteration_s(self.attention_work, self.new_tokens, self.cached_tokens)
        length = shape.length_tokens
        return self.cost.iteration_s(
            length * (shape.requests * float(length) + 2.0 * self.cached_tokens),
            length * shape.requests,
            self.cached_tokens,
        )


def form_batch(
    ranked: Sequence[RankedPrefill], cost: CostCoefficients, grid: GraphGrid, bounds: BatchBounds
) -> FormedBatch | None:
    """The batch of the most urgent request, `ranked` being in order of urgency; None if its head fits no memory.

    Another request joins if the batch with it takes no longer than the two apart. Without captured shapes nothing
    is padded, and urgency alone decides.
    """
    if not ranked or pages(ranked[0], bounds) > bounds.free_kv_tokens:
        return None
    head = ranked[0]
    max_requests = bounds.max_requests
    if grid.shapes:
        max_requests = min(max_requests, grid.deepest(head.request.new_tokens) or max_requests)
    members = [head]
    batch = BatchCost(cost, grid).joined_by(head.request.new_tokens, head.request.cached_tokens)
    predicted_s = batch.time_s()
    kv_tokens = pages(head, bounds)
    lacks_room = False
    for candidate in _by_bucket(head, ranked, grid):
        if len(members) >= max_requests:
            break
        request = candidate.request
        needed_tokens = pages(candidate, bounds)
        joined = batch.joined_by(request.new_tokens, request.cached_tokens)
        if joined.new_tokens > bounds.max_tokens or kv_tokens + needed_tokens > bounds.free_kv_tokens:
            lacks_room = True
            continue
        joined_s = joined.time_s()
        if joined_s > predicted_s + candidate.remaining_s:
            continue  # padding does not pay
        if joined_s > bounds.budget_s:
            lacks_room = True
            continue
        members.append(candidate)
        batch, predicted_s, kv_tokens = joined, joined_s, kv_tokens + needed_tokens
    is_full = lacks_room or len(members) >= max_requests
    return FormedBatch(tuple(members), batch.new_tokens, predicted_s, batch.shape(), is_full)


def lone_batch(head: RankedPrefill, cost: CostCoefficients, grid: GraphGrid) -> FormedBatch:
    """A request by itself, whatever room there is."""
    batch = BatchCost(cost, grid).joined_by(head.request.new_tokens, head.request.cached_tokens)
    return FormedBatch((head,), batch.new_tokens, batch.time_s(), batch.shape(), is_full=True)


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
