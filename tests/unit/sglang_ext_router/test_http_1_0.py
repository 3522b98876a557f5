"""Clients of HTTP/1.0, as nginx's default `proxy_pass`: no chunks, and the end of a reply is that of the connection."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.http.replies import CHUNKED_END, Unchunked, chunk
from support.raw_client import request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import DONE, cut, event, hang, reply, status, stream, stream_head

STREAM = {"text": "x", "stream": True}
WHOLE = {"text": "x"}
EVENTS = (event({"text": "a"}), event({"text": "b"}), DONE)


async def ask(served: Cluster, body: dict[str, Any], target: str = "/generate") -> tuple[int, dict[str, str], bytes]:
    async with await served.connect() as client:
        answer = await client.ask("POST", target, body, version="1.0")
        assert answer.chunks is None, "it understands no chunks"
        assert answer.headers["connection"] == "close"
        assert await client.is_closed_within(1.0)
        return answer.status, dict(answer.headers), answer.body


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
async def test_a_stream_ends_with_its_connection(delay_s: float) -> None:
    async with cluster() as served:
        served.decode[0].script = stream(*EVENTS, delay_s=delay_s)
        code, headers, body = await ask(served, STREAM)
        assert (code, headers["content-type"], body) == (200, "text/event-stream", b"".join(EVENTS))
        assert "content-length" not in headers


async def test_events_come_as_they_are_made() -> None:
    async with cluster() as served:
        release = asyncio.Event()

        async def play(turn: Any) -> None:
            await stream(EVENTS[0], end=b"")(turn)
            await release.wait()
            await turn.write(chunk(DONE) + CHUNKED_END)

        served.decode[0].script = play
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/generate", json.dumps(STREAM).encode(), version="1.0"))
            await client.head()
            assert await client.exactly(len(EVENTS[0])) == EVENTS[0]
            release.set()
            assert await client.exactly(len(DONE)) == DONE
            assert await client.is_closed_within(1.0)


async def test_a_reply_in_chunks_that_is_no_stream() -> None:
    async with cluster() as served:
        served.decode[0].script = stream(b'{"text": ', b'"ok"}')
        assert (await ask(served, WHOLE))[2] == b'{"text": "ok"}'


async def test_a_whole_reply_and_an_error_have_their_length() -> None:
    async with cluster() as served:
        served.decode[0].script = reply({"text": "ok"})
        code, headers, body = await ask(served, WHOLE)
        assert (code, json.loads(body), int(headers["content-length"])) == (200, {"text": "ok"}, len(body))
        served.decode[0].script = served.short[0].script = status(400, "no")
        code, _, body = await ask(served, {"prompt": "x", "stream": True}, "/v1/completions")
        assert (code, json.loads(body)["error"]["message"]) == (400, "no")


async def test_a_stream_whose_instance_is_lost_ends_by_an_error_event() -> None:
    async with cluster(retry_max_retries=0) as served:
        served.decode[0].script = cut(stream_head() + chunk(EVENTS[0]))
        code, _, body = await ask(served, STREAM)
        assert code == 200
        assert body.startswith(EVENTS[0] + b'data: {"error"')
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_kept_alive_by_empty_lines() -> None:
    async with cluster(sse_keep_alive_secs=0.1, request_timeout_secs=1.0) as served:
        served.decode[0].script = served.short[0].script = hang()
        code, headers, body = await ask(served, STREAM)
        assert (code, headers["content-type"]) == (200, "text/event-stream")
        assert body.startswith(b"\n\n")
        assert b"\r\n" not in body
        assert b'data: {"error"' in body


async def test_a_client_that_leaves_aborts_its_request() -> None:
    async with cluster() as served:
        served.decode[0].script = stream(*EVENTS, end=b"")
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/generate", json.dumps(STREAM).encode(), version="1.0"))
            await client.head()
        await served.until_idle()


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_chunks_come_apart_wherever_they_are_cut(chunks: list[bytes], cuts: list[int]) -> None:
    coded = b"".join(map(chunk, chunks)) + CHUNKED_END
    unchunked, got, at = Unchunked(), b"", 0
    while at < len(coded):
        size = cuts[at % len(cuts)]
        got += unchunked.feed(coded[at : at + size])
        at += size
    assert got == b"".join(chunks)
    assert unchunked.is_over


@given(st.binary(max_size=60))
def test_what_is_no_chunk_ends_it(data: bytes) -> None:
    unchunked = Unchunked()
    unchunked.feed(data)
    assert len(unchunked.feed(b"x" * 10)) <= 10
