"""Routers of a group that hand each other parts of their budgets: what one does not need, another may spend.

Each router sends how many units it has of each budget, how many it has refused within the last second, and the sum of
all that it ever handed to each peer. A sum that grew is credited by its receiver, so a lost or repeated message changes
nothing. Sums belong to starts: a router that starts again has handed over and received nothing yet. A unit leaves the
sender's bucket when it is handed over: the buckets of a group never add up to more than the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from sglang_ext_router.decide.budgets import REMEMBERED_S, Bucket


class PeerBucket(NamedTuple):
    """The units that a peer has of a budget, and the units that it has refused within the last second."""

    level: float
    wanted: float


class BudgetExchange:
    """One router's side. Budgets are named by tenant and unit; peers by the number that they have in the group."""

    def __init__(self, start: str) -> None:
        """`start` is an identifier that no other start of a router has."""
        self._start = start
        self._starts: dict[int, str] = {}  # of the peers
        self._handed: dict[str, dict[str, float]] = {}  # sums, by start and budget
        self._credited: dict[str, dict[str, float]] = {}  # what was credited of the sums of each start
        self._peers: dict[int, dict[str, PeerBucket]] = {}

    def message(self, buckets: Mapping[str, Bucket], now_s: float) -> dict[str, Any]:
        """Return what this router sends, as JSON types: budgets that are full, and were not refused, are left out."""
        levels: dict[str, tuple[float, float]] = {}
        for name, bucket in buckets.items():
            bucket.fill(now_s)
            wanted = bucket.wanted_lately(now_s, REMEMBERED_S)
            if wanted or bucket.level < bucket.capacity:
                levels[name] = bucket.level, wanted
        return {"start": self._start, "levels": levels, "handed": self._handed}

    def take(self, peer: int, message: Mapping[str, Any], buckets: Mapping[str, Bucket]) -> None:
        """Credit what a peer has handed to this router. ValueError or TypeError, and nothing is credited, where it
        cannot be read.
        """
        levels = {str(name): PeerBucket(float(level), float(want)) for name, (level, want) in message["levels"].items()}
        sums = {str(name): float(units) for name, units in message["handed"].get(self._start, {}).items()}
        self._starts[peer] = start = str(message["start"])
        self._peers[peer] = levels
        credited = self._credited.setdefault(start, {})
        for name, units in sums.items():
            more = units - credited.get(name, 0.0)
            if more > 0:
                credited[name] = units
                if name in buckets:
                    buckets[name].level += more

    def share(self, buckets: Mapping[str, Bucket], peers: Iterable[int], now_s: float) -> None:
        """Hand what is not needed here to the peers that have refused requests, in equal parts with a part kept."""
        living = set(peers)
        for peer in self._peers.keys() - living:
            del self._peers[peer]
        for name, bucket in buckets.items():
            bucket.fill(now_s)
            spilled, bucket.spilled = bucket.spilled, 0.0
            self._spill(name, spilled, bucket.capacity)
            if bucket.wanted_lately(now_s, REMEMBERED_S) or bucket.level <= 0:
                continue
            wanting = {
                peer: wanted
                for peer, known in self._peers.items()
                if name in known and (wanted := known[name].wanted) > 0
            }
            part = bucket.level / (len(wanting) + 1)
            for peer, wanted in wanting.items():
                units = min(part, wanted)
                self._hand(peer, name, units)
                bucket.level -= units

    def _spill(self, name: str, units: float, capacity: float) -> None:
        """Hand what a full bucket could not take to the peers that have room for it."""
        room = {
            peer: capacity - known[name].level
            for peer, known in self._peers.items()
            if name in known and known[name].level < capacity
        }
        for peer, free in room.items():
            self._hand(peer, name, min(units / len(room), free))

    def _hand(self, peer: int, name: str, units: float) -> None:
        sums = self._handed.setdefault(self._starts[peer], {})
        sums[name] = sums.get(name, 0.0) + units

    def elsewhere(self, name: str, full: float) -> float:
        """Return what the peers have of a budget; `full` is what a peer has that says nothing of it."""
        return sum(max(0.0, known[name].level) if name in known else full for known in self._peers.values())
