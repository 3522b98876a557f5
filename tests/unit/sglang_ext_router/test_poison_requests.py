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
