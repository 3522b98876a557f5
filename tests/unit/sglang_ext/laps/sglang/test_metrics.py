"""What Prometheus hears of dispatches, parks, switches and the report."""

from __future__ import annotations

import pytest

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext.laps.decide.round_plan import (
    Cut,
    DispatchReason,
    LapsMode,
    PrefillBatch,
    PriorityClass,
    QueuedPrefill,
    RoundSnapshot,
)
from sglang_ext.laps.sglang.metrics import LapsMetrics, NoMetrics, PrometheusMetrics
from sglang_ext.types import LengthClass
from support.prefill_loop import policy


class Readings:
    """Samples of this process's registry since `Readings` was made."""

    def __init__(self) -> None:
        self._start = self._samples()

    def change(self, name: str, **labels: str) -> float:
        key = (f"sglang_ext:laps_{name}", frozenset(labels.items()))
        return self._samples().get(key, 0.0) - self._start.get(key, 0.0)

    def now(self, name: str, **labels: str) -> float:
        return self._samples()[f"sglang_ext:laps_{name}", frozenset(labels.items())]

    @staticmethod
    def _samples() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        from prometheus_client import REGISTRY

        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
        }


@pytest.fixture
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics.shared()


@pytest.fixture
def readings(metrics: PrometheusMetrics) -> Readings:
    return Readings()


def queued(key: int, length_class: LengthClass, arrival_s: float, **changes: bool) -> QueuedPrefill:
    state = {"is_started": False, "is_current": False, **changes}
    return QueuedPrefill(key, length_class, 10, 0, 10, arrival_s, 99.0, PriorityClass.NORMAL, **state)


SNAPSHOT = RoundSnapshot(
    10.0,
    (
        queued(1, LengthClass.SHORT, 9.75),
        queued(2, LengthClass.SHORT, 9.5),
        queued(3, LengthClass.SHORT, 0.0),
        queued(4, LengthClass.LONG, 6.0),
        queued(5, LengthClass.LONG, 5.0, is_started=True),
        queued(6, LengthClass.LONG, 4.0, is_started=True, is_current=True),
    ),
    1000,
)


def note(metrics: LapsMetrics, batch: PrefillBatch) -> None:
    members = [request for request in SNAPSHOT.queue if request.key in batch.keys]
    metrics.record_dispatch(SNAPSHOT.now_s, batch, members)


def test_a_batch_of_both_classes(metrics: PrometheusMetrics, readings: Readings) -> None:
    note(metrics, PrefillBatch((1, 2, 5), Cut(4, 5), DispatchReason.MIXED, None, 2, 35, 0.1))
    assert readings.change("dispatches_total", length_class="long", reason="mixed") == 1
    assert readings.change("batch_requests_sum") == 2
    assert readings.change("dispatch_wait_seconds_count", length_class="short") == 2
    assert readings.change("dispatch_wait_seconds_count", length_class="long") == 1
    assert readings.change("resumes_total") == 1


def test_a_metric_registers_once(metrics: PrometheusMetrics) -> None:
    assert PrometheusMetrics.shared() is metrics


def test_a_short_batch(metrics: PrometheusMetrics, readings: Readings) -> None:
    note(metrics, PrefillBatch((1, 2), None, DispatchReason.WINDOW, None, 2, 20, 0.1))
    assert readings.change("dispatches_total", length_class="short", reason="window") == 1
    assert readings.change("batch_requests_count") == 1
    assert readings.change("batch_requests_sum") == 2
    assert readings.change("dispatch_wait_seconds_count", length_class="short") == 2
    assert readings.change("dispatch_wait_seconds_sum", length_class="short") == pytest.approx(0.75)
    assert readings.change("batch_fill_count") == 0
    assert readings.change("padding_tokens_total") == 0


def test_a_padded_batch(metrics: PrometheusMetrics, readings: Readings) -> None:
    note(metrics, PrefillBatch((1, 2), None, DispatchReason.DEPTH, GraphShape(16, 4), 2, 20, 0.1))
    assert readings.change("batch_fill_sum") == pytest.approx(20 / 64)
    assert readings.change("padding_tokens_total") == 44


@pytest.mark.parametrize(
    ("key", "waits", "resumes"),
    [(4, 1, 0), (5, 0, 1), (6, 0, 0)],
    ids=["first chunk", "parked", "in hand"],
)
def test_a_long_chunk(metrics: PrometheusMetrics, readings: Readings, key: int, waits: int, resumes: int) -> None:
    note(metrics, PrefillBatch((), Cut(key, 5), DispatchReason.SHARE, None, 0, 5, 0.1))
    assert readings.change("dispatches_total", length_class="long", reason="share") == 1
    assert readings.change("dispatch_wait_seconds_count", length_class="long") == waits
    assert readings.change("dispatch_wait_seconds_sum", length_class="long") == 4.0 * waits
    assert readings.change("resumes_total") == resumes
    assert readings.change("batch_requests_count") == 0


def test_parks_and_switches(metrics: PrometheusMetrics, readings: Readings) -> None:
    metrics.record_park()
    metrics.record_mode_switch(LapsMode.LONG)
    assert readings.change("parks_total") == 1
    assert readings.change("mode_switches_total", mode="long") == 1
    assert readings.change("mode_switches_total", mode="short") == 0


def test_gauges_follow_the_report_once_a_second(metrics: PrometheusMetrics, readings: Readings) -> None:
    laps = policy(boundary_tokens=77)
    laps.switch_mode(LapsMode.SHORT)
    report = laps.report(SNAPSHOT)
    metrics.publish(100.0, report)
    assert not metrics.is_due(100.9)
    assert metrics.is_due(101.0)
    assert readings.now("queue_requests", length_class="short") == 3
    assert readings.now("queue_requests", length_class="long") == 3
    assert readings.now("queue_oldest_wait_seconds", length_class="short") == 10.0
    assert readings.now("queue_backlog_seconds", length_class="long") == report.long.backlog_s > 0
    assert readings.now("slo_violation_rate", length_class="short") == 0
    assert readings.now("window_seconds") == report.window_s
    assert readings.now("target_depth") == report.depth
    assert readings.now("parked_requests") == 1
    assert readings.now("boundary_tokens") == 77
    assert readings.now("fit_coefficient_seconds", coefficient="kappa") == report.fit.kappa_s > 0
    assert {mode: readings.now("mode", mode=mode) for mode in LapsMode} == {
        LapsMode.SHORT: 1,
        LapsMode.LONG: 0,
        LapsMode.BOTH: 0,
    }


def test_a_rank_that_does_not_count_is_never_due(readings: Readings) -> None:
    metrics = NoMetrics()
    note(metrics, PrefillBatch((), Cut(4, 5), DispatchReason.SHARE, None, 0, 5, 0.1))
    metrics.record_park()
    metrics.record_mode_switch(LapsMode.LONG)
    assert not metrics.is_due(1e9)
    assert readings.change("parks_total") == 0
    assert readings.change("dispatches_total", length_class="long", reason="share") == 0
