"""The files of the service: uploaded inputs, and the outputs and errors of batches.

A file is a row in the store's database and its bytes, under its id: the name that a client gave it is only ever shown.
Bytes are whole and durable before they get their row, so a row without bytes does not exist; bytes without a row are
what a killed service left, and are removed when it starts again.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from sglang_ext.batch.database import Database
from sglang_ext.batch.object_storage import StorageError
from sglang_ext.batch.service.file_bytes import FileBytes
from sglang_ext.types import DEFAULT_TENANT

_SCHEMA = """
CREATE TABLE IF NOT EXISTS service_files (
    file_id TEXT PRIMARY KEY,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
) WITHOUT ROWID
"""
_COLUMNS = "file_id, filename, purpose, size_bytes, created_at, expires_at, tenant"
_ABANDONED_S = 24 * 3600  # what is older and has no row is no file that another process writes


class IdSource:
    """Ids that sort by when they were made: a page of a list begins behind an id, whether that still exists or not."""

    def __init__(self) -> None:
        self._latest_ns = 0

    def make(self, prefix: str) -> str:
        """`PREFIX` and 32 hexadecimal digits: 16 of the time, 16 that cannot be guessed."""
        self._latest_ns = max(self._latest_ns + 1, time.time_ns())
        return f"{prefix}{self._latest_ns:016x}{secrets.token_hex(8)}"

    def has_form(self, prefix: str, text: str) -> bool:
        """Return whether `make` can have returned this text by now."""
        digits = text.removeprefix(prefix)
        is_form = text.startswith(prefix) and re.fullmatch("[0-9a-f]{32}", digits) is not None
        return is_form and int(digits[:16], 16) <= max(self._latest_ns, time.time_ns())


@dataclass(frozen=True)
class StoredFile:
    """One file; times in Unix seconds."""

    file_id: str
    filename: str  # as the client gave it: only for display
    purpose: str  # batch | batch_output
    size_bytes: int
    created_at: int
    expires_at: int | None
    tenant: str

    def as_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class PlacedFile(NamedTuple):
    """A file whose bytes are kept."""

    file_id: str
    size_bytes: int


class FileStore:
    """Rows in `database`, and `bytes`. `now_s` returns Unix time."""

    def __init__(
        self, database: Database, bytes_of: FileBytes, ids: IdSource, now_s: Callable[[], float] = time.time
    ) -> None:
        self._database = database
        self.bytes = bytes_of
        self._ids = ids
        self._now_s = now_s
        database.create(_SCHEMA)
        database.add_column("service_files", "tenant", f"TEXT NOT NULL DEFAULT '{DEFAULT_TENANT}'")
        # Another process that shares the store may be writing what has no row yet.
        bytes_of.remove_unknown(self._known, time.time() - _ABANDONED_S if database.is_shared else None)

    def _known(self) -> set[str]:
        return {row[0] for row in self._database.rows("SELECT file_id FROM service_files")}

    def place(self, file: IO[bytes], is_stopped: Callable[[], bool] = lambda: False) -> PlacedFile:
        """Keep what was written to a file of `bytes.writing()`, under a new id: still without a row. Blocking."""
        placed = PlacedFile(self._ids.make("file-"), file.tell())
        self.bytes.place(file, placed.file_id, is_stopped)
        return placed

    def add(
        self,
        placed: PlacedFile,
        filename: str,
        purpose: str,
        expires_after_s: int | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> StoredFile:
        """Make a placed file known."""
        now = int(self._now_s())
        stored = StoredFile(
            placed.file_id,
            filename,
            purpose,
            placed.size_bytes,
            now,
            None if expires_after_s is None else now + expires_after_s,
            tenant,
        )
        self._database.execute(
            f"INSERT INTO service_files ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            placed.file_id,
            filename,
            purpose,
            stored.size_bytes,
            now,
            stored.expires_at,
            tenant,
        )
        return stored

    def find(self, file_id: str, tenant: str = DEFAULT_TENANT) -> StoredFile | None:
        """The tenant's file of this id, None where there is none (any more)."""
        row = self._database.row(
            f"SELECT {_COLUMNS} FROM service_files"
            " WHERE file_id = ? AND tenant = ? AND (expires_at IS NULL OR expires_at > ?)",
            file_id,
            tenant,
            self._now_s(),
        )
        return None if row is None else StoredFile(*row)

    def may_have_given(self, file_id: str) -> bool:
        """Return whether this is the id of a file, which may be deleted by now: a list goes on behind it."""
        return self._ids.has_form("file-", file_id)

    def page(
        self, tenant: str, after: str | None, limit: int, purpose: str | None, is_ascending: bool
    ) -> list[StoredFile]:
        """Up to `limit` files of a tenant behind the id `after`, the newest first unless `is_ascending`."""
        order, compare = ("ASC", ">") if is_ascending else ("DESC", "<")
        wanted: list[tuple[str, object]] = [("(expires_at IS NULL OR expires_at > ?)", self._now_s())]
        wanted += [("tenant = ?", tenant)]
        wanted += [("purpose = ?", purpose)] if purpose is not None else []
        wanted += [(f"file_id {compare} ?", after)] if after is not None else []
        rows = self._database.rows(
            f"SELECT {_COLUMNS} FROM service_files WHERE {' AND '.join(clause for clause, _ in wanted)}"
            f" ORDER BY file_id {order} LIMIT ?",
            *(value for _, value in wanted),
            limit,
        )
        return [StoredFile(*row) for row in rows]

    def delete(self, file_id: str) -> None:
        """Remove a file; downloads from a folder that have begun run to their end. Blocking."""
        self._database.execute("DELETE FROM service_files WHERE file_id = ?", file_id)
        with suppress(StorageError):  # `bytes.tidy` tries again
            self.bytes.remove(file_id)

    def delete_expired(self) -> int:
        """Remove every file whose time is over; returns how many. Blocking."""
        rows = self._database.rows("SELECT file_id FROM service_files WHERE expires_at <= ?", self._now_s())
        for (file_id,) in rows:
            self.delete(file_id)
        return len(rows)

    def totals(self) -> tuple[int, int]:
        """Return how many files there are, and their bytes."""
        ((count, size),) = self._database.rows("SELECT count(*), coalesce(sum(size_bytes), 0) FROM service_files")
        return int(count), int(size)
