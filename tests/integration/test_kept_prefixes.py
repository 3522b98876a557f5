"""The KV of prompts that went straight to decode stays where it was computed, and the next turns begin behind it."""

from __future__ import annotations

import signal
import time
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
BLOCK_TOKENS = 32
PAGE_TOKENS = 16
STEP_TIMEOUT_S = 5.0  # of `long_member`
PAGES = ("--page-size", str(PAGE_TOKENS))
SPREAD = ("--set", "pool.kept_rows=spread")


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@contextmanager
def served(
    threads: ThreadPoolExecutor, name: str, *member_arguments: str, options: tuple[str, ...] = ()
) -> Iterator[tuple[list[Pair], Coordinator]]:
    """`options`: of the coordinator."""
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64", *options) as coordinator:
        arguments = (*PAGES, *member_arguments)
        specs = [long_member(coordinator, f"{name}{number}", arguments, HANDSHAKE) for number in range(2)]
        *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, arguments=PAGES, worker_options=HANDSHAKE))
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        yield [Pair(engine, decode, threads) for engine in members], coordinator
        for engine in (*members, decode):
            engine.stop()


@pytest.fixture(scope="module")
def pool(threads: ThreadPoolExecutor) -> Iterator[tuple[list[Pair], Coordinator]]:
    with served(threads, "keeps", options=SPREAD) as one:
        yield one


def cached_tokens(prefill: Prefill) -> int:
    """Of its prompt, as its client is told."""
    tokens: int = prefill.replies.result(timeout=120)[1].body["meta_info"]["cached_tokens"]
    return tokens


def settle(coordinator: Coordinator, kept: int) -> None:
    """Until no prompt is under way, and so many are kept."""
    coordinator.wait_for(lambda status: (len(status["requests"]), status["prompts_kept"]) == (0, kept))


