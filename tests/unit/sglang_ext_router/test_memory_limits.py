"""What a client can make the router keep is bounded: without a key nothing, with one by limits that are answered."""

from __future__ import annotations

import asyncio
import resource

import pytest

from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import hang, reply

BODY = b'{"text": "x"}'
GOOD = request_bytes("POST", "/generate", BODY)
KEY = {"Authorization": "Bearer secret"}


def head(path: str, length: int, method: str = "POST", *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: a", f"Content-Length: {length}", *lines, "", ""]).encode()


def used_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 10


async def until_nothing_is_buffered(served: Cluster) -> None:
    await served.until(lambda: served.router.clients.buffered_bytes == 0)


# -- keys -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/generate", "/v1/tokenize", "/workers", "/nowhere"])
@pytest.mark.parametrize("lines", [(), ("Authorization: Bearer wrong",)])
async def test_without_a_key_no_body_is_read(path: str, lines: tuple[str, ...]) -> None:
    async with cluster(api_key="secret") as served, await served.connect() as client:
        await client.send(head(path, 60_000, "POST", *lines) + b"x" * 1000)
        answer = await client.reply()  # while most of the body has not been sent
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.error["type"] == "authentication_error"
        assert served.router.clients.buffered_bytes == 0


async def test_without_a_key_no_client_is_asked_to_go_on() -> None:
    async with cluster(api_key="secret") as served, await served.connect() as client:
        await client.send(head("/generate", 60_000, "POST", "Expect: 100-continue"))
        assert (await client.reply()).status == 401


@pytest.mark.slow
async def test_a_client_that_sends_all_of_a_large_body_gets_to_read_why_not() -> None:
    async with cluster(api_key="secret") as served, await served.connect() as client:
        await client.send(head("/generate", 30_000_000) + b"x" * 30_000_000)
        assert (await client.reply()).status == 401
        assert served.router.clients.buffered_bytes == 0


async def test_a_refusal_waits_for_the_replies_before_it() -> None:
    async with cluster(api_key="secret") as served, await served.connect() as client:
        served.decode[0].script = reply(delay_s=0.1)
        await client.send(request_bytes("POST", "/generate", BODY, KEY) + GOOD + GOOD)
        assert [(await client.reply()).status for _ in range(2)] == [200, 401]
        assert await client.is_closed_within(6.0)


# -- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "length", "expected"),
    [
        ("GET", "/health", 1, 200),
        ("GET", "/health", 70_000, 413),
        ("GET", "/generate", 1, 405),
        ("DELETE", "/workers/a:1", 1, 403),
        ("DELETE", "/workers/a:1", 70_000, 413),
        ("POST", "/health", 70_000, 413),
        ("POST", "/workers", 70_000, 413),
        ("POST", "/nowhere", 70_000, 413),
        ("POST", "/generate", 70_000, 200),
        ("POST", "/generate/", 70_000, 307),
        ("POST", "/v1/tokenize", 70_000, 200),
    ],
)
async def test_how_large_a_body_a_path_takes(method: str, path: str, length: int, expected: int) -> None:
    text = b'{"prompt": "x"}' if path == "/v1/tokenize" else BODY
    body = text + b" " * (length - len(text)) if length > 1 else b"x"
    async with cluster() as served:
        for framed in (
            head(path, length, method) + body,
            f"{method} {path} HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{length:x}\r\n".encode()
            + body
            + b"\r\n0\r\n\r\n",
        ):
            async with await served.connect() as client:
                await client.send(framed)
                answer = await client.reply(has_body=method != "HEAD")
                assert answer.status == expected
        await until_nothing_is_buffered(served)


async def test_no_more_than_so_much_is_buffered_in_all() -> None:
    async with cluster(max_payload_size=100_000, max_buffered_size=250_000) as served:
        held = [await served.connect() for _ in range(2)]
        for client in held:
            await client.send(head("/generate", 100_000) + b"x" * 99_000)
        await served.until(lambda: served.router.clients.buffered_bytes == 200_000)
        announced, arriving = await served.connect(), await served.connect()
        await announced.send(head("/generate", 90_000))
        answer = await announced.reply()
        assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
        await arriving.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n15f90\r\n")
        await arriving.send(b"x" * 60_000)
        assert (await arriving.reply()).status == 503
        assert (await served.ask("POST", "/generate", BODY)).status == 200
        for client in held:
            client.reset()
        await until_nothing_is_buffered(served)
        assert (await served.ask("POST", "/generate", BODY + b" " * 90_000)).status == 200


