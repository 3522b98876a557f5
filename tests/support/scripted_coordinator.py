"""A long pool's coordinator that a test decides for, and a router that asks it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from support.router_process import Cluster, cluster

STATUS = {"members": [], "former_members": [], "requests": [], "recent": []}

Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]


class ScriptedCoordinator:
    """Says at /status that all is well, and answers tickets as the test wants."""

    def __init__(self) -> None:
        self.tickets: list[dict[str, Any]] = []
        self.withdrawn: list[int] = []
        self.turn = asyncio.Event()  # has come for all
        self.turn.set()
        self.name = "?"  # of the member that is named
        self.members: list[str] = []  # names of the members that are to compute it
        self.chunk_s = 0.0  # how long its first chunk takes
        self.answer: Answer = self.named
        self.is_well = True
        self.recent: list[dict[str, Any]] = []
        self.asked = 0

    async def named(self, ticket: dict[str, Any]) -> web.StreamResponse:
        await self.turn.wait()
        named = {"instance": self.name, "members": self.members, "chunk_s": self.chunk_s}
        return web.json_response({"ticket": ticket["ticket"], **named})

    async def post(self, request: web.Request) -> web.StreamResponse:
        ticket = await request.json()
        self.tickets.append(ticket)
        try:
            return await self.answer(ticket)
        except asyncio.CancelledError:
            self.withdrawn.append(ticket["ticket"])
            raise

    async def get_status(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.json_response(STATUS | {"recent": self.recent}) if self.is_well else web.Response(status=500)

    def ended(self, outcome: str) -> None:
        """The prompt of the latest ticket has left the pool."""
        ended = {"room": self.tickets[-1]["ticket"], "outcome": outcome, "times": {}, "steps": []}
        self.recent = [ended]


@asynccontextmanager
async def offering(**options: Any) -> AsyncIterator[tuple[ScriptedCoordinator, Cluster]]:
    """A coordinator, and a router that has read its status; it names the last long instance, of three."""
    coordinator = ScriptedCoordinator()
    app = web.Application()
    app.router.add_get("/status", coordinator.get_status)
    app.router.add_post("/tickets", coordinator.post)
    settings = {"long": 3, "length_boundary_tokens": 256, "load_poll_interval_secs": 0.02} | options
    settings = {"health_check_timeout_secs": 30.0} | settings  # a test process that stands still loses nothing
    async with (
        TestServer(app) as server,
        cluster(coordinator_url=f"http://127.0.0.1:{server.port}", **settings) as served,
    ):
        coordinator.name = f"127.0.0.1:{(*served.both, *served.long)[-1].port}"
        monitor = served.router.long_pool
        assert monitor is not None
        await served.until(lambda: monitor.is_answering)
        yield coordinator, served
        coordinator.turn.set()
