"""Long prefills that end on an instance without their KV: members send it all to decode, and one token is sampled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.laps import NEW_TOKENS, Pair, Prefill
from support.long_pool import Coordinator
from support.served_pool import HANDSHAKE, check_clean, free_tokens, long_member

pytestmark = pytest.mark.integration
LONG = 900
PAGE_TOKENS = 16
PAGES = ("--page-size", str(PAGE_TOKENS))


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
    specs = [long_member(coordinator, f"ending{number}", PAGES, HANDSHAKE) for number in range(2)]
    *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
    coordinator.wait_for(lambda status: len(status["members"]) == 2)
    yield [Pair(engine, decode, threads) for engine in members]
    for engine in (*members, decode):
        engine.stop()


def test_nothing_is_collected(pool: list[Pair], coordinator: Coordinator) -> None:
    before = coordinator.status()
    free = [free_tokens(pair) for pair in pool]
    # In the last page: all of it, one token, and some.
    lengths = (LONG, 912, 913, 927)
    for number, tokens in enumerate(lengths):
        assert pool[number % 2].send(tokens, seed=100 + number).is_exact(), tokens
    after = coordinator.settled()
    assert after["requests_streamed"] == before["requests_streamed"] + len(lengths)
    assert after["requests_collected"] == before["requests_collected"]
    assert all(step["kind"] == "chunk" for request in after["recent"] for step in request["steps"])
    check_clean(pool, free)


def test_the_first_token_is_sampled_as_it_is_wanted(pool: list[Pair], coordinator: Coordinator) -> None:
    before = coordinator.settled()["requests_streamed"]
    free = [free_tokens(pair) for pair in pool]
    assert pool[0].send(LONG, seed=120, temperature=1.0, top_k=1).is_exact()
    biased = pool[1].send(LONG, seed=121, logit_bias={"7": 1000.0})
    assert biased.tokens() == [7] * NEW_TOKENS
    digits = pool[0].send(LONG, seed=122, regex="[0-9]{4}", new_tokens=4, ignore_eos=False)
    reply = digits.replies.result(timeout=120)[1]
    assert reply.status == 200, reply.body
    assert re.fullmatch("[0-9]{4}", reply.body["text"])
    seen = pool[1].send(LONG, seed=123, temperature=2.0)
    assert len(seen.tokens()) == NEW_TOKENS
    assert coordinator.settled()["requests_streamed"] == before + 4
    check_clean(pool, free)


def held_up(pair: Pair, other: Engine, coordinator: Coordinator, seed: int, rid: str) -> Prefill:
    """A request that has been computed, while decode stands still and gets nothing of it; decode is to be thawed."""
    with other.frozen_scheduler():
        one = pair.send(1900, seed=seed, rid=rid)
        coordinator.wait_for(lambda status: any(request["steps"] for request in status["requests"]))
        pair.decode.freeze()
    coordinator.wait_for(lambda status: any(request["computed_s"] is not None for request in status["requests"]))
    return one


def test_aborted_while_it_is_on_its_way(pool: list[Pair], coordinator: Coordinator) -> None:
    free = [free_tokens(pair) for pair in pool]
    one = held_up(pool[0], pool[1].prefill, coordinator, 130, "late")
    try:
        assert pool[0].prefill.post("/abort_request", {"rid": "late"}).status == 200
        coordinator.wait_for(lambda status: not status["requests"])
    finally:
        pool[0].decode.thaw()
    pool[0].abort("late")
    one.replies.result(timeout=60)
    assert coordinator.settled()["recent"][-1]["outcome"] == "cancelled"
    assert pool[0].send(LONG, seed=131).is_exact()
    check_clean(pool, free)


@pytest.mark.full
def test_a_member_is_killed_while_it_is_on_its_way(threads: ThreadPoolExecutor) -> None:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as own:
        specs = [long_member(own, f"mortal{number}", PAGES, HANDSHAKE) for number in range(2)]
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
        pair = Pair(members[0], decode, threads)
        own.wait_for(lambda status: len(status["members"]) == 2)
        free = free_tokens(pair)
        one = held_up(pair, members[1], own, 140, "bereft")
        try:
            members[1].kill()
            own.wait_for(lambda status: len(status["members"]) == 1)
        finally:
            decode.thaw()
        assert one.is_exact()
        pair.check_clean(free)
        assert pair.send(LONG, seed=141).is_exact()
        for engine in (members[0], decode):
            engine.stop()
