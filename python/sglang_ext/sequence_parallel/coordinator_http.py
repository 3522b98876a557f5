"""What a coordinator tells people and Prometheus: `/status`, `/metrics`, `/health`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from sglang_ext.policy.cdsp.coordination import DeclineReason
from sglang_ext.sequence_parallel.pool_exchange import PoolExchange
from sglang_ext.sequence_parallel.pool_records import PoolStatus, PrefillEnd


def make_app(exchange: PoolExchange, status: Callable[[], PoolStatus]) -> web.Application:
    """The three routes."""
    registry = CollectorRegistry()
    registry.register(_PoolCollector(exchange, status))

    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(dataclasses.asdict(status()))

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def get_health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/status", get_status)
    app.router.add_get("/metrics", get_metrics)
    app.router.add_get("/health", get_health)
    return app


class _PoolCollector(Collector):
    """Reads counts when it is asked."""

    def __init__(self, exchange: PoolExchange, status: Callable[[], PoolStatus]) -> None:
        self._exchange = exchange
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status, history = self._status(), self._exchange.history
        yield _gauge("members", "Instances of the long pool", len(status.members))
        yield _gauge("connected", "1 when all members have the mesh of this epoch", status.is_connected)
        yield _gauge("requests", "Prefills that members share or that wait for it", len(status.requests))
        yield _gauge("cost_scale", "What the given costs are multiplied with, from measured chunks", status.cost_scale)
        yield _counter("members_lost", "Members whose connection has ended", history.members_lost)
        yield _counter("meshes_ordered", "Epochs whose mesh was built", history.meshes_ordered)
        yield _counter("steps_failed", "Steps that a member could not do", history.steps_failed)
        yield _counter("computed_tokens", "Tokens of chunks that were done", history.tokens_computed)
        yield _counter("collected_seconds", "Time of collected prefills, from the offer on", history.prefill_s)
        ended = CounterMetricFamily(
            "sglang_ext:cdsp_requests_ended", "Prefills that were offered, by how that ended", labels=["outcome"]
        )
        for outcome in (*PrefillEnd, *DeclineReason):
            ended.add_metric([outcome], history.outcomes[outcome])
        yield ended
        chunks = CounterMetricFamily("sglang_ext:cdsp_chunks", "Chunks that were done", labels=["sp_size"])
        for size, count in sorted(history.chunks.items()):
            chunks.add_metric([str(size)], count)
        yield chunks


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"sglang_ext:cdsp_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"sglang_ext:cdsp_{name}", text, value)
