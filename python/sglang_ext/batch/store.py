"""Everything that a run knows, in one database: the lines, what is still to be done, and the results.

A line's result and its removal from the queue are one transaction, so a line is either in the queue or has one result,
whenever the process ends. What is in flight is only in memory: after a restart it is in the queue still, and leaves
again. Several jobs share a store; one process owns a file, several may share PostgreSQL's tables.

Tables: `lines` (immutable, in the order of input), `queue` (lines without a result, in the order in which they leave),
`results` (in the order in which they came). A line's id is `job << 40 | position`, so a job is a range of ids.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Self

import orjson

from sglang_ext.batch.database import (
    ConflictError,
    Database,
    PostgresDatabase,
    SqliteDatabase,
    StoreError,
)
from sglang_ext.batch.lines import BatchLine

_POSITION_BITS = 40
_PAGE_ROWS, _PAGE_BYTES = 500, 16 << 20  # of a read; a longer one would keep the write-ahead log from starting over
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs(
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, description TEXT NOT NULL,
    is_ready INTEGER NOT NULL, lines INTEGER NOT NULL, succeeded INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS files(id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE);
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
    """One SQLite file with one owner, or PostgreSQL's tables. Every method is one transaction; threads may share it.

    Methods raise StoreFullError when nothing more can be written, StoreError for anything else that is refused. Of
    PostgreSQL's tables a job is leased from by one process at a time; results that come behind another's are dropped.
    """

    def __init__(self, database: Database, lock_file: IO[str] | None = None, limit_bytes: int | None = None) -> None:
        self._database = database
        self._lock_file = lock_file
        self._limit_bytes = limit_bytes
        self._leased: dict[tuple[int, int, int | None], tuple[bytes, int]] = {}  # how far each range is leased

    @classmethod
    def open(cls, path: Path, limit_bytes: int | None = None) -> Self:
        """Open or create a file and become its owner.

        `limit_bytes`: what the file may grow to. StoreError when another process owns it or it is no store.
        """
        lock_file = _lock(path)
        try:
            store = cls(SqliteDatabase(path), lock_file, limit_bytes)
        except BaseException:
            lock_file.close()
            raise
        try:
            store._prepare()
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def open_shared(cls, url: str) -> Self:
        """Open a PostgreSQL database that other processes may use, too. StoreError when that cannot be."""
        store = cls(PostgresDatabase(url))
        try:
            store._database.create(_SCHEMA)
        except BaseException:
            store.close()
            raise
        return store

    def start_over(self) -> None:
        """Empty the store by removing its file, which a full disk allows, too; ownership stays."""
        database = self._database
        assert isinstance(database, SqliteDatabase)
        database.close()
        for suffix in ("", "-wal", "-shm"):
            Path(f"{database.path}{suffix}").unlink(missing_ok=True)
        self._leased.clear()
        self._database = SqliteDatabase(database.path)
        self._prepare()

    def _prepare(self) -> None:
        database = self._database
        assert isinstance(database, SqliteDatabase)
        database.prepare(_VERSION, self._limit_bytes)
        with database.transaction():
            database.create(_SCHEMA)
            database.execute(f"PRAGMA user_version={_VERSION}")

    @property
    def database(self) -> Database:
        """Return where its tables are."""
        return self._database

    def close(self) -> None:
        """Close the connection and give up ownership."""
        self._database.close()
        if self._lock_file is not None:
            self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def create_job(self, name: str, description: Mapping[str, object]) -> int:
        """Add an empty job and return its id. ValueError when there is one of this name."""
        try:
            with self._database.transaction():
                row = self._database.row(
                    "INSERT INTO jobs(name, description, is_ready, lines, succeeded, failed, prompt_tokens,"
                    " completion_tokens) VALUES (?, ?, 0, 0, 0, 0, 0, 0) RETURNING id",
                    name,
                    orjson.dumps(description).decode(),
                )
        except ConflictError:
            raise ValueError(f"there is a job {name!r} already") from None
        assert row is not None
        return int(row[0])

    def describe_job(self, job: int, description: Mapping[str, object]) -> None:
        """Replace the description. KeyError for an unknown job."""
        text = orjson.dumps(description).decode()
        if self._database.execute("UPDATE jobs SET description=? WHERE id=?", text, job) != 1:
            raise KeyError(job)

    def jobs(self) -> list[Job]:
        """All jobs, the oldest first."""
        return [_job(row) for row in self._database.rows("SELECT * FROM jobs ORDER BY id")]

    def job(self, job: int) -> Job:
        """One job with its counts. KeyError for an unknown one."""
        row = self._database.row("SELECT * FROM jobs WHERE id=?", job)
        if row is None:
            raise KeyError(job)
        return _job(row)

    def find_job(self, name: str) -> Job | None:
        """The job of this name."""
        row = self._database.row("SELECT * FROM jobs WHERE name=?", name)
        return None if row is None else _job(row)

    def delete_job(self, job: int) -> None:
        """Remove a job with its lines and results; one transaction, and the space can be used again."""
        first, last = _ids(job)
        with self._database.transaction():
            self._database.execute("DELETE FROM queue WHERE job=?", job)
            self._database.execute("DELETE FROM results WHERE line BETWEEN ? AND ?", first, last)
            self._database.execute("DELETE FROM lines WHERE id BETWEEN ? AND ?", first, last)
            self._database.execute("DELETE FROM jobs WHERE id=?", job)
            self._forget_leases(job)

    def add_lines(self, job: int, lines: Sequence[BatchLine]) -> None:
        """Append lines to a job that is not ready; one transaction. KeyError for an unknown job."""
        with self._database.transaction():
            row = self._database.row("SELECT lines, is_ready FROM jobs WHERE id=?", job)
            if row is None:
                raise KeyError(job)
            if row[1]:
                raise ValueError(f"job {job} has all its lines already")
            start = _ids(job)[0] + row[0]
            files = {name: self._file_id(name) for name in {line.file for line in lines}}
            self._database.execute_many(
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
            self._database.execute("UPDATE jobs SET lines = lines + ? WHERE id=?", len(lines), job)

    def _file_id(self, name: str) -> int:
        self._database.execute("INSERT INTO files(name) VALUES (?) ON CONFLICT DO NOTHING", name)
        found = self._database.row("SELECT id FROM files WHERE name=?", name)
        assert found is not None
        return int(found[0])

    def duplicates(self, job: int, limit: int) -> list[Duplicate]:
        """`custom_id`s that are there more than once, at most `limit` of them. Sorts on disk, not in memory."""
        first, last = _ids(job)
        rows = self._database.rows(
            "SELECT custom_id, min(id) FROM lines WHERE id BETWEEN ? AND ?"
            " GROUP BY custom_id HAVING count(*) > 1 LIMIT ?",
            first,
            last,
            limit,
        )
        return [Duplicate(custom_id, *self._places(custom_id, earliest, last)) for custom_id, earliest in rows]

    def _places(self, custom_id: str, earliest: int, last: int) -> tuple[str, str, int]:
        rows = self._database.rows(
            "SELECT files.name, number FROM lines JOIN files ON files.id = lines.file"
            " WHERE lines.id BETWEEN ? AND ? AND custom_id=? ORDER BY lines.id LIMIT 2",
            earliest,
            last,
            custom_id,
        )
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
        with self._database.transaction():
            self._database.execute(
                "INSERT INTO queue SELECT ?, sort_key, id, prompt_tokens FROM lines WHERE id BETWEEN ? AND ?"
                " ORDER BY sort_key, id",
                job,
                first,
                last,
            )
            self._database.execute("UPDATE jobs SET is_ready=1 WHERE id=?", job)

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
        with self._database.alone():
            key, after = self._leased.get(place, (b"", -1))
            size_bytes = 0
            with self._database.reading(
                "SELECT queue.sort_key, lines.id, custom_id, path, body, lines.prompt_tokens, files.name, number,"
                " prompt_len FROM queue JOIN lines ON lines.id = queue.line JOIN files ON files.id = lines.file"
                " WHERE job=? AND (queue.sort_key, queue.line) > (?, ?)"
                " AND queue.prompt_tokens >= ? AND queue.prompt_tokens < ?"
                " ORDER BY queue.sort_key, queue.line LIMIT ?",
                job,
                key,
                after,
                min_tokens,
                upper,
                most,
            ) as rows:
                for sort_key, line, custom_id, path, body, tokens, file, number, prompt_len in rows:
                    parsed = BatchLine(custom_id, path, body, tokens, sort_key, file, number, prompt_len)
                    leased.append(LeasedLine(line, parsed))
                    key, after = sort_key, line
                    size_bytes += len(body)
                    if size_bytes >= max_bytes:
                        break
            self._leased[place] = (key, after)
        return leased

    def release_leases(self, job: int) -> None:
        """Let lines without a result be leased again. Nothing of the job may be in flight."""
        self._forget_leases(job)

    def _forget_leases(self, job: int) -> None:
        with self._database.alone():
            for place in [place for place in self._leased if place[0] == job]:
                del self._leased[place]

    def finish(self, results: Sequence[LineResult]) -> None:
        """Write results and take their lines out of the queue, all of them or none.

        A line that has a result keeps it in a shared store, where a process that lost the job may still report; in a
        file it cannot have one: StoreError.
        """
        with self._database.transaction():
            self._write_results(self._dequeue(results))

    def _dequeue(self, results: Sequence[LineResult]) -> Sequence[LineResult]:
        """Take lines out of the queue; returns the results whose line was in it."""
        if self._database.is_shared:
            removed = self._database.rows(
                "DELETE FROM queue USING lines WHERE lines.id = ANY(?) AND queue.job = lines.id >> 40"
                " AND queue.sort_key = lines.sort_key AND queue.line = lines.id RETURNING queue.line",
                [result.id for result in results],
            )
            lines = {line for (line,) in removed}
            return [result for result in results if result.id in lines]
        count = self._database.execute_many(
            "DELETE FROM queue WHERE job = ?1 >> 40 AND line = ?1"
            " AND sort_key = (SELECT sort_key FROM lines WHERE id = ?1)",
            ((result.id,) for result in results),
        )
        if count != len(results):
            counts = f"{len(results)} lines have results, {count} of them were in the queue"
            raise StoreError(f"{self._database.name}: {counts}: a line would get a second result")
        return results

    def _write_results(self, results: Sequence[LineResult]) -> None:
        by_job: dict[int, list[int]] = {}
        for result in results:
            sums = by_job.setdefault(result.id >> _POSITION_BITS, [0, 0, 0, 0])
            sums[0 if result.is_ok else 1] += 1
            sums[2] += result.prompt_tokens
            sums[3] += result.completion_tokens
        self._database.execute_many(
            "INSERT INTO results(line, is_ok, status_code, request_id, error, body) VALUES (?, ?, ?, ?, ?, ?)",
            (
                (result.id, result.is_ok, result.status_code, result.request_id, result.error, result.body)
                for result in results
            ),
        )
        for job, sums in sorted(by_job.items()):
            self._database.execute(
                "UPDATE jobs SET succeeded = succeeded + ?, failed = failed + ?,"
                " prompt_tokens = prompt_tokens + ?, completion_tokens = completion_tokens + ? WHERE id = ?",
                *sums,
                job,
            )

    def requeue_failed(self, job: int) -> int:
        """Put failed lines back into the queue, without their results; return how many."""
        first, last = _ids(job)
        with self._database.transaction():
            count = self._database.execute(
                "INSERT INTO queue SELECT ?, sort_key, lines.id, prompt_tokens FROM results"
                " JOIN lines ON lines.id = results.line WHERE line BETWEEN ? AND ? AND is_ok = 0",
                job,
                first,
                last,
            )
            self._database.execute("DELETE FROM results WHERE line BETWEEN ? AND ? AND is_ok = 0", first, last)
            self._database.execute("UPDATE jobs SET failed = 0 WHERE id = ?", job)
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
            with self._database.reading(
                "SELECT results.line, custom_id, is_ok, status_code, request_id, error, results.body,"
                " lines.body, prompt_len FROM results JOIN lines ON lines.id = results.line"
                f" WHERE line > ? AND line <= ?{wanted} ORDER BY line LIMIT {_PAGE_ROWS}",
                after,
                last,
            ) as rows:
                for row in rows:
                    page.append(StoredResult(row[0], row[1], bool(row[2]), *row[3:]))
                    size_bytes += len(row[6]) + len(row[7])
                    if size_bytes >= _PAGE_BYTES:
                        break
            if not page:
                return
            yield from page
            after = page[-1].id


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
