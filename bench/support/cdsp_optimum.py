"""The lowest TTFT of any chunked plan, found without the planner: what the planner's heuristics give away."""

from __future__ import annotations

from baselines.tetris_planner import CdspRequest, PlannerConfig
from sglang_ext.long_pool.decide.price_planner import PrefillSnapshot
from sglang_ext.long_pool.decide.sp_cost import SpCost


def unrestricted_optimum_s(
    config: PlannerConfig, snapshot: PrefillSnapshot, request: CdspRequest, cuts: int = 128
) -> float:
    """Return the lowest TTFT over all growing groups and all chunk boundaries on a grid of `cuts` steps.

    Time depends only on a group's size, so the best group of s instances is the s least delayed ones, for any
    nodes, and these contain one another. What is left is an exact dynamic programme: the earliest time at which the
    first x tokens can be done on sizes up to s. Memory apart; for costs of Eq. 1.
    """
    delays = sorted(snapshot.queue_delays_s)
    grid = [round(request.new_tokens * step / cuts) for step in range(cuts + 1)]
    done_s = [0.0] + [float("inf")] * cuts
    for candidate in sorted(config.candidates, key=lambda one: one.size):
        if candidate.size > len(delays):
            break
        cost = candidate.cost
        assert isinstance(cost, SpCost)
        ready_s = delays[candidate.size - 1]
        before_s = list(done_s)
        for start in range(cuts):
            if before_s[start] == float("inf"):
                continue
            begin_s = max(before_s[start], ready_s)
            cached = request.cached_tokens + grid[start]
            for end in range(start + 1, cuts + 1):
                end_s = begin_s + cost.predict_s(cached, grid[end] - grid[start])
                if end_s < done_s[end]:
                    done_s[end] = end_s
    return done_s[cuts]
