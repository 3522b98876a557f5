"""Prompts that no instance of a long pool could hold alone; decode can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import Pair
from support.long_pool import Coordinator
from support.served_pool import HANDSHAKE, free_tokens, long_member

pytestmark = pytest.mark.integration
PAGES = ("--page-size", "16")
KV_TOKENS = 640  # of one member
SMALL = (*PAGES, "--max-total-tokens", str(KV_TOKENS))
MEMBERS = 3
CHUNK_TOKENS = 300  # that one member computes at once
FULL_ONCE = Path(__file__).parents[1] / "support" / "kv_pool_full"


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    with Coordinator.running("--sp-sizes", "1,2,3", "--min-chunk-tokens", "64") as one:
        yield one


@pytest.fixture(scope="module")
def pool(coordinator: Coordinator) -> Iterator[list[Pair]]:
    options = (*HANDSHAKE, "--set", f"cdsp.max_chunk_tokens={CHUNK_TOKENS}")
    specs = [long_member(coordinator, f"small{number}", SMALL, options) for number in range(MEMBERS)]
    *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
    coordinator.wait_for(lambda status: len(status["members"]) == MEMBERS)
    with ThreadPoolExecutor(32) as threads:
        yield [Pair(engine, decode, threads) for engine in members]
    for engine in (*members, decode):
        engine.stop()


def test_prompts_larger_than_any_instance(pool: list[Pair], coordinator: Coordinator) -> None:
    free = [free_tokens(pair) for pair in pool]
    assert free == [KV_TOKENS] * MEMBERS
    before = coordinator.settled()["requests_streamed"]
    lengths = (KV_TOKENS, KV_TOKENS + 32, 1500, 1850)
    for number, tokens in enumerate(lengths):
        assert pool[number % MEMBERS].send(tokens, seed=100 + number).is_exact(), tokens
    several = [pool[number].send(1000 + number, seed=110 + number) for number in range(MEMBERS)]
    assert all(one.is_exact() for one in several)
    after = coordinator.settled()
    assert after["requests_streamed"] == before + len(lengths) + len(several)
    steps = [step for one in after["recent"] for step in one["steps"]]
    assert all(step["new_tokens"] <= CHUNK_TOKENS * len(step["members"]) for step in steps)
    assert any(len(one["steps"]) > 2 for one in after["recent"])
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_what_not_even_the_pool_can_hold_is_refused(pool: list[Pair]) -> None:
    free = [free_tokens(pair) for pair in pool]
    prefill, decode = pool[0].send(MEMBERS * KV_TOKENS + 70, seed=120).replies.result(timeout=60)
    assert (prefill.status, decode.status >= 500) == (503, True), (prefill, decode)
    for reply in (prefill, decode):
        assert "does not fit this instance's KV memory" in str(reply.body), reply
    assert pool[0].send(900, seed=121).is_exact()
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


def test_a_prompt_that_needs_more_than_its_logits_is_refused(pool: list[Pair]) -> None:
    free = [free_tokens(pair) for pair in pool]
    body = {
        "input_ids": [1] * 1500,
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": 1 << 50,
    }
    reply = pool[0].prefill.post("/generate", body)
    assert reply.status == 503
    assert "a pool cannot share it" in str(reply.body)
    for pair, tokens in zip(pool, free, strict=True):
        pair.check_clean(tokens)


@pytest.mark.full
def test_without_its_pool_a_member_refuses_what_it_cannot_hold(pool: list[Pair], coordinator: Coordinator) -> None:
    coordinator.kill()
    try:
        free = free_tokens(pool[0])
        prefill, _ = pool[0].send(1500, seed=130).replies.result(timeout=60)
        assert prefill.status == 503, prefill
        assert "it is in no pool now" in str(prefill.body)
        assert pool[0].send(500, seed=131).is_exact()
        pool[0].check_clean(free)
    finally:
        coordinator.start_again()
    coordinator.wait_for(lambda status: len(status["members"]) == MEMBERS)
    assert pool[0].send(1500, seed=132).is_exact()


@pytest.mark.full
def test_a_step_that_finds_a_kv_pool_full_is_computed_again_and_still_streamed() -> None:
    """No member could hold the prompt: without streaming it would have to be refused."""
    with Coordinator.running("--sp-sizes", "2", "--min-chunk-tokens", "64") as coordinator:
        specs = [long_member(coordinator, f"once{number}", SMALL, HANDSHAKE) for number in range(2)]
        path = f"{FULL_ONCE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        specs[1] = replace(specs[1], environment=(("PYTHONPATH", path),), has_own_imports=True)
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        with ThreadPoolExecutor(8) as threads:
            pairs = [Pair(engine, decode, threads) for engine in members]
            free = [free_tokens(pair) for pair in pairs]
            assert pairs[0].send(KV_TOKENS + 360, seed=140).is_exact()
            status = coordinator.settled()
            assert (status["requests_streamed"], status["requests_declined"]) == (1, 0)
            (one,) = status["recent"]
            assert [step["has_failed"] for step in one["steps"]].count(True) == 1
            assert pairs[1].send(KV_TOKENS + 361, seed=141).is_exact()
            for pair, tokens in zip(pairs, free, strict=True):
                pair.check_clean(tokens)
        for engine in (*members, decode):
            engine.stop()
