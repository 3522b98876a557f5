"""One router process: it connects the parts, and dispatches each request to the part that serves it."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from prometheus_client.core import Metric

from sglang_ext.laps.decide.boundary import DEFAULT_BOUNDARY_TOKENS
from sglang_ext.types import LengthClass
from sglang_ext_router.config import RouterConfig, WorkerAddress, parse_worker_url
from sglang_ext_router.control.control_plane import build_app, methods_of
from sglang_ext_router.control.controller import PoolController
from sglang_ext_router.decide.admission import AdmissionQueue, Demand
from sglang_ext_router.decide.fair_admission import FairAdmissionQueue
from sglang_ext_router.decide.pd_protocol import RetryPolicy
from sglang_ext_router.decide.retry_budget import RetryBudget
from sglang_ext_router.group.lease import LeaseHolder
from sglang_ext_router.group.shared_state import SharedState
from sglang_ext_router.http.access import FLOW_PATHS, PAGE_PATHS, REPORT_PATHS, STREAM_PATH, Access
from sglang_ext_router.http.asgi_bridge import AsgiCall
from sglang_ext_router.http.client_ports import ClientPorts
from sglang_ext_router.http.http1 import ClientConnection
from sglang_ext_router.http.instance_paths import OTHER_NAMES, PUT_PATHS
from sglang_ext_router.http.request_parser import Request
from sglang_ext_router.http.tls import worker_context
from sglang_ext_router.instances.discovery import Discovery
from sglang_ext_router.instances.kubernetes_api import connect_kubernetes, own_namespace
from sglang_ext_router.instances.kv_events import KvEvents
from sglang_ext_router.instances.load_events import LoadEvents
from sglang_ext_router.instances.long_pool import LongPoolMonitor
from sglang_ext_router.instances.online_load import OnlineWaits, SiblingLoad, UnderWay, describe_class, summarise
from sglang_ext_router.instances.pool_offers import PoolOffers
from sglang_ext_router.instances.probe import Prober
from sglang_ext_router.instances.registry import ModelPools, WorkerRegistry
from sglang_ext_router.instances.token_check import TokenChecks
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.observe.access_log import AccessLog
from sglang_ext_router.observe.exposition import (
    gauge_families,
    group_families,
    kv_event_families,
    pool_families,
    process_families,
    process_figures,
    render,
    request_families,
    worker_families,
)
from sglang_ext_router.observe.live_page import LivePage
from sglang_ext_router.observe.metrics import MetricsSnapshot, RouterMetrics
from sglang_ext_router.observe.traces import Tracer
from sglang_ext_router.request.aborting import Aborter
from sglang_ext_router.request.body_reader import BodyReader
from sglang_ext_router.request.flow import RequestFlow
from sglang_ext_router.request.instance_waits import InstanceWaits
from sglang_ext_router.request.prepared_request import FORWARDED
from sglang_ext_router.request.reply_builder import ReplyBuilder
from sglang_ext_router.request.request_ids import RoomAllocator
from sglang_ext_router.request.routing import RoutePlanner
from sglang_ext_router.request.services import Services
from sglang_ext_router.request.tokenising import Tokenisers
from sglang_ext_router.request.upstream import UpstreamPools
from sglang_ext_router.tenants.accounts import Tenants

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 0.25
RECENT_S = 15.0  # for at least this time a prompt counts as cached where it was sent, if events come
DRAIN_POLL_S = 0.02
DRAIN_FLUSH_S = 1.0  # for aborts and error replies when the grace period is over


class Router:
    """Serves client connections; owns the registry, the planner, and all running requests."""

    def __init__(
        self,
        config: RouterConfig,
        loop: asyncio.AbstractEventLoop,
        process_index: int = 0,
        siblings: SharedState | None = None,
    ) -> None:
        self.config = config
        self.loop = loop
        self.metrics = RouterMetrics(config.request_timeout_secs)
        self.access_log = AccessLog(config.access_log) if config.access_log else None
        if self.access_log is not None:
            self.metrics.access_log_lines = self.access_log.counts
        self._process_index = process_index
        self.registry = WorkerRegistry(config)
        self.planner = RoutePlanner(config, self.registry, random.random)
        self._tokenisers = Tokenisers(loop)
        worker_tls = worker_context(config)
        pools = UpstreamPools(loop, worker_tls)
        self.prober = Prober(
            config,
            self.registry,
            on_restarted=self._on_worker_lost,
            on_info=self._on_worker_info,
            on_frozen=pools.lose_all,
            last_received_s=pools.last_received_s,
            last_worked_s=pools.last_worked_s,
            tls=worker_tls,
        )
        self.kv_events = KvEvents(loop, self.planner.prefixes.blocks)
        self.load_events = LoadEvents(loop, self.prober.take_published_load, self.prober.check_now)
        self._token_checks = TokenChecks(loop, self.prober.ask, self._on_reading_changed)
        self.lease = _lease_holder(config, loop)
        may_act = (lambda: True) if self.lease is None else lambda: self.lease is not None and self.lease.is_leader
        self.controller = PoolController(config, loop, self.registry, self.prober, may_act)
        self.long_pool = _long_pool_monitor(config, loop)
        self.discovery = Discovery(config, self, connect_kubernetes(config)) if config.service_discovery else None
        self.siblings = siblings or SharedState(process_index, config)
        self.running: dict[RequestFlow, None] = {}
        origin = self.siblings.origin
        self.tenants = Tenants(config, origin, self.metrics, loop.time()) if config.tenants_file else None
        queue: type[AdmissionQueue[RequestFlow]] = AdmissionQueue if self.tenants is None else FairAdmissionQueue
        self.admission = queue(config.max_concurrent_requests or None, config.queue_size, config.queue_timeout_secs)
        self.access = Access(config, self.metrics, self.tenants)
        key = config.key_for_workers
        authorization = f"authorization: Bearer {key}\r\n".encode() if key else b""
        self.services = Services(
            config=config,
            loop=loop,
            draw=random.random,
            metrics=self.metrics,
            registry=self.registry,
            planner=self.planner,
            prober=self.prober,
            pools=pools,
            aborter=Aborter(pools, authorization, loop),
            admission=self.admission,
            instance_waits=InstanceWaits(self.registry, loop, config.queue_size),
            rooms=RoomAllocator(secrets.randbits(31), process_index, config.processes),
            reply_builder=ReplyBuilder(loop),
            body_reader=BodyReader(loop),
            online_waits=OnlineWaits(),
            retry_policy=RetryPolicy(
                initial_backoff_s=config.retry_initial_backoff_ms / 1000,
                max_backoff_s=config.retry_max_backoff_ms / 1000,
                backoff_multiplier=config.retry_backoff_multiplier,
            ),
            retry_budget=RetryBudget(config.retry_budget_ratio, config.retry_budget_min_per_sec / config.processes),
            max_retries=0 if config.disable_retries else config.retry_max_retries,
            max_migrations=config.max_migrations,
            siblings=self.siblings,
            running=self.running,
            on_ended=self._on_ended,
            access_log=self.access_log,
            authorization=authorization,
            forwarded_headers=FORWARDED | {name.encode() for name in config.forwarded_headers},
            relays_authorization=not (key or config.needs_client_key or config.admin_api_key),
            tenants=self.tenants,
        )
        if self.long_pool is not None and config.coordinator_offer_timeout_secs:
            learn = self.services.learn_prefix
            offers = PoolOffers(config, self.long_pool, self.planner, self.services.rooms, self.metrics, learn)
            self.services.pool_offers = offers
        if config.otlp_traces_endpoint:
            self.services.tracer = Tracer(config, loop, self.long_pool)
            self.metrics.traces = self.services.tracer.counts
        self.live_page = None if config.disable_ui else LivePage(self, process_index)
        self.is_draining = False
        self._app: FastAPI | None = None
        self._admitted: deque[RequestFlow] = deque()
        self._refused_before = 0  # requests that found the queue full, when the limit was divided last
        self._is_starting = False
        self.ports = ClientPorts(config, loop, self.access, self.access_log)
        self.clients = self.ports.clients
        self.metrics.refusals = self.clients.refusals
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep_due_s = math.inf
        limits_s = (
            config.first_byte_timeout_secs or math.inf,
            config.stream_stall_timeout_secs or math.inf,
            config.sse_keep_alive_secs or math.inf,
        )
        self._progress_interval_s = min(limits_s) / 20  # not at every sweep, as every request is asked
        self._next_progress_s = 0.0
        self._next_age_s = 0.0  # when prompts that were just sent have become older
        self._warned_boundaries: set[int] = set()  # boundaries of instances that differ from the router's

    def control_plane(self) -> FastAPI:
        """Return the application of the control plane, which is built at the first call (60 ms)."""
        if self._app is None:
            self._app = build_app(self)
        return self._app

    # -- life -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to watch the instances."""
        await self.prober.start()
        await self.siblings.start(self)
        self.controller.start()
        if self.long_pool is not None:
            self.long_pool.start()
        if self.discovery is not None:
            self.discovery.start()
        if self.lease is not None:
            self.lease.start()
        self._sweep()

    def connection(self) -> ClientConnection:
        """Protocol for a client that connects."""
        return self.ports.connection(self.dispatch, self.ports.clients)

    def report_connection(self) -> ClientConnection:
        """Protocol for a client that connects to the port for reports."""
        return self.ports.connection(self._dispatch_report, self.ports.reports)

    def page_connection(self) -> ClientConnection:
        """Protocol for a browser that connects to the live page's port."""
        return self.ports.connection(self._dispatch_page, self.ports.pages)

    def announce_end(self) -> None:
        """Answer `/readyz` with 503, and close each connection behind its next reply; everything else goes on.

        A client then leaves between two requests, and none that it sends meets a connection that is being closed.
        """
        self.is_draining = True
        self.clients.is_ending = True

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs end for at most `grace_s`, then cut the rest."""
        self.is_draining = True
        if self.live_page is not None:
            self.live_page.stop()
        self.ports.drain()
        await self._wait_drained(grace_s)
        if self.running:
            logger.warning("%d requests were still running after %g s", len(self.running), grace_s)
        for request in tuple(self.running):
            request.on_timeout()
        await self._wait_drained(DRAIN_FLUSH_S)

    async def stop(self) -> None:
        """Free everything."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self.live_page is not None:
            self.live_page.stop()
        self.ports.close()
        if self.discovery is not None:
            await self.discovery.stop()
        await self.siblings.stop()
        await self.controller.stop()
        if self.lease is not None:
            await self.lease.stop()
        if self.long_pool is not None:
            await self.long_pool.stop()
        await self._token_checks.stop()
        await self.prober.stop()
        await self.kv_events.stop()
        await self.load_events.stop()
        await self.services.stop()
        if self.tenants is not None:
            await self.tenants.stop(self.loop.time())
        self._tokenisers.close()
        if self.access_log is not None:
            await asyncio.to_thread(self.access_log.close)

    # -- requests ---------------------------------------------------------------------------------------

    def dispatch(self, connection: ClientConnection, request: Request) -> None:
        """Serve a request that instances compute with a `RequestFlow`, any other request by the control plane."""
        path, method = request.path, request.method
        if path in OTHER_NAMES:
            request.path = path = OTHER_NAMES[path]
        if path not in FLOW_PATHS:
            if path.rstrip(b"/") in FLOW_PATHS:  # as SGLang answers
                where = path.rstrip(b"/") + (b"?" + request.query if request.query else b"")
                connection.respond(307, b"", b"text/plain", b"location: %b\r\n" % where)
                return
            self._dispatch_control(connection, request)
            return
        if method != b"POST" and not (method == b"PUT" and path in PUT_PATHS):
            if self.access.is_preflight(request):
                self._dispatch_control(connection, request)
                return
            methods = self._methods_of(path)
            allow = f"allow: {', '.join(methods)}\r\n".encode()
            connection.respond_error(405, f"use {' or '.join(methods)}", extra=allow)
            return
        flow = RequestFlow(self.services, connection, request, self.loop.time())
        # Before `begin`: a request that is read by another process must learn that its client left.
        connection.call = flow
        flow.begin()

    def _dispatch_control(self, connection: ClientConnection, request: Request) -> None:
        if self.access.is_preflight(request):
            connection.respond(200, b"", b"text/plain", self.access.preflight_headers(request))
        elif self.config.metrics_port and request.path in REPORT_PATHS:
            connection.respond_error(404, "reports are served at a port of their own")
        elif self.config.ui_port and request.path in PAGE_PATHS:
            connection.respond_error(404, "the live page is served at a port of its own")
        else:
            self._dispatch_page(connection, request)

    def _dispatch_page(self, connection: ClientConnection, request: Request) -> None:
        if request.path == STREAM_PATH and self.live_page is not None:
            self.live_page.open_stream(connection, request)
        else:
            self._dispatch_report(connection, request)

    def _methods_of(self, path: bytes) -> list[str]:
        if path in FLOW_PATHS:
            return ["POST", "PUT"] if path in PUT_PATHS else ["POST"]
        return methods_of(self.control_plane(), path.decode("latin-1"))

    def _dispatch_report(self, connection: ClientConnection, request: Request) -> None:
        connection.call = AsgiCall(self.control_plane(), connection, request, self.access_log)

    def demand(self) -> Demand:
        """Return the requests under way, waiting and just refused, by which routers that share a limit divide it."""
        recently_refused = self.admission.refused - self._refused_before
        return Demand(self.admission.running, self.admission.waiting + recently_refused)

    def limit_requests(self, limit: int) -> None:
        """Set this process's part of `--max-concurrent-requests`."""
        now_s = self.loop.time()
        self._refused_before = self.admission.refused
        self._start(self.admission.set_limit(limit, now_s), now_s)

    def _on_ended(self, request: RequestFlow, now_s: float) -> None:
        """A running request is over: its place goes to the next in the queue."""
        del self.running[request]
        self._start(self.admission.release(now_s, request), now_s)

    def _start(self, admitted: Sequence[RequestFlow], now_s: float) -> None:
        """Start what was admitted, in order."""
        self._admitted += admitted
        if self._is_starting:
            return  # a request that was just started has ended at once: the loop below continues
        self._is_starting = True
        try:
            while self._admitted:
                self._admitted.popleft().start(now_s)
        finally:
            self._is_starting = False

    @property
    def _is_busy(self) -> bool:
        return bool(self.clients.open or self.running or self.services.aborter.is_busy)

    async def _wait_drained(self, limit_s: float) -> None:
        """Wait until every connection has closed, which it does behind its last reply, and every abort is sent."""
        end_s = self.loop.time() + limit_s
        while self.loop.time() < end_s and self._is_busy:  # noqa: ASYNC110 - there is no one event for all of it
            await asyncio.sleep(DRAIN_POLL_S)

    @property
    def requests_in_flight(self) -> int:
        return len(self.running)

    @property
    def requests_queued(self) -> int:
        return self.admission.waiting

    def _sweep(self) -> None:
        """Enforce time limits of connections, queue and requests."""
        self._sweeper = self.loop.call_later(SWEEP_INTERVAL_S, self._sweep)
        now_s = self.loop.time()
        if now_s >= self._sweep_due_s:
            self.metrics.loop_lag_s.observe(now_s - self._sweep_due_s)
        self._sweep_due_s = now_s + SWEEP_INTERVAL_S
        for waiting in self.admission.expire(now_s):
            waiting.on_queue_timeout()
        if self.tenants is not None:
            self._start(self.admission.refresh(now_s), now_s)
            self.tenants.sweep(self.loop, now_s)
        if self.config.max_evictions:
            self._make_room(now_s)
        self.services.instance_waits.expire(now_s)
        limit_s = self.config.request_timeout_secs
        expired = [request for request in self.running if now_s - request.started_s > limit_s]
        for request in expired:
            request.on_timeout()
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + self._progress_interval_s
            for request in tuple(self.running):
                request.check_progress(now_s)
            if self.config.sse_keep_alive_secs:
                for waiting in tuple(self.admission.queue):
                    waiting.keep_alive(now_s)
        if now_s >= self._next_age_s:
            self._next_age_s = now_s + RECENT_S
            self.planner.prefixes.age_recent()
        self.ports.sweep(now_s)
        self.access.reload_keys(now_s)

    def _make_room(self, now_s: float) -> None:
        """Let running requests of low priority give their places to waiting ones that may miss their deadlines."""
        while (waiting := self.admission.next_waiting()) is not None:
            urgent, deadline_s = waiting
            evictable = [request for request in self.running if request.may_be_evicted]
            if not evictable or not urgent.is_urgent(deadline_s, now_s):
                return
            evictable[-1].evict(now_s)  # which has been computed for the shortest time
            if urgent not in self.running:
                return

    # -- reports ---------------------------------------------------------------------------------------

    def describe_load(self, models: Sequence[ModelPools]) -> dict[str, Any]:
        """Return the answer of `GET /load` about these models."""
        now_s = self.loop.time()
        waits, under_way, siblings = self.services.online_waits, self._under_way(now_s), self.siblings.online_loads()
        return {
            "length_boundary_tokens": self.length_boundary_tokens(models),
            "queued": self.requests_queued,
            "in_flight": self.requests_in_flight,
            "classes": {
                length_class.value: describe_class(models, length_class, waits, under_way, siblings, now_s)
                for length_class in LengthClass
            },
        }

    def length_boundary_tokens(self, models: Sequence[ModelPools]) -> int:
        """Return the most new tokens of a short prefill of these models; of several that differ the middle one."""
        boundaries = sorted(self.planner.boundary(model).limit_tokens for model in models)
        given = self.config.length_boundary_tokens or DEFAULT_BOUNDARY_TOKENS
        return boundaries[(len(boundaries) - 1) // 2] if boundaries else given

    def online_load(self) -> SiblingLoad:
        """Return what the other processes are sent about the online requests here."""
        now_s = self.loop.time()
        return summarise(self.services.online_waits, self._under_way(now_s), now_s)

    def _under_way(self, now_s: float) -> UnderWay:
        waits = (flow.online_wait(now_s) for flow in self.running)
        queued_s = (waiting.online_wait_s(now_s) for waiting in self.services.admission.queue)
        return UnderWay(
            [flow.online_class for flow in self.running if flow.online_class is not None],
            [wait for wait in waits if wait is not None],
            [known_s for known_s in queued_s if known_s is not None],
        )

    def metrics_snapshot(self) -> MetricsSnapshot:
        """Return what the other processes are sent about the counts here."""
        legs = {worker.url: (worker.sent_legs, worker.failed_legs) for worker in self.registry}
        if self.tenants is not None:
            self.tenants.collect_usage(self.loop.time())
        return self.metrics.snapshot(legs, self._gauges(), process_figures())

    def _gauges(self) -> dict[str, float]:
        return {
            "requests_in_flight": self.requests_in_flight,
            "requests_queued": self.requests_queued,
            "requests_waiting_for_instance": len(self.services.instance_waits),
            "client_connections": self.ports.open_connections,
            "instance_connections": self.services.pools.open_connections,
            "buffered_bytes": self.ports.buffered_bytes,
        }

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the body of `/metrics` for a client with this Accept header, and its content type."""
        if self.tenants is not None:
            self.tenants.collect_usage(self.loop.time())
        snapshots = self.siblings.metric_snapshots()
        others = [snapshot for _, snapshot in snapshots]
        families: list[Metric] = list(request_families(self.metrics, others))
        families += gauge_families(self._gauges(), others)
        families += worker_families(self.registry, self.loop.time(), others)
        families += kv_event_families(self.registry, self.kv_events)
        families += pool_families(self.registry, self.controller)
        discovered = None if self.discovery is None else self.discovery.state()
        families += group_families(self.siblings.peer_counts(), self.lease, discovered)
        families += process_families(self._process_index, snapshots)
        return render(families, accept)

    # -- membership -------------------------------------------------------------------------------------

    def add_worker(self, address: WorkerAddress) -> Worker:
        worker = self.adopt_worker(address)
        self.siblings.send_added(address)
        return worker

    def adopt_worker(self, address: WorkerAddress) -> Worker:
        """Add an instance here only."""
        worker = self.registry.add(address)
        if worker.role.computes_prompts:
            self.planner.prefixes.add_worker(worker)
        self.prober.watch(worker)
        logger.info("worker %s (%s) added", worker.url, worker.role)
        return worker

    def remove_worker(self, worker: Worker) -> None:
        self.siblings.send_removed(worker.url)
        self.drop_worker(worker)

    def lose_worker(self, worker: Worker) -> None:
        """Remove an instance that the cluster no longer has."""
        self.siblings.send_gone(worker.url)
        self.drop_worker(worker)

    def drop_worker(self, worker: Worker) -> None:
        """Remove an instance here only; what it is serving runs to its end."""
        self.registry.remove(worker)
        self.planner.prefixes.remove_worker(worker)
        self.kv_events.forget(worker)
        self.load_events.forget(worker)
        self._token_checks.forget(worker)
        self.prober.forget(worker)
        self.services.pools.drop(worker)
        logger.info("worker %s (%s) removed", worker.url, worker.role)

    def drain_worker(self, worker: Worker, is_draining: bool) -> None:
        self.siblings.send_draining(worker, is_draining)
        self.set_draining(worker, is_draining)

    def set_draining(self, worker: Worker, is_draining: bool) -> None:
        worker.is_draining = is_draining
        self.registry.refresh()
        logger.info("worker %s (%s) %s", worker.url, worker.role, "is draining" if is_draining else "resumes")

    def abort_requests(self, ids: frozenset[str] | None) -> None:
        """End the requests with these ids of their clients, wherever they are; None: all.

        Other processes and routers have requests of their own at the same instances, which are asked in any case.
        """
        for flow in (*self.admission.queue, *self.running):
            if ids is None or flow.has_id(ids):
                flow.on_abort()
        for worker in self.registry:
            self.services.aborter.abort(worker, None if ids is None else sorted(ids))

    def forget_prefixes(self) -> None:
        for worker in self.registry:
            if worker.keeps_prefixes:
                self.planner.prefixes.empty_worker(worker)

    def _on_worker_lost(self, worker: Worker) -> None:
        worker.rate.forget()
        if worker.keeps_prefixes:
            self.planner.prefixes.empty_worker(worker)
            self.kv_events.on_lost(worker)
            self._token_checks.forget(worker)

    def _compare_boundary(self, worker: Worker) -> None:
        """Warn once for each instance boundary that differs from the router's own."""
        own, others = self.config.length_boundary_tokens, worker.length_boundary_tokens
        if not own or others is None or others == own or others in self._warned_boundaries:
            return
        self._warned_boundaries.add(others)
        logger.warning(
            "worker %s (%s) counts prefills of up to %d new tokens as short, the router those of up to %d: prompts "
            "between are routed as one class and scheduled as the other (--length-boundary-tokens of the router, "
            "--laps-boundary-tokens of `sglang-ext worker`)",
            *(worker.url, worker.role, others, own),
        )

    def _on_worker_info(self, worker: Worker) -> None:
        if worker.label_header:
            self.services.forwarded_headers.add(worker.label_header)
        if worker.keeps_prefixes:  # it may have been a decode instance without so far
            self.planner.prefixes.add_worker(worker)
        if self.config.kv_events:
            self.kv_events.follow(worker)
        self.load_events.follow(worker)
        self.planner.learn_capacity(worker)
        self.planner.learn_boundary(worker)
        self._compare_boundary(worker)
        model = self.registry.models.get(worker.model)
        if model is not None and model.tokeniser is None:
            source = worker.token_source
            model.tokeniser = self._tokenisers.of(source._replace(folder=self.config.tokenizer_path or source.folder))
        if model is not None and model.tokeniser is not None and worker.held_blocks is not None:
            self._token_checks.check(worker, model.tokeniser)

    def _on_reading_changed(self, worker: Worker) -> None:
        self.registry.refresh_readings(worker.model)


def _lease_holder(config: RouterConfig, loop: asyncio.AbstractEventLoop) -> LeaseHolder | None:
    if not config.controller_lease:
        return None
    namespace = config.service_discovery_namespace or own_namespace()
    return LeaseHolder(config.controller_lease, namespace, connect_kubernetes(config), loop)


def _long_pool_monitor(config: RouterConfig, loop: asyncio.AbstractEventLoop) -> LongPoolMonitor | None:
    if not config.coordinator_url:
        return None
    url = parse_worker_url(config.coordinator_url, "--coordinator-url")
    return LongPoolMonitor(url, config.load_poll_interval_secs, config.health_check_timeout_secs, loop.time)
