"""A real instance changes its pool while it serves: nothing is lost, tokens stay right, the next router knows."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

BOUNDARY_TOKENS = 128
NEW_TOKENS = 6
MOVE_WITHIN_S = 60.0


def ask(router: RunningRouter, length: int, seed: int) -> tuple[list[int], list[int]]:
    """A prompt, and the tokens that came back."""
    prompt = random_prompt(length, seed=seed)
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": parameters}
    hints = {"x-sgl-ttft-slo-ms": "60000", "x-sgl-priority": "high"}
    reply, _ = router.call("POST", "/generate", body, headers=hints)
    assert reply.status == 200, reply.body
    return prompt, reply.body["output_ids"]


def is_right(answer: tuple[list[int], list[int]]) -> bool:
    prompt, output = answer
    return bool(output == greedy_reference(prompt, NEW_TOKENS))


def last_move(router: RunningRouter) -> dict[str, Any]:
    """The latest move, once it has ended."""
    deadline = time.monotonic() + MOVE_WITHIN_S
    while time.monotonic() < deadline:
        reply, _ = router.call("GET", "/pools")
        moves: list[dict[str, Any]] = reply.body["controller"]["moves"]
        if moves:
            return moves[0]
        time.sleep(0.1)
    raise AssertionError(f"no move has ended within {MOVE_WITHIN_S} s")


def test_an_instance_changes_its_pool_under_load_and_keeps_it() -> None:
    first, second, decode = engines = FLEET.get(
        EngineSpec(Role.SHORT), EngineSpec(Role.SHORT, name="second-short"), EngineSpec(Role.DECODE)
    )
    options = ("--length-boundary-tokens", str(BOUNDARY_TOKENS), "--set", "controller.drain_timeout_secs=20")
    before = second.get("/laps").body
    try:
        with running_router(engines, *options) as router, ThreadPoolExecutor(4) as threads:
            lengths = [16 if i % 4 else 300 for i in range(24)]
            answers = [threads.submit(ask, router, n, 500 + i) for i, n in enumerate(lengths)]
            reply = router.admin("POST", "/pools/move", {"url": second.url, "to": "long"})
            assert reply.status == 202, reply.body
            done = last_move(router)
            assert (done["outcome"], done["detail"]) == ("moved", None)
            assert all(is_right(answer.result(timeout=120)) for answer in answers)
            after = second.get("/laps").body
            assert after["mode"] == "long"
            assert after["generation"] > before["generation"]
            assert router.workers()[second.url]["role"] == "long"
            assert is_right(ask(router, 400, 900))
            assert router.admin("POST", "/pools/move", {"url": decode.url, "to": "long"}).status == 409
        # The next router is told `short` on its command line.
        with running_router(engines, *options, "--controller", "on", "--set", "controller.interval_secs=0.5") as router:
            deadline = time.monotonic() + 20.0
            while router.workers()[second.url]["role"] != "long":
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert router.workers()[first.url]["role"] == "short"
            assert is_right(ask(router, 16, 901))
            assert is_right(ask(router, 400, 902))
    finally:
        second.post("/laps/mode", {"mode": before["mode"]})
