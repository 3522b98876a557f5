"""What is refused before any instance hears of it: full queue, deadlines, prompts too long, keys, sizes, methods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster, cluster
from support.running_time import running_s
from support.scripted_engine import CONTEXT_TOKENS, DONE, event, hang, reply, status, stream

PROMPT = {"text": "x"}
SLO = "x-sgl-ttft-slo-ms"


@asynccontextmanager
async def busy(**options: Any) -> AsyncIterator[Cluster]:
    """A cluster that serves one request at a time and is serving one that does not end."""
    async with cluster(max_concurrent_requests=1, **options) as served:
        served.decode[0].script = hang()
        first = await waiting(served)
        await served.decode[0].received(1)
        yield served
        first.close()


async def waiting(served: Cluster, headers: dict[str, str] | None = None, rid: str = "") -> RawClient:
    """A client that has sent a request and waits."""
    client = await served.connect()
    body = {**PROMPT, "rid": rid} if rid else PROMPT
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode(), headers))
    return client


async def queued(served: Cluster, count: int) -> None:
    await served.until(lambda: served.router.requests_queued == count)


async def test_a_full_queue_gives_429_at_once() -> None:
    async with busy(queue_size=2) as served:
        others = [await waiting(served) for _ in range(2)]
        await queued(served, 2)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 429
        assert answer.error["type"] == "rate_limit_error"
        assert answer.headers["retry-after"] == "1"
        assert served.router.metrics.refused == {"queue_full": 1}
        assert len(served.decode[0].requests) == 1
        for client in others:
            client.close()


async def test_a_queue_of_size_zero() -> None:
    async with busy(queue_size=0) as served:
        assert (await served.ask("POST", "/generate", PROMPT)).status == 429


@pytest.mark.slow
async def test_waiting_too_long_gives_408() -> None:
    async with busy(queue_timeout_secs=0.2) as served:
        start_s, clock_s = running_s(), time.monotonic()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert time.monotonic() - clock_s >= 0.2
        assert running_s() - start_s < 2.0
        assert answer.status == 408
        assert answer.error["type"] == "timeout_error"
        assert len(served.decode[0].requests) == 1


@pytest.mark.slow
async def test_a_deadline_ends_the_wait_earlier() -> None:
    async with busy(queue_timeout_secs=20.0) as served:
        start_s, clock_s = running_s(), time.monotonic()
        answer = await served.ask("POST", "/generate", PROMPT, {"x-sgl-ttft-slo-ms": "150"})
        assert answer.status == 408
        assert time.monotonic() - clock_s >= 0.15
        assert running_s() - start_s < 2.0


async def test_the_earliest_deadline_is_served_first() -> None:
    async with cluster(max_concurrent_requests=1, queue_timeout_secs=20.0) as served:
        served.decode[0].plan(hang())
        first = await waiting(served)
        await served.decode[0].received(1)
        clients = []
        for name, slo_ms in (("late", "9000"), ("none", ""), ("early", "5000")):
            clients.append(await waiting(served, {"x-sgl-ttft-slo-ms": slo_ms} if slo_ms else None, name))
            await queued(served, len(clients))
        first.close()
        for client in clients:
            assert (await client.reply()).status == 200
            client.close()
        order = [request.rid.split("-")[0] for request in served.decode[0].requests[1:]]
        assert order == ["early", "late", "none"]


@pytest.mark.slow
async def test_the_queue_wait_is_told() -> None:
    async with cluster(max_concurrent_requests=1) as served:
        served.decode[0].plan(reply(delay_s=0.3))
        first = await waiting(served)
        await served.decode[0].received(1)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert 200 <= int(answer.headers["x-sglang-ext-queue-ms"]) <= 2000
        first.close()


@pytest.mark.slow
async def test_never_more_requests_under_way_than_allowed() -> None:
    async with cluster(max_concurrent_requests=3, queue_size=100) as served:
        most = 0

        async def play(turn: Any) -> None:
            nonlocal most
            most = max(most, len(served.decode[0].turns))
            await reply(delay_s=0.005)(turn)

        served.decode[0].script = play
        answers = await asyncio.gather(*(served.ask("POST", "/generate", PROMPT) for _ in range(60)))
        assert {answer.status for answer in answers} == {200}
        assert most == 3


@pytest.mark.slow
async def test_a_long_queue_that_meets_no_instance_is_refused_whole() -> None:
    count = 300
    async with cluster(max_concurrent_requests=1, queue_size=count) as served:
        served.decode[0].plan(hang())
        first = await waiting(served)
        await served.decode[0].received(1)
        clients = [await waiting(served) for _ in range(count)]
        await queued(served, count)
        served.router.drain_worker(served.worker(served.decode[0].url), True)
        first.close()
        for client in clients:
            assert (await client.reply()).status == 503
            client.close()


@pytest.mark.slow
@pytest.mark.parametrize("slo", ["", "abc", "0", "-1", "nan", "inf", "-inf", "1e999", "0x10", "1 2"])
async def test_a_bad_deadline_gives_400(slo: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/generate", PROMPT, {"x-sgl-ttft-slo-ms": slo})
        assert answer.status == 400
        assert answer.error["param"] == "x-sgl-ttft-slo-ms"
        assert served.upstream_requests() == 0


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
async def test_met_and_missed_deadlines_are_counted(is_stream: bool) -> None:
    """What counts is a stream's first byte; of another reply, the end of its prefill."""
    async with cluster() as served:
        slow, other = (served.decode, served.short) if is_stream else (served.short, served.decode)
        slow[0].script = stream(event({}), DONE, delay_s=0.1) if is_stream else reply(delay_s=0.1)
        if is_stream:
            other[0].script = stream(event({}), DONE)
        for slo_ms in ("10000", "20", "10000"):
            answer = await served.ask("POST", "/generate", {"text": "x", "stream": is_stream}, {SLO: slo_ms})
            assert answer.status == 200
        await served.until_idle()
        assert (served.router.metrics.short.slo_met, served.router.metrics.short.slo_missed) == (2, 1)


