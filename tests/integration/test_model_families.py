"""Models with windows, sinks and caps give Hugging Face's tokens, undivided and divided, or are refused at start."""

from __future__ import annotations

import random

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineError, EngineSpec
from support.model_families import FAMILIES, WINDOW, family, family_greedy
from support.pd import greedy

pytestmark = pytest.mark.integration
NEW_TOKENS = 12
REFUSED = "MistralForCausalLM"
IN_TEST = ("GptOssForCausalLM", "Gemma2ForCausalLM")


def spec(architecture: str, role: Role, *arguments: str) -> EngineSpec:
    return EngineSpec(role, arguments=arguments, worker_options=("--model-path", str(family(architecture))))


def prompts() -> list[list[int]]:
    """One within the window, one a little longer, one of several windows and of more than one chunk."""
    draw = random.Random(1)
    return [[draw.randrange(6, 2048) for _ in range(tokens)] for tokens in (5, 40, 300)]


@pytest.mark.parametrize(
    "architecture",
    [one if one in IN_TEST else pytest.param(one, marks=pytest.mark.full) for one in FAMILIES if one != REFUSED],
)
def test_tokens_are_those_of_the_model(architecture: str) -> None:
    wanted = [family_greedy(architecture, prompt, NEW_TOKENS) for prompt in prompts()]
    # Two queues, prompts in chunks, and replies that leave the window behind them.
    prefill, decode = FLEET.get(
        spec(architecture, Role.BOTH, "--chunked-prefill-size", "128"), spec(architecture, Role.DECODE)
    )
    try:
        assert [greedy(prefill, decode, prompt, NEW_TOKENS) for prompt in prompts()] == wanted
        assert [greedy(prefill, decode, prompt, NEW_TOKENS) for prompt in prompts()] == wanted  # behind what is cached
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize("architecture", [one for one in FAMILIES if one != REFUSED])
def test_tokens_of_an_undivided_instance(architecture: str) -> None:
    (engine,) = FLEET.get(spec(architecture, Role.PLAIN))
    try:
        for prompt in prompts():
            assert undivided(engine, prompt) == family_greedy(architecture, prompt, NEW_TOKENS)
    finally:
        engine.stop()


def undivided(engine: Engine, prompt: list[int]) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    reply = engine.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert reply.status == 200, reply.body
    tokens: list[int] = reply.body["output_ids"]
    return tokens


def test_a_window_that_sglang_leaves_out_is_refused_where_prompts_may_be_longer() -> None:
    engine = Engine.start(spec(REFUSED, Role.PLAIN))
    try:
        with pytest.raises(EngineError):
            engine.wait_ready()
        assert f"MistralForCausalLM attends to {WINDOW} tokens, which SGLang leaves out" in engine.log_path.read_text()
    finally:
        engine.stop()
