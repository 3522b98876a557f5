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


def parse_version(text: str) -> SglangVersion:
    """'0.5.23' and '0.5.23.post1' alike. Raises ValueError for anything without three numbers."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a version of SGLang")
    return SglangVersion(*map(int, match.groups()))


def installed_sglang() -> SglangVersion | None:
    """The installed SGLang, read from its metadata; None when there is none."""
    try:
        return parse_version(metadata.version("sglang"))
    except metadata.PackageNotFoundError:
        return None
