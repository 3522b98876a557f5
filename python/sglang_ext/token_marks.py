"""Token ids as spaces and tabs, which JSON allows behind a value: no client of an event needs to know of them."""

from __future__ import annotations

from collections.abc import Iterable

MARKS_HEADER = "x-sglang-ext-mark-tokens"
BITS = 20  # of one id, the highest first: a tab is 1, a space 0; no vocabulary has a million tokens
_TO_MARKS = str.maketrans("01", " \t")
_TO_BITS = bytes.maketrans(b" \t", b"01")


def mark(ids: Iterable[int]) -> str:
    """Return the marks of the ids."""
    return "".join([format(token, f"0{BITS}b") for token in ids]).translate(_TO_MARKS)


def read_marks(line: bytes) -> list[int]:
    """Return the ids whose marks the line ends with."""
    marks = line[len(line.rstrip(b" \t")) :].translate(_TO_BITS)
    return [int(marks[start : start + BITS], 2) for start in range(0, len(marks), BITS)]
