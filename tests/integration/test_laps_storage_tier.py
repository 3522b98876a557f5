"""Prefills with two queues where the prefix cache has a host tier and storage behind it (`--hicache-storage-backend`).

What both tiers of memory have lost comes back from files, after a restart, too: tokens stay those of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.laps import SHAPE, Pair, Prefill
from support.reference import random_prompt

pytestmark = [pytest.mark.integration, pytest.mark.full]

PAGES = ("--page-size", "16")
CHUNK_TOKENS = 32
KV_TOKENS = 3072
HOST_RATIO = 1.25  # the host's KV over the device's
PROMPT_TOKENS = 1200
PROMPTS = 7  # more than both tiers hold
ROUNDS = 3
DECODE = EngineSpec(Role.DECODE, shape=SHAPE, arguments=PAGES)


def prefill_spec(folder: Path, policy: str) -> EngineSpec:
    return EngineSpec(
        Role.BOTH,
        shape=SHAPE,
        arguments=(
            *(*PAGES, "--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", str(KV_TOKENS)),
            *("--enable-hierarchical-cache", "--hicache-ratio", str(HOST_RATIO)),
            *("--hicache-storage-backend", "file", "--file-storage-path", str(folder)),
            *("--hicache-storage-prefetch-policy", policy),
        ),
        worker_options=("--laps-boundary-tokens", "64", "--set", "laps.min_chunk_tokens=16"),
    )


@contextmanager
def running(folder: Path, policy: str) -> Iterator[Pair]:
    """A pair whose prefill instance has its storage here; nothing is left when it ends."""
    (decode,) = FLEET.get(DECODE)
    prefill = Engine.start(prefill_spec(folder, policy))
    try:
        prefill.wait_ready()
        with ThreadPoolExecutor(16) as threads:
            pair = Pair(prefill, decode, threads)
            prefill.wait_idle()
            free_tokens = pair.status()["kv"]["free_tokens"]
            yield pair
            pair.check_clean(free_tokens)
    finally:
        prefill.stop()


def cached_tokens(prefill: Prefill, tier: str) -> int:
    """Tokens of a prompt that came from a tier, once its prefill has been answered."""
    reply, _ = prefill.replies.result(timeout=120)
    details = reply.body["meta_info"].get("cached_tokens_details") or {}
    return int(details.get(tier) or 0)


@pytest.mark.parametrize("policy", ["wait_complete", "best_effort"])
def test_tokens_are_exact_over_evictions_and_loads_of_both_tiers(tmp_path: Path, policy: str) -> None:
    with running(tmp_path, policy) as pair:
        assert all(
            cached_tokens(prefill, "storage") == 0 for prefill in pair.fill(PROMPTS, PROMPT_TOKENS, first_seed=100)
        )
        stored = PROMPTS * PROMPT_TOKENS // 16
        wait_until(lambda: sum(1 for _ in tmp_path.iterdir()) >= stored - PROMPTS, 60)
        again = pair.fill(PROMPTS, PROMPT_TOKENS, first_seed=100) + pair.fill(PROMPTS, PROMPT_TOKENS, first_seed=100)
        if policy == "wait_complete":
            assert sum(cached_tokens(prefill, "storage") for prefill in again) > PROMPTS * PROMPT_TOKENS / 2


def test_an_instance_that_starts_again_finds_what_is_stored(tmp_path: Path) -> None:
    with running(tmp_path, "wait_complete") as pair:
        pair.fill(2, PROMPT_TOKENS, first_seed=200)
        wait_until(lambda: sum(1 for _ in tmp_path.iterdir()) >= 2 * (PROMPT_TOKENS // 16) - 2, 60)
    with running(tmp_path, "wait_complete") as pair:
        found = [cached_tokens(prefill, "storage") for prefill in pair.fill(2, PROMPT_TOKENS, first_seed=200)]
        assert min(found) > PROMPT_TOKENS - 2 * 16


def test_a_prefill_waits_for_its_stored_prefix_while_others_run(tmp_path: Path) -> None:
    """Long and short prompts whose beginnings are loaded, parked between chunks, with and without aborts.

    The memory holds one of the long ones and a part of another: each must end before the next may begin.
    """
    with running(tmp_path, "wait_complete") as pair:
        for seed in range(1000, 1000 + 100 * ROUNDS, 100):
            prefixes = [random_prompt(PROMPT_TOKENS, seed=seed + number) for number in range(3)]
            for number, prefix in enumerate(prefixes):
                assert pair.send(PROMPT_TOKENS + 8, seed=seed + 10 + number, prefix=prefix).is_exact()
            pair.fill(PROMPTS, PROMPT_TOKENS, first_seed=seed + 20)  # which takes the prefixes from both tiers
            longs = [
                pair.send(2 * PROMPT_TOKENS, seed=seed + 30 + number, prefix=prefix, rid=f"long-{seed}-{number}")
                for number, prefix in enumerate(prefixes)
            ]
            shorts = [pair.send(24, seed=seed + 40 + number) for number in range(6)]
            shorts += [
                pair.send(PROMPT_TOKENS + 20, seed=seed + 50 + number, prefix=prefixes[number % 3])
                for number in range(4)
            ]
            pair.abort(f"long-{seed}-2")
            served = (*longs[:2], *shorts)
            assert all(prefill.is_exact() for prefill in served)
            assert sum(cached_tokens(prefill, "storage") for prefill in served) > PROMPT_TOKENS / 2
            longs[2].replies.result(timeout=120)
