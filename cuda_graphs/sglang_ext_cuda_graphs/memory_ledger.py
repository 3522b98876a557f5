"""What graphs take of the device's memory, as measured, and whether one more stays within the budget.

A capture costs twice: memory of its own (its nodes), and what the shared pool grows by when its activations do not fit
into what is there. The first is the same for all shapes of a model, the second is a matter of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.policy.laps_records import GraphShape
from sglang_ext_cuda_graphs.capture_plan import tokens


class CaptureCost(NamedTuple):
    """Measured around one capture."""

    shape: GraphShape
    pool_growth_bytes: int
    own_bytes: int
    seconds: float


class MemoryLedger:
    """Costs of the captures so far. `budget_bytes` None: no limit."""

    def __init__(self, budget_bytes: int | None, assumed_bytes_per_token: float) -> None:
        """`assumed_bytes_per_token`: activations, until a capture has told."""
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"a budget is not negative, got {budget_bytes} bytes")
        self._budget_bytes = budget_bytes
        self._bytes_per_token = assumed_bytes_per_token
        self._pool_tokens = 0  # the largest shape that the pool has held
        self.costs: list[CaptureCost] = []

    @property
    def pool_bytes(self) -> int:
        return sum(cost.pool_growth_bytes for cost in self.costs)

    @property
    def used_bytes(self) -> int:
        return self.pool_bytes + sum(cost.own_bytes for cost in self.costs)

    def expected_bytes(self, shape: GraphShape) -> int:
        """What a capture of `shape` should take: the mean of what graphs took, and the pool's growth."""
        own = sum(cost.own_bytes for cost in self.costs) // len(self.costs) if self.costs else 0
        return own + int(max(0, tokens(shape) - self._pool_tokens) * self._bytes_per_token)

    def can_capture(self, shape: GraphShape) -> bool:
        """Whether the budget is expected to hold."""
        return self._budget_bytes is None or self.used_bytes + self.expected_bytes(shape) <= self._budget_bytes

    def note(self, cost: CaptureCost) -> None:
        """Take a capture into account."""
        self.costs.append(cost)
        count = tokens(cost.shape)
        if count > self._pool_tokens:
            self._pool_tokens = count
            if self.pool_bytes:
                self._bytes_per_token = self.pool_bytes / count
