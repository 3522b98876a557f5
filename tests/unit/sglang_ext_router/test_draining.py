"""On SIGTERM: nothing new, what was received is served to its end, what does not end in time is aborted."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from sglang_ext.types import Role
from support.engines import free_port
from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import DONE, ScriptedEngine, chunk, event, hang, raw, reply, response, stream, stream_head

BODY = b'{"text": "x"}'
GOOD = request_bytes("POST", "/generate", BODY)
STREAMED = request_bytes("POST", "/generate", b'{"text": "x", "stream": true}')


def start_drain(served: Cluster, grace_s: float = 5.0) -> asyncio.Task[None]:
    """What `serve` does after a signal."""
    served.server.close()
    return asyncio.create_task(served.router.drain(grace_s))


@pytest.mark.slow
async def test_idle_connections_close_and_new_ones_are_refused() -> None:
    async with cluster() as served, await served.connect() as client:
        assert (await client.ask("POST", "/generate", BODY)).status == 200
        await asyncio.wait_for(start_drain(served), 3.0)
        assert await client.is_closed_within(3.0)
        with pytest.raises(ConnectionError):
            await served.connect()


@pytest.mark.slow
async def test_a_running_stream_ends_and_says_that_the_connection_closes() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].script = stream(*[event(i) for i in range(5)], DONE, delay_s=0.05)
        await client.send(STREAMED)
        await served.decode[0].received(1)
        drain = start_drain(served)
        answer = await client.reply()
        assert answer.chunks is not None
        assert answer.chunks[-1] == DONE
        assert answer.headers.get("connection") == "close"
        assert await client.is_closed_within(3.0)
        await asyncio.wait_for(drain, 3.0)


@pytest.mark.slow
async def test_queued_requests_are_served() -> None:
    async with cluster(max_concurrent_requests=1) as served:
        served.decode[0].script = reply(delay_s=0.1)
        clients = [await served.connect() for _ in range(3)]
        for client in clients:
            await client.send(GOOD)
        await served.until(lambda: served.router.requests_queued == 2)
        drain = start_drain(served)
        for client in clients:
            assert (await client.reply()).status == 200
        await asyncio.wait_for(drain, 3.0)


@pytest.mark.slow
async def test_pipelined_requests_are_served() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].script = reply(delay_s=0.1)
        await client.send(GOOD * 3)
        await served.decode[0].received(1)
        drain = start_drain(served)
        for _ in range(3):
            assert (await client.reply()).status == 200
        assert await client.is_closed_within(3.0)
        await asyncio.wait_for(drain, 3.0)


@pytest.mark.slow
async def test_a_request_that_is_still_being_sent_is_served() -> None:
    async with cluster() as served, await served.connect() as client:
        await client.send(GOOD[:-4])
        await asyncio.sleep(0.05)
        drain = start_drain(served)
        await asyncio.sleep(0.1)
        assert not drain.done()
        await client.send(GOOD[-4:])
        answer = await client.reply()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        await asyncio.wait_for(drain, 3.0)


@pytest.mark.slow
async def test_readyz_says_503_while_a_client_can_still_ask() -> None:
    async with cluster() as served, await served.connect() as client:
        served.decode[0].script = reply(delay_s=0.2)
        await client.send(GOOD + request_bytes("GET", "/readyz") + request_bytes("GET", "/health"))
        await served.decode[0].received(1)
        drain = start_drain(served)
        assert [(await client.reply()).status for _ in range(3)] == [200, 503, 200]
        await asyncio.wait_for(drain, 3.0)


@pytest.mark.slow
async def test_a_reply_that_is_not_read_yet_is_not_cut() -> None:
    body = b'"' + b"x" * 20_000_000 + b'"'
    async with cluster() as served, await served.connect() as client:
        served.decode[0].script = raw(response(body))
        client.stop_reading()
        await client.send(GOOD)
        await served.decode[0].received(1)
        await asyncio.sleep(0.1)
        drain = start_drain(served)
        await asyncio.sleep(0.3)
        assert not drain.done()
        client.resume_reading()
        assert (await client.reply()).body == body
        await asyncio.wait_for(drain, 3.0)


@pytest.mark.slow
async def test_what_does_not_end_in_time_is_cut_and_aborted() -> None:
    async with cluster() as served:
        served.decode[0].script = hang(stream_head() + chunk(event(1)))
        served.short[0].script = hang()
        async with await served.connect() as streaming, await served.connect() as waiting:
            await streaming.send(STREAMED)
            await streaming.head()
            assert await streaming.chunk() == event(1)
            served.decode[0].script = hang()
            await waiting.send(GOOD)
            await served.decode[0].received(2)
            await asyncio.wait_for(start_drain(served, 0.2), 2.5)
            assert b'"error"' in await streaming.chunk()
            assert (await waiting.reply()).status == 504
            for engine in (served.decode[0], served.short[0]):
                assert {request.rid for request in engine.requests} <= {abort.rid for abort in engine.aborts}


# -- the whole process ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_the_process_drains_on_a_signal(signal_number: int) -> None:
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE, stream(event(1), DONE, delay_s=0.4))]
    for engine in engines:
        await engine.start()
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(port), "--log-json"]
    command += ["--prefill", engines[0].url, "--decode", engines[1].url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ})
    try:
        await until_ready(port)
        async with await RawClient.connect(port) as client:
            await client.send(STREAMED)
            await engines[1].received(1)
            process.send_signal(signal_number)
            answer = await client.reply()
            assert answer.chunks == (event(1), DONE)
        status = await asyncio.to_thread(process.wait, 5)
        assert status == 0
        assert process.stderr is not None
        for line in process.stderr.read().splitlines():
            assert json.loads(line)["level"] in {"info", "warning"}
    finally:
        process.kill()
        process.communicate()
        for engine in engines:
            await engine.stop()


@pytest.mark.slow
async def test_requests_are_taken_while_readyz_says_503_already() -> None:
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    for engine in engines:
        await engine.start()
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.cli", "router", "--port", str(port), "--drain-delay-secs", "60"]
    command += ["--prefill", engines[0].url, "--decode", engines[1].url]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        await until_ready(port)
        async with await RawClient.connect(port) as kept:
            assert (await kept.ask("GET", "/health")).status == 200
            process.terminate()
            for _ in range(500):
                async with await RawClient.connect(port) as probe:
                    if (await probe.ask("GET", "/readyz")).status == 503:
                        break
                await asyncio.sleep(0.01)
            async with await RawClient.connect(port) as probe, await RawClient.connect(port) as new:
                assert (await probe.ask("GET", "/readyz")).status == 503
                for client in (kept, new):  # served, and then free to go to another router
                    answer = await client.ask("POST", "/generate", BODY)
                    assert (answer.status, answer.headers.get("connection")) == (200, "close")
                    assert await client.is_closed_within(5.0)
            async with await RawClient.connect(port) as idle:
                assert process.poll() is None
                process.terminate()  # the second ends the delay
                assert await idle.is_closed_within(5.0)
        assert await asyncio.to_thread(process.wait, 10) == 0
        with pytest.raises(ConnectionError):
            await RawClient.connect(port)
    finally:
        process.kill()
        process.wait()
        for engine in engines:
            await engine.stop()


async def until_ready(port: int) -> None:
    """Wait until the router at this port has an instance of each kind."""
    async with asyncio.timeout(20):
        while True:
            try:
                async with await RawClient.connect(port) as client:
                    if (await client.ask("GET", "/readyz")).status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_client_that_goes_on_at_the_end_of_its_stream_is_served() -> None:
    """Its stream began before the router knew that it would end: its head has no `connection: close`."""
    async with cluster() as served, await served.connect() as client, await served.connect() as idle:
        served.decode[0].script = stream(*[event(i) for i in range(5)], DONE, delay_s=0.05)
        await client.send(STREAMED)
        assert (await client.head())[1].get("connection") is None
        drain = start_drain(served)
        while b"[DONE]" not in await client.chunk():
            pass
        await client.chunk()  # the last one is empty
        await asyncio.sleep(0.1)
        for one in (client, idle):
            answer = await one.ask("POST", "/generate", BODY)
            assert (answer.status, answer.headers.get("connection")) == (200, "close")
            assert await one.is_closed_within(3.0)
        await asyncio.wait_for(drain, 3.0)
