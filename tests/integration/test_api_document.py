"""The router keeps what its OpenAPI document says, whatever is sent: schemathesis over a live cluster.

No answer is a 5xx, none is undocumented, what the document forbids is refused and what it allows is not; and no request
ends an instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support.api_cases import MEMBERSHIP, check_api
from support.engines import FLEET, Engine, EngineSpec
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EngineSpec(Role.SHORT), EngineSpec(Role.LONG), EngineSpec(Role.DECODE))


@pytest.fixture
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, "--length-boundary-tokens", "256") as running:
        yield running


def check_all(router: RunningRouter, engines: list[Engine], folder: Path, seed: int, examples: int) -> None:
    check_api(router, folder, seed, examples, "--exclude-path-regex", MEMBERSHIP)
    for engine in engines:
        assert engine.is_alive
        engine.wait_idle()
    assert router.is_idle()
    # What changes the members comes last. An instance that was added and does not exist is no error of the router's.
    check_api(router, folder, seed, examples, "--include-path-regex", MEMBERSHIP, "--exclude-path", "/flush_cache")


def test_every_answer_is_documented(router: RunningRouter, engines: list[Engine], tmp_path: Path) -> None:
    check_all(router, engines, tmp_path, seed=1, examples=3)


@pytest.mark.full
@pytest.mark.parametrize("seed", [2, 3])
def test_many_answers_are_documented(router: RunningRouter, engines: list[Engine], tmp_path: Path, seed: int) -> None:
    check_all(router, engines, tmp_path, seed, examples=100)


def test_every_path_is_in_the_document(router: RunningRouter) -> None:
    reply, _ = router.call("GET", "/openapi.json")
    paths = reply.body["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/generate", "/v1/models", "/v1/tokenize"):
        assert path in paths
    assert set(paths["/workers"]) == {"get", "post"}
    for methods in paths.values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
