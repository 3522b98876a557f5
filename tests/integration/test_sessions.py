"""Conversations that an SDK names stay at one prefill instance of SGLang, whose cache has their prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator

import openai
import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.handshake_process import wait_until
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

CACHE_REPORT = ("--enable-cache-report",)
PREFILL = "x-sglang-ext-prefill"
TURNS = 5


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    prefills = [EngineSpec(Role.BOTH, arguments=CACHE_REPORT, name=f"session-{number}") for number in range(2)]
    return FLEET.get(*prefills, EngineSpec(Role.DECODE, arguments=CACHE_REPORT))


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, strict_models=True) as running:
        yield running


@pytest.mark.parametrize("how", ["header", "prompt_cache_key", "user"])
def test_short_turns_of_many_conversations_stay(router: RunningRouter, how: str) -> None:
    """Prompts of less than a block: only their name says that they belong together."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        model = client.models.list().data[0].id
        conversations = [(f"{how}-{number}", f"{how} {random.random()}") for number in range(6)]
        homes: dict[str, list[str]] = {name: [] for name, _ in conversations}
        cached: list[int] = []
        for turn in range(TURNS):
            for name, text in conversations:
                fields = {} if how == "header" else {how: name}
                answer = client.chat.completions.with_raw_response.create(
                    model=model,
                    messages=[{"role": "user", "content": f"{text} {'more ' * turn}"}],
                    max_tokens=2,
                    extra_headers={"x-session-id": name} if how == "header" else None,
                    extra_body=fields,
                )
                homes[name].append(answer.headers[PREFILL])
                usage = answer.parse().usage
                assert usage is not None
                if turn and usage.prompt_tokens_details is not None:
                    cached.append(usage.prompt_tokens_details.cached_tokens or 0)
        assert {len(set(visited)) for visited in homes.values()} == {1}, homes
        assert len(cached) == (TURNS - 1) * len(conversations)
        assert min(cached) > 0, "each turn found the one before it"
    wait_until(router.is_idle, 10)  # what follows a reply comes a moment later
