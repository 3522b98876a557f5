"""Clients that trickle, idle or do not read cost no more than their own connection."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from sglang_ext_router.http import unread_replies
from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.running_time import running_s
from support.scripted_engine import STREAM_END, Turn, chunk, event, hang, reply, stream_head

BODY = b'{"text": "x"}'
GOOD = request_bytes("POST", "/generate", BODY)
HEAD_BYTES = len(GOOD) - len(BODY)


async def trickle(client: RawClient, data: bytes, pause_s: float) -> None:
    """Byte by byte until all is sent or the router has closed."""
    try:
        for start in range(len(data)):
            await client.send(data[start : start + 1])
            await asyncio.sleep(pause_s)
    except ConnectionError:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
@pytest.mark.parametrize("sent", [1, HEAD_BYTES - 1, HEAD_BYTES, len(GOOD) - 1])
async def test_a_request_that_does_not_go_on_gets_408(event_loop: str, sent: int) -> None:
    async with cluster(header_timeout_secs=0.15, body_timeout_secs=0.15) as served, await served.connect() as client:
        start_s, clock_s = running_s(), time.monotonic()
        await client.send(GOOD[:sent])
        answer = await client.reply()
        assert (answer.status, answer.headers["connection"]) == (408, "close")
        assert answer.error["type"] == "timeout_error"
        assert time.monotonic() - clock_s > 0.14
        assert running_s() - start_s < 2.0
        assert served.upstream_requests() == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["head", "body"])
async def test_a_request_that_trickles_gets_408_however_regular_it_is(part: str) -> None:
    async with cluster(header_timeout_secs=0.2, body_timeout_secs=0.2) as served, await served.connect() as client:
        if part == "body":
            await client.send(GOOD[:HEAD_BYTES])
            data = GOOD[HEAD_BYTES:]
        else:
            data = GOOD
        sending = asyncio.create_task(trickle(client, data, 0.05))
        assert (await client.reply()).status == 408
        sending.cancel()
        assert served.upstream_requests() == 0


@pytest.mark.slow
async def test_a_slow_body_may_take_longer_than_a_head() -> None:
    async with cluster(header_timeout_secs=0.1, body_timeout_secs=5.0) as served, await served.connect() as client:
        await client.send(GOOD[:-5])
        await asyncio.sleep(0.3)
        await client.send(GOOD[-5:])
        assert (await client.reply()).status == 200


@pytest.mark.slow
async def test_a_slow_next_request_behind_one_being_served() -> None:
    async with cluster(header_timeout_secs=0.15) as served, await served.connect() as client:
        served.decode[0].plan(reply(delay_s=0.4))
        await client.send(GOOD + GOOD[:10])
        assert [(await client.reply()).status for _ in range(2)] == [200, 408]


@pytest.mark.slow
async def test_idle_connections_are_closed_without_a_word() -> None:
    async with cluster(keep_alive_timeout_secs=0.15) as served:
        unused, used = await served.connect(), await served.connect()
        assert (await used.ask("POST", "/generate", BODY)).status == 200
        assert await unused.is_closed_within(1.0)
        assert await used.is_closed_within(1.0)


@pytest.mark.slow
async def test_a_long_reply_does_not_count_as_idle() -> None:
    async with cluster(keep_alive_timeout_secs=0.1, header_timeout_secs=0.1, body_timeout_secs=0.1) as served:
        served.decode[0].script = reply(delay_s=0.5)
        async with await served.connect() as client:
            assert (await client.ask("POST", "/generate", BODY)).status == 200
            assert (await client.ask("POST", "/generate", BODY)).status == 200


@pytest.mark.full
async def test_two_thousand_idle_connections_slow_no_request_down() -> None:
    async with cluster() as served:
        idle = [await served.connect() for _ in range(2000)]
        loop = asyncio.get_running_loop()
        async with await served.connect() as client:
            times = []
            for _ in range(50):
                start_s = loop.time()
                assert (await client.ask("POST", "/generate", BODY)).status == 200
                times.append(loop.time() - start_s)
        assert sorted(times)[25] < 0.2
        for client in idle:
            client.reset()
        await served.until(lambda: len(served.router.ports.clients.open) <= 1)


@pytest.mark.slow
async def test_a_client_that_does_not_read_stalls_its_own_stream_only() -> None:
    piece = chunk(event({"text": "x" * 60_000}))
    written = 0

    async def play(turn: Turn) -> None:
        nonlocal written
        await turn.write(stream_head())
        for _ in range(1000):
            await turn.write(piece)
            written += len(piece)
        await turn.write(STREAM_END)

    async with cluster() as served:
        served.decode[0].plan(play)
        async with await served.connect() as client:
            await client.send(request_bytes("POST", "/generate", json.dumps({"text": "x", "stream": True}).encode()))
            status, _ = await client.head()
            assert status == 200
            client.stop_reading()
            before = -1
            while before != written:
                before = written
                await asyncio.sleep(0.1)
            assert written < 20_000_000  # of 60,000,000: in socket buffers and two high-water marks
            (connection,) = (one for one in served.router.ports.clients.open if one.request is not None)
            assert connection.transport.get_write_buffer_size() < 2_000_000
            assert (await served.ask("POST", "/generate", BODY)).status == 200
            client.resume_reading()
            total = 0
            while data := await client.chunk():
                total += len(data)
            assert total == 1000 * len(event({"text": "x" * 60_000}))


@pytest.mark.slow
async def test_a_client_that_does_not_read_its_pipelined_replies_is_not_served_on() -> None:
    large = b'"' + b"x" * 200_000 + b'"'
    async with cluster() as served:
        served.decode[0].script = reply(large.decode())
        async with await served.connect(receive_buffer_bytes=1 << 14) as client:
            client.stop_reading()
            sending = asyncio.create_task(client.send(GOOD * 200))
            before = -1
            while before != len(served.decode[0].requests):
                before = len(served.decode[0].requests)
                await asyncio.sleep(0.15)
            assert before < 60
            (connection,) = served.router.ports.clients.open
            assert connection.transport.get_write_buffer_size() < 2_000_000
            client.resume_reading()
            for _ in range(200):
                assert (await client.reply()).status == 200
            await sending


@pytest.mark.slow
async def test_a_client_that_neither_reads_nor_leaves_is_freed_with_its_request() -> None:
    async with cluster(request_timeout_secs=0.4) as served:
        served.decode[0].script = hang(stream_head() + chunk(event({"text": "x" * 8_000_000})))
        async with await served.connect(receive_buffer_bytes=1 << 14) as client:
            await client.send(request_bytes("POST", "/generate", json.dumps({"text": "x", "stream": True}).encode()))
            client.stop_reading()
            rid = (await served.decode[0].received(1))[0].rid
            await served.decode[0].abort_of(rid, 2.0)
            await served.until_idle()


# -- a client that never reads --------------------------------------------------------------------------------


async def ask_and_never_read(served: Cluster, client: RawClient) -> None:
    """A whole reply lies in the router's buffer, as the sockets' own are small."""
    served.router.render_metrics = lambda _: (b"x" * 150_000, "text/plain")  # type: ignore[method-assign]
    client.stop_reading()
    await served.until(lambda: len(served.router.clients.open) == 1)
    (connection,) = served.router.clients.open
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    await client.send(request_bytes("GET", "/metrics"))
    await served.until(lambda: connection.transport.get_write_buffer_size() > 50_000)


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_a_client_that_never_reads_its_whole_reply_is_cut(event_loop: str) -> None:
    async with cluster(client_write_timeout_secs=0.5) as served:
        async with await served.connect(receive_buffer_bytes=1 << 14) as client:
            await ask_and_never_read(served, client)
            start_s = running_s()
            await served.until(lambda: not served.router.clients.open)
            assert running_s() - start_s < 3.0
        assert (await served.ask("POST", "/generate", BODY)).status == 200


@pytest.mark.slow
async def test_a_client_that_never_reads_its_stream_is_cut_and_its_legs_are_aborted() -> None:
    async with cluster(client_write_timeout_secs=0.5) as served:
        served.decode[0].plan(hang(stream_head() + chunk(event({"text": "x" * 8_000_000}))))
        async with await served.connect(receive_buffer_bytes=1 << 14) as client:
            client.stop_reading()
            await client.send(request_bytes("POST", "/generate", b'{"text": "x", "stream": true}'))
            rid = (await served.decode[0].received(1))[0].rid
            await served.decode[0].abort_of(rid, 3.0)
            await served.until_idle()


@pytest.mark.slow
async def test_a_client_that_reads_slowly_gets_all_of_it() -> None:
    async with cluster(client_write_timeout_secs=3.0) as served:
        client = await served.connect(receive_buffer_bytes=1 << 14)
        await ask_and_never_read(served, client)
        for _ in range(7):  # longer than the limit in all
            await asyncio.sleep(0.5)
            client.resume_reading()
            await client.exactly(5_000)
            client.stop_reading()
        client.resume_reading()
        assert await client.exactly(95_000) == b"x" * 95_000


@pytest.mark.slow
async def test_a_drain_is_not_held_up_by_a_client_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_replies, "DRAIN_STALL_S", 0.3)
    async with cluster() as served:  # which would wait for its client much longer
        client = await served.connect(receive_buffer_bytes=1 << 14)
        await ask_and_never_read(served, client)
        served.server.close()
        start_s = running_s()
        await served.router.drain(20.0)
        assert running_s() - start_s < 3.0
        assert not served.router.clients.open
