"""Instances that serve all prompts and share the long ones give right tokens, and all of their memory is free again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import Pair
from support.long_pool import Coordinator
from support.reference import greedy_reference, random_prompt
from support.router_cli import running_router
from support.served_pool import HANDSHAKE, check_clean, free_tokens

pytestmark = pytest.mark.integration
NEW_TOKENS = 6
BOUNDARY_TOKENS = 256


def member(coordinator: Coordinator, name: str) -> EngineSpec:
    options = (
        *HANDSHAKE,
        *("--cdsp-coordinator", coordinator.address, "--cdsp-min-tokens", "200"),
        *("--laps-boundary-tokens", str(BOUNDARY_TOKENS), "--set", "cdsp.step_timeout_s=10"),
    )
    return EngineSpec(Role.BOTH, worker_options=options, name=name)


def chunks(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for one in status["recent"] for step in one["steps"] if step["kind"] == "chunk"]


def test_short_and_long_prompts_on_the_same_instances() -> None:
    with (
        Coordinator.running("--sp-sizes", "1,2", "--min-chunk-tokens", "64") as coordinator,
        ThreadPoolExecutor(16) as threads,
    ):
        specs = [member(coordinator, f"one{number}") for number in range(2)]
        *prefill, decode = FLEET.get(*specs, EngineSpec(Role.DECODE, worker_options=HANDSHAKE))
        coordinator.wait_for(lambda status: len(status["members"]) == 2)
        pairs = [Pair(engine, decode, threads) for engine in prefill]
        free = [free_tokens(pair) for pair in pairs]
        arguments = ("--coordinator-url", coordinator.http_url, "--length-boundary-tokens", str(BOUNDARY_TOKENS))
        with running_router([*prefill, decode], *arguments) as router:
            prompts = []
            for number in range(4):
                prompts.append(random_prompt(900 + 50 * number, seed=1100 + number))
                prompts += [random_prompt(10 + 7 * k, seed=1200 + 10 * number + k) for k in range(4)]
            replies = []
            for prompt in prompts:
                replies.append(threads.submit(router.greedy, prompt, NEW_TOKENS))
                time.sleep(0.02)
            for prompt, reply in zip(prompts, replies, strict=True):
                assert reply.result() == greedy_reference(prompt, NEW_TOKENS)
        status = coordinator.status()
        assert any(len(chunk["members"]) == 2 for chunk in chunks(status))
        assert {one["outcome"] for one in status["recent"]} <= {"streamed", "collected", "alone_is_best"}
        check_clean(pairs, free)
        for engine in prefill:
            engine.stop()
