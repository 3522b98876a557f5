"""The `openai` SDK and others against the router over real SGLang: what they call works, streamed and not."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest

from support.engines import Engine
from support.router_cli import RunningRouter, running_router

pytestmark = pytest.mark.integration


@pytest.fixture
def client(router: RunningRouter) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


USER: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "What is a parser?"}]


def test_chat(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=USER, max_tokens=12, temperature=0)
    assert whole.usage
    assert whole.usage.completion_tokens == 12
    text = whole.choices[0].message.content
    assert text
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=USER,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 12
    with client.chat.completions.stream(model=model, messages=USER, max_tokens=12, temperature=0) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text


def test_completions(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="def parse(", max_tokens=12, temperature=0)
    text = whole.choices[0].text
    stream = client.completions.create(model=model, prompt="def parse(", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text
    both = client.completions.create(model=model, prompt=["def parse(", "class A"], max_tokens=12, temperature=0)
    assert len(both.choices) == 2
    assert both.choices[0].text == text


def test_responses(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(
        model=model, instructions="Be brief.", input="What is a parser?", max_output_tokens=12, temperature=0
    )
    assert whole.id.startswith("resp_")
    assert whole.output_text
    assert (whole.status, whole.usage is not None) == ("incomplete", True)  # by max_output_tokens
    events = list(
        client.responses.create(
            model=model,
            instructions="Be brief.",
            input=[{"role": "user", "content": "What is a parser?"}],
            max_output_tokens=12,
            temperature=0,
            stream=True,
        )
    )
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.incomplete"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_a_response_is_not_kept(client: openai.OpenAI, model: str, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=model, input="x", max_output_tokens=4, extra_body={field: "resp_1"})
    assert refused.value.param == field
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_is_asked_for_once(
    router: RunningRouter, client: openai.OpenAI, model: str, stream: bool
) -> None:
    """The instances refuse it, one with an event that looks like an instance's failure."""
    before = router.metric("sglang_ext_router_retries_total")
    asked = {"model": model, "input": "x " * 1500, "max_output_tokens": 1900}
    if stream:
        events = list(client.responses.create(**asked, stream=True))
        assert events[-1].type == "response.failed"
        assert "maximum context length" in events[-1].response.error.message
    else:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.responses.create(**asked)
    assert router.metric("sglang_ext_router_retries_total") == before


