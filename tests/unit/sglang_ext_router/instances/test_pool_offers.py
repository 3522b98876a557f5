"""Long prompts wait until the long pool's coordinator names their instance; whatever it does, they are served."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from support.raw_client import RawClient, Reply, request_bytes
from support.router_process import Cluster
from support.scripted_coordinator import Answer, offering
from support.scripted_engine import hang, reply, status

LONG = {"text": "long " * 3000}
SHORT = {"text": "short"}


def outcomes(served: Cluster) -> dict[str, int]:
    return served.router.metrics.pool_offers


async def sent(served: Cluster, body: dict[str, Any]) -> RawClient:
    """A client that has sent a request and waits."""
    client = await served.connect()
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))
    return client


async def ask(served: Cluster, body: dict[str, Any] = LONG, headers: dict[str, str] | None = None) -> Reply:
    return await served.ask("POST", "/generate", body, headers)


async def test_the_instance_that_is_named_gets_it_under_the_room_of_its_ticket() -> None:
    async with offering() as (coordinator, served):
        for _ in range(3):
            assert (await ask(served, {"text": f"{len(coordinator.tickets)} {LONG['text']}"})).status == 200
        assert [len(engine.requests) for engine in served.long] == [0, 0, 3]
        rooms = [ticket["ticket"] for ticket in coordinator.tickets]
        assert rooms == [one.room for one in served.long[2].requests] == [one.room for one in served.decode[0].requests]
        (ticket, *_) = coordinator.tickets
        assert ticket["tokens"] > 256
        assert 0 <= ticket["waited_s"] < 5
        assert ticket["online"] is True
        assert "slack_s" not in ticket
        assert outcomes(served) == {"named": 3}
        metrics = (await served.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_pool_offers_total{outcome="named"} 3.0' in metrics


async def test_its_tokens_are_work_of_all_that_compute_it() -> None:
    async with offering() as (coordinator, served):
        coordinator.members = [f"127.0.0.1:{served.long[number].port}" for number in (2, 0)] + ["elsewhere:1"]
        served.long[2].plan(hang())
        served.decode[0].plan(hang())
        asking = asyncio.create_task(ask(served))
        await served.until(lambda: bool(served.long[2].requests))
        workers = {worker.name: worker for worker in served.router.registry}
        pending = [workers[f"127.0.0.1:{engine.port}"].pending_tokens for engine in served.long]
        tokens = coordinator.tickets[0]["tokens"]
        assert pending == [tokens // 2, 0, tokens // 2]
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await served.until(lambda: not any(worker.pending_tokens for worker in workers.values()))


async def test_it_is_sent_nowhere_before_its_turn_and_short_ones_do_not_wait() -> None:
    async with offering() as (coordinator, served):
        coordinator.turn.clear()
        asking = [asyncio.create_task(ask(served, {"text": f"{i} {LONG['text']}"})) for i in range(2)]
        await served.until(lambda: len(coordinator.tickets) == 2)
        assert (await ask(served, SHORT)).status == 200
        assert [len(engine.requests) for engine in served.long] == [0, 0, 0]
        assert len(served.decode[0].requests) == 1
        assert len(coordinator.tickets) == 2
        assert served.router.requests_in_flight == 2
        coordinator.turn.set()
        assert [(await one).status for one in asking] == [200, 200]
        assert [len(engine.requests) for engine in served.long] == [0, 0, 2]


async def test_its_own_deadline_is_told_and_low_priority_has_none() -> None:
    async with offering() as (coordinator, served):
        await ask(served, LONG, {"x-sgl-ttft-slo-ms": "90000"})
        await ask(served, {"text": "other " + LONG["text"]}, {"x-sgl-priority": "low"})
        assert 80 < coordinator.tickets[0]["slack_s"] <= 90
        assert [ticket["online"] for ticket in coordinator.tickets] == [True, False]
        assert "slack_s" not in coordinator.tickets[1]


def replying(code: int, body: bytes) -> Answer:
    async def answer(_: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=code, body=body)

    return answer


@pytest.mark.parametrize(
    ("code", "body", "outcome"),
    [
        (503, b'{"error": {}}', "refused"),
        (409, b"", "refused"),
        (200, b"nonsense", "invalid"),
        (200, b"[1]", "invalid"),
        (200, b'{"instance": 3}', "invalid"),
        (200, b'{"instance": "nowhere:1", "chunk_s": "1"}', "invalid"),
        (200, b'{"instance": "nowhere:1"}', "unknown_instance"),
    ],
)
async def test_whatever_it_answers_the_prompt_is_served(code: int, body: bytes, outcome: str) -> None:
    async with offering() as (coordinator, served):
        coordinator.answer = replying(code, body)
        assert (await ask(served)).status == 200
        assert outcomes(served) == {outcome: 1}
        assert sum(len(engine.requests) for engine in served.long) == 1


async def test_a_coordinator_that_is_away_is_not_waited_for() -> None:
    async with offering() as (coordinator, served):
        monitor = served.router.long_pool
        assert monitor is not None
        coordinator.is_well = False
        await served.until(lambda: not monitor.is_answering)
        assert (await ask(served)).status == 200
        assert (coordinator.tickets, outcomes(served)) == ([], {"away": 1})
        coordinator.is_well = True
        await served.until(lambda: monitor.is_answering)
        assert (await ask(served, {"text": "x" + LONG["text"]})).status == 200
        assert outcomes(served) == {"away": 1, "named": 1}


async def test_it_goes_away_while_a_prompt_waits() -> None:
    async with offering() as (coordinator, served):

        async def cut(_: dict[str, Any]) -> web.StreamResponse:
            raise asyncio.CancelledError

        coordinator.answer = cut
        assert (await ask(served)).status == 200
        assert outcomes(served) == {"away": 1}


@pytest.mark.slow
@pytest.mark.parametrize("limits", [{"coordinator_offer_timeout_secs": 0.2}, {"queue_timeout_secs": 0.2}])
async def test_a_turn_that_does_not_come_in_time(limits: dict[str, float]) -> None:
    async with offering(**limits) as (coordinator, served):
        coordinator.turn.clear()
        assert (await ask(served)).status == 200
        assert outcomes(served) == {"timeout": 1}
        await served.until(lambda: coordinator.withdrawn == [one["ticket"] for one in coordinator.tickets])


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_that_leaves_withdraws_its_prompt(how: str) -> None:
    async with offering() as (coordinator, served):
        coordinator.turn.clear()
        client = await sent(served, LONG)
        await served.until(lambda: len(coordinator.tickets) == 1)
        client.reset() if how == "reset" else client.close()
        await served.until(lambda: len(coordinator.withdrawn) == 1)
        await served.until_idle()
        assert served.upstream_requests() == 0
        assert outcomes(served) == {"given_up": 1}
        assert served.router.metrics.requests == {("/generate", "none", 499, "client_left"): 1}


async def test_an_abort_withdraws_a_prompt_whose_turn_has_not_come() -> None:
    async with offering(max_concurrent_requests=1) as (coordinator, served):
        coordinator.turn.clear()
        waiting = asyncio.create_task(ask(served, {**LONG, "rid": "mine"}))
        await served.until(lambda: len(coordinator.tickets) == 1)
        assert (await served.ask("POST", "/abort_request", {"rid": "mine"})).status == 200
        answer = await waiting
        assert (answer.status, served.upstream_requests()) == (503, 0)
        assert "aborted" in answer.error["message"]
        await served.until(lambda: len(coordinator.withdrawn) == 1)
        assert (await ask(served, SHORT)).status == 200, "its place is free"


async def test_its_place_goes_to_the_next_when_its_client_leaves() -> None:
    async with offering(max_concurrent_requests=1) as (coordinator, served):
        coordinator.turn.clear()
        client = await sent(served, LONG)
        await served.until(lambda: len(coordinator.tickets) == 1)
        waiting = asyncio.create_task(ask(served, SHORT))
        await served.until(lambda: served.router.requests_queued == 1)
        client.close()
        assert (await waiting).status == 200


@pytest.mark.slow
async def test_the_longest_life_of_a_request_counts_while_it_waits() -> None:
    async with offering(request_timeout_secs=0.3) as (coordinator, served):
        coordinator.turn.clear()
        answer = await ask(served)
        assert answer.status == 504
        assert served.upstream_requests() == 0
        assert outcomes(served) == {"given_up": 1}
        await served.until(lambda: len(coordinator.withdrawn) == len(coordinator.tickets))


async def test_a_stream_that_waits_is_kept_alive() -> None:
    async with offering(sse_keep_alive_secs=0.1) as (coordinator, served):
        coordinator.turn.clear()
        client = await sent(served, {**LONG, "stream": True})
        await served.until(lambda: len(coordinator.tickets) == 1)
        assert (await client.head())[0] == 200
        client.close()
        await served.until_idle()


async def test_what_an_instance_has_cached_decides_as_ever() -> None:
    async with offering() as (coordinator, served):
        assert (await ask(served)).status == 200
        coordinator.ended("collected")
        await served.until(lambda: has_prefixes(served))
        coordinator.name = f"127.0.0.1:{served.long[0].port}"
        assert (await ask(served, {"text": LONG["text"] + "and more"})).status == 200
        assert len(coordinator.tickets) == 1
        assert [len(engine.requests) for engine in served.long] == [0, 0, 2]


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [list(range(300)), list(range(300))]},
        {**LONG, "sampling_params": {"n": 2}},
        {**LONG, "return_logprob": True, "logprob_start_len": 0},
    ],
)
async def test_what_the_members_would_not_share_is_not_offered(body: dict[str, Any]) -> None:
    async with offering() as (coordinator, served):
        await ask(served, body)
        assert (coordinator.tickets, outcomes(served)) == ([], {})


async def test_a_prompt_is_cached_once_the_coordinator_says_so() -> None:
    async with offering() as (coordinator, served):

        async def is_asked() -> None:
            asked = coordinator.asked
            await served.until(lambda: coordinator.asked > asked + 1)

        await ask(served)
        assert not has_prefixes(served)
        for outcome in ("streamed", "cancelled"):
            coordinator.ended(outcome)
            await is_asked()
            assert not has_prefixes(served)
        coordinator.ended("collected")
        await served.until(lambda: has_prefixes(served))
        await ask(served)
        assert len(coordinator.tickets) == 1  # it goes where its prefix is


@pytest.mark.parametrize("outcome", ["collected", "alone_is_best"])
async def test_a_prompt_that_its_own_instance_has_computed_is_cached(outcome: str) -> None:
    async with offering() as (coordinator, served):
        await ask(served)
        coordinator.ended(outcome)
        await served.until(lambda: has_prefixes(served))


def has_prefixes(served: Cluster) -> bool:
    """Whether the router believes that any instance has a part of any prompt."""
    return served.router.planner.prefixes.index.block_count > 0


async def test_a_retry_is_routed_as_any_other() -> None:
    async with offering() as (coordinator, served):
        served.long[2].plan(status(503))
        served.decode[0].plan(hang())
        assert (await ask(served)).status == 200
        assert len(coordinator.tickets) == 1
        assert [len(engine.requests) for engine in served.long[:2]] in ([0, 1], [1, 0])
        rooms = [one.room for one in served.decode[0].requests]
        assert rooms[0] == coordinator.tickets[0]["ticket"] != rooms[1]


async def test_a_retry_on_the_same_instance_has_a_room_of_its_own() -> None:
    async with offering(long=1, short=0, decode=1) as (coordinator, served):
        coordinator.name = f"127.0.0.1:{served.long[0].port}"
        served.long[0].plan(status(503))
        served.decode[0].plan(hang())
        assert (await ask(served)).status == 200
        rooms = [one.room for one in served.long[0].requests]
        assert rooms[0] == coordinator.tickets[0]["ticket"] != rooms[1]
        assert len(coordinator.tickets) == 1


async def test_an_instance_that_drains_meanwhile_does_not_get_it() -> None:
    async with offering() as (coordinator, served):
        coordinator.turn.clear()
        asking = asyncio.create_task(ask(served))
        await served.until(lambda: len(coordinator.tickets) == 1)
        served.router.set_draining(served.worker(served.long[2].url), True)
        coordinator.turn.set()
        assert (await asking).status == 200
        assert len(served.long[2].requests) == 0
        assert outcomes(served) == {"unknown_instance": 1}


async def test_one_whose_circuit_is_open_does_not_get_it() -> None:
    async with offering(cb_failure_threshold=1, cb_timeout_duration_secs=600.0) as (coordinator, served):
        served.long[2].plan(status(500))
        served.decode[0].plan(hang())
        await ask(served)
        assert (await ask(served, {"text": "x" + LONG["text"]})).status == 200
        assert outcomes(served) == {"named": 1, "unusable": 1}
        rooms = [one.room for one in served.decode[0].requests]
        assert rooms[-1] != coordinator.tickets[-1]["ticket"]


async def test_not_at_all_when_the_timeout_is_zero() -> None:
    async with offering(coordinator_offer_timeout_secs=0.0) as (coordinator, served):
        served.long[0].script = reply()
        assert (await ask(served)).status == 200
        assert (coordinator.tickets, outcomes(served)) == ([], {})
