"""Prefill and decode apart give the tokens that Hugging Face gives."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec
from support.pd import greedy, send_both, with_room
from support.reference import greedy_reference, random_prompt

pytestmark = pytest.mark.integration

PREFILL = EngineSpec(Role.SHORT)
DECODE = EngineSpec(Role.DECODE)
DECODE_TP2 = EngineSpec(Role.DECODE, arguments=("--tp", "2"))
# Around the chunk of 256 tokens, and over several chunks.
LENGTHS = (1, 2, 3, 5, 8, 13, 31, 64, 100, 129, 200, 255, 256, 257, 300, 400, 511, 512, 700, 900)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def engines() -> dict[EngineSpec, Engine]:
    specs = (PREFILL, DECODE, DECODE_TP2)
    return dict(zip(specs, FLEET.get(*specs), strict=True))


@pytest.mark.parametrize("decode", [DECODE, DECODE_TP2], ids=["tp1", "tp2"])
def test_prompts_of_every_length(engines: dict[EngineSpec, Engine], decode: EngineSpec) -> None:
    for length in LENGTHS:
        prompt = random_prompt(length, seed=length + (1000 if decode is DECODE else 0))
        expected = greedy_reference(prompt, NEW_TOKENS)
        assert greedy(engines[PREFILL], engines[decode], prompt, NEW_TOKENS) == expected, length


@pytest.mark.parametrize("decode", [DECODE, DECODE_TP2], ids=["tp1", "tp2"])
def test_turns_that_extend_a_cached_prefix(engines: dict[EngineSpec, Engine], decode: EngineSpec) -> None:
    prompt = random_prompt(150, seed=7000 if decode is DECODE else 8000)
    for turn in range(4):
        expected = greedy_reference(prompt, NEW_TOKENS)
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        }
        prefill_reply, reply = send_both(engines[PREFILL], engines[decode], body)
        assert reply.body["output_ids"] == expected
        cached = prefill_reply.body["meta_info"]["cached_tokens"]
        # A first token may be shared with another test's prompt by chance.
        assert cached >= 150 if turn > 0 else cached < 10
        prompt = prompt + expected + random_prompt(90, seed=100 + turn)


def test_concurrent_requests_do_not_mix(engines: dict[EngineSpec, Engine]) -> None:
    prompts = [random_prompt(10 + 37 * index, seed=500 + index) for index in range(12)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(
            clients.map(lambda prompt: greedy(engines[PREFILL], engines[DECODE], prompt, NEW_TOKENS), prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == greedy_reference(prompt, NEW_TOKENS), len(prompt)


def test_streaming_gives_the_same_text(engines: dict[EngineSpec, Engine]) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "def main(argv):\n    return 0\n"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    prefill, decode = engines[PREFILL], engines[DECODE]
    _, whole = send_both(prefill, decode, body, path="/v1/chat/completions")
    streamed = {**with_room(body, prefill), "stream": True}
    with ThreadPoolExecutor(1) as leg:
        prefill_leg = leg.submit(prefill.post, "/v1/chat/completions", streamed)
        request = urllib.request.Request(
            f"{decode.url}/v1/chat/completions",
            json.dumps(streamed).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            lines = [line[len(b"data: ") :] for line in response if line.startswith(b"data: ")]
        assert prefill_leg.result().status == 200
    assert lines[-1].strip() == b"[DONE]"
    deltas = [json.loads(line)["choices"] for line in lines[:-1]]
    text = "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)
    assert text == whole.body["choices"][0]["message"]["content"]


def test_nothing_is_left_behind(engines: dict[EngineSpec, Engine]) -> None:
    for engine in engines.values():
        engine.wait_idle()


def test_server_info_tells_a_router_what_it_needs(engines: dict[EngineSpec, Engine]) -> None:
    for spec, engine in engines.items():
        info = engine.get("/server_info").body
        assert info["sglang_ext"]["role"] == spec.role.value
        assert "parallel-samples" in info["sglang_ext"]["hooks"]
        assert info["sglang_ext"]["context_tokens"] == spec.shape.context_tokens
        assert info["disaggregation_mode"] == ("prefill" if spec.role.is_prefill else "decode")
        assert info["tp_size"] == (2 if spec is DECODE_TP2 else 1)
        assert info["max_total_num_tokens"] > 0
        assert info["page_size"] >= 1
    assert engines[PREFILL].get("/server_info").body["disaggregation_bootstrap_port"] == engines[PREFILL].bootstrap_port
