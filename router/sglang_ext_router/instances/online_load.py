"""The waits of online clients' requests for their prefill, and the work before them: `GET /load`.

A batch run reads it to yield to them: low priority does not keep the requests that it has already sent from standing
before a request that comes next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

from sglang_ext.types import LengthClass
from sglang_ext_router.decide.prefill_choice import predicted_wait_s
from sglang_ext_router.instances.registry import ModelPools

WINDOW_S = 5.0
MAX_WAITS = 4096
QUANTILE = 0.9
OFFLINE_PRIORITY = "low"


class OnlineLoad(TypedDict):
    """One length class: seconds are None where nothing was measured."""

    online_in_flight: int
    online_wait_s: float | None
    backlog_s: float | None
    instances: int


class OnlineWaits:
    """Describes how long recent requests waited, and at which instance; requests of low priority are not online."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, str, float]] = deque(maxlen=MAX_WAITS)

    def record(self, url: str, wait_s: float, now_s: float) -> None:
        """A prefill at `url` has ended: it took `wait_s` longer, queues and KV transfer included, than it computes."""
        self._waits.append((now_s, url, wait_s if wait_s > 0 else 0.0))

    def recent(self, now_s: float) -> list[tuple[str, float]]:
        """Return instance and wait of each prefill that ended in the last 5 s."""
        waits = self._waits
        while waits and waits[0][0] < now_s - WINDOW_S:
            waits.popleft()
        return [(url, wait_s) for _, url, wait_s in waits]


class UnderWay(NamedTuple):
    """Requests of online clients that have not got an answer yet, at this moment."""

    classes: Sequence[tuple[str, LengthClass]]  # model and class of each request that was sent to instances
    unfinished: Sequence[tuple[str, float]]  # instance and wait so far of those whose prefill has not ended
    queued_s: Sequence[float]  # time so far of each request that waits for admission


class SiblingLoad(NamedTuple):
    """The online requests of another process of this router, as it reports them."""

    in_flight: Mapping[str, Mapping[str, int]]  # online requests, by model and class
    waits_s: Mapping[str, float]  # of online requests, by instance


def quantile_s(waits_s: Sequence[float]) -> float | None:
    """Return the 90th percentile; None of an empty sequence."""
    ordered = sorted(waits_s)
    return ordered[min(len(ordered) - 1, int(QUANTILE * len(ordered)))] if ordered else None


def summarise(waits: OnlineWaits, under_way: UnderWay, now_s: float) -> SiblingLoad:
    """Return what the other processes are sent about this one."""
    waits_s: dict[str, list[float]] = {}
    for url, wait_s in (*waits.recent(now_s), *under_way.unfinished):
        waits_s.setdefault(url, []).append(wait_s)
    in_flight: dict[str, dict[str, int]] = {}
    for model, known_s in under_way.classes:
        of_model = in_flight.setdefault(model, {})
        of_model[known_s.value] = of_model.get(known_s.value, 0) + 1
    return SiblingLoad(in_flight, {url: quantile_s(several) or 0.0 for url, several in waits_s.items()})


def describe_class(
    models: Sequence[ModelPools],
    length_class: LengthClass,
    waits: OnlineWaits,
    under_way: UnderWay,
    siblings: Sequence[SiblingLoad],
    now_s: float,
) -> OnlineLoad:
    """Describe one class of some models together for `GET /load`.

    `online_wait_s` is the 90th percentile of what online requests of any class waited at the instances that serve this
    one, for work of this class stands before them there; requests count while they still wait, and at the admission
    queue. Of the router's processes it is the longest. `backlog_s` is the predicted wait at the instance of the class
    that has the least work, of the model where that is longest.
    """
    by_model = [[worker for worker in model.ready_prefill if worker.role.serves(length_class)] for model in models]
    urls = {worker.url for workers in by_model for worker in workers}
    backlog_s = max(
        (min(predicted_wait_s(worker.prefill_load(0, now_s)) for worker in workers) for workers in by_model if workers),
        default=None,
    )
    own_s = [wait_s for url, wait_s in (*waits.recent(now_s), *under_way.unfinished) if url in urls]
    waits_s = [quantile_s((*own_s, *under_way.queued_s))]
    waits_s += [wait_s for sibling in siblings for url, wait_s in sibling.waits_s.items() if url in urls]
    wait_s = max((known_s for known_s in waits_s if known_s is not None), default=None)
    names = {model.name for model in models}
    in_flight = sum(model in names and known_s is length_class for model, known_s in under_way.classes)
    elsewhere = [
        count.get(length_class.value, 0)
        for sibling in siblings
        for model, count in sibling.in_flight.items()
        if model in names
    ]
    return {
        "online_in_flight": in_flight + sum(elsewhere),
        "online_wait_s": None if wait_s is None else round(wait_s, 4),
        "backlog_s": None if backlog_s is None or backlog_s == float("inf") else round(backlog_s, 4),
        "instances": len(urls),
    }
