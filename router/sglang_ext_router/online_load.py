"""How long requests of online clients wait for their prefill, and how much work lies before them: `GET /load`.

A batch run reads it to stay out of their way: the low priority class alone does not keep what it has already sent from
standing before a request that comes next.
"""

from __future__ import annotations

from collections import deque
from typing import TypedDict

from sglang_ext.policy.routing.prefill_choice import predicted_wait_s
from sglang_ext.types import LengthClass
from sglang_ext_router.workers import WorkerRegistry

WINDOW_S = 5.0
MAX_WAITS = 2048  # kept per class
QUANTILE = 0.9
OFFLINE_PRIORITY = "low"


class OnlineLoad(TypedDict):
    """One length class: seconds are None where there is nothing to tell them by."""

    online_in_flight: int
    online_wait_s: float | None
    backlog_s: float | None
    instances: int


class OnlineWaits:
    """What requests waited lately, by length class; those of low priority are not online."""

    def __init__(self) -> None:
        self._waits: dict[LengthClass, deque[tuple[float, float]]] = {
            length_class: deque(maxlen=MAX_WAITS) for length_class in LengthClass
        }

    def note(self, length_class: LengthClass, wait_s: float, now_s: float) -> None:
        """A prefill has ended: it took `wait_s` longer, queues and KV transfer included, than its computation."""
        self._waits[length_class].append((now_s, wait_s if wait_s > 0 else 0.0))

    def quantile_s(self, length_class: LengthClass, now_s: float) -> float | None:
        """The 90th percentile over the last 5 s; None without a request in that time."""
        waits = self._waits[length_class]
        while waits and waits[0][0] < now_s - WINDOW_S:
            waits.popleft()
        if not waits:
            return None
        ordered = sorted(wait_s for _, wait_s in waits)
        return ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))]


def describe_class(
    registry: WorkerRegistry, waits: OnlineWaits, length_class: LengthClass, online_in_flight: int, now_s: float
) -> OnlineLoad:
    """One class for `GET /load`, with `online_in_flight` requests of online clients under way.

    `backlog_s` is the predicted wait at the instance of the class that has the least work.
    """
    workers = [worker for worker in registry.ready_prefill if worker.role.serves(length_class)]
    backlog_s = min((predicted_wait_s(worker.prefill_load(0)) for worker in workers), default=None)
    wait_s = waits.quantile_s(length_class, now_s)
    return {
        "online_in_flight": online_in_flight,
        "online_wait_s": None if wait_s is None else round(wait_s, 4),
        "backlog_s": None if backlog_s is None or backlog_s == float("inf") else round(backlog_s, 4),
        "instances": len(workers),
    }
