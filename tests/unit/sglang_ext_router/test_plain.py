"""Undivided instances beside prefill and decode: which requests they get, what they are sent, and how failures move."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from support.raw_client import request_bytes
from support.router_process import Cluster, cluster
from support.scripted_engine import DONE, OK, cut, event, hang, reply, status, stream

pytestmark = pytest.mark.slow

PROMPT = {"text": "x"}
LONG_TEXT = {"text": "word " * 4000}
STREAMED = {"text": "x", "stream": True}
EVENTS = [event({"text": str(number)}) for number in range(3)]


def divided_requests(served: Cluster) -> int:
    return sum(len(engine.requests) for engine in (*served.short, *served.long, *served.decode))


async def test_a_short_request_goes_to_an_idle_undivided_instance_without_bootstrap_fields() -> None:
    async with cluster(plain=1) as served:
        for path, body in (
            ("/generate", PROMPT),
            ("/generate", {**PROMPT, "bootstrap_room": 3, "bootstrap_host": "h"}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/messages", {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}),
            ("/v1/responses", {"input": "x"}),
        ):
            answer = await served.ask("POST", path, body)
            assert (answer.status, answer.json) == (200, OK)
            assert answer.headers["x-sglang-ext-plain"] == served.plain[0].url
            assert "x-sglang-ext-decode" not in answer.headers
            got = served.plain[0].requests[-1].json
            assert not [name for name in got if name.startswith("bootstrap")]
        assert divided_requests(served) == 0
        assert served.router.metrics.plain == 6
        await served.until_idle()


async def test_a_stream_is_relayed_and_its_prefill_ends_with_its_first_byte() -> None:
    async with cluster(plain=1) as served:
        release = asyncio.Event()
        worker = served.worker(served.plain[0].url)

        async def play(turn: Any) -> None:
            await stream(EVENTS[0], end=b"")(turn)
            await release.wait()
            await turn.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(DONE), DONE))

        served.plain[0].script = play
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", json.dumps(STREAMED).encode()))
        await client.head()
        assert await client.chunk() == EVENTS[0]
        assert (worker.pending_tokens, worker.in_flight) == (0, 1)
        release.set()
        assert await client.chunk() == DONE
        await served.until_idle()


async def test_a_long_request_is_divided() -> None:
    async with cluster(plain=1) as served:
        answer = await served.ask("POST", "/generate", LONG_TEXT)
        assert "x-sglang-ext-decode" in answer.headers
        assert served.plain[0].requests == []


async def test_the_threshold_is_an_option() -> None:
    async with cluster(plain=1, max_local_prefill_length=100_000) as served:
        answer = await served.ask("POST", "/generate", LONG_TEXT)
        assert answer.headers["x-sglang-ext-plain"] == served.plain[0].url
    async with cluster(plain=1, max_local_prefill_length=1) as served:
        answer = await served.ask("POST", "/generate", {"text": "word " * 50})
        assert "x-sglang-ext-decode" in answer.headers


async def test_a_request_that_finds_the_undivided_instance_busy_is_divided() -> None:
    async with cluster(plain=1) as served:
        served.plain[0].script = hang()
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", json.dumps({"text": "word " * 300}).encode()))
        await served.plain[0].received(1)
        assert "x-sglang-ext-decode" in (await served.ask("POST", "/generate", PROMPT)).headers
        client.close()


async def test_scores_are_left_to_prefill() -> None:
    async with cluster(plain=1) as served:
        body = {"text": "x", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
        await served.ask("POST", "/generate", body)
        assert served.plain[0].requests == []


@pytest.mark.parametrize("gone", ["short", "decode"])
async def test_without_prefill_or_decode_it_serves_everything(gone: str) -> None:
    async with cluster(long=0, plain=1) as served:
        (engine,) = served.short if gone == "short" else served.decode
        served.plain[0].script = reply({"text": "whole"})
        await engine.stop()
        await served.until(lambda: not served.worker(engine.url).is_healthy)
        assert (await served.ask("GET", "/readyz")).status == 200
        for body in (PROMPT, LONG_TEXT):
            answer = await served.ask("POST", "/generate", body)
            assert answer.headers["x-sglang-ext-plain"] == served.plain[0].url
        await engine.start()
        await served.until_ready()
        other = {"text": "other " * 4000}  # of which it holds no prefix
        assert "x-sglang-ext-decode" in (await served.ask("POST", "/generate", other)).headers


async def test_undivided_instances_alone_are_enough() -> None:
    async with cluster(short=0, long=0, decode=0, plain=2) as served:
        assert (await served.ask("GET", "/readyz")).status == 200
        served.plain[0].script = served.plain[1].script = reply({"text": "ok"})
        for body in (PROMPT, LONG_TEXT, {"text": "x", "sampling_params": {"n": 2}}):
            assert (await served.ask("POST", "/generate", body)).json == {"text": "ok"}
        assert (await served.ask("GET", "/v1/models")).status == 200
        assert (await served.ask("POST", "/v1/tokenize", {"prompt": "x"})).status == 200


@pytest.mark.parametrize("how", ["cut", "500", "unreachable"])
async def test_what_an_undivided_instance_fails_is_divided(how: str) -> None:
    async with cluster(plain=1) as served:
        if how == "unreachable":
            await served.plain[0].stop()
        served.plain[0].script = cut() if how == "cut" else status(500)
        served.decode[0].script = reply({"text": "divided"})
        assert (await served.ask("POST", "/generate", PROMPT)).json == {"text": "divided"}


async def test_what_a_pair_fails_is_served_undivided() -> None:
    async with cluster(long=0, plain=1, max_local_prefill_length=1) as served:
        served.decode[0].script = cut()
        served.plain[0].script = reply({"text": "undivided"})
        body = {"text": "word " * 50}
        await served.decode[0].stop()
        assert (await served.ask("POST", "/generate", body)).json == {"text": "undivided"}


async def test_a_client_that_leaves_has_its_request_aborted() -> None:
    async with cluster(plain=1) as served:
        served.plain[0].script = hang()
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", json.dumps(PROMPT).encode()))
        (request,) = await served.plain[0].received(1)
        client.close()
        await served.plain[0].abort_of(request.rid, 2.0)


async def test_own_ids_come_back() -> None:
    async with cluster(plain=1) as served:

        async def echo(turn: Any) -> None:
            await reply({"meta_info": {"id": turn.request.rid}})(turn)

        served.plain[0].script = echo
        answer = await served.ask("POST", "/generate", {**PROMPT, "rid": "mine"})
        assert answer.json == {"meta_info": {"id": "mine"}}
        assert served.plain[0].requests[0].rid != "mine"


async def test_a_frozen_undivided_instance_loses_its_requests_to_a_pair() -> None:
    async with cluster(plain=1, liveness_interval_secs=0.1, liveness_timeout_secs=0.5) as served:
        served.plain[0].script = hang()
        served.decode[0].script = reply({"text": "divided"})
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", json.dumps(PROMPT).encode()))
        await served.plain[0].received(1)
        served.plain[0].freeze()
        assert (await client.reply()).json == {"text": "divided"}
        assert not served.worker(served.plain[0].url).is_healthy


async def test_an_instance_of_another_mode_is_refused() -> None:
    async with cluster() as served:
        engine = await served.extra_engine(Role.DECODE)
        served.router.add_worker(WorkerAddress(engine.url, Role.PLAIN))
        worker = served.worker(engine.url)
        await served.until(lambda: worker.is_refused)
        assert "was given to the router as plain" in worker.last_error


async def test_it_is_shown() -> None:
    async with cluster(plain=1) as served:
        pools = (await served.ask("GET", "/pools")).json
        assert pools["pools"]["plain"]["instances"] == pools["ready"]["plain"] == 1
        (shown,) = [
            worker for worker in (await served.ask("GET", "/workers")).json["workers"] if worker["role"] == "plain"
        ]
        assert shown["pending_tokens"] == 0
        assert shown["free_kv_tokens"] > 0
        info = (await served.ask("GET", "/server_info")).json
        assert [len(info[kind]) for kind in ("prefill", "decode", "plain")] == [2, 1, 1]
        page = (await served.ask("GET", "/metrics")).body.decode()
        assert 'role="plain"' in page
        assert 'event="plain"' in page


async def test_where_all_instances_are_undivided_none_of_another_kind_is_asked_for() -> None:
    async with cluster(short=0, long=0, decode=0, plain=1, queue_timeout_secs=0.2) as served:
        await served.plain[0].stop()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 503
        assert answer.error["message"] == "no instance can serve the request now: no plain instance of m is ready"
        ready = await served.ask("GET", "/readyz", None)
        assert (ready.status, ready.error["message"]) == (503, "no ready instance for: plain")
