"""Long prefills over two real instances with two tensor-parallel ranks each, and three KV heads on these two.

Each of the four ranks sends its heads to decode, which has three ranks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import NEW_TOKENS, Pair, Prefill
from support.long_pool import Coordinator
from support.reference import greedy_reference
from support.served_pool import check_clean, free_tokens
from support.tiny_model import TinyModelShape
from support.transfer_metrics import metric, settled

pytestmark = pytest.mark.integration
MIN_TOKENS = 200
LONG = 900
# SGLang adds a fourth KV head, which means nothing, so that two ranks share them.
SHAPE = TinyModelShape(hidden=48, heads=6, kv_heads=3)
PAGE_TOKENS = 16
BLOCK_TOKENS = 32
PAGES = ("--page-size", str(PAGE_TOKENS))
RANKS = ("--tp", "2")
DECODE_RANKS = 3
HANDSHAKE = ("--transfer-backend", "handshake")
TOKEN_BYTES = 2 * 2 * 3 * 8 * 4  # layers × keys and values × KV heads × head size × float32
METADATA_BYTES = 4096  # more than those of a request and a rank are
STEP_TIMEOUT_S = 8


def member(coordinator: Coordinator, name: str) -> EngineSpec:
    options = (
        *HANDSHAKE,
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", str(MIN_TOKENS)),
        *("--laps-boundary-tokens", "256"),
        *("--set", f"cdsp.step_timeout_s={STEP_TIMEOUT_S}"),
    )
    return EngineSpec(Role.LONG, SHAPE, worker_options=options, arguments=(*RANKS, *PAGES), name=name)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    timeout = ("--set", f"pool.step_timeout_ms={1000 * STEP_TIMEOUT_S}")
    with Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64", *timeout) as one:
        yield one


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool(coordinator: Coordinator, threads: ThreadPoolExecutor) -> Iterator[list[Pair]]:
    specs = [member(coordinator, f"ranks{number}") for number in range(2)]
    *members, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, SHAPE, ("--tp", str(DECODE_RANKS), *PAGES), HANDSHAKE))
    wait_for_both(coordinator)
    yield [Pair(engine, decode, threads) for engine in members]
    for engine in (*members, decode):
        engine.stop()


def wait_for_both(coordinator: Coordinator) -> None:
    coordinator.wait_for(lambda status: len(status["members"]) == 2)


def wait_for_chunk(coordinator: Coordinator, ended: int) -> None:
    """Until two instances are in the middle of a chunk, or were: until more than `ended` requests have ended."""
    while True:
        status = coordinator.status()
        steps = [step for request in status["requests"] for step in request["steps"]]
        if any(step["ended_s"] is None and len(step["members"]) == 2 for step in steps):
            return
        if ended_requests(status) > ended:
            return


def wait_for_transfer(coordinator: Coordinator, ended: int) -> None:
    """Until all of a request is on its way to decode, or has been: until more than `ended` requests have ended."""
    while True:
        status = coordinator.status()
        if any(request["computed_s"] is not None for request in status["requests"]) or ended_requests(status) > ended:
            return


def ended_requests(status: dict[str, Any]) -> int:
    count: int = status["requests_collected"] + status["requests_streamed"] + status["requests_declined"]
    return count


def is_exact(one: Prefill) -> bool:
    """Whether its tokens are those of Hugging Face."""
    return one.tokens() == greedy_reference(one.prompt, NEW_TOKENS, SHAPE)


def test_one_prompt_on_two_instances_of_two_ranks(pool: list[Pair], coordinator: Coordinator) -> None:
    before = coordinator.status()
    assert before["model"].endswith(", 2 ranks, KV to decode by handshake over tcp (2 layers, pages of 16)")
    free = [free_tokens(pair) for pair in pool]
    for seed, pair in enumerate(pool * 3):
        assert is_exact(pair.send(LONG + 37 * seed, seed=100 + seed))
    after = coordinator.settled()
    assert after["requests_streamed"] == before["requests_streamed"] + 6
    assert any(len(step["members"]) == 2 for request in after["recent"] for step in request["steps"])
    check_clean(pool, free)


@pytest.mark.full
def test_all_ranks_send_what_they_compute(pool: list[Pair], coordinator: Coordinator) -> None:
    def written_bytes() -> list[float]:
        return [settled(pair.prefill, "written_bytes_total") for pair in pool]

    before, shared = written_bytes(), coordinator.shared
    lengths = (300, 511, 900, 1504)
    for number, tokens in enumerate(lengths):
        assert is_exact(pool[number % 2].send(tokens, seed=150 + number)), tokens
    assert coordinator.shared > shared
    sent = [now - then for now, then in zip(written_bytes(), before, strict=True)]
    # Each row once, from whichever rank it came; padding does not travel.
    whole = sum(-(-tokens // PAGE_TOKENS) * PAGE_TOKENS for tokens in lengths) * TOKEN_BYTES
    assert whole <= sum(sent) <= whole + len(lengths) * DECODE_RANKS * METADATA_BYTES
    assert all(one > len(lengths) * DECODE_RANKS * METADATA_BYTES for one in sent), sent
    assert metric(pool[0].decode, "requests_total", "restarted") == 0


@pytest.mark.full
def test_two_ranks_of_a_member_send_to_one_of_decode(
    pool: list[Pair], coordinator: Coordinator, threads: ThreadPoolExecutor
) -> None:
    (decode,) = FLEET.get(EngineSpec(Role.DECODE, SHAPE, PAGES, HANDSHAKE, name="one-rank"))
    streamed = coordinator.settled()["requests_streamed"]
    for number, pair in enumerate(pool):
        assert is_exact(Pair(pair.prefill, decode, threads).send(LONG, seed=170 + number))
    after = coordinator.settled()
    assert after["requests_streamed"] == streamed + len(pool)
    assert not any(step["has_failed"] for request in after["recent"][-len(pool) :] for step in request["steps"])
    decode.stop()


@pytest.mark.full
def test_a_cached_prefix_is_history(pool: list[Pair], coordinator: Coordinator) -> None:
    first = pool[0].send(400, seed=7)
    assert is_exact(first)
    before = coordinator.shared
    assert is_exact(pool[0].send(LONG + 100, seed=8, prefix=first.prompt))
    assert coordinator.shared == before + 1


@pytest.mark.full
def test_what_all_ranks_have_computed_is_kept(pool: list[Pair], coordinator: Coordinator) -> None:
    free = [free_tokens(pair) for pair in pool]
    first = pool[0].send(LONG, seed=350)
    assert is_exact(first)
    coordinator.wait_for(lambda status: status["prompts_kept"] == 1)
    again = pool[1].send(LONG + 300, seed=351, prefix=first.prompt)
    assert is_exact(again)
    meta = again.replies.result()[1].body["meta_info"]
    assert meta["cached_tokens"] == LONG // BLOCK_TOKENS * BLOCK_TOKENS
    coordinator.wait_for(lambda status: status["prompts_kept"] == 2)
    check_clean(pool, free)


@pytest.mark.full
def test_many_at_once_with_short_ones_between(pool: list[Pair]) -> None:
    free = [free_tokens(pair) for pair in pool]
    running = []
    for number in range(6):
        running.append(pool[number % 2].send(500 + 70 * number, seed=200 + number))
        running += [pool[(number + k) % 2].send(10 + k, seed=300 + 10 * number + k) for k in range(3)]
    assert all(is_exact(one) for one in running)
    check_clean(pool, free)


def test_aborted_while_others_compute_it(pool: list[Pair], coordinator: Coordinator) -> None:
    free = [free_tokens(pair) for pair in pool]
    for number in range(3):
        ended = ended_requests(coordinator.status())
        one = pool[0].send(1900, seed=400 + number, rid=f"long-{number}")
        wait_for_chunk(coordinator, ended)
        pool[0].abort(f"long-{number}")
        one.replies.result(timeout=60)
    assert is_exact(pool[0].send(LONG, seed=420))
    check_clean(pool, free)


@pytest.mark.full
@pytest.mark.parametrize("wait", [wait_for_chunk, wait_for_transfer])
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_stops_costs_time_only(
    pool: list[Pair], coordinator: Coordinator, rank: int, wait: Callable[[Coordinator, int], None]
) -> None:
    free = [free_tokens(pair) for pair in pool]
    ended = ended_requests(coordinator.status())
    running = [pool[0].send(1900, seed=500 + 10 * rank + number) for number in range(2)]
    wait(coordinator, ended)
    stopped = sorted(pool[1].prefill.process_ids("sglang::scheduler"))[rank]
    os.kill(stopped, signal.SIGSTOP)
    try:
        assert all(is_exact(one) for one in running)
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_for_both(coordinator)
    for number in range(3):
        assert is_exact(pool[number % 2].send(LONG, seed=530 + 10 * rank + number))
    check_clean(pool, free)


@pytest.mark.full
def test_a_rank_that_stops_while_its_instance_is_idle_is_noticed(pool: list[Pair], coordinator: Coordinator) -> None:
    """No step waits for it, and its first rank goes on sending heartbeats."""
    free = [free_tokens(pair) for pair in pool]
    coordinator.settled()
    name = pool[1].prefill.url.partition("://")[2]

    def is_ready(status: dict[str, Any]) -> bool:
        return any(member["name"] == name and member["is_ready"] for member in status["members"])

    coordinator.wait_for(is_ready)
    stopped = sorted(pool[1].prefill.process_ids("sglang::scheduler"))[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        coordinator.wait_for(lambda status: not is_ready(status))
        ended = ended_requests(coordinator.status())
        assert is_exact(pool[0].send(LONG, seed=580)), "alone: no step waits for it"
        status = coordinator.settled()
        assert ended_requests(status) == ended + 1
        assert not any(step["has_failed"] for step in status["recent"][-1]["steps"])
    finally:
        os.kill(stopped, signal.SIGCONT)
    coordinator.wait_for(is_ready)
    assert all(is_exact(pair.send(LONG, seed=590 + number)) for number, pair in enumerate(pool))
    check_clean(pool, free)


def test_a_rank_is_killed_and_takes_its_instance_along(pool: list[Pair], coordinator: Coordinator) -> None:
    free = free_tokens(pool[0])
    ended = ended_requests(coordinator.status())
    running = [pool[0].send(1900, seed=600 + number) for number in range(2)]
    wait_for_chunk(coordinator, ended)
    os.kill(sorted(pool[1].prefill.process_ids("sglang::scheduler"))[1], signal.SIGKILL)
    assert all(is_exact(one) for one in running)
    coordinator.wait_for(lambda status: len(status["members"]) == 1)
    assert is_exact(pool[0].send(LONG, seed=610))
    pool[0].check_clean(free)
