"""Everything that a run knows, in one SQLite file: the lines, what is still to be done, and the results.

A line's result and its removal from the queue are one transaction, so a line is either in the queue or has one result,
whenever the process ends. What is in flight is only in memory: after a restart it is in the queue still, and leaves
again. Several jobs share a store; one process owns it.

Tables: `lines` (immutable, in the order of input), `queue` (lines without a result, in the order in which they leave),
`results` (in the order in which they came). A line's id is `job << 40 | position`, so a job is a range of ids.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import IO, NamedTuple, Self

import orjson

from sglang_ext.batch.lines import BatchLine

_POSITION_BITS = 40
_CACHE_KIB = 32 * 1024
_PAGE_ROWS, _PAGE_BYTES = 500, 16 << 20  # of a read; a longer one would keep the write-ahead log from starting over
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs(
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, description TEXT NOT NULL,
    is_ready INTEGER NOT NULL, lines INTEGER NOT NULL, succeeded INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS files(id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS lines(
    id INTEGER PRIMARY KEY, custom_id TEXT NOT NULL, path TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    sort_key BLOB NOT NULL, file INTEGER NOT NULL, number INTEGER NOT NULL, prompt_len INTEGER, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS queue(
    job INTEGER NOT NULL, sort_key BLOB NOT NULL, line INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    PRIMARY KEY(job, sort_key, line)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS results(
    id INTEGER PRIMARY KEY AUTOINCREMENT, line INTEGER NOT NULL UNIQUE, is_ok INTEGER NOT NULL, status_code INTEGER,
    request_id TEXT NOT NULL, error TEXT, body BLOB NOT NULL);
"""
_VERSION = 1


class StoreError(Exception):
    """The store cannot be used; the text is one line that says why."""


class StoreFullError(StoreError):
    """Nothing more can be written: the disk is full, or the store's limit is reached. What is in it stays."""


class Job(NamedTuple):
    """One job as the store knows it."""

    id: int
    name: str
    description: dict[str, object]  # JSON of the job's owner
    is_ready: bool  # all lines are in, and none is there twice
    lines: int
    succeeded: int
    failed: int
    prompt_tokens: int  # of results, as the endpoint counted them
    completion_tokens: int

    @property
    def remaining(self) -> int:
        """Lines without a result."""
        return self.lines - self.succeeded - self.failed


class LeasedLine(NamedTuple):
    """A line on its way; `id` names it to `finish`."""

    id: int
    line: BatchLine


class LineResult(NamedTuple):
    """The outcome of a line."""

    id: int
    is_ok: bool
    status_code: int | None  # None: no reply came
    request_id: str
    error: str | None  # why it failed
    body: bytes  # what is exported: the reply's JSON, or packed scores
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StoredResult(NamedTuple):
    """A line's result with what an export says of the line."""

    id: int
    custom_id: str
    is_ok: bool
    status_code: int | None
    request_id: str
    error: str | None
    body: bytes
    line_body: bytes
    prompt_len: int | None


class Duplicate(NamedTuple):
    """A `custom_id` that a job has more than once, with the first two lines that have it."""

    custom_id: str
    first: str
    second: str
    second_number: int  # only its line number


