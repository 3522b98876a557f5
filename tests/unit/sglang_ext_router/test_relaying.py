"""Requests reach both instances alike, replies reach the client byte for byte."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from support.raw_client import request_bytes
from support.router_process import cluster
from support.scripted_engine import (
    BOOTSTRAP_PORT,
    DONE,
    STREAM_END,
    Script,
    chunk,
    event,
    in_pieces,
    raw,
    reply,
    response,
    stream,
    stream_head,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
PD_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "rid")


def without_pd_fields(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in PD_FIELDS}


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_both_legs_get_the_same_body(event_loop: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.status == 200
        (prefill,), (decode,) = served.short[0].requests, served.decode[0].requests
        assert prefill.body == decode.body
        sent = prefill.json
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", BOOTSTRAP_PORT)
        assert sent["rid"] == f"{sent['bootstrap_room']:016x}"
        assert without_pd_fields(sent) == CHAT
        assert prefill.header("content-type") == "application/json"
        assert prefill.header("host") == f"127.0.0.1:{served.short[0].port}"


@pytest.mark.slow
async def test_neither_leg_waits_for_the_other() -> None:
    async with cluster() as served:
        served.short[0].plan(reply(delay_s=0.3))
        served.decode[0].plan(reply(delay_s=0.3))
        answer = await served.ask("POST", "/v1/chat/completions", CHAT)
        assert answer.status == 200
        assert abs(served.short[0].requests[0].at_s - served.decode[0].requests[0].at_s) < 0.15


@pytest.mark.slow
async def test_the_client_does_not_wait_for_prefill_to_end() -> None:
    async with cluster() as served:
        served.short[0].plan(reply(delay_s=1.0))
        async with await served.connect() as client:
            async with asyncio.timeout(0.7):
                answer = await client.ask("POST", "/v1/chat/completions", CHAT)
                again = await client.ask("POST", "/v1/chat/completions", CHAT)
        assert (answer.status, again.status) == (200, 200)


@pytest.mark.slow
async def test_two_thousand_requests_at_once_have_two_thousand_rooms() -> None:
    async with cluster(short=2, decode=2) as served:

        async def ask_twenty() -> None:
            async with await served.connect() as client:
                for _ in range(20):
                    assert (await client.ask("POST", "/v1/chat/completions", CHAT)).status == 200

        await asyncio.gather(*(ask_twenty() for _ in range(100)))
        by_room: dict[int, list[bytes]] = {}
        for engine in served.engines:
            for request in engine.requests:
                by_room.setdefault(request.room, []).append(request.body)
        assert len(by_room) == 2000
        assert all(len(bodies) == 2 and bodies[0] == bodies[1] for bodies in by_room.values())
        rids = {json.loads(bodies[0])["rid"] for bodies in by_room.values()}
        assert len(rids) == 2000


@pytest.mark.parametrize(
    ("target", "body", "rooms"),
    [
        ("/v1/chat/completions", {**CHAT, "n": 3}, 3),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}, 4),
        ("/v1/completions", {"prompt": [[1, 2], [3]]}, 2),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/generate", {"text": ["a", "b", "c"]}, 3),
        ("/generate", {"input_ids": [[1], [2]], "sampling_params": {"n": 2}}, 4),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 2}, {"n": 2}]}, 4),
        ("/generate", {"input_embeds": [[[0.5]], [[0.25]]]}, 2),
        ("/generate", {"input_embeds": [[0.5], [0.25]]}, 1),
    ],
)
async def test_every_sequence_has_a_room_of_its_own(target: str, body: dict[str, Any], rooms: int) -> None:
    async with cluster() as served:
        for _ in range(2):
            assert (await served.ask("POST", target, body)).status == 200
        first, second = served.decode[0].requests
        assert second.room - first.room == rooms


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 5, "seed": 0, "temperature": 0.0}),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
                "tool_choice": "auto",
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
                "chat_template_kwargs": {"enable_thinking": False},
            },
        ),
        ("/v1/completions", {"prompt": "é\u2028\U0001f600\x00", "echo": False, "unknown": {"a": [None, 1e-7, -0.0]}}),
        ("/generate", {"text": "x", "sampling_params": {"regex": "a\\d+", "max_new_tokens": 4}, "lora_path": None}),
    ],
)
async def test_fields_pass_through_untouched(target: str, fields: dict[str, Any]) -> None:
    async with cluster() as served:
        assert (await served.ask("POST", target, fields)).status == 200
        for engine in (served.short[0], served.decode[0]):
            (request,) = engine.requests
            assert request.target == target
            assert without_pd_fields(request.json) == fields


async def test_without_fields_of_its_own_the_clients_text_is_kept_as_it_is() -> None:
    text = b'{ "text" : "caf\\u00e9 \\/",\n "big": 123456789012345678901234567890, "n1": 1.10 , "a":{"b":1}}  \n'
    async with cluster() as served:
        assert (await served.ask("POST", "/generate", text)).status == 200
        assert served.decode[0].requests[0].body.startswith(text[: text.rindex(b"}")])


async def test_query_and_known_headers_reach_the_instances_others_do_not() -> None:
    async with cluster() as served:
        headers = {
            "traceparent": "00-1-2-01",
            "Authorization": "Bearer k",
            "x-sgl-ttft-slo-ms": "60000",
            "x-request-id": "mine",
            "Cookie": "secret",
            "X-Forwarded-For": "1.2.3.4",
            "Connection": "keep-alive, x-foo",
            "Accept-Encoding": "gzip",
        }
        answer = await served.ask("POST", "/generate?a=1&b=%20", {"text": "x"}, headers)
        assert answer.headers["x-request-id"] == "mine"
        for engine in (served.short[0], served.decode[0]):
            (request,) = engine.requests
            assert request.target == "/generate?a=1&b=%20"
            assert dict(request.headers) == {
                "host": f"127.0.0.1:{engine.port}",
                "content-type": "application/json",
                "traceparent": "00-1-2-01",
                "authorization": "Bearer k",
                "x-sgl-ttft-slo-ms": "60000",
                "x-request-id": "mine",
                "content-length": str(len(request.body)),
            }


async def test_the_reply_says_who_served_it() -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/generate", {"text": "x"})
        assert answer.headers["x-sglang-ext-class"] == "short"
        assert answer.headers["x-sglang-ext-prefill"] == served.short[0].url
        assert answer.headers["x-sglang-ext-decode"] == served.decode[0].url
        assert answer.headers["x-sglang-ext-queue-ms"] == "0"
        assert answer.headers["x-request-id"] == f"{served.decode[0].requests[0].room:016x}"


async def test_the_reply_can_keep_that_to_itself() -> None:
    async with cluster(disable_route_headers=True) as served:
        answer = await served.ask("POST", "/generate", {"text": "x"})
        assert not [name for name in answer.headers if name.startswith("x-sglang-ext")]
        assert "x-request-id" in answer.headers


WHOLE = response(b'{"text": "\xc3\xa9\\n\\u0000", "id": 1}', headers=(("x-own", "1"), ("server", "uvicorn")))
EVENTS = (event({"t": "\u00e9"}), event({"t": "b"}) + event({"t": "c"}), event({"t": ""}), DONE)
STREAM = stream_head() + b"".join(map(chunk, EVENTS)) + STREAM_END


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 1 << 20])
async def test_a_whole_reply_is_relayed_exactly(event_loop: str, piece_bytes: int) -> None:
    async with cluster() as served:
        served.decode[0].script = in_pieces(WHOLE, piece_bytes)
        async with await served.connect() as client:
            for _ in range(2):
                answer = await client.ask("POST", "/generate", {"text": "x"})
                assert (answer.status, answer.body, answer.chunks) == (200, WHOLE[WHOLE.index(b"\r\n\r\n") + 4 :], None)
                assert answer.headers["x-own"] == "1"


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("piece_bytes", [1, 2, 5, 11, 1 << 20])
async def test_a_stream_is_relayed_exactly(event_loop: str, piece_bytes: int) -> None:
    async with cluster() as served:
        served.decode[0].script = in_pieces(STREAM, piece_bytes)
        async with await served.connect() as client:
            for _ in range(2):
                answer = await client.ask("POST", "/generate", {"text": "x", "stream": True})
                assert answer.chunks == EVENTS


@pytest.mark.parametrize("piece_bytes", [1, 30, 1 << 20])
async def test_a_stream_may_be_answered_whole(piece_bytes: int) -> None:
    async with cluster() as served:
        served.decode[0].script = in_pieces(WHOLE, piece_bytes)
        answer = await served.ask("POST", "/generate", {"text": "x", "stream": True})
        assert (answer.status, answer.body, answer.chunks) == (200, WHOLE[WHOLE.index(b"\r\n\r\n") + 4 :], None)


@pytest.mark.slow
async def test_each_event_is_passed_on_when_it_comes() -> None:
    async with cluster() as served:
        served.decode[0].plan(stream(*EVENTS, delay_s=0.15))
        async with await served.connect() as client:
            loop = asyncio.get_running_loop()
            body = json.dumps({"text": "x", "stream": True}).encode()
            await client.send(request_bytes("POST", "/generate", body))
            await client.head()
            times = []
            while await client.chunk():
                times.append(loop.time())
            assert len(times) == len(EVENTS)
            gaps = [later - earlier for earlier, later in pairwise(times)]
            assert all(gap > 0.05 for gap in gaps), gaps


@pytest.mark.parametrize("size_bytes", [0, 1, 65_535, 65_536, 5_000_000])
async def test_replies_of_any_size(size_bytes: int) -> None:
    body = b'"' + b"x" * size_bytes + b'"'
    async with cluster() as served:
        served.decode[0].script = raw(response(body))
        served.short[0].script = raw(response(body))
        async with await served.connect() as client:
            for _ in range(2):
                assert (await client.ask("POST", "/generate", {"text": "x"})).body == body


async def test_a_prompt_of_some_megabytes() -> None:
    text = "word " * 400_000
    async with cluster() as served:
        for engine in served.decode:
            engine.info = {**engine.info, "context_length": 1 << 20, "max_total_num_tokens": 1 << 21}  # type: ignore[dict-item]
            served.worker(engine.url).has_info = False
        await served.until(lambda: served.worker(served.decode[0].url).max_prompt_tokens == 1 << 20)
        assert (await served.ask("POST", "/generate", {"text": text})).status == 200
        assert served.long[0].requests[0].json["text"] == text


@pytest.mark.parametrize(
    "script",
    [
        raw(response(b"{}", headers=(("Connection", "close"),)), then="close"),
        raw(response(b"{}", headers=(("connection", "keep-alive"), ("Keep-Alive", "timeout=5")))),
    ],
)
async def test_an_instances_connection_headers_are_its_own(script: Script) -> None:
    async with cluster() as served:
        served.decode[0].script = script
        async with await served.connect() as client:
            for _ in range(3):
                answer = await client.ask("POST", "/generate", {"text": "x"})
                assert answer.status == 200
                assert "connection" not in answer.headers
                assert "keep-alive" not in answer.headers


async def test_a_client_that_wants_the_connection_closed_is_told_and_gets_it() -> None:
    async with cluster() as served, await served.connect() as client:
        answer = await client.ask("POST", "/generate", {"text": "x"}, {"Connection": "close"})
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await client.is_closed_within(1.0)
