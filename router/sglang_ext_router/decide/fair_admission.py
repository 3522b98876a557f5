"""Admission shared fairly by tenants: the more urgent priority first, then weighted fair queueing by work.

Within a priority each tenant has a virtual time, which grows by the work of each of its requests over the tenant's
weight (start-time fair queueing: Goyal, Vin, Cheng, 1997). A free place goes to the waiting tenant whose time is the
least, and to the earliest effective deadline within the tenant. A tenant that comes back after a pause begins at the
time of the latest admission: it cannot save up a claim. Work is measured in tokens to compute.

A tenant may have every free place up to its share of all places, which is at least one. Beyond it a tenant leaves
places free for tenants that come and go, so that their next requests need not wait for one of its own to end: as many
as each of them had or wanted within the last `RECENT_S`, up to its share, and no more than those which kept to their
shares had or wanted at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Final, Generic, TypeVar

from sglang_ext.types import PRIORITIES
from sglang_ext_router.decide.admission import AdmissionOutcome, AdmissionQueue, Claim, Demand

T = TypeVar("T", bound=Hashable)

RECENT_S: Final = 5.0  # for at least this time, and at most twice as long, a tenant's peak is remembered
MAX_PLACES: Final = 1 << 30
_ADMITTED: Final = AdmissionOutcome.ADMITTED
_UNBOUNDED: Final = float("inf")


class _TenantPlaces:
    """The places that a tenant has, wants, and has had within the last two stretches of RECENT_S."""

    __slots__ = (
        *("concurrency", "kept", "peak", "peak_before", "running", "running_within", "share", "waiting"),
        *("wanted_within", "weight"),
    )

    def __init__(self) -> None:
        self.weight = 1.0
        self.concurrency = 0
        self.running = 0
        self.waiting = 0
        self.peak = 0  # of running and waiting, in this stretch of RECENT_S and in the one before
        self.peak_before = 0
        self.share = 1  # of all places
        self.kept = 0  # places within its share that it had or wanted recently and has not now
        self.wanted_within = 0  # places that it has or wants; 0 where these exceed its share
        self.running_within = 0  # places that it has; 0 in the same case

    @property
    def recent_peak(self) -> int:
        return max(self.peak, self.peak_before)


class _PriorityLevel(Generic[T]):
    """The virtual times of one priority, and what waits there by tenant."""

    __slots__ = ("finish", "virtual", "waiting")

    def __init__(self) -> None:
        self.virtual = 0.0  # the least start of what waits; of an admission while nothing waits, its start
        self.finish: dict[str, float] = {}  # of each tenant's latest admission
        self.waiting: dict[str, list[tuple[float, int, T]]] = {}  # heaps by effective deadline

    def start(self, tenant: str) -> float:
        return self.finish.get(tenant, self.virtual)

    def catch_up(self, tenant: str) -> None:
        """A tenant of which nothing waited begins at the virtual time. One that waits does not lose its place by that:
        others may pass it while it must not have a place.
        """
        self.finish[tenant] = max(self.virtual, self.finish.get(tenant, 0.0))

    def charge(self, tenant: str, cost: float) -> None:
        self.finish[tenant] = self.start(tenant) + cost


class FairAdmissionQueue(AdmissionQueue[T]):
    """An admission queue in which every item has a claim. `queue_size` bounds the waiting items of each tenant."""

    def __init__(self, max_concurrent: int | None, queue_size: int, queue_timeout_s: float) -> None:
        super().__init__(max_concurrent, queue_size, queue_timeout_s)
        self._levels: list[_PriorityLevel[T]] = [_PriorityLevel() for _ in PRIORITIES]
        self._tenants: dict[str, _TenantPlaces] = {}
        self._claims: dict[T, Claim] = {}  # of items that wait or run
        # Sums over all tenants
        self._kept = 0
        self._wanted_within = 0
        self._wanted_peak = 0  # in this stretch of RECENT_S and in the one before
        self._wanted_peak_before = 0
        self._running_within = 0
        self._shares_weight = 0.0  # of the tenants with a recent peak
        self._stretch_end_s = 0.0

    def offer(
        self, item: T, now_s: float, deadline_s: float | None = None, claim: Claim | None = None
    ) -> AdmissionOutcome:
        """Admit the item, queue it, or refuse it. Raises ValueError without a claim, or when it is queued already."""
        if claim is None:
            raise ValueError(f"{item!r} has no claim")
        if item in self._claims:
            raise ValueError(f"already offered: {item!r}")
        places = self._places(claim)
        # A tenant that may have a place has none waiting that is more urgent: it would have got the place.
        if self.running < self.limit and self._may_run(places):
            self._claims[item] = claim
            level = self._levels[claim.rank]
            if claim.tenant not in level.waiting:
                level.catch_up(claim.tenant)
            if not level.waiting:
                level.virtual = level.start(claim.tenant)
            self._begin(claim, places)
            return _ADMITTED
        if places.waiting >= self.queue_size:
            self.refused += 1
            return AdmissionOutcome.REFUSED
        effective_s = now_s + self.queue_timeout_s
        if deadline_s is not None and deadline_s < effective_s:
            effective_s = deadline_s
        self._enqueue_claim(item, effective_s, claim, places)
        return AdmissionOutcome.QUEUED

    def wait_again(self, item: T, now_s: float, claim: Claim | None = None) -> None:
        """Queue an item that has given its place back before its end, also where its tenant's queue is full.

        Its tenant is charged its work when it has a place again.
        """
        assert claim is not None
        self._levels[claim.rank].charge(claim.tenant, -claim.work_tokens / claim.weight)
        self._enqueue_claim(item, now_s + self.queue_timeout_s, claim, self._places(claim))

    def _enqueue_claim(self, item: T, effective_s: float, claim: Claim, places: _TenantPlaces) -> None:
        self._claims[item] = claim
        self._enqueue(item, effective_s)  # by which it expires
        level = self._levels[claim.rank]
        heap = level.waiting.get(claim.tenant)
        if heap is None:
            level.waiting[claim.tenant] = heap = []
            level.catch_up(claim.tenant)
        heappush(heap, (effective_s, self._sequence, item))
        places.waiting += 1
        self._remember(places)

    def next_waiting(self) -> tuple[T, float] | None:
        """Return the item with the earliest effective deadline of the most urgent priority that waits."""
        for level in self._levels:
            first: tuple[float, int, T] | None = None
            for heap in level.waiting.values():
                while heap and self._waiting.get(heap[0][2]) != heap[0][1]:
                    heappop(heap)
                if heap and (first is None or heap[0][:2] < first[:2]):
                    first = heap[0]
            if first is not None:
                return first[2], first[0]
        return None

    def release(self, now_s: float, item: T | None = None) -> list[T]:
        """Give back the place of `item`; return the items admitted instead, in order."""
        assert item is not None
        claim = self._claims.pop(item)
        places = self._tenants[claim.tenant]
        places.running -= 1
        self.running -= 1
        self._count(places)
        return self._admit(now_s) if self._waiting else []

    def set_limit(self, max_concurrent: int, now_s: float) -> list[T]:
        """Change how many items may run at once, as that of the base class does."""
        if max_concurrent != self.limit:
            self.limit = float(max_concurrent)
            self._divide()
        return self._admit(now_s) if self._waiting else []

    def remove(self, item: T) -> bool:
        """The client of a queued item has left. Returns False when the item is not in the queue."""
        if not super().remove(item):
            return False
        self._forget_waiting(item)
        return True

    def expire(self, now_s: float) -> list[T]:
        """Take out and return the items whose effective deadline is not after `now_s`, earliest first."""
        late = super().expire(now_s)
        for item in late:
            self._forget_waiting(item)
        return late

    def refresh(self, now_s: float) -> list[T]:
        """Forget old peaks; return the items that are admitted to places which are no longer kept."""
        if now_s >= self._stretch_end_s:
            self._stretch_end_s = now_s + RECENT_S
            for name, places in list(self._tenants.items()):
                places.peak_before, places.peak = places.peak, places.running + places.waiting
                if not places.recent_peak:
                    self._count(places)  # as nothing
                    del self._tenants[name]
            self._wanted_peak_before, self._wanted_peak = self._wanted_peak, self._wanted_within
            for level in self._levels:
                level.finish = {name: at for name, at in level.finish.items() if at > level.virtual}
            self._divide()
        return self._admit(now_s) if self._waiting else []

    def demands(self) -> dict[str, Demand]:
        """Return what runs and waits of each tenant."""
        return {name: Demand(places.running, places.waiting) for name, places in self._tenants.items()}

    def correct(self, claim: Claim, work_tokens: float) -> None:
        """Charge the tenant of an admitted item `work_tokens` instead of what its claim says."""
        finish_by_tenant = self._levels[claim.rank].finish
        finish = finish_by_tenant.get(claim.tenant)
        if finish is not None:
            finish_by_tenant[claim.tenant] = finish + (work_tokens - claim.work_tokens) / claim.weight
        claim.work_tokens = work_tokens

    # -- which tenant is next ---------------------------------------------------------------------------

    def _admit(self, now_s: float) -> list[T]:
        admitted: list[T] = []
        self._collect_late(now_s)
        while self.running < self.limit:
            item = self._take_next(now_s)
            if item is None:
                break
            del self._waiting[item]
            claim = self._claims[item]
            places = self._tenants[claim.tenant]
            places.waiting -= 1
            self._begin(claim, places)
            admitted.append(item)
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [entry for entry in self._heap if self._waiting.get(entry[2]) == entry[1]]
            self._heap.sort()  # a sorted list is a heap
        return admitted

    def _take_next(self, now_s: float) -> T | None:
        """Take out the next item to admit; None where no waiting tenant may have a place."""
        for level in self._levels:
            if not level.waiting:
                continue
            chosen, least, floor, empty = "", _UNBOUNDED, _UNBOUNDED, ""
            for tenant, heap in level.waiting.items():
                while heap and (self._waiting.get(heap[0][2]) != heap[0][1] or heap[0][0] <= now_s):
                    heappop(heap)
                if not heap:
                    empty = tenant
                    continue
                start = level.start(tenant)
                floor = min(floor, start)
                if start < least and self._may_run(self._tenants[tenant]):
                    chosen, least = tenant, start
            if floor < _UNBOUNDED:
                level.virtual = max(level.virtual, floor)
            if empty:
                del level.waiting[empty]  # one at a time: the others follow
            if least < _UNBOUNDED:
                return heappop(level.waiting[chosen])[2]
        return None

    def _begin(self, claim: Claim, places: _TenantPlaces) -> None:
        places.running += 1
        self.running += 1
        self.admitted += 1
        self._levels[claim.rank].charge(claim.tenant, claim.work_tokens / claim.weight)
        self._remember(places)

    def _forget_waiting(self, item: T) -> None:
        places = self._tenants[self._claims.pop(item).tenant]
        places.waiting -= 1
        self._count(places)

    # -- places -----------------------------------------------------------------------------------------

    def _places(self, claim: Claim) -> _TenantPlaces:
        places = self._tenants.get(claim.tenant)
        if places is None:
            self._tenants[claim.tenant] = places = _TenantPlaces()
        places.concurrency = claim.concurrency
        if places.weight != claim.weight:
            places.weight = claim.weight
            self._divide()
        return places

    def _may_run(self, places: _TenantPlaces) -> bool:
        """Return whether the tenant may have one more place, if there is one."""
        if places.concurrency and places.running >= places.concurrency:
            return False
        if places.running < places.share:
            return True
        peak = max(self._wanted_peak, self._wanted_peak_before)
        left_free = min(self._kept, peak - self._running_within + places.running_within)
        return self.running + max(0, left_free) < self.limit

    def _remember(self, places: _TenantPlaces) -> None:
        """Take note of the places that a tenant has or wants now."""
        wanted = places.running + places.waiting
        if wanted > places.peak:
            is_new = not places.recent_peak
            places.peak = wanted
            if is_new:
                self._divide()
                return
        self._count(places)

    def _divide(self) -> None:
        """Divide the places among the tenants with a recent peak."""
        self._shares_weight = sum([places.weight for places in self._tenants.values() if places.recent_peak])
        for places in self._tenants.values():
            places.share = MAX_PLACES
            if self.limit < _UNBOUNDED and self._shares_weight > 0:
                places.share = max(1, int(self.limit * places.weight / self._shares_weight))
            self._count(places)

    def _count(self, places: _TenantPlaces) -> None:
        """Bring the sums over all tenants up to date with what one of them has and wants."""
        wanted, running = places.running + places.waiting, places.running
        kept = min(places.share, places.recent_peak)
        if places.concurrency:
            kept = min(kept, places.concurrency)
        kept = max(0, kept - running)
        if wanted > places.share:
            wanted = running = 0
        self._kept += kept - places.kept
        self._wanted_within += wanted - places.wanted_within
        self._running_within += running - places.running_within
        places.kept, places.wanted_within, places.running_within = kept, wanted, running
        if self._wanted_within > self._wanted_peak:
            self._wanted_peak = self._wanted_within
