"""The counters and histograms of one router process; `observe/exposition.py` shows them to Prometheus.

prometheus_client's own instruments take a lock and several microseconds for each observation, too much for the data
path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sglang_ext.types import LengthClass, RouteDecision
from sglang_ext_router.observe.histograms import (
    LOOP_LAG_BUCKETS_S,
    TOKEN_BUCKETS,
    TOKEN_TIME_BUCKETS_S,
    Histogram,
    duration_bounds_s,
    queue_bounds_s,
    ttft_bounds_s,
)

if TYPE_CHECKING:
    from sglang_ext_router.observe.request_record import RequestRecord
    from sglang_ext_router.request.routing import Route

Labels: TypeAlias = tuple[str, ...]
MAX_TENANT_SERIES = 10_000  # combinations of tenant, model and class


class MetricsSnapshot(NamedTuple):
    """Describes what one process sends to the others; plain JSON types once it has been through `orjson`."""

    counters: dict[str, list[tuple[Labels, float]]]
    histograms: list[tuple[str, str, list[int], float]]  # name, length class or "", counts, total
    worker_legs: dict[str, tuple[int, int]]  # url → sent, failed
    gauges: dict[str, float]
    process: dict[str, float]  # prometheus_client's `process_*`

    def with_counts_of(self, earlier: MetricsSnapshot) -> MetricsSnapshot:
        """Add up the counts of both; gauges stay those of this one. Raises ValueError if buckets differ."""
        counters: dict[str, list[tuple[Labels, float]]] = {}
        for name in self.counters.keys() | earlier.counters.keys():
            totals: dict[Labels, float] = {}
            for key, value in (*self.counters.get(name, ()), *earlier.counters.get(name, ())):
                totals[tuple(key)] = totals.get(tuple(key), 0) + value
            counters[name] = list(totals.items())
        before = {(name, cls): (counts, total) for name, cls, counts, total in earlier.histograms}
        histograms = []
        for name, cls, counts, total in self.histograms:
            more, more_total = before.get((name, cls), ([0] * len(counts), 0.0))
            added = [a + b for a, b in zip(counts, more, strict=True)]
            histograms.append((name, cls, added, total + more_total))
        legs = dict(self.worker_legs)
        for url, (sent, failed) in earlier.worker_legs.items():
            own_sent, own_failed = legs.get(url, (0, 0))
            legs[url] = (own_sent + sent, own_failed + failed)
        return self._replace(counters=counters, histograms=histograms, worker_legs=legs)


def read_snapshot(wire: Sequence[Any]) -> MetricsSnapshot:
    """Read a snapshot from parsed JSON. Raises ValueError or TypeError for another shape, of another version."""
    counters, histograms, legs, gauges, process = wire
    return MetricsSnapshot(
        {name: [(tuple(labels), value) for labels, value in entries] for name, entries in counters.items()},
        [(name, length_class, counts, total) for name, length_class, counts, total in histograms],
        {url: (sent, failed) for url, (sent, failed) in legs.items()},
        gauges,
        process,
    )


class ClassMetrics:
    """The instruments of one length class."""

    def __init__(self, limit_s: float) -> None:
        self.ttft_s = Histogram(ttft_bounds_s(limit_s))
        self.duration_s = Histogram(duration_bounds_s(limit_s))
        self.queue_s = Histogram(queue_bounds_s(limit_s))
        self.tpot_s = Histogram(TOKEN_TIME_BUCKETS_S)
        self.stall_s = Histogram(TOKEN_TIME_BUCKETS_S)
        self.predicted_early_s = Histogram(ttft_bounds_s(limit_s))
        self.predicted_late_s = Histogram(ttft_bounds_s(limit_s))
        self.prompt_tokens = Histogram(TOKEN_BUCKETS)
        self.new_tokens = Histogram(TOKEN_BUCKETS)
        self.output_tokens = Histogram(TOKEN_BUCKETS)
        self.slo_met = 0
        self.slo_missed = 0

    def record_prefill(self, actual_s: float, predicted_s: float) -> None:
        """A prefill took `actual_s` from when it was sent, waiting included, and was expected to take `predicted_s`."""
        if actual_s >= predicted_s:
            self.predicted_late_s.observe(actual_s - predicted_s)
        else:
            self.predicted_early_s.observe(predicted_s - actual_s)


class RouterMetrics:
    """All instruments of one router process. Callers increment the attributes directly."""

    def __init__(self, limit_s: float = 1800.0) -> None:
        """`limit_s` is the longest time that a request may take."""
        self.requests: dict[tuple[str, str, int, str], int] = {}  # (path, class, status, outcome) → count
        self.short = ClassMetrics(limit_s)
        self.long = ClassMetrics(limit_s)
        self.objectives: dict[Labels, int] = {}  # (class of the file, whether met) → count
        self.unclassified_slo_missed = 0  # refused before the class was known
        self.refused: dict[str, int] = {}  # reason → count
        self.retries: dict[str, int] = {}  # leg that failed → count
        self.retries_refused: dict[str, int] = {}  # reason → count
        self.aborts: dict[str, int] = {}  # reason → count
        self.pool_offers: dict[str, int] = {}  # outcome → count
        self.access_log_lines: dict[str, int] = {}  # outcome → count
        self.traces: dict[str, int] = {}  # outcome → count
        self.refusals: dict[str, int] = {}  # status → count; that of the client connections
        self.tenant_requests: dict[Labels, int] = {}  # (tenant, model, class) → count
        self.tenant_tokens: dict[Labels, int] = {}  # (tenant, model, class, kind) → count
        self.tenant_refusals: dict[Labels, int] = {}  # (tenant, budget) → count
        self.loop_lag_s = Histogram(LOOP_LAG_BUCKETS_S)
        self.tokenised = 0
        self.tokenised_for_blocks = 0
        self.spilled = 0
        self.waited_for_instance = 0
        self.plain = 0
        self.migrated = 0
        self.evicted = 0
        self.taken_back = 0
        self.cached_tokens = 0
        self.prompt_tokens = 0
        self.decode_cached_tokens = 0
        self.decode_prompt_tokens = 0  # to decode instances that keep prefixes

    def of(self, length_class: LengthClass) -> ClassMetrics:
        return self.short if length_class is LengthClass.SHORT else self.long

    def classes(self) -> tuple[tuple[LengthClass, ClassMetrics], ...]:
        """Return the length classes with their instruments."""
        return (LengthClass.SHORT, self.short), (LengthClass.LONG, self.long)

    def record_ttft(self, decision: RouteDecision, ttft_s: float) -> None:
        """The first byte of a stream came `ttft_s` after its request."""
        self.of(decision.length_class).ttft_s.observe(ttft_s)
        if decision.objective_s:
            key = (decision.class_name, "true" if ttft_s <= decision.objective_s else "false")
            self.objectives[key] = self.objectives.get(key, 0) + 1

    def count(self, counts: dict[str, int], key: str) -> None:
        """Add one to a counter of this object."""
        counts[key] = counts.get(key, 0) + 1

    def count_usage(
        self, tenant: str, model: str, length_class: str, requests: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        """A tenant's requests have used these tokens. Beyond `MAX_TENANT_SERIES` models are not distinguished."""
        key = (tenant, model, length_class)
        if key not in self.tenant_requests and len(self.tenant_requests) >= MAX_TENANT_SERIES:
            key = (tenant, "(other)", "none")
        self.tenant_requests[key] = self.tenant_requests.get(key, 0) + requests
        for kind, tokens in (("prompt", prompt_tokens), ("output", output_tokens)):
            counted = (*key, kind)
            self.tenant_tokens[counted] = self.tenant_tokens.get(counted, 0) + tokens

    def count_tenant_refusal(self, tenant: str, budget: str) -> None:
        """A tenant's request was refused for a budget."""
        self.tenant_refusals[tenant, budget] = self.tenant_refusals.get((tenant, budget), 0) + 1

    def count_route(self, route: Route, prompt_tokens: int) -> None:
        """A request is sent to its instances."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += route.decision.cached_tokens
        route.prefill.sent_legs += 1
        if route.decode is not None:
            route.decode.sent_legs += 1
            if route.decode.caches_at_decode:
                self.decode_prompt_tokens += prompt_tokens
                self.decode_cached_tokens += route.decision.decode_cached_tokens
        elif route.is_plain:
            self.plain += 1
        if route.is_spilled:
            self.spilled += 1

    def record_end(self, record: RequestRecord) -> None:
        """Count a request whose record is closed; without a route it has no length class."""
        route, met_deadline = record.route, record.met_deadline()
        length_class = "none"
        if route is not None:
            decision = route.decision
            length_class = str.__str__(decision.length_class)
            metrics = self.of(decision.length_class)
            metrics.duration_s.observe(record.lived_s)
            metrics.queue_s.observe(record.queue_s)
            metrics.prompt_tokens.observe(decision.new_tokens + decision.cached_tokens)
            metrics.new_tokens.observe(decision.new_tokens)
            if met_deadline is not None:
                metrics.slo_met += met_deadline
                metrics.slo_missed += not met_deadline
        elif met_deadline is not None:
            self.unclassified_slo_missed += 1
        key = (record.path.decode(), length_class, record.status, str(record.outcome))
        self.requests[key] = self.requests.get(key, 0) + 1

    # -- reading them -----------------------------------------------------------------------------------

    def snapshot(
        self, worker_legs: dict[str, tuple[int, int]], gauges: dict[str, float], process: dict[str, float]
    ) -> MetricsSnapshot:
        """Return everything that adds up over processes; the arguments are what this object does not count itself."""
        return MetricsSnapshot(
            {name: samples for name, _, _, samples in self.counters()},
            [(name, cls, histogram.counts, histogram.total) for name, _, cls, histogram in self.histograms()],
            worker_legs,
            gauges,
            process,
        )

    def counters(self) -> Iterator[tuple[str, str, Labels, list[tuple[Labels, float]]]]:
        """Yield name, help, label names and samples of each counter."""
        yield (
            "requests",
            "Requests answered, by path, length class, HTTP status and outcome",
            ("path", "length_class", "status", "outcome"),
            [((path, cls, str(status), outcome), count) for (path, cls, status, outcome), count in self._requests()],
        )
        yield "refused", "Requests refused before an instance was chosen", ("reason",), _flat(self.refused)
        yield "retries", "Attempts repeated, by the leg that failed", ("leg",), _flat(self.retries)
        yield "retries_refused", "Attempts that were not repeated", ("reason",), _flat(self.retries_refused)
        yield (
            "pool_offers",
            "Long prompts for the coordinator, by what came of it",
            ("outcome",),
            _flat(self.pool_offers),
        )
        yield "aborts", "Requests aborted on the instances, by reason", ("reason",), _flat(self.aborts)
        yield (
            "connection_refusals",
            "Requests and connections refused with the connection",
            ("status",),
            _flat(self.refusals),
        )
        yield (
            "access_log_lines",
            "Lines of the access log, by what came of them",
            ("result",),
            _flat(self.access_log_lines),
        )
        yield "traces", "Traces of requests, by what came of them", ("result",), _flat(self.traces)
        slo: list[tuple[Labels, float]] = [(("none", "false"), self.unclassified_slo_missed)]
        for cls, figures in self.classes():
            slo += [((cls.value, "true"), figures.slo_met), ((cls.value, "false"), figures.slo_missed)]
        yield (
            "class_ttft",
            "Streams of the classes of --length-classes, by whether the first byte came within the class's ttft_s",
            ("class", "met"),
            list(self.objectives.items()),
        )
        yield "ttft_slo", "Requests with a TTFT deadline, by whether it was met", ("length_class", "met"), slo
        yield (
            "events",
            "Prompts tokenised as their class was in doubt, or for their blocks; requests served in the other pool, "
            "or that waited for one; streams that went on on other instances; requests that made room for urgent ones, "
            "or that a chunk would have delayed",
            ("event",),
            [
                (("tokenised",), self.tokenised),
                (("tokenised_for_blocks",), self.tokenised_for_blocks),
                (("spilled",), self.spilled),
                (("waited_for_instance",), self.waited_for_instance),
                (("plain",), self.plain),
                (("migrated",), self.migrated),
                (("evicted",), self.evicted),
                (("taken_back",), self.taken_back),
            ],
        )
        yield (
            "prompt_tokens",
            "Prompt tokens routed, by whether the chosen instance was believed to hold them",
            ("cached",),
            [(("true",), self.cached_tokens), (("false",), self.prompt_tokens - self.cached_tokens)],
        )
        at_decode, held = self.decode_prompt_tokens, self.decode_cached_tokens
        yield (
            "decode_prompt_tokens",
            "Prompt tokens routed to decode instances with a prefix cache, by whether these were believed to hold them",
            ("cached",),
            [(("true",), held), (("false",), at_decode - held)],
        )

        labels = ("tenant", "model", "length_class")
        yield "tenant_requests", "Requests with a reply, by tenant", labels, list(self.tenant_requests.items())
        yield "tenant_tokens", "Tokens that tenants are charged", (*labels, "kind"), list(self.tenant_tokens.items())
        refused = ("tenant", "budget")
        yield "tenant_refused", "Requests refused for a budget", refused, list(self.tenant_refusals.items())

    def _requests(self) -> list[tuple[tuple[str, str, int, str], int]]:
        return list(self.requests.items())

    def histograms(self) -> Iterator[tuple[str, str, str, Histogram]]:
        """Yield name, help, length class (or another label's value, or nothing) and counts of each histogram."""
        for length_class, figures in self.classes():
            cls = length_class.value
            yield (
                "ttft_seconds",
                "Time from a stream's arrival to the first byte of its reply's body",
                cls,
                figures.ttft_s,
            )
            yield (
                "tpot_seconds",
                "Time per output token after the first, of streams of one sequence",
                cls,
                figures.tpot_s,
            )
            yield "stream_stall_seconds", "The longest time between two pieces of a stream", cls, figures.stall_s
            yield "request_duration_seconds", "Time from arrival to the end of the reply", cls, figures.duration_s
            yield "queue_wait_seconds", "Time in the router's own queue", cls, figures.queue_s
            yield (
                "prefill_longer_than_predicted_seconds",
                "By how much prefills (wait and computation) took longer than predicted when they were sent",
                cls,
                figures.predicted_late_s,
            )
            yield (
                "prefill_shorter_than_predicted_seconds",
                "By how much prefills took less than predicted",
                cls,
                figures.predicted_early_s,
            )
            yield (
                "request_prompt_tokens",
                "Tokens of the longest prompt of a request (estimated)",
                cls,
                figures.prompt_tokens,
            )
            yield "new_tokens", "Prompt tokens that were not cached (estimated)", cls, figures.new_tokens
            yield "request_output_tokens", "Tokens that the instances made for a request", cls, figures.output_tokens
        yield "event_loop_lag_seconds", "How late a timer of the event loop was served", "", self.loop_lag_s


def _flat(counts: dict[str, int]) -> list[tuple[Labels, float]]:
    return [((key,), value) for key, value in counts.items()]
