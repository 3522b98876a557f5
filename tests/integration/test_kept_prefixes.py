"""The KV of prompts that went straight to decode comes to their own instance's prefix cache afterwards."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import Pair, Prefill
from support.long_pool import Coordinator
from support.served_pool import HANDSHAKE, check_clean, free_tokens, long_member

pytestmark = pytest.mark.integration
LONG = 900
PAGE_TOKENS = 16
PAGES = ("--page-size", str(PAGE_TOKENS))


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@contextmanager
def served(threads: ThreadPoolExecutor, name: str, *member_arguments: str) -> Iterator[tuple[list[Pair], Coordinator]]:
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64", "--keep-prefix") as coordinator:
        arguments = (*PAGES, *member_arguments)
        specs = [long_member(coordinator, f"{name}{number}", arguments, HANDSHAKE) for number in range(2)]
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        yield [Pair(engine, decode, threads) for engine in members], coordinator
        for engine in (*members, decode):
            engine.stop()


@pytest.fixture(scope="module")
def pool(threads: ThreadPoolExecutor) -> Iterator[tuple[list[Pair], Coordinator]]:
    with served(threads, "keeps") as one:
        yield one


def cached_tokens(prefill: Prefill) -> int:
    """Of its prompt, as its client is told."""
    tokens: int = prefill.replies.result(timeout=120)[1].body["meta_info"]["cached_tokens"]
    return tokens


def settle(coordinator: Coordinator, kept: int) -> None:
    """Until so many prompts are in prefix caches, and none is on its way to one."""
    coordinator.wait_for(
        lambda status: (len(status["requests"]), status["requests_keeping"], status["requests_kept"]) == (0, 0, kept)
    )


def test_the_next_turn_finds_the_prompt_in_the_cache(pool: tuple[list[Pair], Coordinator]) -> None:
    pairs, coordinator = pool
    free = [free_tokens(pair) for pair in pairs]
    before = coordinator.settled()
    first = pairs[0].send(LONG, seed=300)
    assert (first.is_exact(), cached_tokens(first)) == (True, 0)
    settle(coordinator, before["requests_kept"] + 1)
    again = pairs[0].send(LONG, seed=301, prefix=first.prompt)
    assert (again.is_exact(), cached_tokens(again)) == (True, LONG // PAGE_TOKENS * PAGE_TOKENS)
    longer = pairs[0].send(LONG + 617, seed=302, prefix=first.prompt)
    assert (longer.is_exact(), cached_tokens(longer)) == (True, LONG // PAGE_TOKENS * PAGE_TOKENS)
    settle(coordinator, before["requests_kept"] + 2)
    third = pairs[0].send(LONG + 1000, seed=303, prefix=longer.prompt)
    assert (third.is_exact(), cached_tokens(third)) == (True, (LONG + 617) // PAGE_TOKENS * PAGE_TOKENS)
    settle(coordinator, before["requests_kept"] + 3)
    ended = coordinator.status()["recent"][-3:]
    assert all(one["outcome"] == "streamed" and one["kept_s"] >= one["ended_s"] for one in ended)
    assert any(step["kind"] == "keep" for one in ended for step in one["steps"])
    check_clean(pairs, free)


def test_several_prompts_at_once(pool: tuple[list[Pair], Coordinator]) -> None:
    pairs, coordinator = pool
    free = [free_tokens(pair) for pair in pairs]
    before = coordinator.settled()["requests_kept"]
    several = [pairs[number % 2].send(LONG + number, seed=310 + number) for number in range(6)]
    assert all(one.is_exact() for one in several)
    coordinator.wait_for(lambda status: not status["requests"] and not status["requests_keeping"])
    assert coordinator.status()["requests_kept"] > before
    again = [pairs[number % 2].send(len(one.prompt), 0, prefix=one.prompt) for number, one in enumerate(several)]
    assert all(one.is_exact() for one in again)
    coordinator.wait_for(lambda status: not status["requests"] and not status["requests_keeping"])
    check_clean(pairs, free)


@contextmanager
def keeping(pool: tuple[list[Pair], Coordinator], seed: int) -> Iterator[None]:
    """A prompt of the first member is at decode, and what the other member has of it does not come."""
    pairs, coordinator = pool
    with pairs[1].prefill.frozen_scheduler():
        one = pairs[0].send(1900, seed=seed)
        coordinator.wait_for(lambda status: any(request["steps"] for request in status["requests"]))
        pairs[0].decode.freeze()
    coordinator.wait_for(lambda status: any(request["computed_s"] is not None for request in status["requests"]))
    coordinator.signal(signal.SIGSTOP)
    pairs[0].decode.thaw()
    assert one.is_exact()
    with pairs[1].prefill.frozen_scheduler():
        coordinator.signal(signal.SIGCONT)
        coordinator.wait_for(lambda status: status["requests_keeping"] == 1)
        yield


def test_everything_is_given_up_while_it_is_kept(pool: tuple[list[Pair], Coordinator]) -> None:
    pairs, coordinator = pool
    free = [free_tokens(pair) for pair in pairs]
    before = coordinator.settled()["requests_kept"]
    with keeping(pool, seed=320):
        # It reaches the engine when the step that runs has ended, possibly as the last one.
        assert pairs[0].prefill.post("/abort_request", {"abort_all": True}).status == 200
    coordinator.wait_for(lambda status: not status["requests_keeping"])
    kept = coordinator.status()["requests_kept"]
    assert kept in (before, before + 1)
    assert pairs[0].send(LONG, seed=321).is_exact()
    settle(coordinator, kept + 1)
    check_clean(pairs, free)


@pytest.mark.full
def test_a_member_is_killed_while_it_is_kept(threads: ThreadPoolExecutor) -> None:
    with served(threads, "keeps-mortal") as (pairs, coordinator):
        free = free_tokens(pairs[0])
        with keeping((pairs, coordinator), seed=330):
            pairs[1].prefill.kill()
        settle(coordinator, 0)
        assert pairs[0].send(LONG, seed=331).is_exact()
        pairs[0].check_clean(free)


@pytest.mark.full
def test_what_does_not_fit_is_not_kept(threads: ThreadPoolExecutor) -> None:
    with served(threads, "keeps-little", "--max-total-tokens", "640") as (pairs, coordinator):
        free = [free_tokens(pair) for pair in pairs]
        larger = pairs[0].send(LONG, seed=340)
        assert larger.is_exact()
        settle(coordinator, 0)
        fitting = pairs[0].send(600, seed=341)
        assert fitting.is_exact()
        settle(coordinator, 1)
        # What is cached makes room for it, and for nothing but what fits.
        other = pairs[0].send(560, seed=342)
        assert (other.is_exact(), cached_tokens(other)) == (True, 0)
        settle(coordinator, 2)
        assert (larger.is_exact(), pairs[1].send(LONG, seed=343).is_exact()) == (True, True)
        settle(coordinator, 2)
        check_clean(pairs, free)
