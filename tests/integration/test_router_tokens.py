"""Through router and pools the tokens are those of Hugging Face and of stock SGLang, however they are asked for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.engines import FLEET, PLAIN_SERVER, Engine
from support.reference import greedy_reference, random_prompt
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

BOUNDARY_TOKENS = 256
PROMPT_LENGTHS = (1, 2, 3, 7, 16, 17, 31, 48, 64, 100, 128, 200, 255, 256, 257, 300, 400, 513, 700, 900)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def stock(engines: list[Engine]) -> Engine:
    """One ordinary SGLang server: no disaggregation, no router."""
    return FLEET.get(PLAIN_SERVER)[0]


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, "--length-boundary-tokens", str(BOUNDARY_TOKENS)) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_left_behind(router: RunningRouter, engines: list[Engine]) -> Iterator[None]:
    yield
    for engine in engines:
        engine.wait_idle()
    assert router.is_idle()


def greedy_body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        **more,
    }


def stream(router: RunningRouter, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Events of a streamed reply, which must end with [DONE]."""
    request = urllib.request.Request(
        router.url + path, json.dumps({**body, "stream": True}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line.decode().strip() for line in response if line.strip()]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_greedy_tokens_are_those_of_hugging_face_and_of_stock_sglang(
    router: RunningRouter, engines: list[Engine], stock: Engine, length: int
) -> None:
    prompt = random_prompt(length, seed=1000 + length)
    reply, headers = router.call("POST", "/generate", greedy_body(prompt))
    assert reply.status == 200, reply.body
    assert reply.body["output_ids"] == greedy_reference(prompt, NEW_TOKENS)
    assert reply.body["output_ids"] == stock.post("/generate", greedy_body(prompt)).body["output_ids"]
    assert reply.body["meta_info"]["prompt_tokens"] == length
    is_short = length <= BOUNDARY_TOKENS
    assert headers["x-sglang-ext-class"] == ("short" if is_short else "long")
    assert headers["x-sglang-ext-prefill"] == engines[0 if is_short else 1].url
    assert headers["x-sglang-ext-decode"] == engines[2].url


def test_a_conversation_reuses_its_prefix_and_keeps_its_tokens(router: RunningRouter, engines: list[Engine]) -> None:
    """A long first turn; later turns bring few new tokens and go where the prefix is, as short ones."""
    history = random_prompt(600, seed=7)
    classes = []
    for turn in range(4):
        reply, headers = router.call("POST", "/generate", greedy_body(history))
        assert reply.status == 200, reply.body
        output = reply.body["output_ids"]
        assert output == greedy_reference(history, NEW_TOKENS)
        assert headers["x-sglang-ext-prefill"] == engines[1].url
        classes.append(headers["x-sglang-ext-class"])
        history = history + output + random_prompt(40, seed=70 + turn)
    assert classes == ["long", "short", "short", "short"]


def test_streaming_says_the_same_as_not_streaming(router: RunningRouter) -> None:
    for length in (5, 300):
        body = greedy_body(random_prompt(length, seed=length))
        whole = router.post("/generate", body).body
        events = stream(router, "/generate", body)
        assert events[-1]["text"] == whole["text"]
        assert events[-1]["output_ids"] == whole["output_ids"]
        assert len(events) >= NEW_TOKENS // 2
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "def fit(self):"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    whole = router.post("/v1/chat/completions", chat).body["choices"][0]["message"]["content"]
    deltas = [
        event["choices"][0]["delta"].get("content") or "" for event in stream(router, "/v1/chat/completions", chat)
    ]
    assert "".join(deltas) == whole


def test_the_openai_client_works_unmodified(router: RunningRouter) -> None:
    client = openai.OpenAI(base_url=router.url + "/v1", api_key="none")
    model = client.models.list().data[0].id
    messages: Any = [{"role": "user", "content": "import os"}]
    whole = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
    pieces = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    many = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0, n=3)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in many.choices}) == 1
    batch = client.completions.create(model=model, prompt=["def a", "class B", "x = 1"], max_tokens=4, temperature=0)
    assert [choice.index for choice in batch.choices] == [0, 1, 2]
    scored = client.chat.completions.create(
        model=model, messages=messages, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.content or []) == 3
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.completions.create(model=model, prompt="x " * 5000, max_tokens=4)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, messages=messages, max_tokens=-1)


def test_structured_output_passes_through(router: RunningRouter) -> None:
    body = {
        "text": "value:",
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "regex": "(yes|no)-[0-9]{3}"},
    }
    text = router.post("/generate", body).body["text"]
    assert text[:-3] in ("yes-", "no-")
    assert text[-3:].isdigit()


def test_prompt_log_probabilities_come_from_prefill(router: RunningRouter, engines: list[Engine]) -> None:
    prompt = random_prompt(20, seed=3)
    body = greedy_body(prompt, return_logprob=True, logprob_start_len=0)
    info = router.post("/generate", body).body["meta_info"]
    assert [entry[1] for entry in info["input_token_logprobs"]] == prompt
    assert len(info["output_token_logprobs"]) == NEW_TOKENS
    several = router.post("/generate", {**body, "input_ids": [prompt, prompt[:7]]}).body
    assert [len(item["meta_info"]["input_token_logprobs"]) for item in several] == [20, 7]


def test_a_prompt_longer_than_decode_can_hold_is_refused_before_it_is_sent(
    router: RunningRouter, engines: list[Engine]
) -> None:
    before = {url: worker["in_flight"] for url, worker in router.workers().items()}
    reply = router.post("/generate", greedy_body(random_prompt(2100, seed=5)))
    assert reply.status == 400
    assert "2100 tokens" in reply.body["error"]["message"]
    assert {url: worker["in_flight"] for url, worker in router.workers().items()} == before


def test_tokenize_and_models_answer_through_the_router(router: RunningRouter) -> None:
    assert router.post("/v1/tokenize", {"prompt": "def f(x):"}).body["count"] >= 3
    models, _ = router.call("GET", "/v1/models")
    assert models.body["data"][0]["max_model_len"] < 2048
    ready, _ = router.call("GET", "/readyz")
    assert ready.status == 200