@pytest.mark.slow
async def test_deadlines_of_requests_without_a_token_are_missed_unless_they_are_at_fault() -> None:
    async with cluster(retry_max_retries=0) as served:
        metrics = served.router.metrics
        served.decode[0].plan(status(503), status(400))
        for code in (503, 400):
            assert (await served.ask("POST", "/generate", PROMPT, {SLO: "10000"})).status == code
        await served.until_idle()
        assert (metrics.short.slo_met, metrics.short.slo_missed) == (0, 1)
    async with cluster(max_concurrent_requests=1) as served:
        served.decode[0].script = hang()
        client = await served.connect()
        await client.send(request_bytes("POST", "/generate", b'{"text": "x"}'))
        await served.decode[0].received(1)
        assert (await served.ask("POST", "/generate", PROMPT, {SLO: "50"})).status == 408
        assert served.router.metrics.unclassified_slo_missed == 1
        client.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/generate", {"input_ids": [7] * (CONTEXT_TOKENS + 1)}),
        ("/v1/completions", {"prompt": [[1], [7] * (CONTEXT_TOKENS + 1)]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcd" * 10 * CONTEXT_TOKENS}]}),
    ],
)
async def test_a_prompt_that_no_decode_instance_can_hold_is_theirs_to_refuse(target: str, body: dict[str, Any]) -> None:
    """They count it, template and all; an estimate would refuse some that fit."""
    async with cluster() as served:
        sentence = "The input (9000 tokens) is longer than the model's context length (4096 tokens)."
        for engine in served.decode:
            engine.script = reply({"object": "error", "message": sentence, "type": "BadRequestError", "code": 400}, 400)
        answer = await served.ask("POST", target, body)
        assert (answer.status, served.upstream_requests()) == (400, 2)
        if target == "/generate":
            assert answer.json["message"] == sentence
        else:
            assert (answer.error["message"], answer.error["code"]) == (sentence, "context_length_exceeded")


async def test_a_prompt_that_just_fits_is_served() -> None:
    async with cluster() as served:
        answer = await served.ask("POST", "/generate", {"input_ids": [7] * CONTEXT_TOKENS})
        assert (answer.status, answer.headers["x-sglang-ext-class"]) == (200, "long")