@pytest.mark.slow
async def test_a_body_in_tiny_chunks_takes_the_memory_that_is_counted() -> None:
    async with cluster() as served, await served.connect() as client:
        await client.send(b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        before_kib, sent_bytes = used_kib(), 0
        while sent_bytes < 2 << 20:
            await client.send(b"2\r\nab\r\n" * 10_000)
            sent_bytes += 20_000
        await served.until(lambda: served.router.clients.buffered_bytes == sent_bytes)
        assert used_kib() - before_kib < 20 << 10
        client.reset()
        await until_nothing_is_buffered(served)


async def test_heads_that_announce_long_bodies_take_little() -> None:
    async with cluster() as served:
        clients = [await served.connect() for _ in range(50)]
        for client in clients:
            await client.send(head("/generate", 60_000_000))
        await served.until(lambda: served.router.clients.buffered_bytes >= 50 * 1024)
        await served.until(lambda: all(one._parser.long_body is not None for one in served.router.clients.open))
        assert served.router.clients.buffered_bytes <= 50 * (64 << 10)
        for client in clients:
            client.reset()
        await until_nothing_is_buffered(served)


async def test_a_request_counts_until_it_is_answered() -> None:
    async with cluster(max_payload_size=100_000, max_buffered_size=150_000) as served:
        served.decode[0].plan(hang())
        large = request_bytes("POST", "/generate", BODY + b" " * 80_000)
        async with await served.connect() as first:
            await first.send(large)
            await served.decode[0].received(1)
            assert served.router.clients.buffered_bytes == 80_000 + len(BODY)
            async with await served.connect() as second:
                await second.send(large)
                assert (await second.reply()).status == 503
            first.reset()
        await until_nothing_is_buffered(served)


async def test_heads_that_do_not_end_count() -> None:
    async with cluster(max_payload_size=1000, max_buffered_size=100_000) as served:
        clients = [await served.connect() for _ in range(4)]
        for client in clients[:3]:
            await client.send(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * 100)
        await served.until(lambda: served.router.clients.buffered_bytes > 60_000)
        await clients[3].send(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * 300)
        assert (await clients[3].reply()).status == 503
        for client in clients:
            client.reset()
        await until_nothing_is_buffered(served)


async def test_headers_without_number_are_refused() -> None:
    async with cluster() as served, await served.connect() as client:
        await client.send(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * 2000 + b"\r\n")
        assert (await client.reply()).status == 431


# -- connections ----------------------------------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_answered_and_closed() -> None:
    async with cluster(max_connections=3) as served:
        clients = [await served.connect() for _ in range(3)]
        await served.until(lambda: len(served.router.clients.open) == 3)
        async with await served.connect() as excess:
            answer = await excess.reply()
            assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
            assert await excess.is_closed_within(1.0)
        assert (await clients[0].ask("POST", "/generate", BODY)).status == 200
        clients[0].reset()
        await served.until(lambda: len(served.router.clients.open) == 2)
        assert (await served.ask("POST", "/generate", BODY)).status == 200


# -- pipelines ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_a_pipeline_of_upgrades_takes_no_memory(event_loop: str) -> None:
    count = 3000
    upgrade = b"GET /x HTTP/1.1\r\nUpgrade:x\r\nConnection:upgrade\r\n\r\n"
    async with cluster() as served, await served.connect() as client:
        before_kib = used_kib()
        most = most_pending = 0
        sending = asyncio.create_task(client.send(upgrade * count))
        (connection,) = served.router.clients.open
        for _ in range(count):
            assert (await client.reply()).status == 404
            most = max(most, served.router.clients.buffered_bytes)
            most_pending = max(most_pending, len(connection._pending))
        await sending
        assert most_pending <= 32 + 4096 // len(upgrade) + 1
        assert most < 600_000
        assert used_kib() - before_kib < 30_000
        await until_nothing_is_buffered(served)


@pytest.mark.slow
async def test_what_waits_behind_a_request_is_bounded() -> None:
    async with cluster(max_pipelined_size=50_000) as served, await served.connect() as client:
        served.decode[0].plan(hang())
        large = request_bytes("POST", "/generate", BODY + b" " * 3_000_000)
        sending = asyncio.create_task(client.send(GOOD + large * 2))
        await served.decode[0].received(1)
        await asyncio.sleep(0.3)
        assert served.router.clients.buffered_bytes < 1_000_000
        served.decode[0].turns[0].cut()
        assert [(await client.reply()).status for _ in range(3)] == [200] * 3
        await sending
        await until_nothing_is_buffered(served)


@pytest.mark.slow
async def test_a_body_that_had_to_wait_has_its_time_after_that() -> None:
    async with (
        cluster(max_pipelined_size=10_000, body_timeout_secs=0.4) as served,
        await served.connect() as client,
    ):
        served.decode[0].plan(reply(delay_s=0.8))
        large = request_bytes("POST", "/generate", BODY + b" " * 50_000)
        await client.send(GOOD + large[:-1])
        assert (await client.reply()).status == 200
        await asyncio.sleep(0.1)
        await client.send(large[-1:])
        assert (await client.reply()).status == 200


@pytest.mark.slow
async def test_a_pipeline_is_answered_whole_however_it_is_cut_into_pieces(stage: object) -> None:
    async with cluster() as served:
        data = (GOOD + request_bytes("GET", "/health")) * 100 + GOOD[:-1]
        for size in (4095, 4096, 4097, 50_000):
            async with await served.connect() as client:
                sending = asyncio.create_task(send_pieces(client, data, size))
                assert [(await client.reply()).status for _ in range(200)] == [200] * 200
                await sending
                await client.send(GOOD[-1:])
                assert (await client.reply()).status == 200
        await until_nothing_is_buffered(served)


async def send_pieces(client: RawClient, data: bytes, size: int) -> None:
    for start in range(0, len(data), size):
        await client.send(data[start : start + size])
