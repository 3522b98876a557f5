"""Describes what `/metrics` shows: the counts of all processes of this router, and gauges of this moment."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from sglang_ext import __version__
from sglang_ext.types import LengthClass, Role
from sglang_ext_router.decide.block_index import Tier
from sglang_ext_router.decide.circuit_breaker import CircuitState
from sglang_ext_router.observe.histograms import Histogram
from sglang_ext_router.observe.metrics import Labels, MetricsSnapshot, RouterMetrics

if TYPE_CHECKING:
    from sglang_ext_router.control.controller import PoolController
    from sglang_ext_router.group.lease import LeaseHolder
    from sglang_ext_router.group.shared_state import PeerCounts
    from sglang_ext_router.instances.discovery import DiscoveryState
    from sglang_ext_router.instances.kv_events import KvEvents
    from sglang_ext_router.instances.registry import WorkerRegistry

PREFIX = "sglang_ext_router_"
# Sums over the processes of this router.
GAUGES = {
    "requests_in_flight": "Requests being served",
    "requests_queued": "Requests in the router's queue",
    "requests_waiting_for_instance": "Requests that wait for an instance to return",
    "client_connections": "Open connections of clients",
    "instance_connections": "Open connections to instances",
    "buffered_bytes": "Bytes of requests that are being received, wait, or are being served",
}


def request_families(metrics: RouterMetrics, siblings: Sequence[MetricsSnapshot]) -> Iterator[Metric]:
    """Yield what was counted of requests here, with the siblings' counts added."""
    for name, text, labels, samples in metrics.counters():
        totals: dict[Labels, float] = {}
        for key, value in samples:
            totals[key] = totals.get(key, 0) + value
        for other in siblings:
            for key_list, value in other.counters.get(name, ()):
                key = tuple(key_list)
                totals[key] = totals.get(key, 0) + value
        counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
        for key, value in totals.items():
            counter.add_metric(key, value)
        yield counter
    merged: dict[str, HistogramMetricFamily] = {}
    joint: dict[tuple[str, str], Histogram] = {}
    for name, text, cls, own in metrics.histograms():
        instance = joint[name, cls] = Histogram(own.bounds)
        instance.add(own.counts, own.total)
        label_names = ("length_class",) if cls else ()
        merged.setdefault(name, HistogramMetricFamily(PREFIX + name, text, labels=label_names))
    for other in siblings:
        for name, cls, counts, total in other.histograms:
            joint[name, cls].add(counts, total)
    for (name, cls), instance in joint.items():
        buckets = [(_le(bound), count) for bound, count in instance.cumulative()]
        merged[name].add_metric((cls,) if cls else (), buckets, instance.total)
    yield from merged.values()


def gauge_families(gauges: dict[str, float], siblings: Sequence[MetricsSnapshot]) -> Iterator[Metric]:
    """Gauges that add up over the processes; `gauges` are this one's."""
    for name, text in GAUGES.items():
        value = gauges[name] + sum(other.gauges.get(name, 0.0) for other in siblings)
        yield GaugeMetricFamily(PREFIX + name, text, value=value)


def worker_families(registry: WorkerRegistry, now_s: float, siblings: Sequence[MetricsSnapshot]) -> Iterator[Metric]:
    """The instances that are known now; a removed one is not shown any more."""
    labels = ("worker", "role")
    up = GaugeMetricFamily(PREFIX + "worker_up", "1 while an instance takes requests", labels=labels)
    load = GaugeMetricFamily(PREFIX + "worker_in_flight", "Legs under way", labels=labels)
    tokens = GaugeMetricFamily(PREFIX + "worker_pending_tokens", "Prompt tokens sent, not yet prefilled", labels=labels)
    rate = GaugeMetricFamily(PREFIX + "worker_prefill_tokens_per_second", "Prefill rate observed", labels=labels)
    circuit = GaugeMetricFamily(PREFIX + "worker_circuit_open", "1 while the breaker is not closed", labels=labels)
    sent = CounterMetricFamily(PREFIX + "worker_requests", "Legs sent to an instance", labels=("worker",))
    failed = CounterMetricFamily(PREFIX + "worker_failures", "Legs that an instance failed", labels=("worker",))
    for worker in registry:
        key = (worker.url, worker.role.value)
        up.add_metric(key, float(worker.is_ready))
        load.add_metric(key, worker.in_flight + worker.sibling_in_flight)
        circuit.add_metric(key, float(worker.breaker.state(now_s) is not CircuitState.CLOSED))
        if worker.role.computes_prompts:
            tokens.add_metric(key, worker.pending_tokens + worker.sibling_tokens)
            rate.add_metric(key, worker.rate.tokens_per_s)
        legs = [other.worker_legs.get(worker.url, (0, 0)) for other in siblings]
        sent.add_metric((worker.url,), worker.sent_legs + sum(leg[0] for leg in legs))
        failed.add_metric((worker.url,), worker.failed_legs + sum(leg[1] for leg in legs))
    yield from (up, load, tokens, rate, circuit, sent, failed)


