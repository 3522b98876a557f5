"""Workload files: Mooncake JSONL, Azure CSV, CSV with `arrived_at`, and CSV of lengths alone.

The kind is told by the file itself: its ending, and the names of its columns.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from sglang_ext.simulation.records import SimRequest

_LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class WorkloadError(ValueError):
    """The workload cannot be used; the text is one line for the user."""


class Workload(NamedTuple):
    """A file of requests. Exactly one of the two is not empty."""

    requests: tuple[SimRequest, ...]  # with times of their own, from 0 on
    lengths: tuple[tuple[int, int], ...]  # (prompt, output) tokens, without times


class _Row(NamedTuple):
    line: int
    at_s: float | None
    prompt_tokens: int
    output_tokens: int


def load_workload(path: Path) -> Workload:
    """Read a workload file. WorkloadError names the file, and the line and the column that is wrong."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = file.read().splitlines()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WorkloadError(f"{path} is not text") from None
    if not any(line.strip() for line in lines):
        raise WorkloadError(f"{path} is empty")
    is_json = path.suffix in {".jsonl", ".json"} or lines[0].lstrip().startswith("{")
    rows = list(_mooncake_rows(path, lines) if is_json else _csv_rows(path, lines))
    if not rows:
        raise WorkloadError(f"{path} has no requests")
    if rows[0].at_s is None:
        return Workload((), tuple((row.prompt_tokens, row.output_tokens) for row in rows))
    return Workload(_timed(path, rows), ())


def _timed(path: Path, rows: list[_Row]) -> tuple[SimRequest, ...]:
    previous_s = 0.0
    requests = []
    for key, row in enumerate(rows):
        assert row.at_s is not None
        if row.at_s < 0:
            raise WorkloadError(f"{path}, line {row.line}: the time {row.at_s:g} s is negative")
        if row.at_s < previous_s:
            raise WorkloadError(
                f"{path}, line {row.line}: times are not sorted ({row.at_s:g} s after {previous_s:g} s)"
            )
        previous_s = row.at_s
        requests.append(SimRequest(key, row.at_s, row.prompt_tokens, row.output_tokens))
    return tuple(requests)


def _mooncake_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            raise WorkloadError(f"{path}, line {number}: not JSON") from None
        if not isinstance(entry, dict):
            raise WorkloadError(f"{path}, line {number}: not an object")
        at_s = _number(path, number, entry, "timestamp") / 1e3
        yield _Row(
            number, at_s, _tokens(path, number, entry, "input_length"), _output(path, number, entry, "output_length")
        )


def _csv_rows(path: Path, lines: list[str]) -> Iterator[_Row]:
    reader = csv.DictReader(lines, restkey=None)
    columns = list(reader.fieldnames or ())
    if _AZURE_COLUMNS[0] in columns:
        _require(path, columns, _AZURE_COLUMNS)
        yield from _azure_rows(path, reader)
        return
    _require(path, columns, _LENGTH_COLUMNS)
    for number, entry in enumerate(reader, 2):
        at_s = _number(path, number, entry, "arrived_at") if "arrived_at" in columns else None
        yield _Row(
            number,
            at_s,
            _tokens(path, number, entry, _LENGTH_COLUMNS[0]),
            _output(path, number, entry, _LENGTH_COLUMNS[1]),
        )


def _azure_rows(path: Path, reader: csv.DictReader[str]) -> Iterator[_Row]:
    first: datetime | None = None
    for number, entry in enumerate(reader, 2):
        text = entry["TIMESTAMP"] or ""
        whole, _, fraction = text.partition(".")
        try:
            # Seven digits of a second are more than a datetime takes.
            at = datetime.fromisoformat(f"{whole}.{fraction[:6]:0<6}")
        except ValueError:
            raise WorkloadError(f"{path}, line {number}: TIMESTAMP {text!r} is no time") from None
        first = first or at
        yield _Row(
            number,
            (at - first).total_seconds(),
            _tokens(path, number, entry, _AZURE_COLUMNS[1]),
            _output(path, number, entry, _AZURE_COLUMNS[2]),
        )


def _require(path: Path, columns: list[str], needed: tuple[str, ...]) -> None:
    missing = [column for column in needed if column not in columns]
    if missing:
        raise WorkloadError(f"{path}: column {missing[0]} is missing (there are: {', '.join(columns)})")


def _number(path: Path, line: int, entry: Mapping[str, object], column: str) -> float:
    value = entry.get(column)
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise WorkloadError(f"{path}, line {line}: {column} {value!r} is no number")
    return number


def _tokens(path: Path, line: int, entry: Mapping[str, object], column: str) -> int:
    number = _number(path, line, entry, column)
    if number < 1 or number != int(number):
        raise WorkloadError(f"{path}, line {line}: {column} {number:g} is not a whole number of at least 1")
    return int(number)


def _output(path: Path, line: int, entry: Mapping[str, object], column: str) -> int:
    """Some traces have requests without an answer: prefill gives one token at least."""
    number = _number(path, line, entry, column)
    if number < 0 or number != int(number):
        raise WorkloadError(f"{path}, line {line}: {column} {number:g} is not a whole number of at least 0")
    return max(1, int(number))