BAD_BODIES: list[tuple[str, bytes]] = [
    ("/generate", b""),
    ("/generate", b"{"),
    ("/generate", b"[]"),
    ("/generate", b"null"),
    ("/generate", b'"text"'),
    ("/generate", b'{"text": "x"} {"text": "y"}'),
    ("/generate", b'{"text": "x"}\x00'),
    ("/generate", b'{"text": "\xff"}'),
    ("/generate", b'{"text": NaN}'),
    ("/generate", b'{"text": "\\ud800"}'),
    ("/generate", b"{}"),
    ("/generate", b'{"text": 1}'),
    ("/generate", b'{"text": []}'),
    ("/generate", b'{"text": [1.5]}'),
    ("/generate", b'{"text": {"a": 1}}'),
    ("/generate", b'{"text": "x", "input_ids": [1]}'),
    ("/generate", b'{"input_ids": [1, "a"]}'),
    ("/generate", b'{"input_ids": [99999999999999999999]}'),
    ("/generate", b'{"text": "x", "sampling_params": {"n": 0}}'),
    ("/generate", b'{"text": "x", "sampling_params": {"n": "2"}}'),
    ("/generate", b'{"text": "x", "sampling_params": {"n": true}}'),
    ("/generate", b'{"text": "x", "sampling_params": {"n": 1000000000}}'),
    ("/v1/completions", b'{"prompt": null}'),
    ("/v1/completions", b'{"prompt": ""}' + b"}"),
    ("/v1/completions", b'{"prompt": ["a", 1]}'),
    ("/v1/completions", b'{"prompt": "x", "n": -1}'),
    ("/v1/completions", b'{"prompt": "x", "rid": 5}'),
    ("/v1/chat/completions", b'{"prompt": "x"}'),
    ("/v1/chat/completions", b'{"messages": []}'),
    ("/v1/chat/completions", b'{"messages": {}}'),
    ("/v1/chat/completions", b'{"messages": ["hi"]}'),
    ("/generate", b'{"text": "x", "a": ' + b"[" * 2000 + b"]" * 2000 + b"}"),
    ("/v1/chat/completions", b'{"messages": [{}], "tools": ' + b"[" * 400 + b"]" * 400 + b"}"),
    ("/v1/chat/completions", b'{"messages": [{"tool_calls": ' + b"[" * 400 + b"]" * 400 + b"}]}"),
    ("/generate", b'{"text": "x", "bootstrap_room": 1, "a": ' + b"[" * 400 + b"]" * 400 + b"}"),
]


async def test_a_body_that_cannot_be_served_gives_400_and_one_line() -> None:
    async with cluster() as served, await served.connect() as client:
        for target, body in BAD_BODIES:
            answer = await client.ask("POST", target, body)
            assert answer.status == 400, body[:80]
            assert answer.error["type"] == "invalid_request_error"
            assert len(answer.error["message"]) < 200
        assert served.upstream_requests() == 0
        assert served.router.metrics.refused == {"bad_request": len(BAD_BODIES)}


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        *(
            (None, 401),
            ("Bearer wrong", 401),
            ("secret", 401),
            ("Basic secret", 401),
            ("Bearer", 401),
            ("Bearer ", 401),
        ),
        *(("Bearer secret", 200), ("bearer secret", 200), ("BEARER secret", 200), ("Bearer  secret ", 200)),
    ],
)
async def test_the_key(authorization: str | None, status: int) -> None:
    async with cluster(api_key="secret") as served:
        headers = {"Authorization": authorization} if authorization else {}
        answer = await served.ask("POST", "/generate", PROMPT, headers)
        assert answer.status == status
        if status == 401:
            assert answer.error["type"] == "authentication_error"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert served.upstream_requests() == (2 if status == 200 else 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
async def test_only_post(method: str, path: str) -> None:
    async with cluster() as served, await served.connect() as client:
        if (method, path) == ("PUT", "/generate"):  # as SGLang has it
            assert (await client.ask(method, path, PROMPT)).status == 200
            return
        for _ in range(2):
            answer = await client.ask(method, path)
            assert answer.status == 405
            assert answer.headers["allow"] == ("POST, PUT" if path == "/generate" else "POST")
            assert (answer.body == b"") == (method == "HEAD")


@pytest.mark.parametrize("path", ["/v1/chat/completions/", "/generate/", "/v1/completions//", "/v1/responses/?a=b"])
async def test_a_slash_at_the_end_is_redirected(path: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", path, PROMPT)
        bare, _, query = path.partition("?")
        where = bare.rstrip("/") + ("?" + query if query else "")
        assert (answer.status, answer.headers["location"]) == (307, where)
        assert served.upstream_requests() == 0


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    "path", ["/", "/ping", "/health", "/healthz", "/liveness", "/ready", "/readyz", "/health_generate"]
)
async def test_probes_need_no_key(method: str, path: str) -> None:
    async with cluster(api_key="secret") as served, await served.connect() as client:
        assert (await client.ask(method, path)).status == 200
        served.router.drain_worker(served.worker(served.decode[0].url), True)
        tells_readiness = path in {"/ready", "/readyz", "/health_generate"}
        assert (await client.ask(method, path)).status == (503 if tells_readiness else 200)


@pytest.mark.parametrize("path", ["/v1", "/V1/completions"])
async def test_unknown_paths(path: str) -> None:
    async with cluster() as served:
        answer = await served.ask("POST", path, PROMPT)
        assert answer.status == 404
        assert answer.error["type"] == "not_found_error"
