"""A router in the test's own process, over scripted engines, that must leave nothing behind.

    async with cluster(decode=2, queue_size=3) as served:
        reply = await served.ask("POST", "/generate", {"text": "hi"})

When the block ends, every count of what is under way must have gone back to zero.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sglang_ext.types import Role
from sglang_ext_router import router as router_module
from sglang_ext_router.config import RouterConfig, WorkerAddress
from sglang_ext_router.group.shared_state import SharedState
from sglang_ext_router.http.tls import client_context
from sglang_ext_router.instances.registry import ModelPools
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.router import Router
from support.raw_client import RawClient, Reply
from support.running_time import running_s
from support.scripted_engine import ScriptedEngine

SWEEP_INTERVAL_S = 0.02
READY_WITHIN_S = 5.0
IDLE_WITHIN_S = 3.0
STOP_WITHIN_S = 5.0

FAST = RouterConfig(
    retry_initial_backoff_ms=5,
    retry_max_backoff_ms=20,
    health_check_interval_secs=0.1,
    health_check_timeout_secs=0.5,
    load_poll_interval_secs=0.05,
    shutdown_grace_period_secs=5.0,
)


class RunningRouter:
    """A router that serves on a port of its own."""

    def __init__(self, router: Router, server: asyncio.Server, port: int) -> None:
        self.router = router
        self.server = server
        self.port = port
        self._workers: set[Worker] = set(router.registry)  # all ever seen, the removed ones too
        self.clients: list[RawClient] = []

    async def connect(self, receive_buffer_bytes: int | None = None) -> RawClient:
        """A client, closed at the latest when the router is."""
        client = await RawClient.connect(self.port, receive_buffer_bytes)
        self.clients.append(client)
        return client

    async def ask(
        self, method: str, target: str, content: object = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """One request on a connection of its own."""
        async with await self.connect() as client:
            return await client.ask(method, target, content, headers)

    async def until(self, is_so: Callable[[], bool], within_s: float = 5.0) -> None:
        """Wait until something has become true."""
        await until(is_so, within_s)

    async def until_ready(self, count: int | None = None) -> None:
        """Wait until all workers (or `count` of them) are healthy."""
        registry = self.router.registry
        wanted = len(registry) if count is None else count
        await self.until(lambda: sum(worker.is_healthy for worker in registry) >= wanted, READY_WITHIN_S)

    def worker(self, url: str) -> Worker:
        worker = self.router.registry.find(url)
        assert worker is not None
        return worker

    @property
    def model(self) -> ModelPools:
        """The only model that is served."""
        model = self.router.registry.find_model(None)
        assert model is not None
        return model

    def under_way(self) -> dict[str, int]:
        """Every count that must be zero while nothing is being served; those that are not."""
        router = self.router
        self._workers |= set(router.registry)
        counts = {
            "running": len(router.running),
            "admission.running": router.admission.running,
            "admission.waiting": router.admission.waiting,
        }
        for worker in self._workers:
            for name in ("in_flight", "pending_tokens", "reserved_tokens"):
                counts[f"{worker.role} {worker.url} {name}"] = getattr(worker, name)
                for number, rank in enumerate(worker.ranks):
                    counts[f"{worker.role} {worker.url} rank {number} {name}"] = getattr(rank, name)
        return {name: count for name, count in counts.items() if count}

    async def until_idle(self) -> None:
        """Wait until nothing is under way; AssertionError names what still is."""
        try:
            await until(lambda: not self.under_way(), IDLE_WITHIN_S)
        except AssertionError:
            raise AssertionError(f"still under way: {self.under_way()}") from None


class Cluster(RunningRouter):
    """A router and the engines behind it."""

    def __init__(
        self, running: RunningRouter, engines: dict[Role, list[ScriptedEngine]], all_engines: list[ScriptedEngine]
    ) -> None:
        super().__init__(running.router, running.server, running.port)
        self.clients = running.clients
        self.short = engines[Role.SHORT]
        self.long = engines[Role.LONG]
        self.both = engines[Role.BOTH]
        self.decode = engines[Role.DECODE]
        self.plain = engines.get(Role.PLAIN, [])
        self.engines = all_engines

    async def extra_engine(self, role: Role) -> ScriptedEngine:
        """One more engine that the router does not know yet."""
        engine = ScriptedEngine(role)
        await engine.start()
        self.engines.append(engine)
        return engine

    def upstream_requests(self) -> int:
        """Generation requests that reached any engine."""
        return sum(len(engine.requests) for engine in self.engines)


async def until(is_so: Callable[[], bool], within_s: float = 5.0) -> None:
    """Poll until something has become true."""
    end_s = running_s() + within_s
    while not is_so():
        assert running_s() < end_s, f"not so within {within_s} s"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def running_router(
    config: RouterConfig, process_index: int = 0, siblings: SharedState | None = None
) -> AsyncIterator[RunningRouter]:
    """Serve as `sglang_ext_router.main.serve` does, without signals; stops without waiting for anything."""
    router_module.SWEEP_INTERVAL_S = SWEEP_INTERVAL_S
    loop = asyncio.get_running_loop()
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    sock.setblocking(False)
    router = Router(config, loop, process_index, siblings)
    await router.start()
    server = await router.ports.listen(router.connection, sock, 4096, client_context(config))
    running = RunningRouter(router, server, sock.getsockname()[1])
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        server.close()
        await asyncio.wait_for(router.stop(), STOP_WITHIN_S)


@asynccontextmanager
async def cluster(
    *,
    short: int = 1,
    long: int = 1,
    both: int = 0,
    decode: int = 1,
    plain: int = 0,
    base: RouterConfig = FAST,
    **options: Any,
) -> AsyncIterator[Cluster]:
    """Engines of each role and a router over them; `options` are fields of RouterConfig."""
    counts = {Role.SHORT: short, Role.LONG: long, Role.BOTH: both, Role.DECODE: decode, Role.PLAIN: plain}
    engines = {role: [ScriptedEngine(role) for _ in range(count)] for role, count in counts.items()}
    all_engines = [engine for group in engines.values() for engine in group]
    for engine in all_engines:
        await engine.start()
    addresses = tuple(WorkerAddress(engine.url, engine.role) for engine in all_engines)
    try:
        async with running_router(replace(base, workers=addresses, **options)) as running:
            served = Cluster(running, engines, all_engines)
            await served.until_ready()
            yield served
            await served.until_idle()
            for engine in all_engines:
                assert engine.malformed == []
    finally:
        for engine in all_engines:
            await engine.stop()