def test_models(client: openai.OpenAI, model: str) -> None:
    assert [one.id for one in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_what_is_not_served(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.embeddings.create(model=model, input="x")


@pytest.mark.parametrize("kind", ["chat", "completion", "response"])
def test_a_stream_that_is_closed_frees_the_engines(
    router: RunningRouter, engines: list[Engine], client: openai.OpenAI, model: str, kind: str
) -> None:
    if kind == "chat":
        stream = client.chat.completions.create(
            model=model, messages=USER, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
    elif kind == "completion":
        stream = client.completions.create(
            model=model, prompt="def parse(", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
    else:
        stream = client.responses.create(model=model, input="What is a parser?", max_output_tokens=1900, stream=True)
    with stream:
        for number, _ in enumerate(stream):
            if number == 6:
                break
    for engine in engines:
        engine.wait_idle(5.0)
    assert router.is_idle()


def test_messages_of_anthropics_clients(router: RunningRouter, client: openai.OpenAI, model: str) -> None:
    chat = client.chat.completions.create(model=model, messages=USER, max_tokens=12, temperature=0)
    body = {"model": model, "messages": USER, "max_tokens": 12, "temperature": 0}
    whole = router.post("/v1/messages", body)
    assert (whole.status, whole.body["type"]) == (200, "message")
    (block,) = whole.body["content"]
    assert block == {"type": "text", "text": chat.choices[0].message.content}
    assert chat.usage
    counted = router.post("/v1/messages/count_tokens", {"model": model, "messages": USER})
    assert counted.body == {"input_tokens": chat.usage.prompt_tokens}
    events = _post_1_0(router, "/v1/messages", {**body, "stream": True}).split("\n\n")
    data = [json.loads(event.partition("data: ")[2]) for event in events if event]
    assert [one["type"] for one in data][:: len(data) - 1] == ["message_start", "message_stop"]
    assert "".join(one["delta"]["text"] for one in data if one["type"] == "content_block_delta") == block["text"]
    refused = router.post("/v1/messages", {**body, "messages": [{"role": "nobody", "content": "x"}]})
    assert (refused.status, refused.body["type"]) == (400, "error")


def test_a_stream_over_http_1_0(router: RunningRouter, client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="def parse(", max_tokens=12, temperature=0)
    body = {"model": model, "prompt": "def parse(", "max_tokens": 12, "temperature": 0, "stream": True}
    events = _post_1_0(router, "/v1/completions", body).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    data = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(one["choices"][0]["text"] for one in data if one["choices"]) == whole.choices[0].text


def _post_1_0(router: RunningRouter, path: str, body: object) -> str:
    content = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", router.port), 30) as connection:
        connection.sendall(f"POST {path} HTTP/1.0\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == 200
        assert reply.getheader("transfer-encoding") is None
        return reply.read().decode()


@pytest.mark.parametrize("tokens", [5000, pytest.param(1 << 20, marks=pytest.mark.full)])
def test_a_prompt_beyond_the_context_is_refused_in_sglangs_words(
    client: openai.OpenAI, model: str, tokens: int
) -> None:
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length") as refused:
        client.completions.create(model=model, prompt=[7] * tokens, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert f"{tokens} tokens" in refused.value.message


@pytest.mark.parametrize("where", ["router", "instances"])
def test_a_request_is_aborted_by_its_clients_id(router: RunningRouter, engines: list[Engine], where: str) -> None:
    got = []
    body = {"text": "Once", "rid": f"mine-{where}", "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True}}
    thread = threading.Thread(target=lambda: got.append(router.post("/generate", body)))
    thread.start()
    deadline_s = time.monotonic() + 20.0
    while thread.is_alive() and time.monotonic() < deadline_s:  # before it is registered an abort finds nothing
        if where == "router":
            assert router.post("/abort_request", {"rid": body["rid"]}).status == 200
        else:
            for engine in engines:
                assert engine.post("/abort_request", {"rid": body["rid"]}).status == 200
        time.sleep(0.2)
    thread.join()
    (answer,) = got
    if answer.status == 200:  # it had begun
        info = answer.body["meta_info"]
        assert (info["id"], info["finish_reason"]["type"]) == (body["rid"], "abort")
        assert info["completion_tokens"] < 1900
    for engine in engines:
        engine.wait_idle(5.0)
    assert router.is_idle()


def test_errors_are_the_sdks(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=model, messages=USER, temperature="hot")  # type: ignore[arg-type]
    assert refused.value.param == "temperature"


@pytest.mark.full
def test_a_stream_that_is_kept_alive(engines: list[Engine]) -> None:
    """The instance stands still for a while; neither the SDK nor a client that takes every line for JSON minds."""
    with running_router(
        engines, "--set", "limits.sse_keep_alive_secs=0.2", "--length-boundary-tokens", "256"
    ) as router:
        asked = {"text": "def parse(", "sampling_params": {"temperature": 0, "max_new_tokens": 6}, "stream": True}
        with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
            model = client.models.list().data[0].id
            whole = client.completions.create(model=model, prompt="def parse(", max_tokens=6, temperature=0)
            with standing_still(engines[0]):
                stream = client.completions.create(
                    model=model, prompt="def parse(", max_tokens=6, temperature=0, stream=True
                )
                assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
        with standing_still(engines[0]):
            reply, _ = router.call("POST", "/generate", asked)
        lines = reply.body.split("\n")
        assert lines[0] == ""  # it was kept alive
        # As sglang.bench_serving reads it.
        events = [line.removeprefix("data: ") for line in lines if line.strip()]
        assert events.pop() == "[DONE]"
        assert json.loads(events[-1])["text"] == whole.choices[0].text


@contextmanager
def standing_still(engine: Engine) -> Iterator[None]:
    """Stopped for a second, which the router bears."""
    engine.freeze()
    timer = threading.Timer(1.0, engine.thaw)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        engine.thaw()
