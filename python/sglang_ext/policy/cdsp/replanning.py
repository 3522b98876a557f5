"""Plans that can be taken back: what has not started is planned again when something arrives, is cancelled or fails.

Tetris plans first come, first served and keeps every plan; an urgent or short request then waits behind chunks that
have not even started. Here the unstarted part of every request is planned anew, one request after the other, in order
of arrival or of Medha's relative slack. Chunks that run are never touched: they are delays. So that they delay no
request for long, the caller may cut a chunk to a time budget (Medha's adaptive chunking, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from sglang_ext.policy.cdsp.plan import CdspRequest, ChunkPlan, NoPlan, PrefillSnapshot, queue_delays_after
from sglang_ext.policy.cdsp.planner import CdspPlanner
from sglang_ext.policy.cdsp.sp_cost import SpCost, TabulatedCost
from sglang_ext.policy.laps.slack import relative_slack


class ReplanMode(StrEnum):
    """When plans are made."""

    OFF = "off"  # once, on arrival, behind all that is planned: the paper
    FCFS = "fcfs"  # again at every event, in order of arrival
    LARS = "lars"  # again at every event, lowest relative slack first
    EDF = "edf"  # again, earliest deadline first; to compare with
    SRPT = "srpt"  # again, shortest remaining time first; to compare with


class PendingPrefill(NamedTuple):
    """A request that has tokens left which no running chunk computes."""

    key: int  # unique; decides among equals
    new_tokens: int  # neither computed nor being computed
    cached_tokens: int  # cached, computed, or being computed by its running chunk
    group: tuple[int, ...]  # of its last chunk that started; positions in the snapshot
    arrival_s: float
    deadline_s: float  # absolute, of the first token; infinity where there is none
    total_s: float  # predicted on idle instances when it arrived: `ideal_prefill_s`; above 0


class PlannedPrefill(NamedTuple):
    """One request's new plan; its times count from the moment of planning."""

    key: int
    plan: ChunkPlan | NoPlan


def ideal_prefill_s(costs: Sequence[SpCost | TabulatedCost], cached_tokens: int, new_tokens: int) -> float:
    """Return the time of the fastest SP size without a queue, as one chunk; infinity where no cost is known."""
    return min(cost.predict_s(cached_tokens, new_tokens) for cost in costs)


def planning_order(
    pending: Sequence[PendingPrefill], mode: ReplanMode, now_s: float, costs: Sequence[SpCost | TabulatedCost]
) -> list[PendingPrefill]:
    """Return the requests in the order in which they are planned.

    Relative slack is (deadline - now - remaining) / total (Medha, section 4.1), with the times of `ideal_prefill_s`.
    Requests that are equal, such as those without a deadline, go by arrival. ValueError for ReplanMode.OFF.
    """
    if mode is ReplanMode.OFF:
        raise ValueError("mode: off plans a request once, with CdspPlanner.plan")
    if mode is ReplanMode.FCFS:
        return sorted(pending, key=lambda one: (one.arrival_s, one.key))
    if mode is ReplanMode.EDF:
        return sorted(pending, key=lambda one: (one.deadline_s, one.arrival_s, one.key))
    if mode is ReplanMode.SRPT:
        return sorted(
            pending,
            key=lambda one: (ideal_prefill_s(costs, one.cached_tokens, one.new_tokens), one.arrival_s, one.key),
        )

    def urgency(one: PendingPrefill) -> tuple[float, float, int]:
        remaining_s = ideal_prefill_s(costs, one.cached_tokens, one.new_tokens)
        has_slack = one.deadline_s < math.inf and one.total_s < math.inf
        slack = relative_slack(one.deadline_s, now_s, remaining_s, one.total_s) if has_slack else math.inf
        return slack, one.arrival_s, one.key

    return sorted(pending, key=urgency)


def replan(
    planner: CdspPlanner,
    mode: ReplanMode,
    now_s: float,
    running: PrefillSnapshot,
    pending: Sequence[PendingPrefill],
    improvement_rate: float,
    *,
    until_busy: bool = False,
) -> tuple[PlannedPrefill, ...]:
    """Plan all pending requests anew, each behind those before it; in the order of planning.

    With `until_busy` planning ends when no instance is left that is free now: enough for a caller that plans again at
    the end of every chunk, since what would start later is planned by then.

    `running` is the instances with nothing but their running chunks: a delay is the time until that chunk ends, and
    free KV is what no unfinished request holds. A request that holds KV finds it free for itself. One that cannot be
    planned keeps its place for the next event and delays no other. ValueError as `CdspPlanner.plan`.
    """
    costs = [candidate.cost for candidate in planner.config.candidates]
    delays_s = tuple(running.queue_delays_s)
    planned: list[PlannedPrefill] = []
    for one in planning_order(pending, mode, now_s, costs):
        if until_busy and min(delays_s) > 0:
            break
        snapshot = PrefillSnapshot(running.node_ids, delays_s, _free_for(one, running, planner.config.page_tokens))
        plan = planner.plan(
            snapshot,
            CdspRequest(one.new_tokens, one.cached_tokens, one.group, max(0.0, now_s - one.arrival_s)),
            improvement_rate,
        )
        planned.append(PlannedPrefill(one.key, plan))
        if isinstance(plan, ChunkPlan):
            delays_s = queue_delays_after(plan, delays_s)
    return tuple(planned)


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


def _free_for(one: PendingPrefill, running: PrefillSnapshot, page_tokens: int) -> Sequence[int]:
    if not one.group:
        return running.free_kv_tokens
    each = -(-one.cached_tokens // len(one.group))
    held = -(-each // page_tokens) * page_tokens
    members = set(one.group)
    return [free + held if index in members else free for index, free in enumerate(running.free_kv_tokens)]
