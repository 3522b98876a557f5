"""Instances that are silent: stopped, hung, or on a machine that is gone. Their requests do not wait for them."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from sglang_ext_router.config import RouterConfig
from sglang_ext_router.request.upstream import UNACKNOWLEDGED_TIMEOUT_MS
from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.running_time import running_s
from support.scripted_engine import DONE, STREAM_END, Turn, chunk, event, hang, reply, stream, stream_head

PROMPT = {"text": "x"}
STREAMED = {"text": "x", "stream": True}
FIRST = stream_head() + chunk(event({"text": "a"}))
IN_TURN: dict[str, Any] = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
QUICK: dict[str, Any] = {"liveness_interval_secs": 0.1, "liveness_timeout_secs": 0.6, **IN_TURN}


async def sent(served: Cluster, body: dict[str, Any]) -> RawClient:
    client = await served.connect()
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))
    return client


async def rest_of(client: RawClient) -> list[bytes]:
    """The chunks that are still to come of a reply."""
    chunks = []
    async with asyncio.timeout(15.0):
        while piece := await client.chunk():
            chunks.append(piece)
    return chunks


def is_in(served: Cluster, index: int = 0) -> bool:
    return served.worker(served.decode[index].url).is_healthy


@pytest.mark.slow
async def test_with_the_defaults_a_frozen_instance_is_out_within_five_seconds() -> None:
    defaults = RouterConfig()
    names = ("health_check_interval_secs", "health_check_timeout_secs", "load_poll_interval_secs")
    options = {name: getattr(defaults, name) for name in names}
    async with cluster(decode=2, **options, **IN_TURN) as served:
        served.decode[0].script = hang()
        served.decode[1].script = stream(event({"text": "elsewhere"}), DONE)
        client = await sent(served, STREAMED)
        await served.decode[0].received(1)
        served.decode[0].freeze()
        began_s = running_s()
        await served.until(lambda: not is_in(served), 20.0)
        assert running_s() - began_s <= 5.0
        assert (await client.reply()).body.endswith(DONE)
        assert running_s() - began_s <= 5.5


@pytest.mark.slow
async def test_streams_of_a_frozen_instance_end_and_what_was_not_answered_is_served_elsewhere() -> None:
    async with cluster(decode=2, **QUICK) as served:
        frozen, other = served.decode
        frozen.script = other.script = hang(FIRST)
        streams = {engine: await sent(served, STREAMED) for engine in (frozen, other)}
        for client in streams.values():
            assert (await client.head())[0] == 200
            await client.chunk()
        frozen.script = hang()
        other.script = reply({"text": "elsewhere"})
        waiting = [await sent(served, PROMPT) for _ in range(4)]
        await frozen.received(3)
        frozen.freeze()
        assert [(await client.reply()).json["text"] for client in waiting] == ["elsewhere"] * 4
        first = min(served.decode, key=lambda engine: engine.requests[0].at_s)
        told = list(streams.values())[0 if first is frozen else 1]
        error, done = await rest_of(told)
        assert b'"error"' in error
        assert done == DONE
        assert not is_in(served)
        assert is_in(served, 1)
        list(streams.values())[1 if first is frozen else 0].close()
        frozen.thaw()
        await served.until(lambda: is_in(served))


@pytest.mark.slow
async def test_a_frozen_prefill_instance_does_not_hold_its_prompts() -> None:
    async with cluster(short=2, long=0, **QUICK) as served:
        frozen, other = served.short
        frozen.script = hang()

        async def as_prefill_allows(turn: Turn) -> None:
            while not any(one.room == turn.request.room for one in other.requests):
                if turn.aborted.is_set() or turn.gone.is_set():
                    return
                await asyncio.sleep(0.01)
            await reply({"text": "ok"})(turn)

        served.decode[0].script = as_prefill_allows
        clients = [await sent(served, PROMPT) for _ in range(4)]
        await frozen.received(2)
        frozen.freeze()
        assert [(await client.reply()).status for client in clients] == [200] * 4
        assert not served.worker(frozen.url).is_healthy


@pytest.mark.slow
async def test_an_instance_that_answers_slowly_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(**QUICK) as served:
        engine = served.decode[0]
        engine.liveness_delay_s = 0.35
        checks = engine.liveness_checks
        await served.until(lambda: engine.liveness_checks >= checks + 4, 10.0)
        assert "is out" not in caplog.text


@pytest.mark.slow
async def test_an_instance_that_has_no_time_for_checks_but_streams_stays() -> None:
    async with cluster(decode=2, **QUICK) as served:
        engine = served.decode[0]
        engine.script = stream(*[event(number) for number in range(12)], DONE, delay_s=0.1)
        engine.liveness_delay_s = None
        answer = await (await sent(served, STREAMED)).reply()
        assert answer.body.endswith(DONE)
        assert is_in(served)
        await served.until(lambda: not is_in(served), 3.0)  # it has nothing more to say


@pytest.mark.slow
async def test_a_router_that_stood_still_itself_takes_no_instance_out(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(**QUICK) as served:
        served.decode[0].liveness_delay_s = 0.3
        for _ in range(2):
            checks = served.decode[0].liveness_checks
            await served.until(lambda: served.decode[0].liveness_checks > checks)  # noqa: B023
            time.sleep(0.8)  # noqa: ASYNC251
            await asyncio.sleep(0.6)
        assert "is out" not in caplog.text


@pytest.mark.slow
async def test_several_misses_can_be_asked_for() -> None:
    async with cluster(decode=2, **QUICK, liveness_failure_threshold=3) as served:
        served.decode[0].liveness_delay_s = None
        began_s = running_s()
        await served.until(lambda: not is_in(served), 10.0)
        assert running_s() - began_s > 1.2


@pytest.mark.slow
async def test_a_scheduler_that_hangs_loses_its_requests_once_its_health_checks_have_failed() -> None:
    """The server process answers, but not for its scheduler: a GPU that hangs."""
    async with cluster(decode=2, health_check_timeout_secs=0.1, health_failure_threshold=3, **QUICK) as served:
        engine = served.decode[0]
        engine.script = hang(FIRST)
        client = await sent(served, STREAMED)
        await client.head()
        engine.health_status = None
        assert b'"error"' in (await rest_of(client))[-2]
        assert not is_in(served)


@pytest.mark.full
@pytest.mark.parametrize("how", ["says that it ends", "closes its port"])
async def test_an_instance_that_ends_in_order_serves_what_it_has(how: str) -> None:
    async with cluster(health_failure_threshold=1, **QUICK) as served:
        engine = served.decode[0]
        events = [event(number) for number in range(2)]
        engine.script = stream(*events, DONE, delay_s=0.8)
        client = await sent(served, STREAMED)
        await client.head()
        if how == "closes its port":
            engine.close_port()
        else:
            engine.health_status = 503

        def is_out() -> bool:
            if how == "closes its port":
                engine.close_idle()  # a check may have been under way
            return not is_in(served)

        await served.until(is_out, 3.0)
        assert await rest_of(client) == [*events, DONE]


class Refuses:
    """A session whose every connection fails in one way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, url: str, **_: object) -> Refuses:
        return self

    async def __aenter__(self) -> None:
        raise self._error

    async def __aexit__(self, *_: object) -> None:
        """Nothing to free."""

    async def close(self) -> None:
        """Nothing to free."""


