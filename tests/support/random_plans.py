"""A coordinator in the test's own process that plans at random, for members that are real instances."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sglang_ext.long_pool.coordinator.coordinator_server import CoordinatorServer
from sglang_ext.long_pool.coordinator.pool_cost import PoolCosts
from sglang_ext.long_pool.coordinator.pool_history import PoolStatus
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol
from sglang_ext.long_pool.coordinator.pool_settings import Identity, PoolSettings
from sglang_ext.long_pool.decide.price_planner import (
    Placement,
    PrefillSnapshot,
    PriceOptions,
    PricePlanner,
    WaitingPrompt,
)
from sglang_ext.long_pool.decide.sp_cost import SpCandidate, SpCost
from support.engines import free_port

MOST_CHUNKS = 4
_CANDIDATES = [SpCandidate(size, SpCost(0.001, 1e-4, 0.0, 0.0)) for size in (1, 2, 3, 4)]


class RandomPlanner(PricePlanner):
    """Groups of any size that contain the holders, whole pages of what is left or all of it."""

    def __init__(self, page_tokens: int, draw: random.Random) -> None:
        super().__init__(PriceOptions(tuple(_CANDIDATES), 1, page_tokens))
        self._draw = draw

    def place(
        self, snapshot: PrefillSnapshot, waiting: Sequence[WaitingPrompt], others_price: float
    ) -> list[Placement]:
        draw, page = self._draw, self.options.page_tokens
        free = {place for place, delay_s in enumerate(snapshot.queue_delays_s) if delay_s == 0.0}
        placements: list[Placement] = []
        for number, one in enumerate(waiting):
            group = [holder.instance for holder in one.holders]
            if not free.issuperset(group):
                continue
            others = sorted(free.difference(group))
            # Each chunk is drawn by itself, so that on average a prompt has several of them.
            group += draw.sample(others, draw.randint(min(len(others), not group), len(others)))
            if not group:
                continue
            free -= {*group}
            pages = one.new_tokens // page
            is_last = pages < 2 or draw.randint(1, MOST_CHUNKS) == 1
            tokens = one.new_tokens if is_last else page * draw.randint(1, pages - 1)
            placements.append(Placement(number, tokens, tuple(group), 0.0, 0.001, 0.001))
        return placements


class RandomCoordinator:
    """Keeps its port when it begins again with other settings."""

    def __init__(self) -> None:
        self._port = free_port()
        self._server: CoordinatorServer | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def status(self) -> PoolStatus:
        assert self._server is not None
        return self._server.status()

    def wait_for(self, condition: Callable[[PoolStatus], bool], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition(self.status()):
            assert time.monotonic() < deadline_s, self.status()
            time.sleep(0.1)

    @contextmanager
    def running(self, settings: PoolSettings, seed: int) -> Iterator[RandomCoordinator]:
        """Serve in a thread of its own."""
        draw = random.Random(seed)

        def planner(settings: PoolSettings, identity: Identity, costs: PoolCosts) -> PricePlanner:
            return RandomPlanner(identity.page_tokens, draw)

        loop, is_up, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

        async def serve() -> None:
            server = CoordinatorServer(
                PoolProtocol(settings, PoolCosts(_CANDIDATES), planner), settings.member_timeout_s
            )
            await server.listen("127.0.0.1", self._port)
            self._server = server
            is_up.set()
            ticking = asyncio.create_task(server.run())
            await stop.wait()
            ticking.cancel()
            await server.close()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="random-coordinator")
        thread.start()
        try:
            assert is_up.wait(30)
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(30)
            loop.close()
