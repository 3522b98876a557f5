"""Several processes of one router, as far as they tell each other what they know, in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from sglang_ext_router.config import WorkerAddress
from sglang_ext_router.group.siblings import DatagramSiblings
from support.router_process import FAST, RunningRouter, running_router
from support.scripted_engine import ScriptedEngine


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
        running = []
        for index in range(count):
            link = DatagramSiblings(folder, index, config)
            running.append(await stack.enter_async_context(running_router(config, index, link)))
        for one in running:
            await one.until_ready()
        yield running
        for one in running:
            await one.until_idle()
