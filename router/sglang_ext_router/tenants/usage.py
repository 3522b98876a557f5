"""Usage of tenants by UTC day, model and length class: counted here, kept in SQLite, added up over routers.

Each start of a router process counts under an identifier of its own. A count only grows, and routers send each other
theirs: the larger number of an identifier is the later one, so that messages may be lost or repeated, and a router that
was killed is counted up to its last message.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

FLUSH_S = 1.0  # between two writings
KEPT_DAYS = 2  # that routers send each other, and that stay in memory where there is a database
KEPT_DAYS_WITHOUT_DATABASE = 32
RESENT_S = 5.0  # a count is sent for this time after its change
EVERYTHING_S = 10.0  # between two messages with all counts, those of other routers among them
MAX_COUNTS = 20_000  # of one day; what exceeds them is counted under OTHER_MODEL
OTHER_MODEL = "(other)"
MAX_COUNT = 1 << 53
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
  day TEXT, tenant TEXT, model TEXT, length_class TEXT, origin TEXT,
  requests INTEGER, prompt_tokens INTEGER, output_tokens INTEGER,
  PRIMARY KEY (day, tenant, model, length_class, origin)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS budgets (router TEXT, name TEXT, level REAL, at_s REAL, PRIMARY KEY (router, name));
"""
_UPSERT = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = max(requests, excluded.requests), prompt_tokens = max(prompt_tokens, excluded.prompt_tokens),
  output_tokens = max(output_tokens, excluded.output_tokens)
