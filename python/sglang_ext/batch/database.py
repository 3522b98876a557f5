"""The two databases that a store can be in: a SQLite file of one process, or PostgreSQL, which several share.

Statements are written once, in what both understand, with `?` for parameters. `_POSTGRES_TYPES` has what differs in a
schema; the rest is in the two classes.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any

_CACHE_KIB = 32 * 1024
# A server or a network that is gone is noticed within a minute, by both ends: a transaction of a client that is gone or
# stands still holds locks that long, and who waits for a lock tries again after a while.
_CONNECTION = {
    "connect_timeout": 10,
    "keepalives_idle": 20,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,
}
_SETTINGS = "-c idle_in_transaction_session_timeout=60s -c lock_timeout=15s"
_REPEATABLE = ("SELECT", "BEGIN")  # statements by themselves that may be sent again if a connection is lost
_POSTGRES_SCHEMA = "sglang_ext_batch"
_POSTGRES_TYPES = (
    ("INTEGER PRIMARY KEY AUTOINCREMENT", "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"),
    ("INTEGER", "BIGINT"),
    ("BLOB", "BYTEA"),
    ("TEXT", 'TEXT COLLATE "C"'),
    (") WITHOUT ROWID", ")"),
)
_SCHEMA_LOCK = 0x736C6261  # any number: of those that make the tables one at a time


class StoreError(Exception):
    """The store cannot be used; the text is one line that says why."""


class StoreFullError(StoreError):
    """Nothing more can be written: the disk is full, or the store's limit is reached. What is in it stays."""


class ConflictError(StoreError):
    """A row with this key is there already."""


class CommitUnknownError(StoreError):
    """The connection was lost while a transaction was committed: it may have taken effect, now or a little later.

    A transaction that locks a row which that one had changed begins when its outcome is known.
    """


class Database(ABC):
    """One connection, safe to use from several threads. What the database refuses is raised as a StoreError."""

    now_ms: str  # SQL of the Unix time in milliseconds: the server's, where several machines ask
    for_update: str  # behind a SELECT within a transaction: no other changes these rows before its end
    is_shared: bool  # other processes may use the same tables

    def __init__(self, name: str) -> None:
        self.name = name
        self._mutex = RLock()
        self._depth = 0  # of transactions within transactions

    @abstractmethod
    def _run(self, statement: str, values: Sequence[Any]) -> Any: ...

    @abstractmethod
    def _run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int: ...

    @abstractmethod
    def _translated(self, error: Exception) -> StoreError: ...

    @abstractmethod
    def create(self, schema: str) -> None:
        """Make the tables of a schema that are not there."""

    @abstractmethod
    def add_column(self, table: str, column: str, definition: str) -> None:
        """Add a column to a table of an earlier version, where it is not there; `definition` has a default."""

    @abstractmethod
    def second(self) -> Database:
        """Open another connection to the same tables; what it commits outlives the machine's power."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._mutex:
            try:
                yield
            except StoreError:
                raise
            except self._errors() as error:
                raise self._translated(error) from error

    @abstractmethod
    def _errors(self) -> type[Exception]: ...

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads from the database meanwhile."""
        with self._mutex:
            yield

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return all rows of a query."""
        with self._guarded():
            found: list[tuple[Any, ...]] = self._run(statement, values).fetchall()
            return found

    def row(self, statement: str, *values: Any) -> tuple[Any, ...] | None:
        """Return the first row of a query."""
        with self._guarded():
            found: tuple[Any, ...] | None = self._run(statement, values).fetchone()
            return found

    @contextmanager
    def reading(self, statement: str, *values: Any) -> Iterator[Iterable[tuple[Any, ...]]]:
        """Yield the rows of a query as they are read; the rest of them is given up at the block's end."""
        with self._guarded():
            cursor = self._run(statement, values)
            try:
                yield cursor
            finally:
                cursor.close()

    def execute(self, statement: str, *values: Any) -> int:
        """Run a statement; return how many rows it changed."""
        with self._guarded():
            changed: int = self._run(statement, values).rowcount
            return changed

    def execute_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run a statement for each row of parameters; return how many rows it changed in all."""
        with self._guarded():
            return self._run_many(statement, rows)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what is done within as a whole or not at all. Within another one it is a part of that."""
        with self._guarded():
            if not self._depth:
                self._begin()
            self._depth += 1
            try:
                yield
                if self._depth == 1:
                    self._commit()
            except BaseException:
                if self._depth == 1:
                    self._roll_back()
                raise
            finally:
                self._depth -= 1

    def _commit(self) -> None:
        self._run("COMMIT", ())

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _roll_back(self) -> None: ...