KEY: Any = SimpleNamespace(host="h", port=1, ssl=True, is_ssl=True)


@pytest.mark.parametrize(
    ("error", "is_alive"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "refused")), True),
        (aiohttp.ClientConnectorError(KEY, OSError(errno.EHOSTUNREACH, "no route")), False),
        (aiohttp.ClientConnectorSSLError(KEY, OSError(errno.EPERM, "handshake")), True),
        (aiohttp.ClientConnectorCertificateError(KEY, ssl.CertificateError("expired")), True),
        (aiohttp.ServerDisconnectedError(), True),
        (TimeoutError(), False),
    ],
)
async def test_what_counts_as_a_sign_of_life(error: Exception, is_alive: bool) -> None:
    """What an instance refuses, it answers; what is unreachable does not."""
    async with cluster() as served:
        prober = served.router.prober
        real: Any = prober._session
        odd: Any = Refuses(error)
        prober._session = odd
        assert await prober._ask_for_life(served.worker(served.decode[0].url)) is is_alive
        prober._session = real


# -- time limits within a reply -------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_stream_that_stalls_is_ended() -> None:
    async with cluster(stream_stall_timeout_secs=0.3, **IN_TURN) as served:
        served.decode[0].script = hang(FIRST)
        client = await sent(served, STREAMED)
        await client.head()
        assert b'"error"' in (await rest_of(client))[-2]
        await served.decode[0].abort_of(served.decode[0].requests[0].rid)
        assert served.router.metrics.aborts == {"stream_stalled": 1}


@pytest.mark.slow
async def test_a_stream_whose_client_does_not_read_does_not_stall() -> None:
    size = 1 << 16

    async def flood(turn: Turn) -> None:
        await turn.write(stream_head())
        for _ in range(300):
            await turn.write(chunk(b"data: %b\n\n" % (b"y" * size)))
        await turn.write(chunk(DONE) + STREAM_END)

    async with cluster(stream_stall_timeout_secs=0.3) as served:
        served.decode[0].script = flood
        client = await sent(served, STREAMED)
        await client.head()
        client.stop_reading()
        await asyncio.sleep(1.2)
        client.resume_reading()
        assert len(await rest_of(client)) == 301
        assert served.router.metrics.aborts == {}


@pytest.mark.slow
async def test_a_stream_that_does_not_begin_is_tried_elsewhere() -> None:
    async with cluster(short=1, decode=2, first_byte_timeout_secs=0.4, **IN_TURN) as served:
        for engine in served.decode:
            engine.script = stream(event({"text": "a"}), DONE)
        served.decode[0].plan(hang())
        answers = [await (await sent(served, STREAMED)).reply() for _ in range(2)]
        assert [answer.body.endswith(DONE) for answer in answers] == [True, True]
        await served.decode[0].abort_of(served.decode[0].requests[0].rid)
        assert served.router.metrics.aborts == {"first_byte_late": 1}
        assert served.router.metrics.retries == {"decode": 1}


@pytest.mark.slow
async def test_a_late_first_byte_is_a_failure_of_prefill_while_it_has_not_answered() -> None:
    async with cluster(short=2, long=0, first_byte_timeout_secs=0.4, retry_max_retries=0, **IN_TURN) as served:
        served.decode[0].script = hang()
        for engine in served.short:
            engine.script = hang()
        assert (await (await sent(served, STREAMED)).reply()).status == 502
        assert sum(served.worker(engine.url).failed_legs for engine in served.short) == 1
        assert served.worker(served.decode[0].url).failed_legs == 0


async def test_the_kernel_ends_connections_whose_peer_acknowledges_nothing() -> None:
    async with cluster() as served:
        await served.ask("POST", "/generate", PROMPT)
        pool = served.router.services.pools._pools[served.worker(served.decode[0].url).id]
        (connection,) = pool._idle
        assert connection.transport is not None
        connected = connection.transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNACKNOWLEDGED_TIMEOUT_MS
