"""Every engine on a CPU computes its chunks at the cost of the new tokens, and gives the tokens of Hugging Face."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pd import greedy
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

PAGES = ("--page-size", "16")
# Grouped-query attention in all of them. SGLang's own scheduler, two ranks, chunks of four pages.
STOCK_SCHEDULER = EngineSpec(
    Role.BOTH,
    arguments=("--tp", "2", *PAGES, "--chunked-prefill-size", "64"),
    worker_options=("--laps-mode", "off"),
)
LAPS = EngineSpec(Role.SHORT)
PAIRS = {
    "stock scheduler, tp 2, page 16": (STOCK_SCHEDULER, EngineSpec(Role.DECODE, arguments=PAGES)),
    "laps, tp 1, page 1": (LAPS, EngineSpec(Role.DECODE)),
}
NEW_TOKENS = 8


@pytest.fixture(params=PAIRS.values(), ids=list(PAIRS), scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Engine, Engine]:
    prefill, decode = FLEET.get(*request.param)
    return prefill, decode


def test_the_hook_is_in_force_whatever_the_scheduler(pair: tuple[Engine, Engine]) -> None:
    for engine in pair:
        assert "prefix-attention" in engine.get("/server_info").body["sglang_ext"]["hooks"]


@pytest.mark.parametrize("tokens", [63, 64, 65, 129, 700])
def test_chunks_behind_their_prefix(pair: tuple[Engine, Engine], tokens: int) -> None:
    prompt = random_prompt(tokens, seed=30_000 + tokens)
    assert greedy(*pair, prompt, NEW_TOKENS) == greedy_reference(prompt, NEW_TOKENS)


def test_requests_with_and_without_a_cached_prefix_at_once(pair: tuple[Engine, Engine]) -> None:
    cached = [random_prompt(tokens, seed=31_000 + tokens) for tokens in (16, 100, 250)]
    for prompt in cached:
        assert greedy(*pair, prompt, 1) == greedy_reference(prompt, 1)
    prompts = [
        prefix + random_prompt(5 + 11 * number, seed=31_500 + number) for number, prefix in enumerate(cached * 2)
    ]
    prompts += [random_prompt(tokens, seed=32_000 + tokens) for tokens in (3, 30, 90)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: greedy(*pair, prompt, NEW_TOKENS), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy_reference(prompt, NEW_TOKENS), len(prompt)
