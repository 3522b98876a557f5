"""Which instances the processes of one router agree on: newest change per instance wins. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress

# As JSON: url, counter, origin, role or null when removed, bootstrap port or null, draining
WireEntry = tuple[str, int, int, str | None, int | None, bool]


class Entry(NamedTuple):
    """The last known change of one instance. `address` is None once it was removed."""

    counter: int  # grows with every change of any process that has seen the one before
    origin: int  # process that made it: decides between changes made at the same time
    address: WorkerAddress | None
    is_draining: bool

    @property
    def version(self) -> tuple[int, int]:
        return self.counter, self.origin


class MembershipTable:
    """One process's picture; merging is commutative and idempotent, so messages may be lost or doubled."""

    def __init__(self, origin: int, initial: Iterable[WorkerAddress]) -> None:
        self._origin = origin
        # What the command line gave is known to all processes: the same version everywhere.
        self._entries = {address.url: Entry(0, 0, address, False) for address in initial}

    def change(self, url: str, address: WorkerAddress | None, is_draining: bool = False) -> None:
        """Note a change made here."""
        known = self._entries.get(url)
        self._entries[url] = Entry(known.counter + 1 if known else 1, self._origin, address, is_draining)

    def merge(self, wire: Iterable[WireEntry]) -> list[tuple[str, Entry]]:
        """Take over newer entries of a sibling; the ones that changed here."""
        changed: list[tuple[str, Entry]] = []
        for url, counter, origin, role, port, is_draining in wire:
            known = self._entries.get(url)
            if known is not None and (counter, origin) <= known.version:
                continue
            address = None if role is None else WorkerAddress(url, Role(role), port)
            entry = Entry(counter, origin, address, is_draining)
            self._entries[url] = entry
            changed.append((url, entry))
        return changed

    def address(self, url: str) -> WorkerAddress | None:
        entry = self._entries.get(url)
        return None if entry is None else entry.address

    def wire(self) -> list[WireEntry]:
        """Everything, for siblings; the command line's own entries are left out as long as they are unchanged."""
        return [
            (
                url,
                entry.counter,
                entry.origin,
                entry.address.role.value if entry.address else None,
                entry.address.bootstrap_port if entry.address else None,
                entry.is_draining,
            )
            for url, entry in self._entries.items()
            if entry.counter
        ]
