"""Anthropic's /v1/messages through both legs: streams, errors in Anthropic's shape, keys, ids, and counting."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_ext_router.request.prompt import count_media, measure
from support.raw_client import Reply
from support.router_process import cluster
from support.scripted_engine import Turn, chunk, cut, hang, reply, status, stream, stream_head

BODY: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
STREAM = {**BODY, "stream": True}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "usage": {"output_tokens": 4}}


def named(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


START = named("message_start", message=MESSAGE)
DELTA = named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"})
STOP = named("message_stop")


def failure(kind: str) -> bytes:
    return named("error", error={"type": kind, "message": "no"})


def anthropic_error(answer: Reply) -> dict[str, Any]:
    """The error object, checked to be in Anthropic's shape."""
    content = answer.json
    assert content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    error: dict[str, Any] = content["error"]
    return error


async def test_both_legs_get_it_with_an_id_that_can_be_aborted() -> None:
    async with cluster() as served:
        served.short[0].script = served.decode[0].script = reply(MESSAGE)
        headers = {"anthropic-version": "2023-06-01", "x-override-rid": "evil"}
        answer = await served.ask("POST", "/v1/messages?beta=true", BODY, headers)
        assert (answer.status, answer.json) == (200, MESSAGE)
        for engine in (served.short[0], served.decode[0]):
            (request,) = engine.requests
            assert (request.path, request.json["messages"]) == ("/v1/messages", BODY["messages"])
            assert request.header("x-override-rid") == request.json["rid"]
            assert type(request.json["bootstrap_room"]) is int


async def test_a_client_that_leaves_aborts_both_legs() -> None:
    async with cluster() as served:
        served.short[0].script = served.decode[0].script = hang()
        task = asyncio.create_task(served.ask("POST", "/v1/messages", STREAM))
        await served.decode[0].received(1)
        task.cancel()
        for engine in (served.short[0], served.decode[0]):
            await engine.abort_of(engine.requests[0].json["rid"], 1.0)


async def test_a_stream() -> None:
    async with cluster() as served:
        events = (START, DELTA, STOP)
        served.short[0].script = served.decode[0].script = stream(*events, delay_s=0.01)
        assert (await served.ask("POST", "/v1/messages", STREAM)).chunks == events


@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_failure_as_the_first_event_is_tried_elsewhere(leg: str, is_announced: bool) -> None:
    async with cluster(short=2, decode=2, long=0, retry_initial_backoff_ms=1) as served:
        good = stream(START, DELTA, STOP, delay_s=0.05)
        for engine in (*served.short, *served.decode):
            engine.script = good
        broken = stream(*([START] if is_announced else []), failure("api_error"), STOP, delay_s=0.02)
        for engine in served.short if leg == "prefill" else served.decode:
            engine.plan(broken)
        answer = await served.ask("POST", "/v1/messages", STREAM)
        assert answer.chunks == (START, DELTA, STOP)


async def test_a_refusal_as_the_first_event_is_relayed() -> None:
    async with cluster() as served:
        served.short[0].script = hang()
        served.decode[0].script = stream(START, failure("invalid_request_error"), STOP)
        answer = await served.ask("POST", "/v1/messages", STREAM)
        assert answer.chunks is not None
        assert b"".join(answer.chunks) == START + failure("invalid_request_error") + STOP
        assert len(served.decode[0].requests) == 1


async def test_a_stream_that_breaks_ends_by_anthropics_error() -> None:
    async with cluster() as served:

        async def play(turn: Turn) -> None:
            await turn.write(stream_head() + chunk(START) + chunk(DELTA))
            await asyncio.sleep(0.05)
            turn.cut()

        served.short[0].script = stream(START, DELTA, STOP)
        served.decode[0].script = play
        answer = await served.ask("POST", "/v1/messages", STREAM)
        assert answer.chunks is not None
        kind, data, *_ = answer.chunks[-1].decode().split("\n")
        assert (kind, json.loads(data.removeprefix("data: "))["error"]["type"]) == ("event: error", "api_error")


def refused(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}


OVERFLOW = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."


@pytest.mark.parametrize(
    ("given", "code", "kind", "message"),
    [
        (refused("invalid_request_error", "no"), 400, "invalid_request_error", "no"),
        (refused("BadRequestError", OVERFLOW), 400, "invalid_request_error", OVERFLOW),
        ({"object": "error", "message": "no", "type": "NotFoundError", "code": 404}, 404, "not_found_error", "no"),
        ({"detail": "no"}, 422, "invalid_request_error", "no"),
        ({"error": {"message": "no"}}, 401, "authentication_error", "no"),
        ("no", 501, "api_error", "no"),
    ],
)
@pytest.mark.parametrize("body", [BODY, STREAM])
async def test_an_instances_error_has_a_type_of_anthropics(
    given: Any, code: int, kind: str, message: str, body: dict[str, Any]
) -> None:
    async with cluster() as served:
        served.decode[0].script = reply(given, code)
        served.short[0].script = hang()
        answer = await served.ask("POST", "/v1/messages", body)
        assert (answer.status, anthropic_error(answer)) == (code, {"type": kind, "message": message})


