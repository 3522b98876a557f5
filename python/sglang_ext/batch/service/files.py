"""The files of the service: uploaded inputs, and the outputs and errors of batches.

A file is a row in the store's database and its bytes in a folder, under its id: the name that a client gave it is only
ever shown. Bytes are written and synced under a temporary name, renamed, and only then get their row, so a row without
bytes does not exist; bytes without a row are what a killed service left, and are removed when it starts again.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from sglang_ext.batch.database import Database

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
_PARTIAL = ".partial"
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


class FileStore:
    """Rows in `database` and bytes under `folder`, which is made. `now_s` returns Unix time."""

    def __init__(self, database: Database, folder: Path, ids: IdSource, now_s: Callable[[], float] = time.time) -> None:
        self._database = database
        self._folder = folder
        self._ids = ids
        self._now_s = now_s
        folder.mkdir(parents=True, exist_ok=True)
        database.create(_SCHEMA)
        paths = list(folder.iterdir())  # before the rows: another process may add files
        known = {row[0] for row in database.rows("SELECT file_id FROM service_files")}
        before_s = time.time() - (_ABANDONED_S if database.is_shared else 0)
        for path in paths:
            if path.name not in known:
                with suppress(FileNotFoundError):
                    if not database.is_shared or path.stat().st_mtime < before_s:
                        path.unlink()

    @contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """A new temporary file to write to; `place` keeps it, else it is removed at the block's end."""
        path = self._folder / (secrets.token_hex(16) + _PARTIAL)
        try:
            with path.open("xb") as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def place(self, file: BinaryIO) -> str:
        """Sync what was written and rename it to a new file id, which is returned: still without a row. Blocking."""
        file.flush()
        os.fsync(file.fileno())
        file_id = self._ids.make("file-")
        os.rename(file.name, self._folder / file_id)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return file_id

    def add(self, file_id: str, filename: str, purpose: str, expires_after_s: int | None = None) -> StoredFile:
        """Make a placed file known."""
        now = int(self._now_s())
        stored = StoredFile(
            file_id,
            filename,
            purpose,
            self.path(file_id).stat().st_size,
            now,
            None if expires_after_s is None else now + expires_after_s,
        )
        self._database.execute(
            "INSERT INTO service_files VALUES (?, ?, ?, ?, ?, ?)",
            file_id,
            filename,
            purpose,
            stored.size_bytes,
            now,
            stored.expires_at,
        )
        return stored

    def path(self, file_id: str) -> Path:
        """Return where the bytes of a known file are."""
        return self._folder / file_id

    def find(self, file_id: str) -> StoredFile | None:
        """The file of this id, None where there is none (any more)."""
        row = self._database.row(
            "SELECT * FROM service_files WHERE file_id = ? AND (expires_at IS NULL OR expires_at > ?)",
            file_id,
            self._now_s(),
        )
        return None if row is None else StoredFile(*row)

    def may_have_given(self, file_id: str) -> bool:
        """Return whether this is the id of a file, which may be deleted by now: a list goes on behind it."""
        return self._ids.has_form("file-", file_id)

    def page(self, after: str | None, limit: int, purpose: str | None, is_ascending: bool) -> list[StoredFile]:
        """Up to `limit` files behind the id `after`, the newest first unless `is_ascending`."""
        order, compare = ("ASC", ">") if is_ascending else ("DESC", "<")
        wanted: list[tuple[str, object]] = [("(expires_at IS NULL OR expires_at > ?)", self._now_s())]
        wanted += [("purpose = ?", purpose)] if purpose is not None else []
        wanted += [(f"file_id {compare} ?", after)] if after is not None else []
        rows = self._database.rows(
            f"SELECT * FROM service_files WHERE {' AND '.join(clause for clause, _ in wanted)}"
            f" ORDER BY file_id {order} LIMIT ?",
            *(value for _, value in wanted),
            limit,
        )
        return [StoredFile(*row) for row in rows]

    def delete(self, file_id: str) -> None:
        """Remove a file; downloads that have begun run to their end."""
        self._database.execute("DELETE FROM service_files WHERE file_id = ?", file_id)
        self.path(file_id).unlink(missing_ok=True)

    def delete_expired(self) -> int:
        """Remove every file whose time is over; returns how many."""
        rows = self._database.rows("SELECT file_id FROM service_files WHERE expires_at <= ?", self._now_s())
        for (file_id,) in rows:
            self.delete(file_id)
        return len(rows)

    def totals(self) -> tuple[int, int]:
        """Return how many files there are, and their bytes."""
        ((count, size),) = self._database.rows("SELECT count(*), coalesce(sum(size_bytes), 0) FROM service_files")
        return int(count), int(size)
