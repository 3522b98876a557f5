"""Counters and histograms cheap enough for every request, shown to Prometheus by a collector.

prometheus_client renders them; its own instruments take a lock and several microseconds an observation,
which the data path does not have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from sglang_ext.policy.routing.circuit_breaker import CircuitState
from sglang_ext.types import LengthClass, Role, RouteDecision

if TYPE_CHECKING:
    from sglang_ext_router.controller import PoolController
    from sglang_ext_router.routing import Route
    from sglang_ext_router.workers import WorkerRegistry

LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
TOKEN_BUCKETS = (
    16.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    65536.0,
    262144.0,
)
PREFIX = "sglang_ext_router_"


class Histogram:
    """Counts per bucket (upper bounds inclusive), their sum, as plain lists."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Buckets as Prometheus wants them: (le, number of observations up to it)."""
        running = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), running))
        return buckets


class ClassMetrics:
    """What is measured per length class."""

    __slots__ = ("duration_s", "new_tokens", "queue_s", "slo_met", "slo_missed", "ttft_s")

    def __init__(self) -> None:
        self.ttft_s = Histogram(LATENCY_BUCKETS_S)
        self.duration_s = Histogram(LATENCY_BUCKETS_S)
        self.queue_s = Histogram(LATENCY_BUCKETS_S)
        self.new_tokens = Histogram(TOKEN_BUCKETS)
        self.slo_met = 0
        self.slo_missed = 0


class RouterMetrics:
    """All instruments of one router process. Increment the attributes directly."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # (path, class, status) → count
        self.short = ClassMetrics()
        self.long = ClassMetrics()
        self.refused: dict[str, int] = {}  # reason → count
        self.retries: dict[str, int] = {}  # leg that failed → count
        self.retries_refused: dict[str, int] = {}  # reason → count
        self.aborts: dict[str, int] = {}  # reason → count
        self.worker_failures: dict[str, int] = {}  # url → count
        self.worker_requests: dict[str, int] = {}
        self.tokenised = 0
        self.spilled = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0

    def of(self, length_class: LengthClass) -> ClassMetrics:
        return self.short if length_class is LengthClass.SHORT else self.long

    def _classes(self) -> tuple[tuple[LengthClass, ClassMetrics], ...]:
        return (LengthClass.SHORT, self.short), (LengthClass.LONG, self.long)

    def count_request(self, path: str, length_class: str, status: int) -> None:
        key = (path, length_class, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def count(self, counts: dict[str, int], key: str) -> None:
        """Add one to a counter of this object."""
        counts[key] = counts.get(key, 0) + 1

    def count_route(self, route: Route, prompt_tokens: int) -> None:
        """A request is sent to its instances."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += route.decision.cached_tokens
        sent = self.worker_requests
        prefill_url = route.prefill.url
        sent[prefill_url] = sent.get(prefill_url, 0) + 1
        if route.decode is not None:
            decode_url = route.decode.url
            sent[decode_url] = sent.get(decode_url, 0) + 1
        if route.is_spilled:
            self.spilled += 1

    def count_end(
        self, path: str, decision: RouteDecision | None, status: int, duration_s: float, queue_s: float
    ) -> None:
        """An admitted request is over; without a decision no instance could take it."""
        if decision is None:
            self.count_request(path, "none", status)
            return
        one = self.of(decision.length_class)
        one.duration_s.observe(duration_s)
        one.queue_s.observe(queue_s)
        one.new_tokens.observe(decision.new_tokens)
        self.count_request(path, str.__str__(decision.length_class), status)

    def snapshot(self) -> dict[str, Any]:
        """Everything that adds up over processes, as JSON types."""
        return {
            "counters": {name: list(map(list, samples)) for name, _, _, samples in self._counters()},
            "histograms": [
                [name, length_class.value, instrument.counts, instrument.total]
                for name, _, length_class, instrument in self._histograms()
            ],
        }

    def _counters(self) -> Iterator[tuple[str, str, tuple[str, ...], list[tuple[tuple[str, ...], float]]]]:
        yield (
            "requests",
            "Requests answered, by path, length class and HTTP status",
            ("path", "length_class", "status"),
            [((path, cls, str(status)), count) for (path, cls, status), count in self.requests.items()],
        )
        yield "refused", "Requests refused before an instance was chosen", ("reason",), _flat(self.refused)
        yield "retries", "Attempts repeated, by the leg that failed", ("leg",), _flat(self.retries)
        yield "retries_refused", "Attempts that were not repeated", ("reason",), _flat(self.retries_refused)
        yield "aborts", "Requests aborted on the instances, by reason", ("reason",), _flat(self.aborts)
        yield "worker_requests", "Legs sent to an instance", ("worker",), _flat(self.worker_requests)
        yield "worker_failures", "Legs that an instance failed", ("worker",), _flat(self.worker_failures)
        yield (
            "ttft_slo",
            "Requests with a TTFT deadline, by whether it was met",
            ("length_class", "met"),
            [
                ((cls.value, met), count)
                for cls, one in self._classes()
                for met, count in (("true", one.slo_met), ("false", one.slo_missed))
            ],
        )
        yield (
            "events",
            "Prompts tokenised because their class was in doubt; requests served in the other pool",
            ("event",),
            [(("tokenised",), self.tokenised), (("spilled",), self.spilled)],
        )
        yield (
            "prompt_tokens",
            "Prompt tokens routed, by whether the chosen instance was believed to hold them",
            ("cached",),
            [(("true",), self.cached_tokens), (("false",), self.prompt_tokens - self.cached_tokens)],
        )

    def _histograms(self) -> Iterator[tuple[str, str, LengthClass, Histogram]]:
        for length_class, one in self._classes():
            yield "ttft_seconds", "Time to the first byte of the reply's body", length_class, one.ttft_s
            yield "request_duration_seconds", "Time to the end of the reply", length_class, one.duration_s
            yield "queue_wait_seconds", "Time in the router's own queue", length_class, one.queue_s
            yield "new_tokens", "Prompt tokens that were not cached (estimated)", length_class, one.new_tokens

    def families(self, siblings: Iterable[Mapping[str, Any]] = ()) -> Iterator[Metric]:
        """Metric families of this process with its siblings' snapshots added."""
        others = list(siblings)
        for name, text, labels, samples in self._counters():
            totals: dict[tuple[str, ...], float] = {}
            for key, value in samples:
                totals[key] = totals.get(key, 0) + value
            for other in others:
                for key_list, value in other["counters"].get(name, ()):
                    key = tuple(key_list)
                    totals[key] = totals.get(key, 0) + value
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for key, value in totals.items():
                counter.add_metric(key, value)
            yield counter
        merged: dict[str, HistogramMetricFamily] = {}
        remote: dict[tuple[str, str], list[tuple[list[int], float]]] = {}
        for other in others:
            for name, cls, counts, total in other["histograms"]:
                remote.setdefault((name, cls), []).append((counts, total))
        for name, text, length_class, instrument in self._histograms():
            family = merged.setdefault(name, HistogramMetricFamily(PREFIX + name, text, labels=("length_class",)))
            joint = Histogram(instrument.bounds)
            joint.counts = list(instrument.counts)
            joint.total = instrument.total
            for counts, total in remote.get((name, length_class.value), ()):
                joint.counts = [a + b for a, b in zip(joint.counts, counts, strict=True)]
                joint.total += total
            family.add_metric((length_class.value,), joint.cumulative(), joint.total)
        yield from merged.values()


