"""Describes which shapes of the grid are captured, in which order, and in how much memory.

The largest come first: all graphs share one memory pool, a later and smaller capture fits into what an earlier and
larger one took, so the pool grows once (LAPS, 3.1, pays for each graph apart).

A capture costs twice: memory of its own (its nodes), and what the shared pool grows by when its activations do not fit
into what is there. The first is much the same for all shapes of a model. The second is a matter of tokens, beyond those
of the largest shape that the pool has held, but not only of tokens: the first capture brings workspaces, and memory
comes in segments. So what a small shape took says little of a large one, and an estimate is only corrected by as much
as a measurement proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from sglang_ext.graphs.decide.graph_grid import GraphShape

DEFAULT_LENGTHS_TOKENS = (8, 16, 32, 64, 128, 256)
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def plan_captures(
    lengths_tokens: Sequence[int], batch_sizes: Sequence[int], max_batch_tokens: int, max_requests: int
) -> list[GraphShape]:
    """The shapes of the product that batches run on, in the order of capture.

    A batch has `max_batch_tokens` at most: of each length, no shape is larger than the smallest that holds them.
    """
    shapes = set()
    for length in lengths_tokens:
        for requests in sorted(batch_sizes):
            if requests > max_requests:
                break
            shapes.add(GraphShape(length, requests))
            if length * requests >= max_batch_tokens:
                break
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.requests), reverse=True)


# Workspaces of the matrix products, and what two segments of the allocator may have left unused.
UNEXPLAINED_BYTES = 64 << 20


class CaptureCost(NamedTuple):
    """Measured around one capture."""

    shape: GraphShape
    pool_growth_bytes: int
    own_bytes: int
    seconds: float


class MemoryLedger:
    """Costs of the captures so far. `budget_bytes` None: no limit."""

    def __init__(self, budget_bytes: int | None, assumed_bytes_per_token: float) -> None:
        """`assumed_bytes_per_token`: activations, until captures have shown them."""
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"a budget is not negative, got {budget_bytes} bytes")
        self._budget_bytes = budget_bytes
        self._pool_tokens = 0  # the largest shape that the pool has held
        self._bytes_per_token = assumed_bytes_per_token  # of a shape that finds nothing in the pool to use again
        # Of each token beyond the largest shape so far: more than the former where what is there does not fit.
        self._growth_per_token = assumed_bytes_per_token
        self.costs: list[CaptureCost] = []

    @property
    def pool_bytes(self) -> int:
        return sum(cost.pool_growth_bytes for cost in self.costs)

    @property
    def used_bytes(self) -> int:
        return self.pool_bytes + sum(cost.own_bytes for cost in self.costs)

    def expected_bytes(self, shape: GraphShape) -> int:
        """Return what a capture of `shape` should take: the median of what graphs took, and the pool's growth."""
        own = median_low(cost.own_bytes for cost in self.costs) if self.costs else 0
        count = shape.tokens
        growth = max(0, count - self._pool_tokens) * self._growth_per_token
        return own + int(min(growth, count * self._bytes_per_token))

    def can_capture(self, shape: GraphShape) -> bool:
        """Return whether the budget is expected to hold."""
        return self._budget_bytes is None or self.used_bytes + self.expected_bytes(shape) <= self._budget_bytes

    def record(self, cost: CaptureCost) -> None:
        """Take a capture into account."""
        self.costs.append(cost)
        count, growth = cost.shape.tokens, cost.pool_growth_bytes
        added = count - self._pool_tokens
        if added > 0:
            least, most = growth - UNEXPLAINED_BYTES, growth + UNEXPLAINED_BYTES
            self._bytes_per_token = _within(self._bytes_per_token, least / count, most / added)
            self._growth_per_token = _within(self._growth_per_token, least / added, most / added)
            self._pool_tokens = count


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