def blocks(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def test_the_next_turns_begin_behind_what_is_kept(pool: tuple[list[Pair], Coordinator]) -> None:
    pairs, coordinator = pool
    free = [free_tokens(pair) for pair in pairs]
    settle(coordinator, 0)
    first = pairs[0].send(LONG, seed=300)
    assert (first.is_exact(), cached_tokens(first)) == (True, 0)
    settle(coordinator, 1)
    kept = [member["kept_tokens"] for member in coordinator.status()["members"]]
    assert (sum(kept), min(kept) > 0) == (blocks(LONG), True)
    again = pairs[1].send(LONG, seed=301, prefix=first.prompt)
    assert (again.is_exact(), cached_tokens(again)) == (True, blocks(LONG))
    longer = pairs[0].send(LONG + 617, seed=302, prefix=first.prompt)
    assert (longer.is_exact(), cached_tokens(longer)) == (True, blocks(LONG))
    settle(coordinator, 2)
    third = pairs[1].send(LONG + 1000, seed=303, prefix=longer.prompt)
    assert (third.is_exact(), cached_tokens(third)) == (True, blocks(LONG + 617))
    # One that goes another way shares the beginning.
    other = pairs[1].send(LONG + 400, seed=304, prefix=longer.prompt[: LONG + 10])
    assert (other.is_exact(), cached_tokens(other)) == (True, blocks(LONG + 10))
    ended = coordinator.settled()["recent"][-4:]
    assert [one["outcome"] for one in ended] == ["streamed"] * 4
    assert [one["kept_tokens"] for one in ended] == [blocks(n) for n in (LONG, LONG, LONG + 617, LONG + 10)]
    check_clean(pairs, free)
    settle(coordinator, 0)  # with the prefix caches


def test_a_prefix_of_the_instances_own_cache_is_kept_with_the_rest(pool: tuple[list[Pair], Coordinator]) -> None:
    pairs, coordinator = pool
    free = [free_tokens(pair) for pair in pairs]
    short = pairs[0].send(180, seed=305)  # too short for the pool
    assert short.is_exact()
    first = pairs[0].send(LONG, seed=306, prefix=short.prompt)
    assert (first.is_exact(), cached_tokens(first)) == (True, 180 // PAGE_TOKENS * PAGE_TOKENS)
    settle(coordinator, 1)
    again = pairs[1].send(LONG + 300, seed=307, prefix=first.prompt)
    assert (again.is_exact(), cached_tokens(again)) == (True, blocks(LONG))
    coordinator.settled()
    check_clean(pairs, free)


def test_several_prompts_at_once(pool: tuple[list[Pair], Coordinator]) -> None:
    pairs, coordinator = pool
    free = [free_tokens(pair) for pair in pairs]
    several = [pairs[number % 2].send(LONG + number, seed=310 + number) for number in range(6)]
    assert all(one.is_exact() for one in several)
    coordinator.settled()
    again = [
        pairs[(number + 1) % 2].send(len(one.prompt) + 100, 320 + number, prefix=one.prompt)
        for number, one in enumerate(several)
    ]
    assert all(one.is_exact() for one in again)
    assert sum(cached_tokens(one) for one in again) > 0
    coordinator.settled()
    check_clean(pairs, free)


@contextmanager
def keeping(pool: tuple[list[Pair], Coordinator], seed: int) -> Iterator[None]:
    """A prompt of the first member is at decode, and the other member does not know that it is to be kept."""
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
        coordinator.wait_for(lambda status: status["prompts_kept"] == 1)
        yield


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
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_a_holder_fails_while_its_rows_are_used_in_place(threads: ThreadPoolExecutor, how: str) -> None:
    """The next turn is to be computed by both holders, and one of them does nothing any more."""
    with served(threads, f"keeps-{how}", options=SPREAD) as (pairs, coordinator):
        free = [free_tokens(pair) for pair in pairs]
        first = pairs[0].send(LONG, seed=360)
        assert first.is_exact()
        settle(coordinator, 1)
        assert min(member["kept_tokens"] for member in coordinator.status()["members"]) > 0
        with pairs[1].prefill.frozen_scheduler():
            again = pairs[0].send(LONG + 200, seed=361, prefix=first.prompt)
            coordinator.wait_for(lambda status: any(request["steps"] for request in status["requests"]))
            (request,) = coordinator.status()["requests"]
            assert (request["cached_tokens"], sorted(request["steps"][0]["members"])) == (blocks(LONG), [0, 1])
            if how == "killed":
                pairs[1].prefill.kill()
            else:
                time.sleep(STEP_TIMEOUT_S + 3.0)
                assert again.is_exact()  # without the holder that hangs
        assert again.is_exact()
        left = pairs[:1] if how == "killed" else pairs
        coordinator.wait_for(lambda status: len(status["members"]) == len(left))
        assert all(pair.send(LONG, seed=362 + number).is_exact() for number, pair in enumerate(left))
        coordinator.settled()
        check_clean(left, free[: len(left)])


def test_what_is_kept_makes_way_for_everything_else(threads: ThreadPoolExecutor) -> None:
    with served(threads, "keeps-little", "--max-total-tokens", "640") as (pairs, coordinator):
        free = [free_tokens(pair) for pair in pairs]
        first = pairs[0].send(600, seed=341)
        assert first.is_exact()
        settle(coordinator, 1)
        # A prompt that the pool computes, and one that is too short for it, want the memory.
        other = pairs[1].send(LONG, seed=342)
        assert (other.is_exact(), cached_tokens(other)) == (True, 0)
        coordinator.settled()
        assert coordinator.status()["prompts_kept"] <= 1
        short = [pair.send(180, seed=343 + number) for number in range(4) for pair in pairs]
        assert all(one.is_exact() for one in short)
        again = pairs[1].send(700, seed=350, prefix=first.prompt)
        assert again.is_exact()
        coordinator.settled()
        check_clean(pairs, free)
        settle(coordinator, 0)
