"""Which dispatcher works on a batch: a lease in the store, renewed while it lives and taken over when it does not.

Every dispatcher has an entry of its own as well, by which the others know how many there are. Times are the
database's. A dispatcher whose lease was taken over may not change the batch's state any more (`confirm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_ext.batch.database import Database

LEASE_S = 15.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS service_leases (
    name TEXT PRIMARY KEY,
    dispatcher TEXT NOT NULL,
    until_ms INTEGER NOT NULL
) WITHOUT ROWID
"""
_DISPATCHER = "dispatcher "


class LeaseLostError(Exception):
    """Another dispatcher has the batch now."""


@dataclass(frozen=True)
class Holders:
    """Who holds what at one moment."""

    batches: Mapping[str, str] = field(default_factory=dict)  # batch → dispatcher
    dispatchers: int = 1  # that live


class Leases:
    """The leases of the dispatcher called `owner`. One of the same name has its leases again at once."""

    def __init__(self, database: Database, owner: str, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._owner = owner
        self._lease_ms = int(lease_s * 1000)
        database.create(_SCHEMA)

    def take(self, name: str) -> bool:
        """Take what is held by no one, or was held too long; False when another has it."""
        now_ms = self._database.now_ms
        changed = self._database.execute(
            f"INSERT INTO service_leases VALUES (?, ?, {now_ms} + ?)"
            " ON CONFLICT (name) DO UPDATE SET dispatcher = excluded.dispatcher, until_ms = excluded.until_ms"
            f" WHERE service_leases.dispatcher = excluded.dispatcher OR service_leases.until_ms < {now_ms}",
            name,
            self._owner,
            self._lease_ms,
        )
        return changed == 1

    def renew(self) -> Holders:
        """Renew all that is held, this dispatcher's own entry too, and return who holds what."""
        self.take(_DISPATCHER + self._owner)
        self._database.execute(
            f"UPDATE service_leases SET until_ms = {self._database.now_ms} + ? WHERE dispatcher = ?",
            self._lease_ms,
            self._owner,
        )
        rows = self._database.rows(
            f"SELECT name, dispatcher FROM service_leases WHERE until_ms >= {self._database.now_ms}"
        )
        held = dict(rows)
        batches = {name: holder for name, holder in held.items() if not name.startswith(_DISPATCHER)}
        return Holders(batches, len(held) - len(batches))

    def confirm(self, name: str) -> None:
        """Within a transaction: nothing takes the lease before its end. LeaseLostError when another has it."""
        row = self._database.row(
            f"SELECT dispatcher FROM service_leases WHERE name = ?{self._database.for_update}", name
        )
        if row is None or row[0] != self._owner:
            raise LeaseLostError(name)

    def give_up(self, name: str) -> None:
        """Let others take it."""
        self._database.execute("DELETE FROM service_leases WHERE name = ? AND dispatcher = ?", name, self._owner)

    def give_up_all(self) -> None:
        """Let others take everything: this dispatcher ends."""
        self._database.execute("DELETE FROM service_leases WHERE dispatcher = ?", self._owner)

    def is_mine(self, holder: str) -> bool:
        """Return whether a holder is this dispatcher."""
        return holder == self._owner
