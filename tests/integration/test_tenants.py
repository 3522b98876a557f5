"""Tenants are charged what SGLang's own counters say, and their budgets end where these do."""

from __future__ import annotations

import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.router_cli import ADMIN_KEY, RunningRouter, running_router
from support.tenants import bearer, tenants_file

pytestmark = pytest.mark.integration

TENANTS = ("a", "b")
ROUNDS = 4
PROMPT_COUNTER, OUTPUT_COUNTER = "sglang:prompt_tokens_total", "sglang:generation_tokens_total"
COUNTED_WITHIN_S = 10.0
UNDIVIDED, DIVIDED = "undivided", "divided"
SPECS = {
    UNDIVIDED: (EngineSpec(Role.PLAIN, name="of-tenants"),),
    DIVIDED: (EngineSpec(Role.BOTH, name="of-tenants"), EngineSpec(Role.DECODE, name="of-tenants")),
}


@pytest.fixture(params=[UNDIVIDED, DIVIDED])
def engines(request: pytest.FixtureRequest) -> list[Engine]:
    return FLEET.get(*SPECS[request.param])


@pytest.fixture
def router(engines: list[Engine], tmp_path: Path) -> Iterator[RunningRouter]:
    path = tenants_file(tmp_path, a={}, b={"weight": 2, "tokens_per_minute": 10_000_000})
    options = ("--tenants-file", path, "--usage-db", str(tmp_path / "usage.db"), "--max-concurrent-requests", "4")
    with running_router(engines, *options) as running:
        yield running


def engine_tokens(engines: list[Engine]) -> tuple[float, float]:
    """Return the tokens of prompts and replies that the engines have counted; each of a pair counts its own part."""
    counts: Counter[str] = Counter()
    for engine in engines:
        with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        for line in lines:
            name = line.partition("{")[0]
            is_counted = name == OUTPUT_COUNTER or (name == PROMPT_COUNTER and engine.spec.role is not Role.DECODE)
            if is_counted and not (name == OUTPUT_COUNTER and engine.spec.role.is_prefill):
                counts[name] += float(line.rpartition(" ")[2])  # type: ignore[assignment]
    return counts[PROMPT_COUNTER], counts[OUTPUT_COUNTER]


def usage(router: RunningRouter, key: str = ADMIN_KEY) -> dict[str, tuple[int, int, int]]:
    """Return requests, tokens of prompts and tokens of replies by tenant."""
    reply, _ = router.call("GET", "/v1/usage", headers=bearer(key))
    found: dict[str, tuple[int, int, int]] = {}
    for row in reply.body["data"]:
        requests, prompts, outputs = found.get(row["tenant"], (0, 0, 0))
        found[row["tenant"]] = (
            requests + row["requests"],
            prompts + row["prompt_tokens"],
            outputs + row["output_tokens"],
        )
    return found


def requests_of(client: openai.OpenAI, number: int) -> None:
    """Send requests of each kind whose reply says how many tokens it took."""
    model = "any"
    messages: Any = [{"role": "user", "content": f"Tell {number} of me " + "again " * number}]
    client.chat.completions.create(model=model, messages=messages, max_tokens=3 + number)
    client.completions.create(model=model, prompt=[f"{number}", "two of them"], max_tokens=4)
    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=5 + number, stream=True, stream_options={"include_usage": True}
    )
    assert sum(1 for _ in stream) > 1


def sampled(number: int) -> list[int]:
    """Return the token ids of a prompt of which two samples are asked for."""
    return list(range(20 + number))


def test_usage_is_what_the_engines_count(engines: list[Engine], router: RunningRouter) -> None:
    """Prompts with two samples are left out: `usage` has them once, the counters once for each, and once for the prefix
    that an undivided instance computes first.
    """
    times = 3 if engines[0].spec.role is Role.PLAIN else 2
    again = (times - 1) * len(TENANTS) * sum(len(sampled(number)) for number in range(ROUNDS))
    before = engine_tokens(engines)

    def ask(tenant: str) -> None:
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key=tenant, max_retries=0) as client:
            for number in range(ROUNDS):
                requests_of(client, number)
                body = {"input_ids": sampled(number), "sampling_params": {"max_new_tokens": 6, "n": 2}}
                reply, _ = router.call("POST", "/generate", body, headers=bearer(tenant))
                assert reply.status == 200, reply.body

    with ThreadPoolExecutor(len(TENANTS)) as threads:
        for done in [threads.submit(ask, tenant) for tenant in TENANTS]:
            done.result()
    end_s = time.monotonic() + COUNTED_WITHIN_S
    while True:
        prompts, outputs = (now - then for now, then in zip(engine_tokens(engines), before, strict=True))
        counted = (prompts - again, outputs)
        used = usage(router)
        charged = tuple(sum(counts[part] for counts in used.values()) for part in (1, 2))
        if charged == counted or time.monotonic() > end_s:
            break
        time.sleep(0.1)
    assert {name: counts[0] for name, counts in used.items()} == dict.fromkeys(TENANTS, 4 * ROUNDS)
    assert charged == counted
    assert used["a"][:2] == used["b"][:2], "replies are drawn, and may end early"
    for tenant in TENANTS:
        assert usage(router, tenant) == {tenant: used[tenant]}


def test_a_budget_ends_where_the_tokens_do(engines: list[Engine], tmp_path: Path) -> None:
    """Requests of 30 tokens each are let in as long as the budget lasts, and what they did not use counts again."""
    path = tenants_file(tmp_path, a={"tokens_per_minute": 600})
    body = {"input_ids": list(range(100, 120)), "sampling_params": {"max_new_tokens": 10, "ignore_eos": True}}
    with running_router(engines, "--tenants-file", path) as router:
        began_s = time.monotonic()
        let_in = 0
        while True:
            reply, headers = router.call("POST", "/generate", body, headers=bearer("a"))
            if reply.status == 429:
                break
            assert reply.status == 200, reply.body
            let_in += 1
        expected = 600 * (1 + (time.monotonic() - began_s) / 60) / 30
        assert expected - 1.5 <= let_in <= expected + 0.01
        assert 0 < int(headers["retry-after"]) <= 3
