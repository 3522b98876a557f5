"""Conversations that clients name: by header or field, to the instance of the turn before, and not into its queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.types import LengthClass, Role
from sglang_ext_router.request.prompt import measure
from support.router_process import Cluster, cluster
from support.scripted_engine import event, reply, status, stream
from unit.sglang_ext_router.request.test_routing import Pools

SHORT, LONG, DECODE = Role.SHORT, Role.LONG, Role.DECODE
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
MESSAGE = {"model": "m", "max_tokens": 4, **CHAT}


async def prefill_of(served: Cluster, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
    answer = await served.ask("POST", path, body, headers)
    assert answer.status == 200
    return answer.headers["x-sglang-ext-prefill"]


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", CHAT, {"x-session-id": "s"}),
        ("/generate", {"text": "x"}, {"x-session-id": "s"}),
        ("/v1/chat/completions", {**CHAT, "prompt_cache_key": "s"}, {}),
        ("/v1/chat/completions", {**CHAT, "safety_identifier": "s", "user": ""}, {}),
        ("/v1/completions", {"prompt": "x", "user": "s"}, {}),
        ("/v1/responses", {"input": "x", "prompt_cache_key": "s"}, {}),
        ("/v1/messages", {**MESSAGE, "metadata": {"user_id": "s"}}, {}),
    ],
)
async def test_a_conversation_stays(path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Prompts this short have no block that the prefix index knows: without a name, the draw decides."""
    async with cluster(short=4, long=0) as served:
        homes = {await prefill_of(served, path, body, headers) for _ in range(12)}
        assert len(homes) == 1
        await served.until_idle()
        sent = [request for engine in served.short for request in engine.requests]
        assert not any("x-session-id" in request.headers for request in sent), "it is the router's"


@pytest.mark.parametrize(
    "fields", [{}, {"prompt_cache_key": 5}, {"prompt_cache_key": None}, {"metadata": {"user_id": "s"}}]
)
async def test_without_a_name_instances_take_turns(fields: dict[str, Any]) -> None:
    async with cluster(short=4, long=0) as served:
        homes = {await prefill_of(served, "/v1/chat/completions", {**CHAT, **fields}) for _ in range(30)}
        assert len(homes) > 1


async def test_the_header_counts_before_the_fields() -> None:
    async with cluster(short=4, long=0) as served:
        home = await prefill_of(served, "/v1/chat/completions", CHAT, {"x-session-id": "s"})
        for number in range(8):
            body = {**CHAT, "prompt_cache_key": str(number), "user": "u"}
            assert await prefill_of(served, "/v1/chat/completions", body, {"x-session-id": "s"}) == home
        assert len(served.router.planner.prefixes.sessions) == 1


async def test_a_conversation_leaves_an_instance_that_fails() -> None:
    async with cluster(short=2, long=0) as served:
        headers = {"x-session-id": "s"}
        home = await prefill_of(served, "/v1/chat/completions", CHAT, headers)
        (first,) = [engine for engine in served.short if engine.url == home]
        first.plan(status(500))
        others = [await prefill_of(served, "/v1/chat/completions", CHAT, headers) for _ in range(3)]
        assert home not in others


@pytest.mark.parametrize(
    ("fields", "is_known"), [({}, True), ({"stream": True}, True), ({"n": 2}, True), ({"n": 2, "stream": True}, False)]
)
async def test_a_reply_says_that_prefill_has_ended(fields: dict[str, Any], *, is_known: bool) -> None:
    """Prefill's own reply may come later: a turn after decode's reply must not take the instance for busy.

    The first byte of a stream of two sequences says that of one of them alone.
    """
    async with cluster(short=2, long=0) as served:
        release = asyncio.Event()

        async def play(turn: Any) -> None:
            await release.wait()
            await reply({})(turn)

        for engine in served.short:
            engine.script = play
        if "stream" in fields:
            for engine in served.decode:
                engine.script = stream(event({"choices": [{"delta": {"content": "a"}}]}))
        body = {**CHAT, **fields}
        try:
            homes = {await prefill_of(served, "/v1/chat/completions", body, {"x-session-id": "s"}) for _ in range(3)}
            pending = [served.worker(engine.url).pending_tokens for engine in served.short]
            assert sum(served.worker(engine.url).in_flight for engine in served.short) == 3
            assert (pending == [0, 0]) == is_known
            assert not is_known or len(homes) == 1
        finally:
            release.set()
        await served.until_idle()


def route(pools: Pools, text: str, tokens: int, session: int = 1) -> Any:
    none: frozenset[int] = frozenset()
    return pools.planner.route(
        pools.model, measure(b"/generate", {"text": text}), tokens, none, none, 100.0, session=session
    )


def test_a_turn_waits_no_longer_than_its_prefix_takes() -> None:
    pools = Pools(SHORT, SHORT, DECODE)
    busy, idle = pools.workers[:2]
    pools.planner.prefixes.sessions.record(1, busy.id, 300, [])
    busy.pending_tokens = 299
    assert route(pools, "x", 400).prefill is busy
    busy.pending_tokens = 301
    assert route(pools, "x", 400).prefill is idle
    assert route(pools, "x", 400, session=2).prefill is idle


def test_a_hint_changes_neither_class_nor_account() -> None:
    """What is believed to be cached is the index's to say: a wrong hint must not make a long prompt short."""
    pools = Pools(SHORT, LONG, LONG, DECODE)
    short, _, third = pools.workers[:3]
    for worker in (short, third):
        pools.planner.prefixes.sessions.record(1, worker.id, 2000, [])
        chosen = route(pools, "x", 2100)
        assert chosen.prefill.role is LONG
        assert chosen.decision.length_class is LengthClass.LONG
        assert (chosen.decision.cached_tokens, chosen.decision.new_tokens) == (0, 2100)
    assert chosen.prefill is third


def test_undivided_instances_keep_conversations_too() -> None:
    pools = Pools(Role.PLAIN, Role.PLAIN, Role.PLAIN)
    for worker in pools.workers:
        pools.planner.prefixes.sessions.record(1, worker.id, 100, [])
        assert route(pools, "x", 150).prefill is worker


def test_a_restarted_instance_holds_nothing() -> None:
    pools = Pools(SHORT, SHORT, DECODE)
    second = pools.workers[1]
    pools.planner.prefixes.sessions.record(1, second.id, 300, [])
    assert route(pools, "x", 400).prefill is second
    pools.planner.prefixes.empty_worker(second)
    assert route(pools, "x", 400).prefill is pools.workers[0]