"""


class UsageKey(NamedTuple):
    """The dimensions of a count."""

    day: str  # YYYY-MM-DD
    tenant: str
    model: str
    length_class: str


class UsageCount(NamedTuple):
    """Requests with a reply, and their tokens."""

    requests: int
    prompt_tokens: int
    output_tokens: int

    def plus(self, other: UsageCount) -> UsageCount:
        """Return the sums."""
        return UsageCount(*(a + b for a, b in zip(self, other, strict=True)))


class UsageRow(NamedTuple):
    """One count of one origin, as it is sent and stored."""

    day: str
    tenant: str
    model: str
    length_class: str
    origin: str
    requests: int
    prompt_tokens: int
    output_tokens: int


NOTHING = UsageCount(0, 0, 0)


class UsageLedger:
    """The counts of this process, and the counts that other routers have sent."""

    def __init__(self, path: str = "", router: str = "0", today: str | None = None) -> None:
        """`path` is the database, empty for none; `router` distinguishes the processes that share it.

        Raise sqlite3.Error if the database cannot be used.
        """
        self.origin = secrets.token_hex(8)
        self._router = router
        self._own: dict[UsageKey, UsageCount] = {}
        self._others: dict[tuple[UsageKey, str], UsageCount] = {}  # by key and origin
        self._changed_s: dict[UsageKey, float] = {}
        self._unsaved: set[tuple[UsageKey, str]] = set()
        self._everything_due_s = 0.0
        self._lock = threading.Lock()  # of the database
        self._database = open_usage_database(path) if path else None
        if self._database is not None:
            first = _days_before(today or utc_day(), KEPT_DAYS - 1)
            for row in self._database.execute("SELECT * FROM usage WHERE day >= ?", (first,)):
                key, origin, count = _split(UsageRow(*row))
                self._others[key, origin] = count

    # -- counting ---------------------------------------------------------------------------------------

    def add(self, tenant: str, model: str, length_class: str, count: UsageCount, now_s: float, day: str) -> None:
        """Count a request."""
        key = UsageKey(day, tenant, model, length_class)
        known = self._own.get(key)
        if known is None and len(self._own) >= MAX_COUNTS:
            key = UsageKey(day, tenant, OTHER_MODEL, "none")
            known = self._own.get(key)
        self._own[key] = count if known is None else known.plus(count)
        self._changed_s[key] = now_s
        self._unsaved.add((key, self.origin))

    def rows_to_send(self, now_s: float) -> list[UsageRow]:
        """Return the rows for other routers: rows that changed within RESENT_S, and every EVERYTHING_S all."""
        rows = []
        is_everything = now_s >= self._everything_due_s
        for key, count in self._own.items():
            if is_everything or now_s - self._changed_s[key] < RESENT_S:
                rows.append(UsageRow(*key, self.origin, *count))
        if is_everything:
            self._everything_due_s = now_s + EVERYTHING_S
            rows += [UsageRow(*key, origin, *count) for (key, origin), count in self._others.items()]
        return rows

    def merge(self, rows: Iterable[UsageRow]) -> None:
        """Take over what another router has sent."""
        for row in rows:
            key, origin, count = _split(row)
            if origin == self.origin:
                continue
            known = self._others.get((key, origin), NOTHING)
            merged = UsageCount(*(max(a, b) for a, b in zip(known, count, strict=True)))
            if merged != known:
                self._others[key, origin] = merged
                self._unsaved.add((key, origin))

    # -- reading and keeping ----------------------------------------------------------------------------

    def rows_to_save(self) -> list[UsageRow]:
        """Return what has changed since the last call; `save` or `read_totals` writes it."""
        unsaved, self._unsaved = self._unsaved, set()
        rows = []
        for key, origin in unsaved:
            count = self._own.get(key) if origin == self.origin else self._others.get((key, origin))
            if count is not None:
                rows.append(UsageRow(*key, origin, *count))
        return rows

    def save(self, rows: list[UsageRow], levels: dict[str, float]) -> None:
        """Write rows, and the levels of budgets. May run in a thread."""
        if self._database is None:
            return
        now_s = time.time()
        values = [(self._router, name, level, now_s) for name, level in levels.items()]
        try:
            with self._lock, self._database:
                self._database.executemany(_UPSERT, rows)
                self._database.executemany("INSERT OR REPLACE INTO budgets VALUES (?, ?, ?, ?)", values)
        except sqlite3.Error as error:
            self._unsaved.update((key, origin) for key, origin, _ in map(_split, rows))
            logger.warning("usage could not be written, and is kept in memory: %s", error)

    def read_totals(
        self, rows: list[UsageRow], first_day: str, last_day: str, tenant: str | None = None
    ) -> list[tuple[UsageKey, UsageCount]]:
        """Write `rows`, and return the sums over all routers of these days, in order. May run in a thread.

        Raise sqlite3.Error if the database cannot be read.
        """
        self.save(rows, {})
        totals: dict[UsageKey, UsageCount] = {}
        for row in self._known_rows(first_day, last_day):
            key, _, count = _split(row)
            if tenant is None or key.tenant == tenant:
                totals[key] = totals.get(key, NOTHING).plus(count)
        return sorted(totals.items())

    def _known_rows(self, first_day: str, last_day: str) -> list[UsageRow]:
        if self._database is not None:
            with self._lock:
                found = self._database.execute("SELECT * FROM usage WHERE day BETWEEN ? AND ?", (first_day, last_day))
                return [UsageRow(*row) for row in found]
        rows = [UsageRow(*key, self.origin, *count) for key, count in tuple(self._own.items())]
        rows += [UsageRow(*key, origin, *count) for (key, origin), count in tuple(self._others.items())]
        return [row for row in rows if first_day <= row.day <= last_day]

    def read_levels(self, now_s: float) -> dict[str, tuple[float, float]]:
        """Return the level of each budget that the process of this number left, and how many seconds ago; `now_s` is
        wall time.
        """
        if self._database is None:
            return {}
        found = self._database.execute("SELECT name, level, at_s FROM budgets WHERE router = ?", (self._router,))
        return {name: (level, max(0.0, now_s - at_s)) for name, level, at_s in found}

    def forget_old(self, today: str) -> None:
        """Drop from memory what is old; the database keeps it."""
        days = KEPT_DAYS if self._database is not None else KEPT_DAYS_WITHOUT_DATABASE
        first = _days_before(today, days - 1)
        self._own = {key: count for key, count in self._own.items() if key.day >= first}
        self._others = {known: count for known, count in self._others.items() if known[0].day >= first}
        self._changed_s = {key: at_s for key, at_s in self._changed_s.items() if key.day >= first}

    def close(self) -> None:
        """Close the database; what has not been saved is lost."""
        if self._database is not None:
            self._database.close()


def open_usage_database(path: str) -> sqlite3.Connection:
    """Open a database of usage. Raise sqlite3.Error if it cannot be used."""
    database = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.executescript(_SCHEMA)
    except sqlite3.Error:
        database.close()
        raise
    return database


def read_usage_rows(wire: Sequence[Sequence[Any]]) -> list[UsageRow]:
    """Read rows of parsed JSON; ValueError or TypeError where one cannot be read, as of another version."""
    rows = []
    for entry in wire:
        row = UsageRow(*entry)
        if not all(type(text) is str for text in row[:5]):
            raise TypeError(f"{row[:5]!r} name no usage")
        if not all(type(count) is int and 0 <= count < MAX_COUNT for count in row[5:]):
            raise ValueError(f"{row[5:]!r} are no counts")
        rows.append(row)
    return rows


def utc_day(at_s: float | None = None) -> str:
    """Return the UTC day of a wall time, now without one, as YYYY-MM-DD."""
    return datetime.fromtimestamp(time.time() if at_s is None else at_s, UTC).date().isoformat()


def _days_before(day: str, days: int) -> str:
    return utc_day(datetime.fromisoformat(day + "T12:00:00+00:00").timestamp() - 86400 * days)


def _split(row: UsageRow) -> tuple[UsageKey, str, UsageCount]:
    return UsageKey(*row[:4]), row.origin, UsageCount(*row[5:])
