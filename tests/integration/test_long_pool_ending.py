"""Long prefills that end on an instance without their KV: members send it all to decode, and one token is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import Pair
from support.long_pool import Coordinator

pytestmark = pytest.mark.integration
MIN_TOKENS = 200
LONG = 900
PAGE_TOKENS = 16
PAGES = ("--page-size", str(PAGE_TOKENS))
HANDSHAKE = ("--transfer-backend", "handshake")


def member(coordinator: Coordinator, name: str) -> EngineSpec:
    options = (
        *HANDSHAKE,
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(MIN_TOKENS)),
        *("--laps-boundary-tokens", "256", "--cdsp-step-timeout-s", "5"),
    )
    return EngineSpec(Role.LONG, worker_options=options, arguments=PAGES, name=name)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as one:
        yield one


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(coordinator: Coordinator, threads: ThreadPoolExecutor) -> Iterator[list[Pair]]:
    specs = [member(coordinator, f"ending{number}") for number in range(2)]
    *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
    coordinator.wait_for(lambda status: len(status["members"]) == 2 and status["is_connected"])
    yield [Pair(engine, decode, threads) for engine in members]
    for engine in (*members, decode):
        engine.stop()


def free_tokens(pair: Pair) -> int:
    assert pair.prefill.post("/flush_cache", {}).status == 200
    tokens: int = pair.status()["kv"]["free_tokens"]
    return tokens


def check_clean(pool: list[Pair], free: list[int]) -> None:
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_nothing_is_collected(pool: list[Pair], coordinator: Coordinator) -> None:
    before = coordinator.status()
    free = [free_tokens(pair) for pair in pool]
    # In the last page: all of it, one token, and some.
    lengths = (LONG, 912, 913, 927)
    for number, tokens in enumerate(lengths):
        assert pool[number % 2].send(tokens, seed=100 + number).is_exact(), tokens
    after = coordinator.status()
    assert after["requests_streamed"] == before["requests_streamed"] + len(lengths)
    assert after["requests_collected"] == before["requests_collected"]
    assert all(step["kind"] == "chunk" for request in after["recent"] for step in request["steps"])
    check_clean(pool, free)
