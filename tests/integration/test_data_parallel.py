"""Instances with data-parallel ranks, behind a router: each has a queue and a prefix cache of its own.

They spawn their processes, each of which imports SGLang, and take a minute or more to start.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.reference import greedy_reference, random_prompt
from support.router_cli import running_router

pytestmark = [pytest.mark.integration, pytest.mark.full]

RANKS = 2
PAGES = ("--page-size", "16")
DATA_PARALLEL = (*PAGES, "--dp-size", str(RANKS))
TCP = ("--transfer-backend", "sglang_ext_tcp")
NEW_TOKENS = 8


def body(prompt: list[int], **fields: Any) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": parameters, **fields}


def test_ranks_of_prefill_have_queues_and_prefixes_of_their_own() -> None:
    """Tokens are those of one instance; what a rank holds is found there; both ranks work."""
    prefill, _ = engines = FLEET.get(
        EngineSpec(Role.BOTH, arguments=DATA_PARALLEL, worker_options=TCP),
        EngineSpec(Role.DECODE, arguments=PAGES, worker_options=TCP),
    )
    with running_router(engines) as router:

        def known() -> dict[str, Any]:
            described: dict[str, Any] = router.workers()[prefill.url]["cached_prefixes"]
            return described

        wait_until(lambda: known()["from"] == "events", 30)
        prompts = [random_prompt(150 + 40 * number, seed=number) for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as clients:
            replies = list(clients.map(lambda prompt: router.post("/generate", body(prompt)), prompts))
        for prompt, reply in zip(prompts, replies, strict=True):
            assert reply.status == 200, reply
            assert reply.body["output_ids"] == greedy_reference(prompt, NEW_TOKENS)
        status = prefill.get("/laps").body
        assert len(status["ranks"]) == RANKS
        assert all(rank["decisions"]["batches"] for rank in status["ranks"])
        assert sum(rank["decisions"]["batches"] for rank in status["ranks"]) == status["decisions"]["batches"]
        # Each is found on its rank, and nowhere else: half of them would not be by chance.
        wait_until(lambda: known()["blocks"] >= sum(len(prompt) // 16 for prompt in prompts), 10)
        for prompt in prompts:
            before = cached_tokens(prefill)
            assert router.post("/generate", body(prompt)).body["output_ids"] == greedy_reference(prompt, NEW_TOKENS)
            full_tokens = (len(prompt) - 1) // 16 * 16
            wait_until(lambda before=before, full=full_tokens: cached_tokens(prefill) - before == full, 10)  # type: ignore[misc]


def cached_tokens(engine: Engine) -> float:
    """Return how many tokens of all prompts an instance has found in its prefix caches."""
    found = re.findall(r"^sglang:cached_tokens_total(?:\{[^}]*\})? (\S+)$", engine.get("/metrics").body, re.M)
    return sum(map(float, found))
