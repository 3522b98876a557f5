"""Instances that change between prefill and decode, by the controller, by hand, and behind the router's back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.types import Role
from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.decide.pool_move import MoveOutcome
from support.laps_engine import ADMIN, CONTROLLED, SLOW, ControlledCluster, ended
from support.role_engine import RoleEngine
from support.router_process import running_router
from support.scripted_engine import ScriptedEngine, one_token_until

PROMPT = {"text": "x"}


@asynccontextmanager
async def switchable(prefill: int = 1, decode: int = 2, **options: Any) -> AsyncIterator[ControlledCluster]:
    """Prefill and decode instances whose roles can be switched, and a router over them."""
    engines: dict[Role, list[ScriptedEngine]] = {role: [] for role in Role}
    engines[Role.BOTH] = [RoleEngine(Role.BOTH) for _ in range(prefill)]
    engines[Role.DECODE] = [RoleEngine(Role.DECODE) for _ in range(decode)]
    all_engines = [*engines[Role.BOTH], *engines[Role.DECODE]]
    for engine in all_engines:
        await engine.start()
    addresses = tuple(WorkerAddress(engine.url, engine.role) for engine in all_engines)
    try:
        async with running_router(replace(CONTROLLED, workers=addresses, **options)) as running:
            served = ControlledCluster(running, engines, all_engines)
            await served.until_ready()
            yield served
            await served.until_idle()
    finally:
        for engine in all_engines:
            await engine.stop()


def role_engine(engine: ScriptedEngine) -> RoleEngine:
    assert isinstance(engine, RoleEngine)
    return engine


async def switch(served: ControlledCluster, engine: ScriptedEngine, to: str) -> Any:
    return await served.ask("POST", "/pools/move", {"url": engine.url, "to": to}, ADMIN)


async def outcomes(served: ControlledCluster, count: int) -> list[tuple[str, str, str, str]]:
    """The moves that have ended, once there are so many."""
    await served.until(lambda: len(served.router.controller.moves) >= count)
    return [(move["from"], move["to"], move["reason"], move["outcome"]) for move in reversed(await served.moves())]


async def test_without_prefill_a_decode_instance_prefills_until_one_is_back() -> None:
    async with switchable() as served:
        (prefill,) = served.both
        helper, other = served.decode
        await prefill.stop()
        waiting = await served.ask("POST", "/generate", PROMPT)
        assert waiting.status == 200
        assert await outcomes(served, 1) == [("decode", "prefill", "below_minimum", "moved")]
        assert role_engine(helper).switches == [{"new_role": "prefill"}]
        assert served.role(helper) is Role.BOTH
        # The first attempt may have come as far as decode, at either instance, before it was known that nothing
        # listens at prefill.
        assert (len(helper.requests), len(other.requests)) in {(1, 1), (1, 2), (2, 1)}
        assert helper.requests[-1].room == other.requests[-1].room
        assert helper.requests[-1].json["bootstrap_port"] == 8998
        await prefill.start()
        assert (await outcomes(served, 2))[1] == ("prefill", "decode", "return", "moved")
        assert served.role(helper) is Role.DECODE
        # It gets the graphs of a decode instance, as it may never have captured any.
        assert role_engine(helper).switches[1]["new_role"] == "decode"
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        assert len(prefill.requests) == 1


async def test_a_pressed_side_gets_an_instance() -> None:
    async with switchable(prefill=3, decode=1) as served:
        role_engine(served.decode[0]).use(0.9)
        assert await outcomes(served, 1) == [("prefill", "decode", "pressure", "moved")]
        moved = next(engine for engine in served.both if served.role(engine) is Role.DECODE)
        assert role_engine(moved).mode == "decode"
        asked = role_engine(moved).switches[0]
        assert (asked["decode_cuda_graph_bs"], asked["decode_cuda_graph_memory_gb"]) == ([1, 2], 0.5)


async def test_advice_switches_nothing() -> None:
    async with switchable(controller="advise") as served:
        await served.both[0].stop()
        counts = served.router.controller.decision_counts
        await served.until(lambda: counts.get(("advise", "below_minimum"), 0) >= 3)
        assert all(role_engine(engine).switches == [] for engine in served.decode)
        await served.both[0].start()


async def test_requests_under_way_end_before_the_switch() -> None:
    release = asyncio.Event()
    async with switchable(controller="off", controller_drain_timeout_secs=5.0, **SLOW) as served:
        served.decode[1].plan(one_token_until(release))
        served.router.drain_worker(served.worker(served.decode[0].url), True)
        asking = asyncio.create_task(served.ask("POST", "/generate", {**PROMPT, "stream": True}))
        await served.decode[1].received(1)
        served.router.drain_worker(served.worker(served.decode[0].url), False)
        assert (await switch(served, served.decode[1], "prefill")).status == 202
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        assert role_engine(served.decode[1]).switches == []
        release.set()
        assert (await asking).status == 200
        assert await outcomes(served, 1) == [("decode", "prefill", "operator", "moved")]


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [("cut", "moved"), ("ignore", "failed"), ("refuse", "failed"), ("break", "lost")],
)
async def test_how_a_switch_ends(behaviour: str, outcome: str, complaints: Any) -> None:
    async with switchable(controller="off", **SLOW) as served:
        helper = role_engine(served.decode[1])
        helper.behaviour = behaviour
        assert (await switch(served, helper, "prefill")).status == 202
        assert (await ended(served))["outcome"] == outcome
        assert served.role(helper) is (Role.BOTH if outcome == MoveOutcome.MOVED else Role.DECODE)
        assert served.worker(helper.url).is_ready is (outcome != MoveOutcome.LOST)
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200


async def test_switches_that_are_refused() -> None:
    async with switchable(decode=1, controller="off", **SLOW) as served:
        prefill, decode = served.both[0], served.decode[0]
        for engine, to, text in (
            (prefill, "prefill", "already"),
            (prefill, "decode", "the last prefill instance"),
            (decode, "prefill", "the last decode instance"),
            (decode, "long", "neither pool"),
        ):
            answer = await switch(served, engine, to)
            assert (answer.status, text in answer.error["message"]) == (409, True), answer.body
        served.worker(decode.url).can_switch_roles = False
        answer = await switch(served, decode, "prefill")
        assert (answer.status, "--enable-pd-role-switch" in answer.error["message"]) == (409, True)


async def test_an_instance_is_what_it_says_that_it_is() -> None:
    async with switchable(controller="off", **SLOW) as served:
        switched = role_engine(served.decode[0])
        switched.mode = "prefill"  # by another router of the group
        await served.until(lambda: served.role(switched) is Role.BOTH)
        assert [worker.url for worker in served.model.ready_decode] == [served.decode[1].url]
        assert (await served.ask("POST", "/generate", PROMPT)).status == 200
        await switched.stop()
        await served.until(lambda: not served.worker(switched.url).is_healthy)
        switched.mode = "decode"
        await switched.start()
        await served.until(lambda: served.worker(switched.url).is_ready)
        assert served.role(switched) is Role.DECODE
