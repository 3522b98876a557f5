"""Shared by all tests."""

from __future__ import annotations

import hypothesis
import pytest

import support.engines  # noqa: F401 - takes note of the environment before any test changes it
from sglang_ext_router.compiled import describe_compiled

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to test compiled modules that are older than their sources."""
    is_stale, message = describe_compiled()
    if is_stale:
        pytest.exit(message, returncode=2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full`: also the tests that `make test-all` runs and `make test` does not."""
    parser.addoption("--full", action="store_true", help="run tests that are marked full, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full`, leave those out."""
    if config.getoption("--full"):
        return
    kept = [item for item in items if item.get_closest_marker("full") is None]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
