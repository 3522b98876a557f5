"""KV in FP8: tokens of Hugging Face with rounded keys and values, through queues, transfers and long pools."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.transfer.sglang.transfer_backend import WINDOWS
from sglang_ext.types import Role
from support.engines import FLEET, EngineSpec
from support.laps import NEW_TOKENS
from support.model_families import FAMILIES, family, family_greedy
from support.pd import greedy
from support.reference import random_prompt
from support.served_pool import SharedPrompts, share_prompts

pytestmark = pytest.mark.integration
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
CHUNKS = ("--chunked-prefill-size", "128")
CACHING = ("--disaggregation-decode-enable-radix-cache",)
HANDSHAKE = ("--transfer-backend", "handshake")
BY_LAYER = ("--set", "transfer.stream_layer_kib=0")
TCP = ("--transfer-backend", "sglang_ext_tcp")
LENGTHS = (5, 40, 300)
# Keys and values of heads, windows in a pool of their own (also with sinks), layers with a recurrent state between
# those with KV.
SERVED = ("LlamaForCausalLM", "GraniteSWAForCausalLM", "GptOssForCausalLM", "FalconH1ForCausalLM")
LATENT = "DeepseekV3ForCausalLM"  # Hugging Face's cache has keys and values of heads where SGLang's has latent rows


def steady_seed(architecture: str, tokens: int, prefix: tuple[int, ...] = ()) -> int:
    """A seed of a prompt whose answer does not hang on how the last bit of a key or a value is rounded."""
    for seed in range(tokens, tokens + 50):
        prompt = (*prefix, *random_prompt(tokens - len(prefix), seed))
        answers = [family_greedy(architecture, prompt, NEW_TOKENS, is_fp8=True, noise=noise) for noise in range(4)]
        if answers.count(answers[0]) == len(answers):
            return seed
    raise AssertionError(f"{architecture}: no steady prompt of {tokens} tokens")


def steady_prompts(architecture: str) -> list[list[int]]:
    return [random_prompt(tokens, steady_seed(architecture, tokens)) for tokens in LENGTHS]


def spec(
    architecture: str, role: Role, arguments: tuple[str, ...] = (), options: tuple[str, ...] = (), name: str = ""
) -> EngineSpec:
    options = ("--model-path", str(family(architecture)), *options)
    return EngineSpec(role, arguments=arguments, worker_options=options, name=name)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as executor:
        yield executor


@pytest.mark.parametrize(
    ("architecture", "transfer"),
    [
        pytest.param(
            *(architecture, transfer),
            id=f"{architecture}-{transfer[1]}",
            marks=() if (architecture, transfer) == ("GraniteSWAForCausalLM", HANDSHAKE) else pytest.mark.full,
        )
        for architecture in SERVED
        for transfer in (HANDSHAKE, TCP)
    ],
)
def test_tokens_are_those_of_rounded_keys_and_values(architecture: str, transfer: tuple[str, ...]) -> None:
    options = (*transfer, *BY_LAYER) if transfer == HANDSHAKE else transfer
    caching = () if WINDOWS in FAMILIES[architecture].states else CACHING
    prefill, decode = FLEET.get(
        spec(architecture, Role.BOTH, (*FP8, *CHUNKS), options),
        spec(architecture, Role.DECODE, (*FP8, *caching), transfer),
    )
    prompts = steady_prompts(architecture)
    wanted = [family_greedy(architecture, prompt, NEW_TOKENS, is_fp8=True) for prompt in prompts]
    # Otherwise the comparison would not notice KV that is not rounded.
    assert wanted != [family_greedy(architecture, prompt, NEW_TOKENS) for prompt in prompts]
    try:
        for turn in range(2):  # the second time behind cached prefixes
            assert [greedy(prefill, decode, prompt, NEW_TOKENS) for prompt in prompts] == wanted, turn
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_rows_give_an_undivided_instances_tokens(ranks: int) -> None:
    plain, prefill, decode = FLEET.get(
        spec(LATENT, Role.PLAIN, FP8),
        spec(LATENT, Role.BOTH, (*FP8, *CHUNKS), (*HANDSHAKE, *BY_LAYER)),
        spec(LATENT, Role.DECODE, (*FP8, *CACHING, "--tp", str(ranks)), HANDSHAKE),
    )
    prompts = [random_prompt(tokens, tokens) for tokens in LENGTHS]
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    try:
        wanted = []
        for prompt in prompts:
            reply = plain.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
            assert reply.status == 200, reply.body
            wanted.append(reply.body["output_ids"])
        assert wanted != [family_greedy(LATENT, prompt, NEW_TOKENS) for prompt in prompts]
        for turn in range(2):
            assert [greedy(prefill, decode, prompt, NEW_TOKENS) for prompt in prompts] == wanted, turn
    finally:
        for engine in (plain, prefill, decode):
            engine.stop()


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteSWAForCausalLM"])
def test_long_prompts_on_two_members_of_a_pool(architecture: str, threads: ThreadPoolExecutor) -> None:
    arguments, model = (*FP8, "--page-size", "16"), ("--model-path", str(family(architecture)))
    outcome = "requests_collected" if FAMILIES[architecture].states else "requests_streamed"
    prompts = SharedPrompts(
        lambda _, length, prefix: steady_seed(architecture, length, prefix),
        lambda prompt: family_greedy(architecture, prompt, NEW_TOKENS, is_fp8=True),
        outcome,
    )
    share_prompts(
        threads, arguments, (*model, *HANDSHAKE), spec(architecture, Role.DECODE, arguments, HANDSHAKE), prompts
    )
