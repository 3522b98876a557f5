"""Several processes of one router, as far as they tell each other what they know, in the test's own process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sglang_ext.types import Role
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.group.peers import Peers
from sglang_ext_router.group.supervisor import ProcessPlace
from support.router_process import FAST, RunningRouter, running_router
from support.scripted_engine import Script, ScriptedEngine


@asynccontextmanager
async def process_links(folder: Path, config: RouterConfig) -> AsyncIterator[Callable[[int], Peers]]:
    """A function that makes the link of the process of a number; called again, of the process that replaces it."""
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16)) for _ in range(config.processes)
        ]
        peers = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]

        def link(number: int) -> Peers:
            return Peers(config, sockets[number].dup(), ProcessPlace(number, "secret", peers, -1, str(folder)))

        yield link


@asynccontextmanager
async def processes(
    folder: Path, engines: list[ScriptedEngine], count: int = 2, **options: object
) -> AsyncIterator[list[RunningRouter]]:
    """Routers linked as processes are, over the same engines."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        workers = tuple(WorkerAddress(engine.url, engine.role) for engine in engines)
        config = replace(FAST, workers=workers, processes=count, admin_api_key="admin", **options)  # type: ignore[arg-type]
        link = await stack.enter_async_context(process_links(folder, config))
        running = [
            await stack.enter_async_context(running_router(config, number, link(number))) for number in range(count)
        ]
        for one in running:
            await one.until_ready()
            await one.until(lambda one=one: len(one.router.siblings.demands()) == count - 1)  # type: ignore[misc]
        yield running
        for one in running:
            await one.until_idle()


@asynccontextmanager
async def peer_group(
    count: int,
    own: Callable[[int, RouterConfig], RouterConfig] = lambda number, config: config,
    script: Script | None = None,
) -> AsyncIterator[list[RunningRouter]]:
    """Routers that are each other's peers, over the same two instances; `own` makes the options of each."""
    engines = [ScriptedEngine(Role.BOTH), ScriptedEngine(Role.DECODE)]
    if script is not None:
        engines[1].script = script
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
        peers = tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
        workers = tuple(WorkerAddress(engine.url, engine.role) for engine in engines)
        shared = replace(FAST, workers=workers, peer=peers, peer_port=1, peer_key="secret")
        routers = []
        for number, sock in enumerate(sockets):
            sock.setblocking(False)
            config = own(number, shared)
            routers.append(await stack.enter_async_context(running_router(config, siblings=Peers(config, sock))))
        yield routers
