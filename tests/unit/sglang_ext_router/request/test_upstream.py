"""Connections to instances: reused, replaced when they have grown stale, which is no failure of the instance."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.decide.circuit_breaker import CircuitState
from sglang_ext_router.request import upstream
from support.raw_client import request_bytes
from support.router_process import FAST, Cluster, cluster, running_router
from support.scripted_engine import (
    DONE,
    ScriptedEngine,
    Turn,
    cut,
    drop_when_reused,
    event,
    hang,
    raw,
    reply,
    response,
    status,
    stream,
)

PROMPT = {"text": "x"}


@pytest.fixture(autouse=True)
def _a_slow_machine_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "RESEND_WITHIN_S", 10.0)


async def ask(served: Cluster, count: int = 1) -> list[int]:
    return [(await served.ask("POST", "/generate", PROMPT)).status for _ in range(count)]


def circuit(served: Cluster, index: int = 0) -> CircuitState:
    return served.worker(served.decode[index].url).breaker.state(served.router.loop.time())


def connections_used(served: Cluster) -> list[int]:
    return [request.connection for request in served.decode[0].requests]


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_connections_are_reused(event_loop: str) -> None:
    async with cluster() as served:
        await ask(served, 10)
        assert len(set(connections_used(served))) == 1
        served.decode[0].script = stream(event(1), DONE)
        await ask(served, 5)
        assert len(set(connections_used(served))) == 1


@pytest.mark.slow
async def test_no_connection_serves_two_requests_at_once() -> None:
    async with cluster() as served:
        # Long enough for all twenty to be on their way before the first one has its answer.
        served.decode[0].script = reply(delay_s=0.5)
        await asyncio.gather(*(ask(served, 3) for _ in range(20)))
        assert len(served.decode[0].requests) == 60
        assert len(set(connections_used(served))) == 20
        assert served.decode[0].malformed == []


async def test_a_connection_that_the_instance_closed_while_idle_is_not_used() -> None:
    async with cluster() as served:
        await ask(served)
        served.decode[0].close_idle()
        served.short[0].close_idle()
        await asyncio.sleep(0.05)
        assert await ask(served) == [200]
        assert connections_used(served)[0] != connections_used(served)[1]


@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_a_connection_closed_at_the_very_moment_of_reuse_costs_nothing(event_loop: str) -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.script = drop_when_reused(reply())
        assert await ask(served, 6) == [200] * 6
        assert served.router.metrics.retries == {}
        assert sum(worker.failed_legs for worker in served.router.registry) == 0
        for engine in served.engines:  # what a dropped connection took may have been served
            assert len({request.room for request in engine.requests}) == len(engine.requests)
            assert len({request.rid for request in engine.requests}) == len(engine.requests)
        assert circuit(served) is CircuitState.CLOSED


@pytest.mark.slow
async def test_many_connections_closed_at_the_moment_of_reuse() -> None:
    async with cluster() as served:
        for engine in served.engines:
            engine.script = drop_when_reused(reply(delay_s=0.02))
        for _ in range(4):
            assert {code for codes in await asyncio.gather(*(ask(served) for _ in range(50))) for code in codes} == {
                200
            }
        assert sum(worker.failed_legs for worker in served.router.registry) == 0


async def test_a_reused_connection_that_breaks_within_the_reply_is_a_failure() -> None:
    async with cluster(decode=2) as served:
        await ask(served, 4)
        for engine in served.decode:
            engine.plan(cut(b"HTTP/1.1 200 OK\r\n"), reply())
            assert await ask(served, 2) == [200, 200]
        assert served.router.metrics.retries["decode"] >= 1


async def test_connections_idle_for_long_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "REUSE_IDLE_S", 0.1)
    async with cluster() as served:
        await ask(served)
        await asyncio.sleep(0.2)
        await ask(served)
        first, second = connections_used(served)
        assert first != second


async def test_an_instance_that_wants_its_connection_closed() -> None:
    async with cluster() as served:
        served.decode[0].script = raw(response(b"{}", headers=(("connection", "close"),)))
        await ask(served, 3)
        assert len(set(connections_used(served))) == 3
        await served.until(lambda: served.decode[0].open_connections <= 2)  # the health checks'


async def test_bytes_without_a_request_close_the_connection() -> None:
    async with cluster() as served:
        served.decode[0].plan(raw(response(b"{}"), b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil", pause_s=0.05))
        await ask(served)
        await asyncio.sleep(0.15)
        assert (await served.ask("POST", "/generate", PROMPT)).json["text"] == "ok"
        first, second = connections_used(served)
        assert first != second


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\nab",
        b"\x00" * 100,
    ],
)
async def test_an_instance_that_does_not_speak_http_counts_as_lost(answer: bytes) -> None:
    async with cluster(retry_max_retries=0) as served:
        served.decode[0].script = raw(answer, then="hang")
        served.short[0].script = hang()
        assert await ask(served) == [502]


async def test_an_instance_that_answers_nothing_but_closes() -> None:
    async with cluster(retry_max_retries=2) as served:
        served.decode[0].script = raw(then="close")
        assert await ask(served) == [502]
        assert len(served.decode[0].requests) == 2


@pytest.mark.slow
async def test_failures_one_after_the_other_open_the_circuit_and_it_recovers() -> None:
    async with cluster(
        decode=2, cb_failure_threshold=3, cb_timeout_duration_secs=600.0, cb_success_threshold=2
    ) as served:
        bad, good = served.decode
        bad.script = status(500)
        while circuit(served) is CircuitState.CLOSED:
            assert await ask(served) == [200]
        assert len(bad.requests) == 3
        await ask(served, 10)
        assert len(bad.requests) == 3
        bad.script = reply()
        served.worker(bad.url).breaker.open_s = 1e-9  # its time has passed
        while circuit(served) is not CircuitState.CLOSED:
            assert await ask(served) == [200]
        assert len(bad.requests) == 5
        assert good.requests


@pytest.mark.slow
async def test_a_burst_that_dies_together_does_not_open_the_circuit() -> None:
    async with cluster(decode=1, retry_max_retries=0, cb_failure_threshold=3) as served:

        async def die_together(turn: Turn) -> None:
            await served.decode[0].received(100)
            turn.cut()

        served.decode[0].script = die_together
        codes = await asyncio.gather(*(ask(served) for _ in range(100)))
        assert {code for group in codes for code in group} == {502}
        assert circuit(served) is CircuitState.CLOSED
        served.decode[0].script = reply()
        assert await ask(served) == [200]


async def test_with_all_circuits_open_instances_are_still_tried() -> None:
    async with cluster(cb_failure_threshold=1, cb_timeout_duration_secs=60.0, retry_max_retries=0) as served:
        served.decode[0].script = status(500)
        served.short[0].script = hang()
        await ask(served)
        assert circuit(served) is CircuitState.OPEN
        served.decode[0].script = served.short[0].script = reply()
        assert await ask(served) == [200]


async def test_client_errors_and_departures_do_not_open_the_circuit() -> None:
    async with cluster(cb_failure_threshold=1, retry_max_retries=0) as served:
        served.decode[0].script = status(400)
        assert await ask(served) == [400]
        served.decode[0].script = hang()
        client = await served.connect()
        await client.send(b'POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 13\r\n\r\n{"text": "x"}')
        await served.decode[0].received(2)
        client.close()
        await served.until_idle()
        assert circuit(served) is CircuitState.CLOSED


async def test_the_circuit_breaker_can_be_switched_off() -> None:
    async with cluster(decode=2, cb_failure_threshold=1, disable_circuit_breaker=True) as served:
        served.decode[0].script = status(500)
        await ask(served, 20)
        assert len(served.decode[0].requests) > 1


async def test_a_removed_instances_connections_are_closed() -> None:
    async with cluster(decode=2) as served:
        await ask(served, 10)
        served.router.remove_worker(served.worker(served.decode[0].url))
        await served.until(lambda: served.decode[0].open_connections <= 1, 2.0)  # the health checks'
        assert await ask(served, 3) == [200] * 3


@pytest.mark.slow
async def test_what_a_dying_instance_closed_goes_to_another_one() -> None:
    """It was killed while connections were kept, and takes new ones until its process is gone: no request is lost."""
    async with cluster(short=2, long=0, prefill_policy="random", cb_failure_threshold=1000) as served:
        dying = served.short[0]
        served.decode[0].script = reply(delay_s=0.05)  # prefill is lost first
        for _ in range(12):
            dying.script = reply()
            count = len(dying.requests)
            while len(dying.requests) == count:
                assert await ask(served, 1) == [200]
            dying.script = cut()
            assert await ask(served, 4) == [200] * 4
            assert sum(served.worker(engine.url).failed_legs for engine in served.decode) == 0


@pytest.mark.slow
@pytest.mark.parametrize("event_loop", ["uvloop", "asyncio"])
async def test_a_connection_whose_instance_answers_before_it_has_the_body_is_not_used_again(event_loop: str) -> None:
    """Such an instance may never read the rest, and what the connection holds of it is not counted."""
    prefill, decode = ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []
    is_over = asyncio.Event()

    async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_decode, from_decode = await asyncio.open_connection("127.0.0.1", decode.port)
        writers.extend((writer, from_decode))
        task = asyncio.create_task(_copy(to_decode, writer))
        tasks.add(task)
        with suppress(ConnectionError):  # the router resets what it closes with bytes unread
            while data := await reader.read(1 << 10):
                if b"content-length: 20000" in data:
                    writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}")
                    await is_over.wait()
                    return
                from_decode.write(data)

    for engine in (prefill, decode):
        await engine.start()
    server = await asyncio.start_server(front, "127.0.0.1", 0, limit=1 << 10)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    workers = (WorkerAddress(prefill.url, Role.BOTH), WorkerAddress(url, Role.DECODE))
    try:
        async with running_router(replace(FAST, workers=workers)) as served, server:
            await served.until_ready()
            padding = b'{"text": "x", "padding": "%b"}' % (b"x" * 20_000_000)
            async with await served.connect() as client:
                await client.send(request_bytes("POST", "/generate", padding))
                assert (await client.reply()).status == 400
            assert (await asyncio.wait_for(served.ask("POST", "/generate", PROMPT), 10.0)).status == 200
    finally:
        for task in tasks:
            task.cancel()
        is_over.set()
        for writer in writers:
            writer.transport.abort()
        for engine in (prefill, decode):
            await engine.stop()
        await asyncio.sleep(0.05)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