def _flat(counts: Mapping[str, int]) -> list[tuple[tuple[str, ...], float]]:
    return [((key,), value) for key, value in counts.items()]


def worker_families(registry: WorkerRegistry, in_flight: int, queued: int, now_s: float) -> Iterator[Metric]:
    """Gauges of the pools at this moment."""
    yield GaugeMetricFamily(PREFIX + "requests_in_flight", "Requests being served", value=in_flight)
    yield GaugeMetricFamily(PREFIX + "requests_queued", "Requests in the router's queue", value=queued)
    labels = ("worker", "role")
    up = GaugeMetricFamily(PREFIX + "worker_up", "1 while an instance takes requests", labels=labels)
    load = GaugeMetricFamily(PREFIX + "worker_in_flight", "Legs under way", labels=labels)
    tokens = GaugeMetricFamily(PREFIX + "worker_pending_tokens", "Prompt tokens sent, not yet prefilled", labels=labels)
    rate = GaugeMetricFamily(PREFIX + "worker_prefill_tokens_per_second", "Prefill rate observed", labels=labels)
    circuit = GaugeMetricFamily(PREFIX + "worker_circuit_open", "1 while the breaker is not closed", labels=labels)
    for worker in registry:
        key = (worker.url, worker.role.value)
        up.add_metric(key, float(worker.is_ready))
        load.add_metric(key, worker.in_flight)
        circuit.add_metric(key, float(worker.breaker.state(now_s) is not CircuitState.CLOSED))
        if worker.role.is_prefill:
            tokens.add_metric(key, worker.pending_tokens)
            rate.add_metric(key, worker.rate.tokens_per_s)
    yield from (up, load, tokens, rate, circuit)


class _Collector:
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(families: Iterable[Metric]) -> bytes:
    """Prometheus text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(list(families)))
    return generate_latest(registry)


def pool_families(registry: WorkerRegistry, controller: PoolController) -> Iterator[Metric]:
    """Gauges at this moment, and counters of this process. A pool whose pressure is unknown has no pressure."""
    sizes = GaugeMetricFamily(PREFIX + "pool_instances", "Instances of a pool, ready or not", labels=("pool",))
    for role in Role:
        sizes.add_metric((role.value,), sum(worker.role is role for worker in registry))
    yield sizes
    pressures = GaugeMetricFamily(PREFIX + "pool_pressure", "P90 of its instances' pressures", labels=("pool",))
    offered = GaugeMetricFamily(
        PREFIX + "pool_offered_instances", "Load offered to a pool, in instances' worth of work", labels=("pool",)
    )
    decision = controller.decision
    if decision is not None:
        for pool, view in ((LengthClass.SHORT, decision.short), (LengthClass.LONG, decision.long)):
            if view.pressure is not None:
                pressures.add_metric((pool.value,), view.pressure)
            if view.offered_instances is not None:
                offered.add_metric((pool.value,), view.offered_instances)
    yield from (pressures, offered)
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
