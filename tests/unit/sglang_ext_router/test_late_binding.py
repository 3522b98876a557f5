"""Short prompts that wait where a chunk is about to run are taken back, and sent where they end much sooner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from sglang_ext_router.instances.workers import Worker
from support.raw_client import RawClient, request_bytes
from support.router_process import Cluster
from support.scripted_coordinator import ScriptedCoordinator, offering
from support.scripted_engine import ScriptedEngine, hang, reply

TOKENS_PER_S = 1000.0
WAIT_TOKENS = 60_000  # of other prompts: a minute
MANY_TOKENS = 4 * WAIT_TOKENS
SHORT = [7] * 40
LONG = [8] * 3000


class Scene(NamedTuple):
    """Three instances for both classes: a short prompt waits at the first one."""

    served: Cluster
    coordinator: ScriptedCoordinator
    first: ScriptedEngine
    second: ScriptedEngine
    short: RawClient

    def worker(self, engine: ScriptedEngine) -> Worker:
        """The router's record of an instance."""
        return next(worker for worker in self.served.router.registry if worker.name == f"127.0.0.1:{engine.port}")

    async def bring_long(self, to: ScriptedEngine, members: tuple[ScriptedEngine, ...], chunk_s: float) -> RawClient:
        """Have a long prompt placed at an instance, which computes it with these members."""
        coordinator = self.coordinator
        coordinator.name = f"127.0.0.1:{to.port}"
        coordinator.members = [f"127.0.0.1:{member.port}" for member in members]
        coordinator.chunk_s = chunk_s
        count = len(coordinator.tickets)
        client = await send(self.served, LONG)
        await self.served.until(lambda: len(coordinator.tickets) == count + 1)
        await self.served.until(lambda: any(len(request.json["input_ids"]) == len(LONG) for request in to.requests))
        return client

    def short_prompts(self, engine: ScriptedEngine) -> list[str]:
        """Ids of the short prompts that an instance has got."""
        return [request.rid for request in engine.requests if len(request.json["input_ids"]) == len(SHORT)]


async def send(served: Cluster, tokens: list[int], **fields: Any) -> RawClient:
    """A client that has sent a prompt and waits."""
    client = await served.connect()
    body = {"input_ids": tokens, **fields}
    await client.send(request_bytes("POST", "/generate", json.dumps(body).encode()))
    return client


def set_pending(worker: Worker, tokens: int) -> None:
    """Let an instance have this much of other work."""
    worker.foreign_tokens = tokens
    worker.rate.tokens_per_s = TOKENS_PER_S


@asynccontextmanager
async def waiting_short(
    *, first_has: int = WAIT_TOKENS, second_has: int = 0, third_has: int = MANY_TOKENS, **fields: Any
) -> AsyncIterator[Scene]:
    """A short prompt has been sent to the first instance, which has `first_has` tokens to compute before it. The others
    have had more work then, and have this much now."""
    async with offering(both=3, short=0, long=0, load_poll_interval_secs=30.0) as (coordinator, served):
        first, second, third = served.both
        shown = Scene(served, coordinator, first, second, await served.connect())
        set_pending(shown.worker(first), first_has)
        for engine in (second, third):
            set_pending(shown.worker(engine), MANY_TOKENS)
        for engine in (*served.both, *served.decode):
            engine.script = hang()
        shown.short.close()
        shown = shown._replace(short=await send(served, SHORT, **fields))
        await served.until(lambda: len(first.requests) == len(served.decode[0].requests) == 1)
        set_pending(shown.worker(second), second_has)
        set_pending(shown.worker(third), third_has)
        yield shown
        shown.short.close()


