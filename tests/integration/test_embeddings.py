"""/v1/embeddings, /v1/classify, /v1/rerank and /v1/score over real undivided instances, as plain SGLang answers."""

from __future__ import annotations

import base64
import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pyarrow.parquet as pq
import pytest

from sglang_ext.types import Role
from support.engines import FLEET, Engine, EngineSpec, free_port
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration

EMBEDDING = EngineSpec(Role.PLAIN, arguments=("--is-embedding", "--served-model-name", "embedder"), name="embedder")
SECOND = EngineSpec(Role.PLAIN, arguments=EMBEDDING.arguments, name="embedder-2")
GENERATING = EngineSpec(Role.PLAIN, arguments=("--served-model-name", "scorer"), name="scorer")
MODEL = "embedder"
VECTOR_SIZE = 64  # of the tests' model


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    return FLEET.get(EMBEDDING, GENERATING, EngineSpec(Role.SHORT), EngineSpec(Role.DECODE))


@pytest.fixture(scope="module")
def router(engines: list[Engine]) -> Iterator[RunningRouter]:
    with running_router(engines, strict_models=True) as running:
        yield running


@pytest.fixture
def client(router: RunningRouter) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def numbers(value: Any, found: list[float]) -> Any:
    """A reply without ids and times, and with its fractions taken out into `found`: their last digits depend on the
    batch in which a text is computed, and on what is cached."""
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if key not in {"id", "created", "meta_info"}}
        if isinstance(kept.get("embedding"), str):
            kept["embedding"] = list(struct.unpack(f"<{VECTOR_SIZE}f", base64.b64decode(kept["embedding"])))
        return {key: numbers(item, found) for key, item in kept.items()}
    if isinstance(value, list):
        return [numbers(item, found) for item in value]
    if isinstance(value, float):
        found.append(value)
        return float
    return value


def test_embeddings_of_the_sdk(client: openai.OpenAI) -> None:
    """The SDK asks for base64 and decodes it; `float` comes as numbers. Both are the same."""
    both = client.embeddings.create(model=MODEL, input=["def parse(", "class A"])
    assert [item.index for item in both.data] == [0, 1]
    assert [len(item.embedding) for item in both.data] == [VECTOR_SIZE] * 2
    assert both.usage.prompt_tokens == both.usage.total_tokens > 2
    one = client.embeddings.create(model=MODEL, input="def parse(", encoding_format="float")
    assert one.data[0].embedding == pytest.approx(both.data[0].embedding, abs=1e-4)
    assert math.hypot(*one.data[0].embedding) == pytest.approx(1.0, abs=1e-3)
    ids = client.embeddings.create(model=MODEL, input=[[5, 6, 7], [8]])
    assert ids.usage.prompt_tokens == 4
    many = client.embeddings.create(model=MODEL, input=[f"text {number}" for number in range(400)])
    assert len(many.data) == 400, "more than --max-sequences-per-request, which bounds what takes rooms"


def test_errors_of_the_sdk(client: openai.OpenAI, router: RunningRouter) -> None:
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.embeddings.create(model=MODEL, input="")
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length") as refused:
        client.embeddings.create(model=MODEL, input="x " * 3000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="another", input="x")
    divided = next(model.id for model in client.models.list() if model.id not in (MODEL, "scorer"))
    with pytest.raises(openai.NotFoundError, match="needs an undivided instance"):
        client.embeddings.create(model=divided, input="x")
    with pytest.raises(openai.BadRequestError, match="--is-embedding"):
        client.embeddings.create(model="scorer", input="x")
    assert router.metric("sglang_ext_router_retries_total") == 0


