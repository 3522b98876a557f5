"""Rows and frames of the stream as JSON: what is done for every one of them.

A module of its own, as it is compiled: that of the rows is read at run time for their documents.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

MAX_TEXT_CHARACTERS = 120
MAX_WHOLE = (1 << 53) - 1  # what a reader in JavaScript still counts exactly

encode: Callable[[object], str] = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def row_json(row: Sequence[Any]) -> bytes:
    """A row as JSON: texts are cut, numbers rounded to 0.1 ms and kept within what JavaScript counts exactly."""
    cleaned = [_clean(value) for value in row]
    try:
        return orjson.dumps(cleaned)
    except TypeError:  # half of a pair of surrogates, which is no text; JSON can write it all the same
        return encode(cleaned).encode()


def _clean(value: Any) -> Any:
    kind = type(value)  # the plain ones first: this runs for every field of every row
    if value is None or kind is bool:
        return value
    if kind is float:
        return round(value, 4) if -MAX_WHOLE < value < MAX_WHOLE else None  # not a number is not within
    if kind is int:
        return value if -MAX_WHOLE < value < MAX_WHOLE else max(-MAX_WHOLE, min(MAX_WHOLE, value))
    if isinstance(value, str):
        return str(value)[:MAX_TEXT_CHARACTERS]
    return [_clean(item) for item in value]


def frame_json(head: Mapping[str, object], sections: Mapping[str, Sequence[bytes]]) -> bytes:
    """A frame of rows that `row_json` has made; empty sections are left out."""
    rows = [b',"%b":[%b]' % (name.encode(), b",".join(made)) for name, made in sections.items() if made]
    return b"%b%b}" % (encode(head)[:-1].encode(), b"".join(rows))
