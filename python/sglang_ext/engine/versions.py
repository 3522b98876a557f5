"""SGLang versions as comparable numbers."""

from __future__ import annotations

import re
from importlib import metadata
from typing import NamedTuple


class SglangVersion(NamedTuple):
    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


OLDEST_SGLANG, NEWEST_SGLANG = SglangVersion(0, 5, 22), SglangVersion(0, 5, 23)
SUPPORTED_SGLANG = f"{OLDEST_SGLANG} or {NEWEST_SGLANG}"


def parse_version(text: str) -> SglangVersion:
    """Read '0.5.23' and '0.5.23.post1' as 0.5.23. Raises ValueError for anything without three numbers."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a version of SGLang")
    return SglangVersion(*map(int, match.groups()))


def installed_sglang() -> SglangVersion | None:
    """Return the version in the metadata of the installed SGLang; None when SGLang is not installed."""
    try:
        return parse_version(metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        return None
