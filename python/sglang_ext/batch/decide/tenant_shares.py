"""Weighted fair queueing: which tenant's work is next, so that tenants get work in proportion to their weights.

Each tenant has a virtual time, the work that it has had for its weight, and the one that is furthest behind is next
(start-time fair queueing: Goyal, Vin, Cheng, SIGCOMM 1996). A tenant that had nothing to send goes on from the present:
a pause saves nothing up.
"""

from __future__ import annotations

from collections.abc import Iterable


class TenantShares:
    """The virtual time of each tenant. Work is in any unit, the same for all."""

    __slots__ = ("_now", "_times")

    def __init__(self) -> None:
        self._now = 0.0  # at which the latest work began
        self._times: dict[str, float] = {}

    def choose(self, tenants: Iterable[str]) -> str:
        """Return whose work is next; the first of several that are equally far behind."""
        return min(tenants, key=self._start)

    def charge(self, tenant: str, work: float, weight: float) -> None:
        """Record that work of a tenant begins."""
        self._now = start = self._start(tenant)
        self._times[tenant] = start + work / weight

    def correct(self, tenant: str, work: float, weight: float) -> None:
        """Record that work which began earlier was larger than charged by so much."""
        self._times[tenant] = self._times.get(tenant, self._now) + work / weight

    def _start(self, tenant: str) -> float:
        return max(self._now, self._times.get(tenant, 0.0))
