"""A stream that brings nothing is kept alive by empty lines; what comes of it is told behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import (
    DONE,
    STREAM_END,
    Script,
    Turn,
    chunk,
    cut,
    event,
    hang,
    reply,
    status,
    stream,
    stream_head,
)

STREAMED = {"text": "x", "stream": True}
ONE: dict[str, Any] = {"sse_keep_alive_secs": 0.2, "long": 0}
EMPTY_LINE = b"\n"


async def ask(served: Cluster, client: RawClient, body: dict[str, Any] = STREAMED) -> None:
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))


async def rest(client: RawClient) -> bytes:
    """What the events are made of: everything to the end of the body."""
    data = b""
    while piece := await client.chunk():
        data += piece
    return data


def after(told: asyncio.Event, script: Script) -> Script:
    """Play the script once `told`."""

    async def play(turn: Turn) -> None:
        await told.wait()
        await script(turn)

    return play


async def begun(client: RawClient) -> None:
    """The head and two empty lines have come."""
    code, headers = await client.head()
    assert (code, headers["content-type"], headers["transfer-encoding"]) == (200, "text/event-stream", "chunked")
    assert "content-length" not in headers
    for _ in range(2):
        assert await client.chunk() == EMPTY_LINE


@pytest.mark.slow
async def test_a_stream_that_begins_late() -> None:
    async with cluster(**ONE) as served, await served.connect() as client:
        told = asyncio.Event()
        served.short[0].script = after(told, stream(event(0), DONE))
        served.decode[0].script = after(told, stream(event({"text": "a"}), event({"text": "b"}), DONE))
        await ask(served, client)
        await begun(client)
        told.set()
        assert (await rest(client)).lstrip(b"\n") == event({"text": "a"}) + event({"text": "b"}) + DONE
        assert (await client.ask("GET", "/health")).status == 200  # the connection is in order


@pytest.mark.slow
async def test_attempts_before_the_first_byte_are_still_repeated() -> None:
    async with cluster(retry_max_retries=1, **ONE) as served, await served.connect() as client:
        told = asyncio.Event()
        served.short[0].script = stream(event(0), DONE)
        served.decode[0].plan(after(told, status(503)), stream(event({"text": "a"}), DONE))
        await ask(served, client)
        await begun(client)
        told.set()
        assert (await rest(client)).lstrip(b"\n") == event({"text": "a"}) + DONE
        rooms = [request.room for request in served.decode[0].requests]
        assert len(set(rooms)) == len(rooms) == 2


@pytest.mark.slow
async def test_an_instances_refusal_becomes_an_event() -> None:
    async with cluster(**ONE) as served, await served.connect() as client:
        told = asyncio.Event()
        served.short[0].script = hang()
        served.decode[0].script = after(told, reply({"object": "error", "message": "too hot", "code": 400}, 400))
        await ask(served, client)
        await begun(client)
        told.set()
        data = (await rest(client)).lstrip(b"\n")
        error, done, end = data.split(b"\n\n")
        assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "too hot"
        assert (done, end) == (b"data: [DONE]", b"")
        assert (await client.ask("GET", "/health")).status == 200


@pytest.mark.slow
async def test_the_routers_own_error_becomes_an_event() -> None:
    async with cluster(disable_retries=True, **ONE) as served, await served.connect() as client:
        told = asyncio.Event()
        served.short[0].script = hang()
        served.decode[0].script = after(told, cut())
        await ask(served, client)
        await begun(client)
        told.set()
        data = (await rest(client)).lstrip(b"\n")
        error = json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))["error"]
        assert error["code"] == 502
        assert data.endswith(DONE)
        await served.until_idle()


@pytest.mark.slow
async def test_a_stream_that_waits_in_the_queue() -> None:
    async with cluster(max_concurrent_requests=1, queue_timeout_secs=1.5, **ONE) as served:
        for engine in (*served.short, *served.decode):
            engine.script = hang()
        async with await served.connect() as first, await served.connect() as client:
            await ask(served, first, {"text": "x"})
            await served.decode[0].received(1)
            await ask(served, client)
            await begun(client)
            data = (await rest(client)).lstrip(b"\n")
            assert json.loads(data.split(b"\n\n")[0].removeprefix(b"data: "))["error"]["code"] == 408


@pytest.mark.slow
async def test_only_between_events() -> None:
    async with cluster(**ONE) as served, await served.connect() as client:
        told = asyncio.Event()

        async def halting(turn: Turn) -> None:
            whole = event({"text": "a"})
            await turn.write(stream_head() + chunk(whole))
            await told.wait()
            await turn.write(chunk(whole[:9]))
            await asyncio.sleep(0.8)  # nothing may come now
            await turn.write(chunk(whole[9:]) + chunk(DONE) + STREAM_END)

        served.short[0].script = stream(event(0), DONE)
        served.decode[0].script = halting
        await ask(served, client)
        assert (await client.head())[0] == 200
        assert await client.chunk() == event({"text": "a"})
        assert await client.chunk() == EMPTY_LINE
        told.set()
        data = (await rest(client)).lstrip(b"\n")
        assert data == event({"text": "a"}) + DONE


@pytest.mark.slow
@pytest.mark.parametrize(("interval_s", "body"), [(0.2, {"text": "x"}), (0.0, STREAMED)])
async def test_nothing_for_what_is_no_stream_or_by_option(interval_s: float, body: dict[str, Any]) -> None:
    async with cluster(sse_keep_alive_secs=interval_s, long=0) as served, await served.connect() as client:
        script = stream(event(0), DONE) if "stream" in body else reply({"text": "a"})
        served.short[0].script = served.decode[0].script = _late(script)
        await ask(served, client, body)
        answer = await client.reply()
        assert answer.status == 200
        assert not answer.body.startswith(b"\n")


def _late(script: Script) -> Script:
    async def play(turn: Turn) -> None:
        await asyncio.sleep(0.8)
        await script(turn)

    return play
