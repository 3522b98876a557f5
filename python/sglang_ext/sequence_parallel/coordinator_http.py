"""What a coordinator tells people and Prometheus, and the one thing that they may change: its improvement rates."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from sglang_ext.costs.improvement_rates import BY_REQUEST, describe_rates
from sglang_ext.policy.cdsp.coordination import DeclineReason
from sglang_ext.policy.cdsp.improvement_rate import table_from_json
from sglang_ext.sequence_parallel.pool_exchange import PoolExchange
from sglang_ext.sequence_parallel.pool_records import PoolStatus, PrefillEnd, PrefillRecord


def make_app(exchange: PoolExchange, status: Callable[[], PoolStatus]) -> web.Application:
    """The routes."""
    registry = CollectorRegistry()
    registry.register(_PoolCollector(exchange, status))

    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(describe_status(status()))

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def get_health(request: web.Request) -> web.Response:
        return web.Response()

    async def get_improvement_rates(request: web.Request) -> web.Response:
        return web.json_response(describe_rates(exchange.improvement_rates))

    async def put_improvement_rates(request: web.Request) -> web.Response:
        try:
            table = table_from_json(json.loads(await request.read()))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return _refusal("the body is not JSON")
        except ValueError as error:
            return _refusal(str(error))
        exchange.improvement_rates.put(table, BY_REQUEST, time.time())
        return web.json_response(describe_rates(exchange.improvement_rates))

    app = web.Application()
    app.router.add_get("/status", get_status)
    app.router.add_get("/metrics", get_metrics)
    app.router.add_get("/health", get_health)
    app.router.add_get("/improvement_rates", get_improvement_rates)
    app.router.add_put("/improvement_rates", put_improvement_rates)
    return app


def describe_status(status: PoolStatus) -> dict[str, Any]:
    """The pool as JSON; every request also says where its time went."""
    described = dataclasses.asdict(status)
    for name in ("requests", "recent"):
        records: tuple[PrefillRecord, ...] = getattr(status, name)
        for one, record in zip(described[name], records, strict=True):
            one["times"] = dataclasses.asdict(record.times)
    return described


def _refusal(message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=400)


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
        yield _gauge("improvement_rate", "What more instances must save, a share", status.improvement_rate)
        yield _counter("members_lost", "Members whose connection has ended", history.members_lost)
        yield _counter("meshes_ordered", "Epochs whose mesh was built", history.meshes_ordered)
        yield _counter("steps_failed", "Steps that a member could not do", history.steps_failed)
        yield _counter("computed_tokens", "Tokens of chunks that were done", history.tokens_computed)
        yield _counter("collected_seconds", "Time of collected prefills, from the offer on", history.prefill_s)
        yield _counter("collect_seconds", "Time in which all KV went to its own instance", history.collect_s)
        transferred = CounterMetricFamily(
            "sglang_ext:cdsp_transfer_seconds",
            "From the offer of a prefill until all its KV was at decode, by whether its last token had been computed",
            labels=["part"],
        )
        for part, seconds in history.transfer_s.items():
            transferred.add_metric([part], seconds)
        yield transferred
        yield _counter("transfers", "Prefills that were offered and whose KV is at decode", history.transfers)
        yield SummaryMetricFamily(
            "sglang_ext:cdsp_first_step_wait_seconds",
            "From the offer of a prefill to its first step",
            count_value=history.first_waits,
            sum_value=history.first_wait_s,
        )
        spent = CounterMetricFamily(
            "sglang_ext:cdsp_member_seconds", "Members' time in chunks, by what it was spent on", labels=["activity"]
        )
        for activity, seconds in history.member_s.items():
            spent.add_metric([activity], seconds)
        yield spent
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
