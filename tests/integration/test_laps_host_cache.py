"""Prefills with two queues where the prefix cache has a tier on the host: tokens after evictions and loads, parked
prefills whose prefix was loaded, and memory that is whole afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import DECODE, SHAPE, Pair, Prefill
from support.reference import random_prompt

pytestmark = pytest.mark.integration

CHUNK_TOKENS = 32
KV_TOKENS = 4096
PREFIX_TOKENS = 1500
PROMPT_TOKENS = 1200
PROMPTS = 6  # of PROMPT_TOKENS each: twice what the device holds, half of what the host does


def prefill_spec(policy: str) -> EngineSpec:
    return EngineSpec(
        Role.BOTH,
        shape=SHAPE,
        arguments=(
            *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", str(KV_TOKENS)),
            *("--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", policy),
        ),
        worker_options=("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16"),
    )


@pytest.fixture(params=["write_through", pytest.param("write_back", marks=pytest.mark.full)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    prefill, decode = FLEET.get(prefill_spec(request.param), DECODE)
    with ThreadPoolExecutor(16) as threads:
        pair = Pair(prefill, decode, threads)
        prefill.wait_idle()
        pair.flush()
        free_tokens = pair.status()["kv"]["free_tokens"]
        yield pair
        for engine in (prefill, decode):
            engine.post("/abort_request", {"rid": "", "abort_all": True})
        pair.check_clean(free_tokens)


def loaded_tokens(prefill: Prefill) -> int:
    """Tokens of a prompt that came from the host, once its prefill has been answered."""
    reply, _ = prefill.replies.result(timeout=120)
    details = reply.body["meta_info"].get("cached_tokens_details") or {}
    return int(details.get("host", 0))


def test_tokens_are_exact_over_evictions_and_loads(pair: Pair) -> None:
    assert all(loaded_tokens(prefill) == 0 for prefill in pair.fill(PROMPTS, PROMPT_TOKENS, first_seed=100))
    for _ in range(2):
        again = pair.fill(PROMPTS, PROMPT_TOKENS, first_seed=100)
        assert sum(map(loaded_tokens, again)) > PROMPTS * PROMPT_TOKENS / 2


def test_a_prefill_runs_in_chunks_behind_a_prefix_from_the_host(pair: Pair) -> None:
    prefix = random_prompt(PREFIX_TOKENS, seed=1)
    assert pair.send(PREFIX_TOKENS + 8, seed=2, prefix=prefix).is_exact()
    pair.fill(4, PROMPT_TOKENS, first_seed=200)  # which takes the prefix from the device
    work = pair.prefill.get("/laps?since=0").body["work"]
    long = pair.send(2 * PREFIX_TOKENS, seed=3, prefix=prefix)
    shorts = []
    for number in range(3):
        pair.wait_for(lambda status: status["short"]["requests"] == 0)
        shorts.append(pair.send(24, seed=300 + number))
    assert all(short.is_exact() for short in shorts)
    assert long.is_exact()
    assert loaded_tokens(long) >= PREFIX_TOKENS - 1
    batches = records_since(pair, work["last"], PREFIX_TOKENS)
    # What was loaded does not count as prefilled twice: the rest still runs in chunks.
    assert max(tokens for tokens in batches) <= CHUNK_TOKENS + 3 * 24
    assert sum(batches) >= PREFIX_TOKENS


def records_since(pair: Pair, cursor: int, tokens: int) -> list[int]:
    """New tokens of the prefill batches after `cursor`, once there are that many in all."""
    found: list[int] = []
    until_s = time.monotonic() + 60
    while sum(found) < tokens:
        work: dict[str, Any] = pair.prefill.get(f"/laps?since={cursor}").body["work"]
        cursor = work["last"]
        found += [record[5] for record in work["records"] if record[0] == "prefill" and record[2] is not None]
        if work["missed"]:
            pytest.skip("a stalled machine has lost records of the batches")
        assert time.monotonic() < until_s, found
    return found


def test_aborted_prefills_leave_nothing_on_either_tier(pair: Pair) -> None:
    prefixes = [random_prompt(PREFIX_TOKENS, seed=10 + number) for number in range(2)]
    for number, prefix in enumerate(prefixes):
        assert pair.send(PREFIX_TOKENS + 8, seed=20 + number, prefix=prefix).is_exact()
    pair.fill(4, PROMPT_TOKENS, first_seed=400)
    aborted = pair.send(2 * PREFIX_TOKENS, seed=30, prefix=prefixes[0], rid="aborted", priority="low")
    pair.wait_for(lambda status: status["long"]["requests"] >= 1 or aborted.replies.done())
    kept = pair.send(PREFIX_TOKENS + 400, seed=31, prefix=prefixes[1], priority="high")
    short = pair.send(24, seed=32)
    pair.abort("aborted")
    assert short.is_exact()
    assert kept.is_exact()
    aborted.replies.result(timeout=120)
    # What was loaded for the aborted one is whole, and used again.
    assert pair.send(PREFIX_TOKENS + 40, seed=33, prefix=prefixes[0]).is_exact()
    pair.fill(4, PROMPT_TOKENS, first_seed=400)