async def test_an_instances_error_ends_a_stream_that_was_kept_alive() -> None:
    async with cluster(sse_keep_alive_secs=0.05) as served:
        served.decode[0].script = reply(refused("BadRequestError", "no"), 400, delay_s=0.5)
        served.short[0].script = hang()
        answer = await served.ask("POST", "/v1/messages", STREAM)
        assert answer.body.startswith(b"\n\n")
        assert answer.body.endswith(b"event: error\ndata: %b\n\n" % as_json(refused("invalid_request_error", "no")))


def as_json(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("body", "code", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        ({**BODY, "messages": []}, 400, "invalid_request_error"),
        ({**BODY, "max_tokens": "many"}, 400, "invalid_request_error"),
        ({**BODY, "model": "other"}, 404, "not_found_error"),
    ],
)
async def test_what_the_router_refuses(body: Any, code: int, kind: str) -> None:
    async with cluster() as served:
        served.short[0].script = served.decode[0].script = reply(MESSAGE)
        answer = await served.ask("POST", "/v1/messages", body)
        assert answer.status == code
        assert anthropic_error(answer)["type"] == kind


async def test_an_instance_that_is_lost() -> None:
    async with cluster(disable_retries=True) as served:
        served.decode[0].script = cut()
        answer = await served.ask("POST", "/v1/messages", BODY)
        assert (answer.status, anthropic_error(answer)["type"]) == (502, "api_error")
        served.decode[0].script = status(503)
        assert (await served.ask("POST", "/v1/messages", BODY)).status == 503


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "secret"}, 200),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "Bearer wrong", "x-api-key": "secret"}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_keys(headers: dict[str, str], code: int, path: str) -> None:
    async with cluster(api_key="secret") as served:
        for engine in served.engines:
            engine.script = reply(MESSAGE)
        answer = await served.ask("POST", path, BODY, headers)
        assert answer.status == (code if path == "/v1/messages" or code == 401 else answer.status)
        if code == 401:
            assert anthropic_error(answer)["type"] == "authentication_error"


async def test_tokens_are_counted_by_an_instance() -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/v1/messages/count_tokens", {"model": "m", "messages": BODY["messages"]})
        assert (answer.status, answer.json["path"]) == (200, "/v1/messages/count_tokens")
        assert json.loads(answer.json["got"])["messages"] == BODY["messages"]


def agent_messages() -> list[dict[str, Any]]:
    """The beginning of an agent's conversation, in which most text is not the agent's own."""
    thought = {"type": "thinking", "thinking": "t" * 6400, "signature": "x"}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"q": "b" * 200}}
    image = {"type": "image", "source": {}}
    found = {"type": "search_result", "title": "x", "source": "y", "content": [{"type": "text", "text": "g" * 300}]}
    return [
        {"role": "user", "content": [{"type": "text", "text": "a" * 100}, image]},
        {"role": "assistant", "content": [thought, call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "c" * 400}]},
        {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "d" * 800}, image]}]},
        {"role": "user", "content": [found, {"type": "text", "text": None}, "no block"]},
    ]


def test_all_text_of_a_conversation_counts() -> None:
    system = [{"type": "text", "text": "e" * 1600, "cache_control": {"type": "ephemeral"}}]
    body = {"system": system, "messages": agent_messages(), "tools": [{"name": "f" * 3200}]}
    prompt = measure(b"/v1/messages", body)
    assert 13000 <= prompt.text_bytes <= 13300
    assert count_media(b"/v1/messages", body) == (2, 0)


def test_a_turn_begins_as_the_turn_before_it() -> None:
    """Answers of tools and thought stand where they were said, so that an agent's turns meet at one prefix cache."""
    messages = agent_messages()
    before = measure(b"/v1/messages", {"system": "s", "messages": messages})
    further = [{"role": "assistant", "content": "h" * 5000}, {"role": "user", "content": "i" * 5000}]
    after = measure(b"/v1/messages", {"system": "s", "messages": messages + further})
    assert len(before.hashes) > 30
    assert after.hashes[: len(before.hashes)] == before.hashes
