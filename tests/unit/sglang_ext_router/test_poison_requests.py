"""Requests that end what serves them visit two instances at most, and retries are a share of all requests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.router_process import Cluster, cluster
from support.scripted_engine import cut, hang, reply, status

IN_TURN: dict[str, Any] = {"prefill_policy": "round_robin", "decode_policy": "round_robin"}
PROMPT = {"text": "poison"}


def visits(served: Cluster) -> int:
    return sum(len(engine.requests) for engine in served.decode)


@pytest.mark.parametrize("after", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_request_that_makes_decode_drop_its_connection_visits_two_instances(after: bytes) -> None:
    async with cluster(decode=6, long=0, **IN_TURN) as served:
        served.short[0].script = hang()
        for engine in served.decode:
            engine.script = cut(after)
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 502
        assert visits(served) == 2
        assert len({request.room for request in served.short[0].requests}) == 2


async def test_nor_does_it_visit_more_over_kept_connections() -> None:
    async with cluster(decode=6, long=0, **IN_TURN) as served:
        for engine in served.decode:
            engine.script = reply()
        for _ in range(6):
            assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        served.short[0].script = hang()
        for engine in served.decode:
            engine.script = cut()
        before = visits(served)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 502
        assert visits(served) - before == 2


MESSAGES = [{"role": "user", "content": "poison"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": PROMPT,
    "/v1/completions": {"prompt": ["poison", "more"]},
    "/v1/chat/completions": {"messages": MESSAGES, "n": 2},
    "/v1/responses": {"model": "m", "input": "poison"},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_at_prefill_no_request_visits_more_than_two_instances(path: str, is_stream: bool) -> None:
    async with cluster(short=6, long=0, **IN_TURN) as served:
        for engine in served.short:
            engine.script = cut()
        for engine in served.decode:
            engine.script = hang()
        answer = await served.ask("POST", path, {**BODIES[path], "stream": is_stream})
        assert answer.status == 502
        assert sum(len(engine.requests) for engine in served.short) == 2
        assert answer.headers["x-should-retry"] == "false", "or a client's library sends it to two more"


async def test_nor_does_a_request_for_scores() -> None:
    async with cluster(short=6, long=0, **IN_TURN) as served:
        for engine in served.short:
            engine.script = cut()
        body = {"prompt": "poison", "max_tokens": 0, "prompt_logprobs": 1}
        assert (await served.ask("POST", "/v1/completions", body)).status == 502
        assert sum(len(engine.requests) for engine in served.short) == 2


async def test_an_instance_at_each_leg_is_two_instances() -> None:
    async with cluster(short=3, decode=3, long=0, **IN_TURN) as served:
        for engine in served.short:
            engine.script = hang()
        for engine in served.decode:
            engine.script = hang()
        served.short[0].script = cut()
        served.decode[1].script = cut()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, visits(served)) == (502, 2)


@pytest.mark.parametrize(
    "path",
    [
        *("/tokenize", "/v1/tokenize", "/v1/detokenize", "/v1/messages/count_tokens"),
        *("/parse_function_call", "/separate_reasoning", "/api/show"),
    ],
)
async def test_what_is_passed_on_visits_two_instances(path: str) -> None:
    async with cluster(short=3, decode=3, long=0) as served:
        engines = [*served.short, *served.decode]
        for engine in engines:
            engine.pages[path] = cut()
        answer = await served.ask("POST", path, {"prompt": "poison"})
        assert (answer.status, answer.headers["x-should-retry"]) == (502, "false")
        assert sum(request.path == path for engine in engines for request in engine.control) == 2


async def test_a_single_loss_without_retries_may_be_sent_again_by_the_client() -> None:
    async with cluster(long=0, disable_retries=True) as served:
        served.decode[0].script = cut()
        served.short[0].script = hang()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert answer.status == 502
        assert "x-should-retry" not in answer.headers


async def test_a_request_whose_instance_was_lost_once_is_served() -> None:
    async with cluster(decode=2, long=0, **IN_TURN) as served:
        served.decode[0].plan(cut())
        answers = [await served.ask("POST", "/generate", PROMPT) for _ in range(2)]
        assert [answer.status for answer in answers] == [200, 200]


async def test_retries_beyond_the_budget_are_refused() -> None:
    budget = {"retry_budget_ratio": 0.1, "retry_budget_min_per_sec": 0.2, "disable_circuit_breaker": True}
    async with cluster(decode=2, long=0, **budget, **IN_TURN) as served:
        for engine in served.decode:
            engine.script = status(503)
        answers = await asyncio.gather(*(served.ask("POST", "/generate", PROMPT) for _ in range(30)))
        assert {answer.status for answer in answers} == {503}
        # at most 30 * 0.1 + 0.2 * 10 retries, of 150
        assert 30 < visits(served) <= 35
        assert served.router.metrics.retries_refused["budget"] >= 25
        shown = (await served.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_retries_refused_total{reason="budget"}' in shown


async def test_without_a_budget_nothing_is_tried_again() -> None:
    async with cluster(decode=2, long=0, retry_budget_ratio=0.0, retry_budget_min_per_sec=0.0, **IN_TURN) as served:
        for engine in served.decode:
            engine.script = cut()
        answer = await served.ask("POST", "/generate", PROMPT)
        assert (answer.status, visits(served)) == (503, 1)
        assert "tried again" in answer.error["message"]
