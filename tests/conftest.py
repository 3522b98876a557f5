"""Shared by all tests."""

from __future__ import annotations

import pytest

from sglang_ext_router.compiled import describe


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to test compiled modules that are older than their sources."""
    is_stale, message = describe()
    if is_stale:
        pytest.exit(message, returncode=2)