class SqliteDatabase(Database):
    """A file."""

    now_ms = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
    for_update = ""  # a transaction has the whole file
    is_shared = False

    def __init__(self, path: Path, *, is_durable: bool = False) -> None:
        super().__init__(str(path))
        self.path = path
        with self._guarded():
            self._connection = sqlite3.connect(
                path, timeout=30.0, isolation_level=None, check_same_thread=False, cached_statements=64
            )
            if is_durable:
                self._connection.execute("PRAGMA synchronous=FULL")

    def prepare(self, version: int, limit_bytes: int | None) -> None:
        """Check that the file is new or a store of this version, and set it up; `limit_bytes`: what it may grow to."""
        with self._guarded():
            execute = self._connection.execute
            found = execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, version):
                raise StoreError(f"{self.name}: written by another version of sglang-ext (format {found})")
            if found == 0 and execute("SELECT 1 FROM sqlite_master").fetchone():
                raise StoreError(f"{self.name}: a database, but no store of batches")
            execute("PRAGMA journal_mode=WAL")
            execute("PRAGMA synchronous=NORMAL")
            execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            execute("PRAGMA auto_vacuum=INCREMENTAL")
            if limit_bytes is not None:
                page_bytes = execute("PRAGMA page_size").fetchone()[0]
                execute(f"PRAGMA max_page_count={max(1, limit_bytes // page_bytes)}")

    def create(self, schema: str) -> None:
        with self.transaction():
            for statement in filter(str.strip, schema.split(";")):
                self._connection.execute(statement)

    def add_column(self, table: str, column: str, definition: str) -> None:
        with self.transaction():
            if column not in {row[1] for row in self.rows(f"PRAGMA table_info({table})")}:
                self._connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {definition}")

    def second(self) -> Database:
        return SqliteDatabase(self.path, is_durable=True)

    def close(self) -> None:
        with self._mutex:
            self._connection.close()

    def _run(self, statement: str, values: Sequence[Any]) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def _run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._connection.executemany(statement, rows).rowcount

    def _begin(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def _roll_back(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def _errors(self) -> type[Exception]:
        return sqlite3.Error

    def _translated(self, error: Exception) -> StoreError:
        code = getattr(error, "sqlite_errorcode", 0) or 0
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(f"{self.name}: the disk is full, or the store's limit is reached")
        if code & 0xFF == sqlite3.SQLITE_IOERR:
            return StoreFullError(f"{self.name}: cannot be written ({getattr(error, 'sqlite_errorname', error)})")
        if isinstance(error, sqlite3.IntegrityError):
            return ConflictError(f"{self.name}: {error}")
        return StoreError(f"{self.name}: {error}")


class PostgresDatabase(Database):
    """Tables in the schema `sglang_ext_batch` of a PostgreSQL database. A connection that was lost is made again."""

    now_ms = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"
    for_update = " FOR UPDATE"
    is_shared = True

    def __init__(self, url: str) -> None:
        self._psycopg = _psycopg()
        try:
            parts = self._psycopg.conninfo.conninfo_to_dict(url)
        except self._psycopg.Error as error:
            raise StoreError(f"--store: {_one_line(error)}") from None
        super().__init__(f"postgresql://{parts.get('host', '')}/{parts.get('dbname', '')}")  # without the password
        self._url = url
        self._connection: Any = None
        with self._guarded():
            self._connect()

    def _connect(self) -> None:
        self._connection = self._psycopg.connect(
            self._url, autocommit=True, options=f"-c search_path={_POSTGRES_SCHEMA} {_SETTINGS}", **_CONNECTION
        )

    def create(self, schema: str) -> None:
        schema = _in_postgres_types(schema)
        with self.transaction():
            self._run("SELECT pg_advisory_xact_lock(?)", (_SCHEMA_LOCK,))
            self._run(f"CREATE SCHEMA IF NOT EXISTS {_POSTGRES_SCHEMA}", ())
            for statement in filter(str.strip, schema.split(";")):
                self._run(statement, ())

    def add_column(self, table: str, column: str, definition: str) -> None:
        with self.transaction():
            self._run("SELECT pg_advisory_xact_lock(?)", (_SCHEMA_LOCK,))
            found = self.row(
                "SELECT 1 FROM information_schema.columns"
                " WHERE table_schema = current_schema() AND table_name = ? AND column_name = ?",
                table,
                column,
            )
            if found is None:  # else other services need not wait for the lock that adding one takes
                self._run(f"ALTER TABLE {table} ADD COLUMN {column} {_in_postgres_types(definition)}", ())

    def second(self) -> Database:
        return PostgresDatabase(self._url)

    def close(self) -> None:
        with self._mutex:
            self._connection.close()

    def _run(self, statement: str, values: Sequence[Any]) -> Any:
        if self._connection.closed and not self._depth:
            self._connect()
        statement = statement.replace("?", "%s")
        try:
            return self._connection.execute(statement, _storable(values))
        except self._psycopg.OperationalError:
            if self._depth or not self._connection.closed or not statement.startswith(_REPEATABLE):
                raise
        self._connect()
        return self._connection.execute(statement, _storable(values))

    def _run_many(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        with self._connection.cursor() as cursor:
            cursor.executemany(statement.replace("?", "%s"), map(_storable, rows))
            changed: int = cursor.rowcount
            return changed

    def _begin(self) -> None:
        self._run("BEGIN", ())

    def _commit(self) -> None:
        try:
            self._run("COMMIT", ())
        except self._psycopg.OperationalError as error:
            if self._connection.closed:
                raise CommitUnknownError(f"{self.name}: lost during a commit: {_one_line(error)}") from error
            raise

    def _roll_back(self) -> None:
        try:
            self._connection.execute("ROLLBACK")
        except self._psycopg.Error:
            self._connection.close()  # which rolls back, too

    def _errors(self) -> type[Exception]:
        errors: type[Exception] = self._psycopg.Error
        return errors

    def _translated(self, error: Exception) -> StoreError:
        text = f"{self.name}: {_one_line(error)}"
        if isinstance(error, self._psycopg.errors.UniqueViolation):
            return ConflictError(text)
        if isinstance(error, self._psycopg.errors.DiskFull):
            return StoreFullError(text)
        return StoreError(text)


def _psycopg() -> ModuleType:
    try:
        import psycopg
    except ImportError:
        raise StoreError("--store: PostgreSQL needs the extra 'postgres': pip install 'sglang-ext[postgres]'") from None
    return psycopg


def _in_postgres_types(schema: str) -> str:
    for ours, theirs in _POSTGRES_TYPES:
        schema = schema.replace(ours, theirs)
    return schema


def _storable(values: Sequence[Any]) -> list[Any]:
    """PostgreSQL has no NUL in a text, and no number for a truth."""
    return [
        value.replace("\0", "\N{REPLACEMENT CHARACTER}")
        if isinstance(value, str)
        else int(value)
        if isinstance(value, bool)
        else value
        for value in values
    ]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
