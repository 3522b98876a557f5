"""GET /pools and the long pool's coordinator: its members and prompts, or why nothing is known of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sglang_ext_router.config import RouterConfig, RouterConfigError
from sglang_ext_router.instances import long_pool
from sglang_ext_router.instances.long_pool import LongPoolMonitor, read_status
from support.router_process import Cluster, cluster

RATE = 0.25
TIMES = {"wait_s": 0.5, "compute_s": 2.0, "ring_s": 0.25, "rebalance_s": 0.0, "collect_s": 0.125, "failed_s": 0.0}
TIMES |= {"transfer_s": 2.75, "exposed_transfer_s": 0.125}


def step(kind: str, members: list[int], tokens: int, *, has_failed: bool = False) -> dict[str, Any]:
    return {"kind": kind, "members": members, "new_tokens": tokens, "ordered_s": 10.0, "ended_s": 12.5} | {
        "has_failed": has_failed
    }


def request(owner: int, steps: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "request": 1,
        "owner": owner,
        "tokens": 3000,
        "cached_tokens": 0,
        "offered_s": 9.5,
        "ended_s": 13.0,
        "outcome": "collected",
        "steps": steps,
        "times": TIMES,
        **changes,
    }


def status(**changes: Any) -> dict[str, Any]:
    member = {
        "instance": 3,
        "name": "host:1",
        "node": "n",
        "backlog_s": 0.0,
        "free_kv_tokens": 10,
        "held_tokens": 0,
        "is_ready": True,
    }
    steps = [step("chunk", [3], 1000), step("chunk", [3, 1], 2000, has_failed=True), step("chunk", [3, 1, 7], 2000)]
    return {
        "model": "m",
        "arrivals_per_s": RATE,
        "members": [member],
        "former_members": [{"instance": 1, "name": "host:2"}],
        "requests": [],
        "recent": [request(3, [*steps, step("collect", [3, 1], 0)])],
        **changes,
    }


class FakeCoordinator:
    """Answers /status as it is told."""

    def __init__(self) -> None:
        self.answer: object = status()
        self.asked = 0
        self.asked_recent: set[str | None] = set()

    async def get_status(self, request: web.Request) -> web.Response:
        self.asked += 1
        self.asked_recent.add(request.query.get("recent"))
        if isinstance(self.answer, bytes):
            return web.Response(body=self.answer)
        return web.json_response(self.answer)


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[FakeCoordinator, TestServer, Cluster]]:
    coordinator = FakeCoordinator()
    app = web.Application()
    app.router.add_get("/status", coordinator.get_status)
    async with (
        TestServer(app) as server,
        cluster(coordinator_url=f"http://127.0.0.1:{server.port}", load_poll_interval_secs=0.02) as served,
    ):
        yield coordinator, server, served


async def shown(served: Cluster) -> Any:
    return (await served.ask("GET", "/pools")).json["long_pool"]


async def until_shown(served: Cluster, name: str, value: object) -> Any:
    async with asyncio.timeout(5):
        while (pool := await shown(served))[name] != value:  # noqa: ASYNC110 - it is asked over HTTP
            await asyncio.sleep(0.01)
    return pool


async def test_members_and_prompts_are_shown_by_name() -> None:
    async with watched() as (_, _, served):
        pool = await until_shown(served, "arrivals_per_s", RATE)
        assert pool["problem"] is None
        assert [member["name"] for member in pool["members"]] == ["host:1"]
        (one,) = pool["recent"]
        assert (one["owner"], one["seconds"], one["wait_s"], one["ring_s"]) == ("host:1", 3.5, 0.5, 0.25)
        assert [(chunk["tokens"], chunk["instances"]) for chunk in one["chunks"]] == [
            (1000, ["host:1"]),
            (2000, ["host:1", "host:2", "7"]),
        ]


async def test_no_more_is_asked_for_than_is_shown_and_traced() -> None:
    async with watched() as (coordinator, _, served):
        await until_shown(served, "arrivals_per_s", RATE)
        assert coordinator.asked_recent == {str(long_pool.ASKED_REQUESTS)}


async def test_a_coordinator_that_goes_is_shown_as_away_with_its_last_word() -> None:
    async with watched() as (_, server, served):
        await until_shown(served, "arrivals_per_s", RATE)
        await server.close()
        async with asyncio.timeout(5):
            while (pool := await shown(served))["problem"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert "Cannot connect" in pool["problem"]
        assert (pool["arrivals_per_s"], len(pool["recent"])) == (RATE, 1)
        assert (await served.ask("POST", "/generate", {"text": "hi"})).status == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"{", None),
        ([], "the answer is not an object"),
        (status(members=7), "members is not a list"),
        (status(members=[None]), "a member is not an object"),
        (status(recent=[request(0, [], times=None)]), "times of a request is not an object"),
        (status(recent=[request(0, [step("chunk", [0], 1) | {"members": None}])]), "members is not a list"),
    ],
)
async def test_nonsense_is_a_problem_and_no_more(answer: object, problem: str | None) -> None:
    async with watched() as (coordinator, _, served):
        await until_shown(served, "problem", None)
        coordinator.answer = answer
        async with asyncio.timeout(5):
            while (pool := await shown(served))["problem"] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert problem is None or pool["problem"] == problem
        coordinator.answer = status(arrivals_per_s=5.0)
        assert (await until_shown(served, "arrivals_per_s", 5.0))["problem"] is None


async def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_pool, "MAX_STATUS_BYTES", 1000)
    async with watched() as (coordinator, _, served):
        coordinator.answer = b" " * 100_000
        await until_shown(served, "problem", "more than 1000 bytes")


async def test_without_a_coordinator_there_is_no_long_pool_to_show() -> None:
    async with cluster() as served:
        assert await shown(served) is None


def test_only_the_latest_are_shown_latest_first() -> None:
    described = read_status(status(recent=[request(3, [], tokens=number) for number in range(50)]))
    assert [one["tokens"] for one in described["recent"]] == list(range(49, 29, -1))


def test_numbers_that_are_none_are_no_numbers() -> None:
    (one,) = read_status(status(recent=[request(3, [], offered_s=None, times={**TIMES, "ring_s": "x"})]))["recent"]
    assert (one["seconds"], one["ring_s"]) == (None, None)


def test_what_is_no_address_is_refused() -> None:
    with pytest.raises(RouterConfigError, match="--coordinator-url: 'ftp://x:1' must be an http:// URL"):
        RouterConfig(coordinator_url="ftp://x:1")


def test_the_clock_of_a_coordinator_is_followed_when_it_jumps_and_not_when_an_answer_is_late() -> None:
    now_s = 100.0
    monitor = LongPoolMonitor("http://x:1", 1.0, 1.0, lambda: now_s)
    monitor._follow_clock(None)
    assert monitor.clock_offset_s is None
    monitor._follow_clock(10.0)
    assert monitor.clock_offset_s == 90.0
    now_s = 101.2  # the answer was under way for 0.2 s
    monitor._follow_clock(11.0)
    assert monitor.clock_offset_s == 90.0
    now_s = 102.0  # it was started again
    monitor._follow_clock(0.5)
    assert monitor.clock_offset_s == 101.5