@pytest.mark.parametrize(
    "body",
    [
        {"text": "x", "sampling_params": {"max_new_tokens": 2}},
        {"model": MODEL, "prompt": "x"},
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        {"model": MODEL, "input": "x"},
    ],
    ids=["generate", "completion", "chat", "message", "response"],
)
def test_nothing_asks_an_instance_that_embeds_to_generate(
    router: RunningRouter, engines: list[Engine], body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Plain SGLang ends at such a request."""
    names = {"generate": "/generate", "completion": "/v1/completions", "chat": "/v1/chat/completions"}
    path = {**names, "message": "/v1/messages", "response": "/v1/responses"}[request.node.callspec.id]
    reply = router.post(path, {"model": MODEL, **body})
    assert reply.status == 400
    assert "does not generate" in reply.body["error"]["message"]
    assert engines[0].is_alive
    assert router.post("/v1/embeddings", {"model": MODEL, "input": "x"}).status == 200


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        (MODEL, "/v1/embeddings", {"input": "a b c"}),
        (MODEL, "/v1/embeddings", {"input": [{"text": "a"}, {"text": "b"}]}),
        (MODEL, "/v1/embeddings", {"input": [{"text": "a"}]}),
        (MODEL, "/v1/embeddings", {"input": [5.0, 6.0], "encoding_format": "base64", "user": "u"}),
        (MODEL, "/v1/embeddings", {"input": ["a", " "]}),
        (MODEL, "/v1/embeddings", {"input": [[5], [1 << 30]]}),
        (MODEL, "/v1/embeddings", {"input": "a", "dimensions": 8}),
        (MODEL, "/v1/embeddings", {"input": "a", "encoding_format": "x"}),
        (MODEL, "/v1/classify", {"input": ["a", "b"]}),
        (MODEL, "/v1/classify", {"input": [5, 6]}),
        (MODEL, "/v1/classify", {"input": [[5], [6]]}),
        (MODEL, "/v1/rerank", {"query": "a", "documents": ["b", "a c", "d e f"], "top_n": 2}),
        (MODEL, "/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
        (MODEL, "/v1/rerank", {"query": "a", "documents": [""]}),
        ("scorer", "/v1/score", {"query": "Is it ", "items": ["cold", "warm"], "label_token_ids": [10, 11]}),
        (
            "scorer",
            "/v1/score",
            {"query": [5], "items": [[6], [7, 8]], "label_token_ids": [[9], [10]], "item_first": True},
        ),
        ("scorer", "/v1/score", {"query": "a", "items": "b", "label_token_ids": [9, 10], "apply_softmax": True}),
        ("scorer", "/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1 << 20]}),
        ("scorer", "/v1/score", {"query": "a", "items": ["b"]}),
    ],
    ids=str,
)
def test_the_answer_is_that_of_plain_sglang(
    router: RunningRouter, engines: list[Engine], model: str, path: str, body: dict[str, Any]
) -> None:
    asked = {"model": model, **body}
    plain = engines[0 if model == MODEL else 1].post(path, asked)
    routed = router.post(path, asked)
    assert routed.status == plain.status
    if plain.status == 200:
        found: list[float] = []
        expected: list[float] = []
        assert numbers(routed.body, found) == numbers(plain.body, expected)
        assert found == pytest.approx(expected, abs=1e-4)
        assert expected
    else:
        assert routed.body["error"]["message"] in str(plain.body["message"])
    assert all(engine.is_alive for engine in engines)
    assert router.is_idle()


@pytest.mark.chaos
def test_a_killed_instance_costs_no_request(engines: list[Engine]) -> None:
    victim = Engine.start(SECOND, (free_port(), free_port()))
    try:
        victim.wait_ready()
        with running_router([engines[0], victim], strict_models=True) as router:
            for number in range(12):
                if number == 4:
                    victim.kill()
                reply = router.post("/v1/embeddings", {"model": MODEL, "input": [f"text {number}", "b"]})
                assert (reply.status, len(reply.body["data"])) == (200, 2)
    finally:
        victim.stop()


def test_a_batch_of_embeddings(router: RunningRouter, client: openai.OpenAI, tmp_path: Path) -> None:
    texts = [f"def parse_{number}(" for number in range(12)]
    lines = [
        {"custom_id": text, "method": "POST", "url": "/v1/embeddings", "body": {"model": MODEL, "input": text}}
        for text in texts
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.parquet"
    command = [sys.executable, "-m", "sglang_ext.cli", "batch", "run", "--input", str(tmp_path / "in.jsonl")]
    command += ["--output", str(output), "--endpoint", router.url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    rows = pq.read_table(output).to_pylist()
    assert [row["custom_id"] for row in rows] == texts
    asked = client.embeddings.create(model=MODEL, input=texts[3])
    assert [len(one) for row in rows for one in row["embeddings"]] == [VECTOR_SIZE] * len(texts)
    assert rows[3]["embeddings"][0] == pytest.approx(asked.data[0].embedding, abs=1e-4)
    assert rows[3]["usage"]["prompt_tokens"] == asked.usage.prompt_tokens