def kv_event_families(registry: WorkerRegistry, events: KvEvents) -> Iterator[Metric]:
    """Yield what this process knows by KV events, of the instances that publish some."""
    known = GaugeMetricFamily(
        PREFIX + "kv_events_known", "1 while all that an instance holds is known by its KV events", labels=("worker",)
    )
    blocks = GaugeMetricFamily(
        PREFIX + "kv_events_blocks", "KV blocks that an instance holds by its events", labels=("worker", "tier")
    )
    lag = GaugeMetricFamily(
        PREFIX + "kv_events_lag_seconds", "Time between a batch's making and its coming", labels=("worker",)
    )
    batches = CounterMetricFamily(PREFIX + "kv_events_batches", "Batches of KV events received", labels=("worker",))
    gaps = CounterMetricFamily(
        PREFIX + "kv_events_gaps", "Gaps in an instance's batches, by what came of them", labels=("worker", "result")
    )
    for worker in registry:
        ranks, held = events.ranks(worker), worker.held_blocks
        if held is None:
            continue
        known.add_metric((worker.url,), float(held.is_whole))
        for tier in Tier:
            count = sum(events.index.held_blocks(rank.source, tier) for rank in ranks)
            blocks.add_metric((worker.url, tier.name.lower()), count)
        lags_s = [rank.lag_s for rank in ranks if rank.lag_s is not None]
        if lags_s:
            lag.add_metric((worker.url,), max(lags_s))
        batches.add_metric((worker.url,), sum(rank.batches for rank in ranks))
        losses = sum(rank.sequence.losses for rank in ranks)
        gaps.add_metric((worker.url, "lost"), losses)
        gaps.add_metric((worker.url, "replayed"), max(0, sum(rank.sequence.gaps for rank in ranks) - losses))
    yield from (known, blocks, lag, batches, gaps)


def pool_families(registry: WorkerRegistry, controller: PoolController) -> Iterator[Metric]:
    """Gauges at this moment, and counters of this process. A pool whose pressure is unknown has no pressure."""
    labels = ("model", "pool")
    sizes = GaugeMetricFamily(PREFIX + "pool_instances", "Instances of a pool, ready or not", labels=labels)
    pressures = GaugeMetricFamily(PREFIX + "pool_pressure", "P90 of its instances' pressures", labels=labels)
    offered = GaugeMetricFamily(
        PREFIX + "pool_offered_instances", "Load offered to a pool, in instances' worth of work", labels=labels
    )
    pending = GaugeMetricFamily(
        PREFIX + "pool_pending_tokens", "Prompt tokens sent to a pool, not yet prefilled", labels=labels
    )
    rates = GaugeMetricFamily(
        PREFIX + "pool_prefill_tokens_per_second", "Prefill rate of an instance of a pool, on average", labels=labels
    )
    for model in sorted({worker.model for worker in registry}):
        for role in Role:
            members = [worker for worker in registry if worker.role is role and worker.model == model]
            sizes.add_metric((model, role.value), len(members))
            if members and role.computes_prompts:
                tokens = sum(worker.pending_tokens + worker.sibling_tokens for worker in members)
                pending.add_metric((model, role.value), tokens)
                rate = sum(worker.rate.tokens_per_s for worker in members) / len(members)
                rates.add_metric((model, role.value), rate)
        decision = controller.control(model).decision
        if decision is None:
            continue
        for pool, view in ((LengthClass.SHORT, decision.short), (LengthClass.LONG, decision.long)):
            if view.pressure is not None:
                pressures.add_metric((model, pool.value), view.pressure)
            if view.offered_instances is not None:
                offered.add_metric((model, pool.value), view.offered_instances)
    yield sizes
    yield from (pending, rates, pressures, offered)
    moves = CounterMetricFamily(
        PREFIX + "pool_moves", "Moves between pools that have ended", labels=("source", "target", "outcome")
    )
    for move_key, count in controller.move_counts.items():
        moves.add_metric(move_key, count)
    decisions = CounterMetricFamily(
        PREFIX + "controller_decisions", "The controller's decisions, by what came of them", labels=("result", "reason")
    )
    for decision_key, count in controller.decision_counts.items():
        decisions.add_metric(decision_key, count)
    yield from (moves, decisions)


