"""Describes what an instance's LAPS reports to Prometheus. Labels are bounded: classes, modes, reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_ext.laps.decide.round_plan import (
    LapsMode,
    LapsReport,
    PrefillBatch,
    QueuedPrefill,
)
from sglang_ext.types import LengthClass

_PUBLISH_INTERVAL_S = 1.0
_DEPTHS = (1, 2, 4, 8, 16, 32, 64, 128)
_WAITS_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_COEFFICIENTS = ("alpha", "token", "read", "kappa", "request", "replayed_token", "replayed_kappa")
_FILLS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class LapsMetrics(Protocol):
    """Describes where an instance's events and state go."""

    def is_due(self, now_s: float) -> bool: ...

    def record_dispatch(self, now_s: float, batch: PrefillBatch, members: Sequence[QueuedPrefill]) -> None: ...

    def record_park(self) -> None: ...

    def record_mode_switch(self, mode: LapsMode) -> None: ...

    def publish(self, now_s: float, report: LapsReport) -> None: ...


class NoMetrics:
    """Ranks that do not decide, and engines without --enable-metrics."""

    def is_due(self, now_s: float) -> bool:
        return False

    def record_dispatch(self, now_s: float, batch: PrefillBatch, members: Sequence[QueuedPrefill]) -> None:
        pass

    def record_park(self) -> None:
        pass

    def record_mode_switch(self, mode: LapsMode) -> None:
        pass

    def publish(self, now_s: float, report: LapsReport) -> None:
        pass


class PrometheusMetrics:
    """Registered once per process, next to SGLang's own (`--enable-metrics`); gauges follow once a second."""

    _shared: PrometheusMetrics | None = None

    def __init__(self) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its schedulers; the client reads it on import.
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, help_text: str, *labels: str, of_ranks: str = "mostrecent") -> Gauge:
            return Gauge(f"sglang_ext:laps_{name}", help_text, labels, multiprocess_mode=of_ranks)  # type: ignore[arg-type]

        # Each data-parallel rank has a queue of its own.
        self._queued = gauge("queue_requests", "Requests with prefill work left", "length_class", of_ranks="sum")
        self._oldest_wait = gauge(
            "queue_oldest_wait_seconds", "Time since the oldest of them arrived", "length_class", of_ranks="max"
        )
        self._backlog = gauge(
            "queue_backlog_seconds", "Predicted time to compute them all", "length_class", of_ranks="max"
        )
        self._slo_violation_rate = gauge(
            "slo_violation_rate", "Share of recent prefills that ended after their deadline", "length_class"
        )
        self._window = gauge("window_seconds", "Waiting window W of short batches")
        self._depth = gauge("target_depth", "Target depth D of short batches")
        self._parked = gauge("parked_requests", "Long prefills between two chunks, not the one in hand", of_ranks="sum")
        self._boundary = gauge("boundary_tokens", "Most new tokens of a short prefill without cached tokens")
        self._coefficients = gauge("fit_coefficient_seconds", "Cost model, per unit of its feature", "coefficient")
        self._fit_error = gauge("fit_relative_error", "Relative error of the cost model", "quantile")
        self._mode = gauge("mode", "1 for the mode in force", "mode")
        self._waits = Histogram(
            "sglang_ext:laps_dispatch_wait_seconds",
            "Time from arrival to the first dispatch",
            ["length_class"],
            buckets=_WAITS_S,
        )
        self._depths = Histogram("sglang_ext:laps_batch_requests", "Short prefills in a batch", buckets=_DEPTHS)
        self._fills = Histogram(
            "sglang_ext:laps_batch_fill",
            "Tokens of a short batch over those of its captured shape",
            buckets=_FILLS,
        )
        self._padding = Counter("sglang_ext:laps_padding_tokens", "Tokens computed only for padding")
        self._dispatches = Counter(
            "sglang_ext:laps_dispatches",
            "Batches by what made them leave; long: with a long prefill in it",
            ["length_class", "reason"],
        )
        self._parks = Counter("sglang_ext:laps_parks", "Long prefills that yielded between two chunks")
        self._resumes = Counter("sglang_ext:laps_resumes", "Parked long prefills that went on")
        self._switches = Counter("sglang_ext:laps_mode_switches", "Mode switches", ["mode"])
        self._published_s = float("-inf")

    @classmethod
    def shared(cls) -> PrometheusMetrics:
        """The one of this process: a metric registers once."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    def is_due(self, now_s: float) -> bool:
        return now_s - self._published_s >= _PUBLISH_INTERVAL_S

    def record_dispatch(self, now_s: float, batch: PrefillBatch, members: Sequence[QueuedPrefill]) -> None:
        length_class = LengthClass.SHORT if batch.is_short else LengthClass.LONG
        self._dispatches.labels(length_class, batch.reason).inc()
        for member in members:
            if not member.is_started:
                self._waits.labels(member.length_class).observe(max(0.0, now_s - member.arrival_s))
            elif not member.is_current:
                self._resumes.inc()
        if batch.short_requests:
            self._depths.observe(batch.short_requests)
        if batch.shape is not None:
            padded_tokens = batch.shape.tokens
            self._fills.observe(batch.new_tokens / padded_tokens)
            self._padding.inc(padded_tokens - batch.new_tokens)

    def record_park(self) -> None:
        self._parks.inc()

    def record_mode_switch(self, mode: LapsMode) -> None:
        self._switches.labels(mode).inc()

    def publish(self, now_s: float, report: LapsReport) -> None:
        self._published_s = now_s
        for length_class, queue in ((LengthClass.SHORT, report.short), (LengthClass.LONG, report.long)):
            self._queued.labels(length_class).set(queue.requests)
            self._oldest_wait.labels(length_class).set(queue.oldest_wait_s)
            self._backlog.labels(length_class).set(queue.backlog_s)
            self._slo_violation_rate.labels(length_class).set(queue.slo_violation_rate)
        self._window.set(report.window_s)
        self._depth.set(report.depth)
        self._parked.set(report.parked)
        self._boundary.set(report.boundary_tokens)
        fit = report.fit
        for name in _COEFFICIENTS:
            value = getattr(fit, name + "_s")
            if value is not None:
                self._coefficients.labels(name).set(value)
        for quantile, error in (("0.5", fit.error_p50), ("0.9", fit.error_p90)):
            if error is not None:
                self._fit_error.labels(quantile).set(error)
        for mode in LapsMode:
            self._mode.labels(mode).set(mode is report.mode)
