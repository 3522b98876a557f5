"""The load of the rolling update judges every end, and leaves a router that closes its connection."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))

from support.steady_load import SteadyLoad

Answer = Callable[[web.Request, int], Awaitable[web.StreamResponse]]


async def stream(
    request: web.Request, tokens: int, *, is_whole: bool = True, closes: bool = False
) -> web.StreamResponse:
    """As the router streams `/generate`, whole or cut with an error event."""
    reply = web.StreamResponse(headers={"x-sglang-ext-prefill": "http://p", "x-sglang-ext-decode": "http://d"})
    if closes:
        reply.force_close()
    await reply.prepare(request)
    for count in range(1, tokens + 1):
        await reply.write(b"data: " + json.dumps({"meta_info": {"completion_tokens": count}}).encode() + b"\n\n")
        if not is_whole:
            await reply.write(b'data: {"error": {"message": "lost"}}\n\n')
            break
    await reply.write(b"data: [DONE]\n\n")
    return reply


async def outcomes_of(
    answer: Answer, routers: int = 1, limit_s: float = 20.0
) -> tuple[list[tuple[str, str]], set[str]]:
    """How requests to a few routers with this behaviour ended, and which routers were asked."""

    async def serve(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await answer(request, body["sampling_params"]["max_new_tokens"])

    runners, urls = [], []
    for _ in range(routers):
        app = web.Application()
        app.router.add_post("/generate", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
    load = SteadyLoad(lambda: urls, users=1, period_s=0.02, boundary_tokens=64, limit_s=limit_s)
    async with load:
        while len(load.ended) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for runner in runners:
        await runner.cleanup()
    assert all(one.ttft_ms is not None for one in load.ended if one.outcome == "ok")
    return [(one.outcome, one.detail) for one in load.ended], {one.router for one in load.ended}


@pytest.mark.parametrize("closes", [False, True])
def test_whole_streams_are_good_and_a_closed_connection_leads_to_the_next_router(closes: bool) -> None:
    async def answer(request: web.Request, tokens: int) -> web.StreamResponse:
        return await stream(request, tokens, closes=closes)

    ended, routers = asyncio.run(outcomes_of(answer, routers=2))
    assert {outcome for outcome, _ in ended} == {"ok"}
    assert len(routers) == (2 if closes else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "outcome", "detail"),
    [
        ("error event", "failed", "lost"),
        ("status", "failed", "status 503"),
        ("no reply", "failed", "Server"),
        ("too few tokens", "failed", "tokens"),
        ("no end", "hung", "no end"),
    ],
)
def test_anything_else_is_not(kind: str, outcome: str, detail: str) -> None:
    async def answer(request: web.Request, tokens: int) -> web.StreamResponse:
        if kind == "status":
            return web.Response(status=503)
        if kind == "no reply":
            assert request.transport is not None
            request.transport.close()
        if kind == "no end":
            await asyncio.sleep(30.0)
        return await stream(request, tokens - (kind == "too few tokens"), is_whole=kind != "error event")

    ended, _ = asyncio.run(outcomes_of(answer, limit_s=0.5 if outcome == "hung" else 20.0))
    assert {found for found, _ in ended} == {outcome}
    assert all(detail in found for _, found in ended), ended
