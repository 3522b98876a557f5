"""Admission: it bounds the requests under way; the others wait, earliest effective deadline first.

A request's effective deadline is the earlier of its own and its arrival plus the queue's timeout. Requests
without a deadline therefore age: none that arrives later than a queue timeout after them can pass them.

Several routers that share one limit divide it by max-min fairness over what each of them has to serve.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from enum import Enum
from heapq import heappop, heappush
from typing import Final, Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)

DANGER_SHARE: Final = 0.5  # of the time between arrival and deadline


class AdmissionOutcome(Enum):
    """The result of offering a request."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    REFUSED = "refused"  # the queue is full


_ADMITTED = AdmissionOutcome.ADMITTED


class Claim:
    """A request's claim to a place, where tenants share the places."""

    __slots__ = ("concurrency", "rank", "tenant", "weight", "work_tokens")

    def __init__(self, tenant: str, weight: float, concurrency: int, rank: int, work_tokens: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.concurrency = concurrency  # requests of the tenant that may have a place at once; 0 is no limit
        self.rank = rank  # of its priority; 0 is the most urgent
        self.work_tokens = work_tokens  # that its tenant is charged; at first an estimate (`AdmissionQueue.correct`)


class AdmissionQueue(Generic[T]):
    """Bounded concurrency with a bounded queue. Items are compared by equality and must be hashable.

    `max_concurrent` None means no bound. Every admitted item must be released exactly once. Raises
    ValueError, naming the argument, when a bound makes no sense.
    """

    def __init__(self, max_concurrent: int | None, queue_size: int, queue_timeout_s: float) -> None:
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
        if queue_size < 0:
            raise ValueError(f"queue_size must be at least 0, got {queue_size}")
        if not queue_timeout_s > 0:
            raise ValueError(f"queue_timeout_s must be above 0, got {queue_timeout_s}")
        self.max_concurrent = max_concurrent
        self.queue_size = queue_size
        self.queue_timeout_s = queue_timeout_s
        # of now; `set_limit` changes it
        self.limit: float = float("inf") if max_concurrent is None else max_concurrent
        self._heap: list[tuple[float, int, T]] = []  # may hold removed items
        self._waiting: dict[T, int] = {}  # item → its sequence number in the heap
        self._late: list[T] = []  # found expired by a release; the next expire returns them
        self._sequence = 0
        self.running = 0
        # totals since the start
        self.admitted = 0
        self.queued = 0
        self.refused = 0
        self.expired = 0
        self.removed = 0

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue."""
        return len(self._waiting)

    @property
    def queue(self) -> Iterable[T]:
        """Return the requests in the queue."""
        return self._waiting

    def offer(
        self, item: T, now_s: float, deadline_s: float | None = None, claim: Claim | None = None
    ) -> AdmissionOutcome:
        """Admit the item, queue it, or refuse it. Raises ValueError when it is queued already.

        A `claim` counts where tenants share the places (`decide/fair_admission.py`).
        """
        if self.running < self.limit:
            self.running += 1
            self.admitted += 1
            return _ADMITTED
        if item in self._waiting:
            raise ValueError(f"already queued: {item!r}")
        if len(self._waiting) >= self.queue_size:
            self.refused += 1
            return AdmissionOutcome.REFUSED
        effective_s = now_s + self.queue_timeout_s
        if deadline_s is not None and deadline_s < effective_s:
            effective_s = deadline_s
        self._enqueue(item, effective_s)
        return AdmissionOutcome.QUEUED

    def wait_again(self, item: T, now_s: float, claim: Claim | None = None) -> None:
        """Queue an item that has given its place back before its end, also where the queue is full."""
        self._enqueue(item, now_s + self.queue_timeout_s)

    def _enqueue(self, item: T, effective_s: float) -> None:
        self._sequence += 1
        self._waiting[item] = self._sequence
        heappush(self._heap, (effective_s, self._sequence, item))
        self.queued += 1

    def next_waiting(self) -> tuple[T, float] | None:
        """Return the item that comes next and its effective deadline; None where none waits."""
        self._drop_removed()
        return (self._heap[0][2], self._heap[0][0]) if self._heap else None

    def release(self, now_s: float, item: T | None = None) -> list[T]:
        """Give back the place of an admitted item that has ended; return the items admitted instead, in order.

        Items that have expired meanwhile are not admitted; the next `expire` returns them.
        """
        self.running -= 1
        return self._admit(now_s) if self._heap else []

    def set_limit(self, max_concurrent: int, now_s: float) -> list[T]:
        """Change how many items may run at once; return the items admitted by that, in order, as `release` does.

        Items that run beyond a smaller limit run to their end. 0 admits nothing. Raises ValueError below 0.
        """
        if max_concurrent < 0:
            raise ValueError(f"max_concurrent must be at least 0, got {max_concurrent}")
        self.limit = float(max_concurrent)
        return self._admit(now_s) if self._heap else []

    def refresh(self, now_s: float) -> list[T]:
        """Return the items that the passing of time admits; to be called now and then. Here it admits none."""
        return []

    def demands(self) -> dict[str, Demand]:
        """Return what runs and waits of each tenant; empty where there are none."""
        return {}

    def correct(self, claim: Claim, work_tokens: float) -> None:
        """Charge the tenant of an admitted item `work_tokens` instead of what its claim says. Here nothing changes."""

    def expire(self, now_s: float) -> list[T]:
        """Take out and return the items whose effective deadline is not after `now_s`, earliest first."""
        self._collect_late(now_s)
        if not self._late:
            return []
        late, self._late = self._late, []
        for item in late:
            del self._waiting[item]
        self.expired += len(late)
        return late

    def remove(self, item: T) -> bool:
        """The client of a queued item has left. Returns False when the item is not in the queue."""
        if self._waiting.pop(item, None) is None:
            return False
        if item in self._late:
            self._late.remove(item)
        self.removed += 1
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2]) == entry[1]]
            self._heap.sort()  # a sorted list is a heap
        return True

    def _admit(self, now_s: float) -> list[T]:
        admitted: list[T] = []
        self._collect_late(now_s)
        while self.running < self.limit and self._heap:
            item = heappop(self._heap)[2]
            del self._waiting[item]
            self.running += 1
            self.admitted += 1
            admitted.append(item)
            self._drop_removed()
        return admitted

    def _collect_late(self, now_s: float) -> None:
        self._drop_removed()
        while self._heap and self._heap[0][0] <= now_s:
            self._late.append(heappop(self._heap)[2])
            self._drop_removed()

    def _drop_removed(self) -> None:
        heap = self._heap
        while heap and self._waiting.get(heap[0][2]) != heap[0][1]:
            heappop(heap)


def is_in_danger(arrived_s: float, deadline_s: float, now_s: float) -> bool:
    """Return whether a waiting request is near enough to its deadline to miss it."""
    return now_s - arrived_s >= DANGER_SHARE * (deadline_s - arrived_s)


class Demand(NamedTuple):
    """The requests of one of several routers: how many are under way, and how many wait for a place."""

    running: int
    waiting: int

    @property
    def total(self) -> int:
        return self.running + self.waiting


def fair_shares(limit: int, demands: Mapping[int, Demand]) -> dict[int, int]:
    """Divide `limit` places among the routers, by their numbers; the shares add up to exactly `limit`.

    The division is max-min fair: no router has less than it needs while another one has more than that. Places that no
    router needs yet are divided equally, so that each can admit its next requests at once.
    """
    order = sorted(demands, key=lambda number: (demands[number].total, number))
    shares: dict[int, int] = {}
    left = limit
    for position, number in enumerate(order):
        shares[number] = min(demands[number].total, left // (len(order) - position))
        left -= shares[number]
    for position, number in enumerate(order):
        extra = left // (len(order) - position)
        shares[number] += extra
        left -= extra
    return shares


def limit_of(number: int, limit: int, demands: Mapping[int, Demand], granted: Mapping[int, int]) -> int:
    """Return how many requests this router may have under way: its share, and no more than the others leave now.

    A share grows at once, but the router that it was taken from still runs its requests to their end: until then there
    is no place. `granted` is the largest share of another router since it reported its demand: of the requests that
    waited then, as many may run by now. Where there are more routers than places each may have one request.
    """
    left = limit
    for other, demand in demands.items():
        if other != number:
            left -= max(demand.running, min(demand.total, granted.get(other, 0)))
    least = 1 if limit < len(demands) else 0
    return max(least, min(fair_shares(limit, demands)[number], left))
