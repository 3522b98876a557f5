"""A router over prefill and decode answers as a plain SGLang server does, or differs as `differences.py` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pytest

from conformance.answers import Answer, send
from conformance.cases import MODEL, Case, all_cases, embedding_cases, score_cases
from conformance.differences import DIFFERENCES, Difference, explanation
from sglang_ext.types import Role
from support.engines import FLEET, PLAIN_SERVER, Engine, EngineSpec
from support.router_cli import running_router

pytestmark = [pytest.mark.integration, pytest.mark.full]
ARGUMENTS = ("--enable-cache-report", "--tool-call-parser", "qwen25", "--served-model-name", MODEL)
PAIR = (EngineSpec(Role.SHORT, arguments=ARGUMENTS), EngineSpec(Role.DECODE, arguments=ARGUMENTS))
PLAIN = PLAIN_SERVER.__class__(
    Role.BOTH,
    arguments=(*PLAIN_SERVER.arguments, *ARGUMENTS),
    worker_options=PLAIN_SERVER.worker_options,
    name=PLAIN_SERVER.name,
)


class Sides(NamedTuple):
    """Addresses of both servers, and the engines behind them."""

    plain: str
    router: str
    engines: tuple[Engine, ...]


@pytest.fixture(scope="module")
def sides() -> Iterator[Sides]:
    prefill, decode, plain = FLEET.get(*PAIR, PLAIN)
    with running_router([prefill, decode], strict_models=True) as router:
        yield Sides(f"127.0.0.1:{plain.port}", f"127.0.0.1:{router.port}", (prefill, decode, plain))


EMBEDDER = EngineSpec(Role.PLAIN, arguments=("--is-embedding", "--served-model-name", MODEL), name="conformance")
SCORER = EngineSpec(Role.PLAIN, arguments=("--served-model-name", MODEL), name="conformance")


def is_well_formed(case: Case, answer: Answer) -> bool:
    """Whether an error has the shape that clients of its path read; /generate keeps that of SGLang."""
    path = case.path.rstrip("/")
    if answer.status < 400 or path == "/generate" or case.method == "HEAD":
        return True
    found = json.loads(answer.raw)
    if path.startswith("/v1/messages"):
        return found["type"] == "error" and set(found["error"]) == {"type", "message"}
    return set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}


def shown(case: Case, plain: Answer, router: Answer) -> str:
    return f"{case.name}\n  plain  {plain.status} {plain.raw[:300]!r}\n  router {router.status} {router.raw[:300]!r}"


def compared(sides: Sides, group: str, cases: Iterable[Case]) -> set[Difference]:
    """Send the cases to both sides and return the differences that they show; AssertionError names all others."""
    unnamed: list[str] = []
    seen: set[Difference] = set()
    for case in cases:
        plain, router = send(sides.plain, case), send(sides.router, case)
        assert plain.status, f"{case.name} ends a plain server"
        assert is_well_formed(case, router), shown(case, plain, router)
        if (plain.status, plain.content) == (router.status, router.content):
            continue
        difference = explanation(case, plain, router)
        if difference is None:
            unnamed.append(f"{group}: {shown(case, plain, router)}")
        else:
            seen.add(difference)
    assert all(engine.is_alive for engine in sides.engines), group
    assert not unnamed, (
        f"{len(unnamed)} answers differ in what docs/reference/differences.md does not name:\n" + "\n".join(unnamed)
    )
    return seen


@pytest.mark.parametrize(
    ("spec", "cases"), [(EMBEDDER, embedding_cases), (SCORER, score_cases)], ids=["embed", "score"]
)
def test_what_generates_nothing_is_answered_as_by_a_plain_server(
    spec: EngineSpec, cases: Callable[[], Iterator[Case]]
) -> None:
    """The router's undivided instance is the plain server itself."""
    (engine,) = FLEET.get(spec)
    with running_router([engine], strict_models=True) as router:
        sides = Sides(f"127.0.0.1:{engine.port}", f"127.0.0.1:{router.port}", (engine,))
        compared(sides, spec.name, cases())
        assert router.metric("sglang_ext_router_retries_total") == 0
    engine.wait_idle()


def test_every_answer_is_that_of_a_plain_server_or_named(sides: Sides) -> None:
    seen: set[Difference] = set()
    for group, cases in all_cases().items():
        seen |= compared(sides, group, cases)
    assert [known.sent for known in DIFFERENCES if known not in seen] == [], "named, but there is no such difference"
