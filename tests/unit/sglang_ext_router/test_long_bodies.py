"""Bodies that pass the parser by: every byte arrives, in any pieces, and a request that follows is served."""

from __future__ import annotations

import asyncio
import contextlib
import random
from itertools import pairwise

import orjson
import pytest

from sglang_ext_router.http.request_parser import FIRST_BUFFER_BYTES, LONG_BYTES, PARSED_AT_ONCE_BYTES
from support.raw_client import RawClient, request_bytes
from support.router_process import cluster
from support.scripted_engine import reply

NEXT = b'{"text": "x", "padding": "next"}'
LOOPS = ["uvloop", "asyncio"]


def body_of(size: int, seed: int = 0) -> bytes:
    """A request to `/generate` of `size` bytes with a short prompt, which differs from others in every part."""
    draw = random.Random(f"{seed} {size}")
    text = b"".join(b"%x" % draw.getrandbits(64) for _ in range(size // 12 + 2))
    start = b'{"text": "x", "padding": "'
    return start + text[: size - len(start) - 2] + b'"}'


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", LOOPS)
@pytest.mark.parametrize("piece_bytes", [1500, 70_001, 10_000_000])
async def test_bodies_of_all_sizes_arrive(event_loop: str, piece_bytes: int) -> None:
    """Around the sizes where the way changes, one behind the other on one connection, at both instances."""
    sizes = [PARSED_AT_ONCE_BYTES, LONG_BYTES, LONG_BYTES + PARSED_AT_ONCE_BYTES, 200_000, FIRST_BUFFER_BYTES]
    sizes = [size + more for size in sizes for more in (-1, 0, 1)] + [3_000_000]
    bodies = [body_of(size) for size in sizes]
    assert [len(body) for body in bodies] == sizes
    async with cluster() as served, await served.connect() as client:
        for body in bodies:
            data = request_bytes("POST", "/generate", body)
            for start in range(0, len(data), piece_bytes):
                await client.send(data[start : start + piece_bytes])
            assert (await client.reply()).status == 200
        decoded = [request.json["padding"] for request in served.decode[0].requests]
        assert decoded == [orjson.loads(body)["padding"] for body in bodies]
        prefilled = [one.json["padding"] for engine in (served.short[0], served.long[0]) for one in engine.requests]
        assert sorted(prefilled) == sorted(decoded)
        await served.until(lambda: served.router.clients.buffered_bytes == 0)


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", LOOPS)
@pytest.mark.parametrize("has_pauses", [False, True])
async def test_a_request_behind_a_long_body_is_served(event_loop: str, has_pauses: bool) -> None:
    async with cluster() as served, await served.connect() as client:
        for _ in range(3):
            data = request_bytes("POST", "/generate", body_of(150_000)) + request_bytes("POST", "/generate", NEXT)
            cuts = [0, 50, 60_000, 150_000, 150_100, len(data)] if has_pauses else [0, len(data)]
            for start, end in pairwise(cuts):
                await client.send(data[start:end])
                if has_pauses:
                    await asyncio.sleep(0.01)
            assert (await client.reply()).status == 200
            assert (await client.reply()).status == 200
            assert [request.json["padding"] for request in served.decode[0].requests][-1] == "next"


@pytest.mark.slow
async def test_long_bodies_behind_a_request_that_is_served_wait_their_turn() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].plan(reply(delay_s=0.5))
        bodies = [body_of(60_000, seed) for seed in range(3)]
        await client.send(request_bytes("POST", "/generate", NEXT))
        await served.decode[0].received(1)
        await client.send(b"".join(request_bytes("POST", "/generate", body) for body in bodies))
        await served.until(lambda: served.router.clients.buffered_bytes > 60_000)
        assert len(served.decode[0].requests) == 1
        for _ in range(4):
            assert (await client.reply()).status == 200
        texts = [request.json["padding"] for request in served.decode[0].requests]
        assert texts == ["next", *(orjson.loads(body)["padding"] for body in bodies)]


@pytest.mark.parametrize("event_loop", LOOPS)
async def test_a_client_that_leaves_within_a_long_body_leaves_nothing(event_loop: str) -> None:
    async with cluster() as served:
        for is_reset in (True, False):
            client = await served.connect()
            await client.send(request_bytes("POST", "/generate", body_of(500_000))[:300_000])
            await served.until(lambda: served.router.clients.buffered_bytes == 500_000)
            client.reset() if is_reset else client.close()
            await served.until(lambda: not served.router.clients.open)
            assert served.router.clients.buffered_bytes == 0
        assert served.upstream_requests() == 0


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", LOOPS)
async def test_a_long_body_that_stalls_is_refused_and_the_rest_of_it_is_not_read(event_loop: str) -> None:
    async with cluster(body_timeout_secs=0.3) as served, await served.connect() as client:
        data = request_bytes("POST", "/generate", body_of(500_000))
        await client.send(data[:100_000])
        answer = await client.reply()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert served.router.clients.buffered_bytes == 0
        await client.send(data[100_000:])
        assert await client.is_closed_within(8.0)
        assert served.upstream_requests() == 0


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", LOOPS)
async def test_what_grows_beyond_all_that_may_be_buffered_is_refused(event_loop: str) -> None:
    """The announced size was free then; another body took it meanwhile."""
    async with cluster(max_payload_size=4 << 20, max_buffered_size=5 << 20) as served:
        first, second = await served.connect(), await served.connect()
        data = request_bytes("POST", "/generate", body_of(4 << 20))
        for client in (first, second):
            await client.send(data[:500_000])
        await served.until(lambda: served.router.clients.buffered_bytes > 990_000)
        await asyncio.gather(_send(first, data[500_000:-1]), _send(second, data[500_000:-1]))
        await served.until(lambda: bool(served.router.clients.refusals))  # neither is whole, and both have grown
        statuses = await asyncio.gather(_finish(first, data[-1:]), _finish(second, data[-1:]))
        assert sorted(statuses) == [200, 503]
        await served.until(lambda: served.router.clients.buffered_bytes == 0)


async def _send(client: RawClient, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        await client.send(data)


async def _finish(client: RawClient, data: bytes) -> int:
    await _send(client, data)
    return (await client.reply()).status


async def test_expect_continue_with_a_long_body() -> None:
    async with cluster() as served, await served.connect() as client:
        body = body_of(100_000)
        await client.send(
            b"POST /generate HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        assert (await client.head())[0] == 100
        await client.send(body)
        assert (await client.reply()).status == 200
        assert served.decode[0].requests[-1].json["padding"] == orjson.loads(body)["padding"]


async def test_a_long_body_for_a_control_path() -> None:
    """It has no instances to go to, but its handler gets all of it."""
    async with cluster(admin_api_key="k") as served, await served.connect() as client:
        await client.send(
            request_bytes("POST", "/workers", b'{"url": "' + b"x" * 30_000 + b'"}', {"Authorization": "Bearer k"})
        )
        assert (await client.reply()).status == 400
        await client.send(request_bytes("POST", "/generate", NEXT))
        assert (await client.reply()).status == 200
