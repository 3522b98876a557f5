"""One object storage for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.object_storage import ObjectStorage, object_storage


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStorage]:
    with object_storage() as storage:
        yield storage


@pytest.fixture
def storage(server: ObjectStorage) -> Iterator[ObjectStorage]:
    yield server
    server.faults.mode, server.faults.hold_after_bytes = "pass", None