class BatchStore:
    """One SQLite file, one owner. Every method is one transaction; safe to call from several threads.

    Methods raise StoreFullError when nothing more can be written, StoreError for anything else that SQLite refuses.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, lock_file: IO[str]) -> None:
        self.path = path
        self._connection = connection
        self._lock_file = lock_file
        self._limit_bytes: int | None = None
        self._mutex = RLock()
        self._leased: dict[tuple[int, int, int | None], tuple[bytes, int]] = {}  # how far each range is leased

    @classmethod
    def open(cls, path: Path, limit_bytes: int | None = None) -> Self:
        """Open or create the store and become its owner.

        `limit_bytes`: what the file may grow to. StoreError when another process owns it or it is no store.
        """
        lock_file = _lock(path)
        try:
            store = cls(path, _connect(path), lock_file)
        except BaseException:
            lock_file.close()
            raise
        try:
            store._limit_bytes = limit_bytes
            store._prepare()
        except BaseException:
            store.close()
            raise
        return store

    def start_over(self) -> None:
        """Empty the store by removing its file, which a full disk allows, too; ownership stays."""
        with self._mutex:
            self._connection.close()
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
            self._leased.clear()
            self._connection = _connect(self.path)
            self._prepare()

    def _prepare(self) -> None:
        with self._translating():
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _VERSION):
                raise StoreError(f"{self.path}: written by another version of sglang-ext (format {version})")
            if version == 0 and self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise StoreError(f"{self.path}: a database, but no store of batches")
            execute = self._connection.execute
            execute("PRAGMA journal_mode=WAL")
            execute("PRAGMA synchronous=NORMAL")
            execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            execute("PRAGMA auto_vacuum=INCREMENTAL")
            if self._limit_bytes is not None:
                page_bytes = execute("PRAGMA page_size").fetchone()[0]
                execute(f"PRAGMA max_page_count={max(1, self._limit_bytes // page_bytes)}")
            with self._transaction():
                for statement in _SCHEMA.split(";"):
                    if statement.strip():
                        execute(statement)
                execute(f"PRAGMA user_version={_VERSION}")

    def close(self) -> None:
        """Close the file and give up ownership."""
        with self._mutex:
            self._connection.close()
            self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def create_job(self, name: str, description: Mapping[str, object]) -> int:
        """Add an empty job and return its id. ValueError when there is one of this name."""
        with self._translating(), self._transaction():
            try:
                cursor = self._connection.execute(
                    "INSERT INTO jobs(name, description, is_ready, lines, succeeded, failed, prompt_tokens,"
                    " completion_tokens) VALUES (?, ?, 0, 0, 0, 0, 0, 0)",
                    (name, orjson.dumps(description).decode()),
                )
            except sqlite3.IntegrityError:
                raise ValueError(f"there is a job {name!r} already") from None
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def describe_job(self, job: int, description: Mapping[str, object]) -> None:
        """Replace the description. KeyError for an unknown job."""
        with self._translating(), self._transaction():
            text = orjson.dumps(description).decode()
            if self._connection.execute("UPDATE jobs SET description=? WHERE id=?", (text, job)).rowcount != 1:
                raise KeyError(job)

    def jobs(self) -> list[Job]:
        """All jobs, the oldest first."""
        with self._translating():
            rows = self._connection.execute("SELECT * FROM jobs ORDER BY id").fetchall()
        return [_job(row) for row in rows]

    def job(self, job: int) -> Job:
        """One job with its counts. KeyError for an unknown one."""
        with self._translating():
            row = self._connection.execute("SELECT * FROM jobs WHERE id=?", (job,)).fetchone()
        if row is None:
            raise KeyError(job)
        return _job(row)

    def find_job(self, name: str) -> Job | None:
        """The job of this name."""
        with self._translating():
            row = self._connection.execute("SELECT * FROM jobs WHERE name=?", (name,)).fetchone()
        return None if row is None else _job(row)

    def delete_job(self, job: int) -> None:
        """Remove a job with its lines and results; one transaction, and the space can be used again."""
        first, last = _ids(job)
        with self._translating(), self._transaction():
            self._connection.execute("DELETE FROM queue WHERE job=?", (job,))
            self._connection.execute("DELETE FROM results WHERE line BETWEEN ? AND ?", (first, last))
            self._connection.execute("DELETE FROM lines WHERE id BETWEEN ? AND ?", (first, last))
            self._connection.execute("DELETE FROM jobs WHERE id=?", (job,))
            self._forget_leases(job)

    def add_lines(self, job: int, lines: Sequence[BatchLine]) -> None:
        """Append lines to a job that is not ready; one transaction. KeyError for an unknown job."""
        with self._translating(), self._transaction():
            row = self._connection.execute("SELECT lines, is_ready FROM jobs WHERE id=?", (job,)).fetchone()
            if row is None:
                raise KeyError(job)
            if row[1]:
                raise ValueError(f"job {job} has all its lines already")
            start = _ids(job)[0] + row[0]
            files = {name: self._file_id(name) for name in {line.file for line in lines}}
            self._connection.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (
                        start + offset,
                        line.custom_id,
                        line.path,
                        line.prompt_tokens,
                        line.sort_key,
                        files[line.file],
                        line.number,
                        line.prompt_len,
                        line.body,
                    )
                    for offset, line in enumerate(lines)
                ),
            )
            self._connection.execute("UPDATE jobs SET lines = lines + ? WHERE id=?", (len(lines), job))

    def _file_id(self, name: str) -> int:
        self._connection.execute("INSERT OR IGNORE INTO files(name) VALUES (?)", (name,))
        found: int = self._connection.execute("SELECT id FROM files WHERE name=?", (name,)).fetchone()[0]
        return found

    def duplicates(self, job: int, limit: int) -> list[Duplicate]:
        """`custom_id`s that are there more than once, at most `limit` of them. Sorts on disk, not in memory."""
        first, last = _ids(job)
        with self._translating():
            rows = self._connection.execute(
                "SELECT custom_id, min(id) FROM lines WHERE id BETWEEN ? AND ?"
                " GROUP BY custom_id HAVING count(*) > 1 LIMIT ?",
                (first, last, limit),
            ).fetchall()
            return [Duplicate(custom_id, *self._places(custom_id, earliest, last)) for custom_id, earliest in rows]

    def _places(self, custom_id: str, earliest: int, last: int) -> tuple[str, str, int]:
        rows = self._connection.execute(
            "SELECT files.name, number FROM lines JOIN files ON files.id = lines.file"
            " WHERE lines.id BETWEEN ? AND ? AND custom_id=? ORDER BY lines.id LIMIT 2",
            (earliest, last, custom_id),
        ).fetchall()
        places = [BatchLine("", "", b"", 0, b"", name, number).place for name, number in rows]
        return places[0], places[1], rows[1][1]

    def make_ready(self, job: int) -> None:
        """All lines are in: put them into the queue in the order in which they leave.

        ValueError when a `custom_id` is there more than once.
        """
        if found := self.duplicates(job, 1):
            duplicate = found[0]
            raise ValueError(f"custom_id {duplicate.custom_id!r} is on {duplicate.first} and on {duplicate.second}")
        first, last = _ids(job)
        with self._translating(), self._transaction():
            self._connection.execute(
                "INSERT INTO queue SELECT ?, sort_key, id, prompt_tokens FROM lines WHERE id BETWEEN ? AND ?"
                " ORDER BY sort_key, id",
                (job, first, last),
            )
            self._connection.execute("UPDATE jobs SET is_ready=1 WHERE id=?", (job,))

    # -- work ---------------------------------------------------------------------------------------------------------

    def lease(
        self,
        job: int,
        most: int,
        *,
        min_tokens: int = 0,
        below_tokens: int | None = None,
        max_bytes: int = 1 << 24,
    ) -> list[LeasedLine]:
        """The next lines without a result whose prompt has `min_tokens` or more, and less than `below_tokens`.

        At most `most` of them, and no more after `max_bytes` of bodies. None is leased twice before `release_leases`;
        a range of tokens must not overlap another that is leased from. Empty when there is none left to lease.
        """
        place = (job, min_tokens, below_tokens)
        upper = 1 << 62 if below_tokens is None else below_tokens
        leased: list[LeasedLine] = []
        with self._translating():
            key, after = self._leased.get(place, (b"", -1))
            rows = self._connection.execute(
                "SELECT queue.sort_key, lines.id, custom_id, path, body, lines.prompt_tokens, files.name, number,"
                " prompt_len FROM queue JOIN lines ON lines.id = queue.line JOIN files ON files.id = lines.file"
                " WHERE job=? AND (queue.sort_key, queue.line) > (?, ?)"
                " AND queue.prompt_tokens >= ? AND queue.prompt_tokens < ?"
                " ORDER BY queue.sort_key, queue.line LIMIT ?",
                (job, key, after, min_tokens, upper, most),
            )
            size_bytes = 0
            for sort_key, line, custom_id, path, body, tokens, file, number, prompt_len in rows:
                parsed = BatchLine(custom_id, path, body, tokens, sort_key, file, number, prompt_len)
                leased.append(LeasedLine(line, parsed))
                key, after = sort_key, line
                size_bytes += len(body)
                if size_bytes >= max_bytes:
                    break
            rows.close()
            self._leased[place] = (key, after)
        return leased

    def release_leases(self, job: int) -> None:
        """Let lines without a result be leased again. Nothing of the job may be in flight."""
        with self._mutex:
            self._forget_leases(job)

    def _forget_leases(self, job: int) -> None:
        for place in [place for place in self._leased if place[0] == job]:
            del self._leased[place]

    def finish(self, results: Sequence[LineResult]) -> None:
        """Write results and take their lines out of the queue, all of them or none. StoreError if one has a result."""
        by_job: dict[int, list[int]] = {}
        for result in results:
            sums = by_job.setdefault(result.id >> _POSITION_BITS, [0, 0, 0, 0])
            sums[0 if result.is_ok else 1] += 1
            sums[2] += result.prompt_tokens
            sums[3] += result.completion_tokens
        with self._translating(), self._transaction():
            try:
                self._connection.executemany(
                    "INSERT INTO results(line, is_ok, status_code, request_id, error, body) VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        (result.id, result.is_ok, result.status_code, result.request_id, result.error, result.body)
                        for result in results
                    ),
                )
            except sqlite3.IntegrityError as error:
                raise StoreError(f"{self.path}: a line would get a second result ({error})") from None
            removed = self._connection.executemany(
                "DELETE FROM queue WHERE job = ?1 >> 40 AND line = ?1"
                " AND sort_key = (SELECT sort_key FROM lines WHERE id = ?1)",
                ((result.id,) for result in results),
            ).rowcount
            if removed != len(results):
                raise StoreError(f"{self.path}: {len(results)} lines have results, {removed} of them were in the queue")
            for job, sums in by_job.items():
                self._connection.execute(
                    "UPDATE jobs SET succeeded = succeeded + ?, failed = failed + ?,"
                    " prompt_tokens = prompt_tokens + ?, completion_tokens = completion_tokens + ? WHERE id = ?",
                    (*sums, job),
                )

    def requeue_failed(self, job: int) -> int:
        """Put failed lines back into the queue, without their results; return how many."""
        first, last = _ids(job)
        with self._translating(), self._transaction():
            count = self._connection.execute(
                "INSERT INTO queue SELECT ?, sort_key, lines.id, prompt_tokens FROM results"
                " JOIN lines ON lines.id = results.line WHERE line BETWEEN ? AND ? AND is_ok = 0",
                (job, first, last),
            ).rowcount
            self._connection.execute("DELETE FROM results WHERE line BETWEEN ? AND ? AND is_ok = 0", (first, last))
            self._connection.execute("UPDATE jobs SET failed = 0 WHERE id = ?", (job,))
            self._forget_leases(job)
            return count

    # -- results ------------------------------------------------------------------------------------------------------

    def results(self, job: int, *, ok: bool | None = None) -> Iterator[StoredResult]:
        """Yield the results in the order of the input: all of them, or those whose success is `ok`.

        Reads a page at a time, so writing goes on meanwhile.
        """
        first, last = _ids(job)
        wanted = "" if ok is None else f" AND is_ok = {int(ok)}"
        after = first - 1
        while True:
            page: list[StoredResult] = []
            size_bytes = 0
            with self._translating():
                rows = self._connection.execute(
                    "SELECT results.line, custom_id, is_ok, status_code, request_id, error, results.body,"
                    " lines.body, prompt_len FROM results JOIN lines ON lines.id = results.line"
                    f" WHERE line > ? AND line <= ?{wanted} ORDER BY line LIMIT {_PAGE_ROWS}",
                    (after, last),
                )
                for row in rows:
                    page.append(StoredResult(row[0], row[1], bool(row[2]), *row[3:]))
                    size_bytes += len(row[6]) + len(row[7])
                    if size_bytes >= _PAGE_BYTES:
                        break
                rows.close()
            if not page:
                return
            yield from page
            after = page[-1].id

    # -- SQLite -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _translating(self) -> Iterator[None]:
        with self._mutex:
            try:
                yield
            except sqlite3.Error as error:
                raise _translated(self.path, error) from error


def _connect(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
    except sqlite3.Error as error:
        raise _translated(path, error) from None


def _ids(job: int) -> tuple[int, int]:
    return job << _POSITION_BITS, (job + 1 << _POSITION_BITS) - 1


def _job(row: Iterable[object]) -> Job:
    identifier, name, description, is_ready, *counts = row
    return Job(identifier, name, orjson.loads(description), bool(is_ready), *counts)  # type: ignore[arg-type]


def _lock(path: Path) -> IO[str]:
    """Own the store until the file is closed or the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open(f"{path}.lock", "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the store is
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock_file.seek(0)
        owner = lock_file.read().strip() or "unknown"
        lock_file.close()
        raise StoreError(f"{path}: in use by another process ({owner})") from None
    try:
        lock_file.truncate(0)
        lock_file.write(str(os.getpid()))
        lock_file.flush()
    except OSError:
        pass  # a full disk; the lock holds without a name
    return lock_file


def _translated(path: Path, error: sqlite3.Error) -> StoreError:
    code = getattr(error, "sqlite_errorcode", 0) or 0
    if code == sqlite3.SQLITE_FULL:
        return StoreFullError(f"{path}: the disk is full, or the store's limit is reached")
    if code & 0xFF == sqlite3.SQLITE_IOERR:
        return StoreFullError(f"{path}: cannot be written ({getattr(error, 'sqlite_errorname', error)})")
    return StoreError(f"{path}: {error}")
