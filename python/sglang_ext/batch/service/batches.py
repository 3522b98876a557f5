"""The batches of the service: one row each in the store's database, and their shape in OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from sglang_ext.batch.database import Database
from sglang_ext.batch.decide.batch_lifecycle import BatchLifecycle, BatchStatus
from sglang_ext.types import DEFAULT_TENANT

_SCHEMA = """
CREATE TABLE IF NOT EXISTS service_batches (
    batch_id TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    description BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS service_batches_by_status ON service_batches (status);
"""
_TENANTS_INDEX = "CREATE INDEX IF NOT EXISTS service_batches_by_tenant ON service_batches (tenant, batch_id)"


@dataclass(frozen=True)
class LineProblem:
    """Describes why a line of the input, or all of it (`line` None), cannot be sent; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True)
class RequestTotals:
    """Describes how many requests a batch has, how many of them have a result or are in the error file, and what they
    took."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0  # of results, as the endpoint counted them
    completion_tokens: int = 0


@dataclass(frozen=True)
class BatchEntry:
    """One batch: what the client asked for, where it stands, what came of it."""

    batch_id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    lifecycle: BatchLifecycle
    metadata: dict[str, str] | None = None
    output_expires_after_s: int | None = None
    problems: tuple[LineProblem, ...] = ()
    totals: RequestTotals = RequestTotals()
    output_file_id: str | None = None
    error_file_id: str | None = None
    tenant: str = DEFAULT_TENANT

    @property
    def status(self) -> BatchStatus:
        return self.lifecycle.status

    def as_json(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        times = asdict(self.lifecycle)
        del times["status"], times["is_expiring"]
        totals = self.totals
        problems = [asdict(problem) for problem in self.problems]
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": problems} if problems else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **times,
            "request_counts": {"total": totals.total, "completed": totals.completed, "failed": totals.failed},
            "usage": {
                "input_tokens": totals.prompt_tokens,
                "output_tokens": totals.completion_tokens,
                "total_tokens": totals.prompt_tokens + totals.completion_tokens,
            },
            "metadata": self.metadata,
        }


def _decoded(row: Sequence[Any]) -> BatchEntry:
    description, tenant = row
    fields: dict[str, Any] = orjson.loads(description)
    lifecycle = fields["lifecycle"]
    return BatchEntry(
        **fields
        | {
            "lifecycle": BatchLifecycle(**lifecycle | {"status": BatchStatus(lifecycle["status"])}),
            "problems": tuple(LineProblem(**problem) for problem in fields["problems"]),
            "totals": RequestTotals(**fields["totals"]),
            "tenant": tenant,
        }
    )


class BatchTable:
    """The rows. Each write is durable when it returns, or when its transaction ends."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.create(_SCHEMA)
        database.add_column("service_batches", "tenant", f"TEXT NOT NULL DEFAULT '{DEFAULT_TENANT}'")
        database.create(_TENANTS_INDEX)

    def put(self, entry: BatchEntry) -> None:
        """Insert or replace a batch's row."""
        self._database.execute(
            "INSERT INTO service_batches (batch_id, status, description, tenant) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (batch_id) DO UPDATE SET status = excluded.status, description = excluded.description",
            entry.batch_id,
            entry.status.value,
            orjson.dumps(entry),
            entry.tenant,
        )

    def find(self, batch_id: str) -> BatchEntry | None:
        """The batch of this id."""
        row = self._database.row("SELECT description, tenant FROM service_batches WHERE batch_id = ?", batch_id)
        return None if row is None else _decoded(row)

    def find_to_change(self, batch_id: str) -> BatchEntry | None:
        """Within a transaction: the batch of this id, which no other changes before its end."""
        statement = f"SELECT description, tenant FROM service_batches WHERE batch_id = ?{self._database.for_update}"
        row = self._database.row(statement, batch_id)
        return None if row is None else _decoded(row)

    def page(self, tenant: str, after: str | None, limit: int) -> list[BatchEntry]:
        """Up to `limit` batches of a tenant, the newest first, behind the id `after`."""
        rows = self._database.rows(
            "SELECT description, tenant FROM service_batches WHERE tenant = ? AND batch_id < ?"
            " ORDER BY batch_id DESC LIMIT ?",
            tenant,
            "~" if after is None else after,  # behind every id
            limit,
        )
        return [_decoded(row) for row in rows]

    def open(self) -> list[BatchEntry]:
        """Every batch that is not over, the oldest first."""
        ended = [status.value for status in BatchStatus if status.is_terminal]
        places = ", ".join("?" * len(ended))
        rows = self._database.rows(
            f"SELECT description, tenant FROM service_batches WHERE status NOT IN ({places}) ORDER BY batch_id", *ended
        )
        return [_decoded(row) for row in rows]

    def count_by_status(self) -> dict[BatchStatus, int]:
        """Return how many batches have each status; all statuses are there."""
        counts = dict(self._database.rows("SELECT status, count(*) FROM service_batches GROUP BY status"))
        return {status: counts.get(status.value, 0) for status in BatchStatus}

    def is_validating(self, input_file_id: str) -> bool:
        """Return whether a batch is still read from this file."""
        return any(
            entry.input_file_id == input_file_id and entry.status is BatchStatus.VALIDATING for entry in self.open()
        )
