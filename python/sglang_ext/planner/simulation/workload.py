"""The requests of a simulation: from workload files, at the times of a trace or at arrivals drawn from a seed.

Files: Mooncake JSONL, Azure CSV, CSV with `arrived_at`, CSV of lengths only, and of turns of sessions. The kind is
recognised by the file itself: its ending, and the names of its columns.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

from sglang_ext.planner.simulation.events import Prefix, SimRequest

_LENGTH_COLUMNS = ("num_prefill_tokens", "num_decode_tokens")
_TURN_COLUMNS = ("conv", "turn", "new_input_tokens", "history_tokens", "output_tokens")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS = 512  # of a hash id
SESSION_BLOCK_TOKENS = 64  # what two turns share is counted in blocks of this size
ANSWER_S_PER_TOKEN = 0.02  # a reader's time with an answer begins when it is written
_SESSION_BLOCKS = 1 << 32  # block ids of one session


class WorkloadError(ValueError):
    """The workload cannot be used; the text is one line for the user."""


class Turn(NamedTuple):
    """One request of a session."""

    history_tokens: int  # earlier prompts and answers of the session, which the prompt begins with
    new_tokens: int
    output_tokens: int


class Workload(NamedTuple):
    """A file of requests. Exactly one of the three is not empty."""

    requests: tuple[SimRequest, ...] = ()  # with times of their own, from 0 on
    lengths: tuple[tuple[int, int], ...] = ()  # (prompt, output) tokens, without times
    sessions: tuple[tuple[Turn, ...], ...] = ()  # without times

    def drawn_lengths(self) -> tuple[tuple[int, int], ...]:
        """(prompt, output) tokens of every request, without what else is known of it."""
        timed = tuple((request.prompt_tokens, request.output_tokens) for request in self.requests)
        turns = (turn for session in self.sessions for turn in session)
        return (
            self.lengths
            or timed
            or tuple((turn.history_tokens + turn.new_tokens, turn.output_tokens) for turn in turns)
        )


class _Row(NamedTuple):
    line: int
    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    prefix: Prefix | None = None


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
    if not is_json and _TURN_COLUMNS[0] in next(csv.reader(lines[:1])):
        return Workload(sessions=read_sessions(path, lines))
    rows = list(_mooncake_rows(path, lines) if is_json else _csv_rows(path, lines))
    if not rows:
        raise WorkloadError(f"{path} has no requests")
    if rows[0].at_s is None:
        return Workload(lengths=tuple((row.prompt_tokens, row.output_tokens) for row in rows))
    return Workload(_timed(path, rows))


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
        requests.append(SimRequest(key, row.at_s, row.prompt_tokens, row.output_tokens, 0, row.prefix))
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
        prompt_tokens = _tokens(path, number, entry, "input_length")
        prefix = _hashed_prefix(path, number, entry.get("hash_ids"), prompt_tokens)
        yield _Row(number, at_s, prompt_tokens, _output(path, number, entry, "output_length"), prefix)


def _hashed_prefix(path: Path, line: int, hash_ids: object, prompt_tokens: int) -> Prefix | None:
    """The full blocks among them; a last block that is not full is shared with no other prompt."""
    if hash_ids is None:
        return None
    if not isinstance(hash_ids, list) or not all(type(block_id) is int for block_id in hash_ids):
        raise WorkloadError(f"{path}, line {line}: hash_ids is not a list of whole numbers")
    return Prefix(MOONCAKE_BLOCK_TOKENS, tuple(hash_ids[: prompt_tokens // MOONCAKE_BLOCK_TOKENS]))


def read_sessions(path: Path, lines: list[str]) -> tuple[tuple[Turn, ...], ...]:
    """Sessions of a CSV of turns, one after the other; `part`, if it is there, divides a conversation into several.

    WorkloadError as `load_workload`.
    """
    reader = csv.DictReader(lines, restkey=None)
    _require(path, list(reader.fieldnames or ()), _TURN_COLUMNS)
    sessions: list[list[Turn]] = []
    previous: tuple[str | None, str | None] | None = None
    turn = 0.0
    for number, entry in enumerate(reader, 2):
        session = entry["conv"], entry.get("part")
        after, turn = turn, _number(path, number, entry, "turn")
        if session != previous:
            sessions.append([])
        elif turn <= after:
            raise WorkloadError(f"{path}, line {number}: turns are not sorted (turn {turn:g} after {after:g})")
        previous = session
        sessions[-1].append(
            Turn(
                _whole(path, number, entry, "history_tokens", 0),
                # An empty message still has the template's tokens.
                max(1, _whole(path, number, entry, "new_input_tokens", 0)),
                _output(path, number, entry, "output_tokens"),
            )
        )
    if not sessions:
        raise WorkloadError(f"{path} has no requests")
    return tuple(tuple(turns) for turns in sessions)


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
    return _whole(path, line, entry, column, 1)


def _output(path: Path, line: int, entry: Mapping[str, object], column: str) -> int:
    """Some traces have requests without an answer: prefill gives one token at least."""
    return max(1, _whole(path, line, entry, column, 0))


def _whole(path: Path, line: int, entry: Mapping[str, object], column: str, least: int) -> int:
    number = _number(path, line, entry, column)
    if number < least or number != int(number):
        raise WorkloadError(f"{path}, line {line}: {column} {number:g} is not a whole number of at least {least}")
    return int(number)


def poisson_s(rate_per_s: float, random: Random) -> Iterator[float]:
    """Arrival times without end. The same seed at twice the rate gives the same pattern in half the time."""
    now_s = 0.0
    while True:
        now_s += random.expovariate(1.0) / rate_per_s
        yield now_s


def bursty_s(rate_per_s: float, shape: float, random: Random) -> Iterator[float]:
    """Arrival times with gamma-distributed gaps of this mean rate; below a shape of 1 they come in bursts.

    The gaps' coefficient of variation is 1 / sqrt(shape).
    """
    now_s = 0.0
    while True:
        now_s += random.gammavariate(shape, 1.0 / shape) / rate_per_s
        yield now_s


def drawn_requests(
    lengths: Sequence[tuple[int, int]], count: int, rate_per_s: float, seed: int, burst_shape: float = 1.0
) -> Iterator[SimRequest]:
    """Requests whose (prompt, output) tokens are drawn from `lengths` with replacement, at such arrivals.

    Lengths and times have random streams of their own, so that the lengths of a seed are the same at every rate.
    """
    gaps, draws = Random(f"arrivals {seed}"), Random(f"lengths {seed}")
    times_s = poisson_s(rate_per_s, gaps) if burst_shape == 1.0 else bursty_s(rate_per_s, burst_shape, gaps)
    for key in range(count):
        prompt_tokens, output_tokens = draws.choice(lengths)
        yield SimRequest(key, next(times_s), prompt_tokens, output_tokens)


def session_requests(
    sessions: Sequence[Sequence[Turn]], count: int, rate_per_s: float, seed: int, think_s: float, burst_shape: float
) -> list[SimRequest]:
    """Requests of sessions drawn with replacement, sorted by arrival, `rate_per_s` of them on average.

    Sessions begin Poisson, or in bursts. A turn arrives when the answer before it has been written, at 20 ms a token,
    and its reader has thought about it, exponentially distributed with mean `think_s`: independent of the simulated
    instances do, so that all systems get the same arrivals. A prompt begins with the session so far, blocks of which
    are its prefix. The first `count` arrivals are returned.
    """
    gaps, draws = Random(f"arrivals {seed}"), Random(f"sessions {seed}")
    sessions_per_s = rate_per_s * len(sessions) / sum(len(turns) for turns in sessions)
    starts_s = poisson_s(sessions_per_s, gaps) if burst_shape == 1.0 else bursty_s(sessions_per_s, burst_shape, gaps)
    arrivals: list[tuple[float, int, Turn]] = []
    # With as many sessions as requests, no later session begins before the last request that is returned.
    for session in range(count):
        now_s = next(starts_s)
        for turn in draws.choice(sessions):
            arrivals.append((now_s, session, turn))
            now_s += ANSWER_S_PER_TOKEN * turn.output_tokens + draws.expovariate(1.0 / think_s)
    arrivals.sort(key=lambda arrival: arrival[0])
    return [_session_request(key, *arrival) for key, arrival in enumerate(arrivals[:count])]


def _session_request(key: int, arrival_s: float, session: int, turn: Turn) -> SimRequest:
    prompt_tokens = turn.history_tokens + turn.new_tokens
    first = session * _SESSION_BLOCKS
    blocks = tuple(range(first, first + prompt_tokens // SESSION_BLOCK_TOKENS))
    return SimRequest(key, arrival_s, prompt_tokens, turn.output_tokens, 0, Prefix(SESSION_BLOCK_TOKENS, blocks))


def scaled(requests: Sequence[SimRequest], rate_per_s: float) -> list[SimRequest]:
    """The same requests with their arrival times stretched to this mean rate (Tetris, section 7.2).

    ValueError unless the first and the last arrive at different times.
    """
    first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
    if not last_s > first_s:
        raise ValueError("all requests arrive at once: no rate can be given to them")
    factor = (len(requests) - 1) / rate_per_s / (last_s - first_s)
    return [request._replace(arrival_s=(request.arrival_s - first_s) * factor) for request in requests]
