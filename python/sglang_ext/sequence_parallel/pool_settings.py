"""How a long pool is served: what the options of `sglang-ext coordinator` say."""

from __future__ import annotations

from typing import NamedTuple

from sglang_ext.policy.cdsp.replanning import ReplanMode
from sglang_ext.policy.cdsp.sharding import Interleaving


class PoolSettings(NamedTuple):
    """One pool's settings."""

    interleaving: Interleaving = Interleaving.ZIGZAG
    mode: ReplanMode = ReplanMode.LARS
    improvement_rate: float = 0.05
    min_chunk_tokens: int = 512
    patience_s: float = 5.0
    step_timeout_s: float = 30.0
    silence_s: float = 5.0
    overlaps_rebalancing: bool = True

    @property
    def stuck_s(self) -> float:
        """From the first failure in a step on: everybody else has waited in vain, too, by then."""
        return 2 * self.step_timeout_s + self.silence_s
