"""Orders of waiting prefills that put none back, in place of a long pool's `OnTimeOrder`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from sglang_ext.long_pool.decide.on_time_order import OrderedPrefill, PendingPrefill

Urgency = Callable[[PendingPrefill, float], float]


class UrgencyOrder:
    """Sorts by an urgency at a time, the lowest first, then by arrival."""

    def __init__(self, urgency: Urgency) -> None:
        self._urgency = urgency

    def record_arrival(self) -> None:
        """Nothing depends on how many have arrived."""

    def order(
        self, now_s: float, waiting: Sequence[PendingPrefill], instances: int, running_s: float
    ) -> list[OrderedPrefill]:
        """Return all of `waiting` in their order, without deadlines.

        Where none is put back, all that are late would take ever larger groups, and throughput would collapse.
        """
        in_order = sorted(waiting, key=lambda prefill: (self._urgency(prefill, now_s), prefill.arrival_s, prefill.key))
        return [OrderedPrefill(prefill, math.inf) for prefill in in_order]


def relative_slack(deadline_s: float, now_s: float, remaining_s: float, total_s: float) -> float:
    """Medha's rho (section 4.1): infinite without a deadline, negative when the deadline cannot be met any more."""
    return (deadline_s - now_s - remaining_s) / total_s


def arrival(prefill: PendingPrefill, now_s: float) -> float:
    """First come, first served."""
    return prefill.arrival_s


def slack(prefill: PendingPrefill, now_s: float) -> float:
    """Lowest relative slack first: how much of its own length a prefill can still afford to wait."""
    if not (prefill.deadline_s < math.inf and prefill.total_s < math.inf):
        return math.inf
    return relative_slack(prefill.deadline_s, now_s, prefill.fastest_s, prefill.total_s)


def deadline(prefill: PendingPrefill, now_s: float) -> float:
    """Earliest deadline first."""
    return prefill.deadline_s


def remaining_time(prefill: PendingPrefill, now_s: float) -> float:
    """Shortest remaining time first."""
    return prefill.fastest_s


def fcfs() -> UrgencyOrder:
    """Return a new order of arrival."""
    return UrgencyOrder(arrival)


def lars() -> UrgencyOrder:
    """Return a new order of relative slack."""
    return UrgencyOrder(slack)


def edf() -> UrgencyOrder:
    """Return a new order of deadlines."""
    return UrgencyOrder(deadline)


def srpt() -> UrgencyOrder:
    """Return a new order of remaining time."""
    return UrgencyOrder(remaining_time)
