"""Settings of a command line in tests."""

from __future__ import annotations


def sets(*assignments: str) -> list[str]:
    """Return the words `--set ASSIGNMENT` for each."""
    return [word for assignment in assignments for word in ("--set", assignment)]
