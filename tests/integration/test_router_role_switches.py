"""Real instances change between prefill and decode, over SGLang's own Mooncake backend on TCP."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_ext.types import Role
from support.engines import Engine, EngineSpec
from support.mooncake_folder import ENVIRONMENT, needs_mooncake
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = [pytest.mark.integration, pytest.mark.full, needs_mooncake]

NEW_TOKENS = 6
WITHIN_S = 90.0


def spec(role: Role, name: str) -> EngineSpec:
    """A forked engine would not look for Mooncake in its folder."""
    return EngineSpec(
        role,
        arguments=("--enable-pd-role-switch",),
        worker_options=("--transfer-backend", "mooncake"),
        environment=ENVIRONMENT,
        name=name,
        has_own_imports=True,
    )


def ask(router: RunningRouter, length: int, seed: int) -> bool:
    """Return whether a prompt was answered with the right tokens."""
    prompt = random_prompt(length, seed=seed)
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    reply, _ = router.call("POST", "/generate", {"input_ids": prompt, "sampling_params": parameters}, WITHIN_S)
    assert reply.status == 200, reply.body
    return bool(reply.body["output_ids"] == greedy_reference(prompt, NEW_TOKENS))


def moves(router: RunningRouter, count: int) -> list[dict[str, Any]]:
    """The moves that have ended, the oldest first, once there are so many."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        ended: list[dict[str, Any]] = router.call("GET", "/pools")[0].body["controller"]["moves"]
        if len(ended) >= count:
            return ended[::-1]
        time.sleep(0.1)
    raise AssertionError(f"fewer than {count} moves within {WITHIN_S} s: {router.log_path.read_text()[-4000:]}")


def test_a_decode_instance_takes_the_place_of_prefill_and_goes_back() -> None:
    prefill_spec = spec(Role.BOTH, "prefill")
    engines = [Engine.start(one) for one in (prefill_spec, spec(Role.DECODE, "first"), spec(Role.DECODE, "second"))]
    options = ["--controller", "on", "--retry-max-retries", "20"]
    for setting in ("interval_secs=0.3", "confirm_rounds=2", "cooldown_secs=1", "drain_timeout_secs=20"):
        options += ["--set", f"controller.{setting}"]
    try:
        for engine in engines:
            engine.wait_ready()
        prefill = engines[0]
        with running_router(engines, *options) as router, ThreadPoolExecutor(3) as threads:
            assert ask(router, 40, 1)
            helpers = []
            for turn in range(3):
                prefill.kill()
                asked = [threads.submit(ask, router, 30 + 100 * i, 10 * turn + i) for i in range(3)]
                assert all(answer.result(timeout=WITHIN_S) for answer in asked)
                taken = moves(router, 2 * turn + 1)[-1]
                assert (taken["from"], taken["to"], taken["reason"], taken["outcome"]) == (
                    *("decode", "prefill", "below_minimum", "moved"),
                )
                helper = next(engine for engine in engines if engine.url == taken["url"])
                helpers.append(helper.spec.name)
                assert helper.get("/model_info").body["disaggregation_mode"] == "prefill"
                assert router.workers()[helper.url]["role"] == "both"
                prefill.stop()
                prefill = engines[0] = Engine.start(prefill_spec, (prefill.port, prefill.bootstrap_port))
                prefill.wait_ready()
                back = moves(router, 2 * turn + 2)[-1]
                assert (back["url"], back["to"], back["reason"], back["outcome"]) == (
                    *(helper.url, "decode", "return", "moved"),
                )
                assert router.workers()[helper.url]["role"] == "decode"
                answers = [ask(router, 50 + 90 * i, 100 + 10 * turn + i) for i in range(4)]
                assert all(answers)
            # One helped twice: the other knew it as prefill, at ports that were no more.
            assert len(helpers) == 3 > len(set(helpers))
    finally:
        for engine in engines:
            engine.stop()
