"""Chunks of a long pool that are cut by time: short requests are answered between them, and an abort ends them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import SHAPE, Pair
from support.long_pool import Coordinator
from support.served_pool import HANDSHAKE, check_clean, free_tokens, long_member

pytestmark = pytest.mark.integration
LONG = 7000
WAIT_S = 60.0
# About 200 tokens on two instances by the coordinator's costs, until it has measured what chunks take here.
MAX_CHUNK_MS = 100
FIRST_CHUNKS, FIRST_TOKENS = 3, 250


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    options = ("--sp-sizes", "2", "--min-chunk-tokens", "64", "--set", f"pool.max_chunk_ms={MAX_CHUNK_MS}")
    with Coordinator.running(*options) as one:
        yield one


@pytest.fixture(scope="module")
def pool(coordinator: Coordinator) -> Iterator[list[Pair]]:
    specs = [replace(long_member(coordinator, f"cut{number}", (), HANDSHAKE), shape=SHAPE) for number in range(2)]
    *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, shape=SHAPE, worker_options=HANDSHAKE))
    coordinator.wait_for(lambda status: len(status["members"]) == 2)
    with ThreadPoolExecutor(16) as threads:
        yield [Pair(engine, decode, threads) for engine in members]
    for engine in (*members, decode):
        engine.stop()


def chunks_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in record["steps"] if step["kind"] == "chunk" and step["ended_s"] is not None]


def wait_for_chunks(coordinator: Coordinator, count: int) -> dict[str, Any]:
    """The one prompt under way, once so many of its chunks are done."""
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        for one in coordinator.status()["requests"]:
            if len(chunks_of(one)) >= count:
                return one
    raise AssertionError(f"no prompt has had {count} chunks")


def test_short_requests_are_answered_between_chunks(pool: list[Pair], coordinator: Coordinator) -> None:
    free = [free_tokens(pair) for pair in pool]
    records = []
    # On a busy machine the long prompt may have ended before it is known that short ones are answered.
    for attempt in range(10):
        long = pool[0].send(LONG, seed=700 + attempt)
        wait_for_chunks(coordinator, 1)
        short = [pair.send(100, seed=710 + number, new_tokens=1) for number, pair in enumerate(pool)]
        for one in short:
            one.replies.result(timeout=WAIT_S)
        under_way = coordinator.status()["requests"]
        assert long.is_exact()
        assert all(len(one.tokens()) == 1 for one in short)
        records.append(coordinator.settled()["recent"][-1])
        if under_way:
            break
    else:
        raise AssertionError("short requests were answered only when the long one had ended")
    assert all(record["outcome"] == "streamed" for record in records)
    assert len(chunks_of(records[-1])) > len(chunks_of(under_way[0]))
    first = chunks_of(records[0])
    assert len(first) > FIRST_CHUNKS
    assert all(step["new_tokens"] < FIRST_TOKENS for step in first[:FIRST_CHUNKS])
    check_clean(pool, free)


def test_an_abort_ends_it_between_two_chunks(pool: list[Pair], coordinator: Coordinator) -> None:
    free = [free_tokens(pair) for pair in pool]
    # The abort may come too late: then all has been computed, and another prompt is tried.
    for attempt in range(10):
        rid = f"cut-{attempt}"
        long = pool[0].send(LONG, seed=720 + attempt, rid=rid)
        wait_for_chunks(coordinator, 1)
        pool[0].abort(rid)
        long.replies.result(timeout=WAIT_S)
        record = coordinator.settled()["recent"][-1]
        if sum(step["new_tokens"] for step in chunks_of(record)) < LONG:
            break
    else:
        raise AssertionError("no abort came between two chunks")
    assert record["outcome"] == "cancelled"
    assert pool[1].send(900, seed=730).is_exact()
    check_clean(pool, free)
