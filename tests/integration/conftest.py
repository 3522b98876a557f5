"""The cluster that most tests of served requests use: three real engines, and a router over them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.router_cli import RunningRouter, running_router


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.LONG), EngineSpec(Role.DECODE))


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, "--length-boundary-tokens", "256") as running:
        yield running
