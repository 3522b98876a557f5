"""The objects that all requests of one router process share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.live.decide.view import LiveView
from sglang_ext_router.config import RouterConfig
from sglang_ext_router.decide.admission import AdmissionQueue
from sglang_ext_router.decide.pd_protocol import RetryPolicy
from sglang_ext_router.decide.retry_budget import RetryBudget
from sglang_ext_router.group.shared_state import SharedState
from sglang_ext_router.instances.online_load import OnlineWaits
from sglang_ext_router.instances.pool_offers import PoolOffers
from sglang_ext_router.instances.probe import Prober
from sglang_ext_router.instances.registry import WorkerRegistry
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.observe.access_log import AccessLog
from sglang_ext_router.observe.metrics import RouterMetrics
from sglang_ext_router.observe.traces import Tracer
from sglang_ext_router.request.aborting import Aborter
from sglang_ext_router.request.body_reader import BodyReader
from sglang_ext_router.request.instance_waits import InstanceWaits
from sglang_ext_router.request.prompt import Prompt
from sglang_ext_router.request.reply_builder import ReplyBuilder
from sglang_ext_router.request.request_ids import RoomAllocator
from sglang_ext_router.request.routing import RoutePlanner
from sglang_ext_router.request.upstream import UpstreamPools
from sglang_ext_router.tenants.accounts import Tenants

if TYPE_CHECKING:
    from sglang_ext_router.request.flow import RequestFlow


@dataclass(slots=True)
class Services:
    """The objects that `RequestFlow` and `Attempt` use: one of each kind per process."""

    config: RouterConfig
    loop: asyncio.AbstractEventLoop
    draw: Callable[[], float]  # uniform in [0, 1)
    metrics: RouterMetrics
    registry: WorkerRegistry
    planner: RoutePlanner
    prober: Prober
    pools: UpstreamPools
    aborter: Aborter
    admission: AdmissionQueue[RequestFlow]
    instance_waits: InstanceWaits
    rooms: RoomAllocator
    reply_builder: ReplyBuilder
    body_reader: BodyReader
    online_waits: OnlineWaits
    retry_policy: RetryPolicy
    retry_budget: RetryBudget
    max_retries: int
    max_migrations: int
    siblings: SharedState
    running: dict[RequestFlow, None]  # in order of their start
    on_ended: Callable[[RequestFlow, float], None]
    authorization: bytes  # header line for the instances, in place of the client's; empty without a key for them
    forwarded_headers: set[bytes]  # names of the client's headers that instances get, in lower case
    relays_authorization: bool  # without any key the client's own header is for the instances
    access_log: AccessLog | None
    pool_offers: PoolOffers | None = None  # with a coordinator that plans the long pool
    tenants: Tenants | None = None  # with a file of tenants
    tracer: Tracer | None = None  # with a collector of traces
    view: LiveView | None = None  # what its viewers are sent, while there are any

    def learn_prefix(self, prompt: Prompt, worker: Worker, rank: int | None = None) -> None:
        """Record that the prompt is in this instance's prefix cache, that of its rank, or will be."""
        if self.registry.contains(worker):
            self.planner.prefixes.record_sent(worker, prompt.hashes, rank)
            if prompt.hashes:
                self.siblings.send_prefix(worker.url if rank is None else f"{worker.url}#{rank}", prompt.hashes)

    async def stop(self) -> None:
        """Free what has tasks, processes or connections."""
        if self.pool_offers is not None:
            await self.pool_offers.stop()
        if self.tracer is not None:
            await self.tracer.stop()
        await self.reply_builder.stop()
        await self.body_reader.stop()
        self.pools.close()