def group_families(
    peers: PeerCounts | None, lease: LeaseHolder | None, discovery: DiscoveryState | None
) -> Iterator[Metric]:
    """The group of routers and the API server, as this process sees them; without them families without samples."""

    def gauge(name: str, text: str, value: float | None) -> Metric:
        return GaugeMetricFamily(PREFIX + name, text, value=value)

    yield gauge("peers_found", "Other routers of the group, by options or the Service", peers and peers.found)
    yield gauge("peers_connected", "Routers that this router sends its state to", peers and peers.connected)
    yield gauge("peers_received", "Routers whose state came recently", peers and peers.received)
    yield CounterMetricFamily(
        PREFIX + "peer_messages_skipped", "Messages that a peer did not read", value=peers and peers.skipped_messages
    )
    leads, reaches_lease = (None, None) if lease is None else (float(lease.is_leader), float(lease.is_connected))
    yield gauge("controller_leader", "1 while this router holds the Lease and moves instances", leads)
    yield gauge("controller_lease_connected", "1 while the API server answers for the Lease", reaches_lease)
    connected = None if discovery is None else float(discovery.is_connected)
    yield gauge("discovery_connected", "1 while the API server answers for the EndpointSlices", connected)
    age_s = None if discovery is None else discovery.sync_age_s
    yield gauge("discovery_sync_age_seconds", "Time since the API server last answered or sent an event", age_s)
    endpoints = GaugeMetricFamily(PREFIX + "discovery_endpoints", "Instances found in the cluster", labels=("state",))
    for state, count in discovery.endpoints.items() if discovery is not None else ():
        endpoints.add_metric((state.value,), count)
    yield endpoints


def process_families(index: int, siblings: Sequence[tuple[int, MetricsSnapshot]]) -> Iterator[Metric]:
    """Yield what runs: the versions, and prometheus_client's `process_*` of every process, named by its number."""
    build = GaugeMetricFamily(PREFIX + "build_info", "Always 1", labels=("version", "sglang_version", "python_version"))
    build.add_metric((__version__, _installed_version("sglang"), platform.python_version()), 1)
    yield build
    for own in ProcessCollector(registry=None).collect():
        is_counter = own.type == "counter"
        kind = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = kind(own.name, own.documentation, labels=("process",))
        family.add_metric((str(index),), own.samples[0].value)
        for number, other in siblings:
            if own.name in other.process:
                family.add_metric((str(number),), other.process[own.name])
        yield family


def process_figures() -> dict[str, float]:
    """prometheus_client's `process_*` of this process, by name (that of a counter without `_total`)."""
    return {family.name: family.samples[0].value for family in ProcessCollector(registry=None).collect()}


@cache
def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _le(bound: float) -> str:
    """Return the bound as prometheus_client writes it, so that SGLang's series have the same label."""
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text


class _Collector:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(families: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """The text and its content type: Prometheus text format, or OpenMetrics where the Accept header asks for it."""
    registry = CollectorRegistry()
    registry.register(_Collector(list(families)))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
