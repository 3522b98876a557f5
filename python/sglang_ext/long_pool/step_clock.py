"""Describes where a member's time in one step goes: a few readings of the clock per layer, none per row."""

from __future__ import annotations

import time
from typing import NamedTuple

from sglang_ext.long_pool.wire_types import Seconds


class StepTimes(NamedTuple):
    """One member's part of one step, s. What is left of `total_s` is computing."""

    total_s: Seconds
    ring_s: Seconds  # waited for keys and values of others that computing did not hide
    rebalance_s: Seconds  # moved earlier KV: reading, writing, and waiting for what has not come

    @property
    def compute_s(self) -> float:
        return max(0.0, self.total_s - self.ring_s - self.rebalance_s)


class StepClock:
    """Adds up one member's times in one step, from its making on.

    began_s = clock.now_s()
    call.wait()
    clock.ring_s += clock.now_s() - began_s
    """

    __slots__ = ("_began_s", "rebalance_s", "ring_s")

    now_s = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.ring_s = 0.0
        self.rebalance_s = 0.0
        self._began_s = self.now_s()

    def times(self) -> StepTimes:
        """Return the times until now."""
        return StepTimes(self.now_s() - self._began_s, self.ring_s, self.rebalance_s)