async def test_it_leaves_an_instance_that_gets_a_chunk() -> None:
    async with waiting_short() as scene:
        scene.second.script = reply({"text": "x"})
        scene.served.decode[0].plan(hang(), reply({"text": "x"}))  # the long prompt, and then the short one
        sent_first = scene.first.requests[0].rid
        long = await scene.bring_long(scene.first, (scene.first,), chunk_s=5.0)
        assert (await scene.short.reply()).status == 200
        assert len(scene.short_prompts(scene.second)) == 1
        await scene.first.abort_of(sent_first)
        await scene.served.decode[0].abort_of(sent_first)
        metrics = scene.served.router.metrics
        assert (metrics.taken_back, metrics.evicted, metrics.retries, metrics.aborts) == (1, 0, {}, {})
        shown = (await scene.served.ask("GET", "/metrics")).body.decode()
        assert 'sglang_ext_router_events_total{event="taken_back"} 1.0' in shown
        long.close()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_both_legs_move_under_another_room(is_stream: bool) -> None:
    async with waiting_short(stream=is_stream) as scene:
        decode = scene.served.decode[0]
        long = await scene.bring_long(scene.first, (scene.first,), chunk_s=5.0)
        await scene.served.until(lambda: len(scene.short_prompts(scene.second)) == 1 and len(decode.requests) == 3)
        at_first, at_second = scene.first.requests[0], scene.second.requests[0]
        rooms = [request.room for request in decode.requests]
        assert at_second.room == rooms[2]
        assert len({at_first.room, *rooms}) == 3
        assert decode.requests[2].json["bootstrap_host"] == at_second.json["bootstrap_host"]
        long.close()


async def test_it_goes_where_it_ends_later_but_for_the_chunk() -> None:
    async with waiting_short(first_has=6_000, second_has=20_000) as scene:
        long = await scene.bring_long(scene.first, (scene.first,), chunk_s=60.0)
        await scene.served.until(lambda: len(scene.short_prompts(scene.second)) == 1)
        long.close()


async def no_chunk(scene: Scene) -> RawClient:
    return await scene.bring_long(scene.first, (scene.first,), chunk_s=0.0)


async def a_chunk_elsewhere(scene: Scene) -> RawClient:
    return await scene.bring_long(scene.second, (scene.second,), chunk_s=5.0)


async def a_chunk_of_both(scene: Scene) -> RawClient:
    return await scene.bring_long(scene.first, (scene.first, scene.second), chunk_s=5.0)


async def a_chunk(scene: Scene) -> RawClient:
    return await scene.bring_long(scene.first, (scene.first,), chunk_s=5.0)


@pytest.mark.parametrize(
    ("comes", "settings"),
    [
        (no_chunk, {}),
        (a_chunk_elsewhere, {"third_has": 0}),
        (a_chunk_of_both, {"third_has": MANY_TOKENS}),
        (a_chunk, {"second_has": WAIT_TOKENS // 2 + 10_000}),  # sooner there, but not much
        (a_chunk, {"first_has": 0}),  # it has begun, as far as can be known
    ],
    ids=["no-chunk", "elsewhere", "nowhere-without", "hardly-sooner", "begun"],
)
async def test_it_stays(comes: Any, settings: dict[str, int]) -> None:
    async with waiting_short(**settings) as scene:
        long = await comes(scene)
        await asyncio.sleep(0.05)
        assert [len(scene.short_prompts(engine)) for engine in scene.served.both] == [1, 0, 0]
        assert scene.served.router.metrics.taken_back == 0
        long.close()


async def test_it_moves_only_once() -> None:
    async with waiting_short(second_has=WAIT_TOKENS // 3) as scene:
        clients = [await scene.bring_long(scene.first, (scene.first,), chunk_s=5.0)]
        await scene.served.until(lambda: len(scene.short_prompts(scene.second)) == 1)
        set_pending(scene.worker(scene.second), WAIT_TOKENS)
        set_pending(scene.worker(scene.first), 0)
        clients.append(await scene.bring_long(scene.second, (scene.second,), chunk_s=60.0))
        await asyncio.sleep(0.05)
        assert [len(scene.short_prompts(engine)) for engine in scene.served.both] == [1, 1, 0]
        assert scene.served.router.metrics.taken_back == 1
        for client in clients:
            client.close()


async def test_it_is_served_if_the_other_instance_fails() -> None:
    async with waiting_short() as scene:
        long = await scene.bring_long(scene.first, (scene.first,), chunk_s=5.0)
        await scene.served.until(lambda: len(scene.short_prompts(scene.second)) == 1)
        await scene.served.until(lambda: len(scene.served.decode[0].requests) == 3)
        for engine in (scene.first, scene.served.decode[0]):
            engine.script = reply({"text": "x"})
        await scene.second.stop()
        assert (await scene.short.reply()).status == 200
        long.close()
