"""Recent work of a prefill instance, for the lanes of the live page: kept by the instance, read by the router.

The instance keeps a bounded number of records, whether they are read or not, and answers with the records after a
cursor. Times are on the instance's clock, and every answer names that clock's time: a reader needs no other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_ext.types import LengthClass

WORK_KEY = "work"  # of `GET /laps`, where it was asked for
KEPT_RECORDS = 64  # of each kind
PREFILL, PARKED, TRANSFER = "prefill", "parked", "transfer"
KINDS = (PREFILL, PARKED, TRANSFER)
MIXED = "mixed"  # a batch of both classes
_CLASSES = (None, LengthClass.SHORT.value, LengthClass.LONG.value, MIXED)


class BatchMember(NamedTuple):
    """A request in a batch that is launched."""

    key: int  # of the instance's own
    name: str
    length_class: LengthClass | None  # None: of neither, as a health check, which counts only by itself
    new_tokens: int
    tokens_left: int  # that later chunks compute


class WorkRecord(NamedTuple):
    """One thing that the instance did."""

    kind: str
    start_s: float
    end_s: float | None  # None: it goes on
    length_class: str | None
    label: str
    tokens: int  # computed; of a parked prefill: left to compute; of a transfer: whose KV was sent
    requests: int


class InstanceWork(NamedTuple):
    """An instance's answer."""

    now_s: float  # its clock as it answered
    last: int  # the cursor for the next question
    missed: int  # records since the cursor that are not among these
    records: tuple[WorkRecord, ...]


class _BatchInFlight(NamedTuple):
    number: int
    members: tuple[BatchMember, ...]
    shape: str


class _Unfinished(NamedTuple):
    """A prefill between two chunks."""

    since_s: float
    launch: int  # the batch that had its latest chunk
    name: str
    tokens_left: int


class WorkLog:
    """Recent work of one scheduler process. Results come in the order of the launches."""

    def __init__(self) -> None:
        self._last = 0
        self._records = {kind: deque[tuple[int, WorkRecord]](maxlen=KEPT_RECORDS) for kind in KINDS}
        self._launches = 0
        self._launched: deque[_BatchInFlight] = deque()
        self._unfinished: dict[int, _Unfinished] = {}

    def record_launch(self, now_s: float, members: Iterable[BatchMember]) -> None:
        """A batch is launched. A prefill in it that waited while others ran was parked until now."""
        self._launches += 1
        launched = _BatchInFlight(self._launches, tuple(members), "")
        self._launched.append(launched)
        for member in launched.members:
            waited = self._unfinished.pop(member.key, None)
            if waited is not None and launched.number > waited.launch + 1:
                self._add(_parked(waited, now_s))

    def record_shape(self, shape: str) -> None:
        """The batch that was launched last is replayed as a graph of this shape."""
        self._launched[-1] = self._launched[-1]._replace(shape=shape)

    def record_result(self, start_s: float, end_s: float) -> None:
        """The oldest launched batch has ended. IndexError where none was launched."""
        launched = self._launched.popleft()
        self._add(_batch(launched, start_s, end_s))
        for member in launched.members:
            if member.tokens_left > 0:
                self._unfinished[member.key] = _Unfinished(end_s, launched.number, member.name, member.tokens_left)
        while len(self._unfinished) > KEPT_RECORDS:
            del self._unfinished[next(iter(self._unfinished))]

    def record_transfers(self, start_s: float, end_s: float, tokens: int, names: Sequence[str]) -> None:
        """Record that KV of these requests is at decode; they are one record, as their ends were seen at once."""
        self._add(WorkRecord(TRANSFER, start_s, end_s, None, _names(names), tokens, len(names)))

    def answer(self, now_s: float, parked: Collection[int], since: int, most: int) -> dict[str, Any]:
        """The latest `most` records behind the cursor, and the prefills that are `parked` now (their keys), as JSON.

        A cursor that is ahead of this log is of the process before it, and is answered with all that is kept.
        """
        if since > self._last:
            since = 0
        kept = sorted((entry for log in self._records.values() for entry in log if entry[0] > since), key=_number)
        chosen = kept[max(0, len(kept) - most) :]
        going_on = [
            _parked(unfinished, None)
            for key, unfinished in self._unfinished.items()
            if key in parked and self._launches > unfinished.launch
        ]
        return {
            "now_s": now_s,
            "last": self._last,
            "missed": self._last - since - len(chosen),
            "records": [list(record) for _, record in chosen] + [list(record) for record in going_on[:most]],
        }

    def _add(self, record: WorkRecord) -> None:
        self._last += 1
        self._records[record.kind].append((self._last, record))


def _number(entry: tuple[int, WorkRecord]) -> int:
    return entry[0]


def _parked(waited: _Unfinished, end_s: float | None) -> WorkRecord:
    return WorkRecord(
        PARKED, waited.since_s, end_s, LengthClass.LONG.value, _names([waited.name]), waited.tokens_left, 1
    )


def _batch(launched: _BatchInFlight, start_s: float, end_s: float) -> WorkRecord:
    members = [member for member in launched.members if member.length_class is not None] or launched.members
    tokens = dict.fromkeys(LengthClass, 0)
    for member in members:
        if member.length_class is not None:
            tokens[member.length_class] += member.new_tokens
    short_tokens, long_tokens = tokens[LengthClass.SHORT], tokens[LengthClass.LONG]
    if short_tokens and long_tokens:
        length_class: str | None = MIXED
        label = f"{long_tokens:,} long and {short_tokens:,} short tokens"
    else:
        length_class = LengthClass.LONG.value if long_tokens else LengthClass.SHORT.value if short_tokens else None
        label = _names([member.name for member in members])
    if launched.shape:
        label += f", graph {launched.shape}"
    return WorkRecord(
        *(PREFILL, start_s, end_s, length_class, label),
        sum([member.new_tokens for member in members]),
        max(1, len(members)),
    )


def _names(names: Sequence[str]) -> str:
    if not names:
        return ""
    return names[0][:48] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def read_work(answer: object) -> InstanceWork | None:
    """Parse what `WorkLog.answer` made; None from an instance that keeps no log. Raises ValueError where it is no such
    thing."""
    if answer is None:
        return None
    if not isinstance(answer, Mapping):
        raise ValueError("work is not an object")
    records = answer.get("records")
    if not isinstance(records, list) or len(records) > 2 * KEPT_RECORDS * len(KINDS):
        raise ValueError("records of the work are not a list, or too many")
    return InstanceWork(
        _seconds(answer.get("now_s")),
        _whole(answer.get("last")),
        _whole(answer.get("missed")),
        tuple(_read_record(record) for record in records),
    )


def _read_record(fields: object) -> WorkRecord:
    if not isinstance(fields, list) or len(fields) < len(WorkRecord._fields):
        raise ValueError("a record of the work is not a list of its fields")
    kind, start_s, end_s, length_class, label, tokens, requests = fields[: len(WorkRecord._fields)]
    if kind not in KINDS or length_class not in _CLASSES or not isinstance(label, str):
        raise ValueError(f"a record of the work is {str(fields)[:100]}")
    start_s = _seconds(start_s)
    end_s = None if end_s is None else max(start_s, _seconds(end_s))
    return WorkRecord(kind, start_s, end_s, length_class, label, _whole(tokens), _whole(requests))


def _seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"a time of the work is {value!r}")
    return float(value)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a count of the work is {value!r}")
    return value
