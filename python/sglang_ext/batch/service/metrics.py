"""The service's metrics for Prometheus; no label has a value that a client can choose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sglang_ext.batch.decide.batch_lifecycle import BatchStatus

PREFIX = "sglang_ext_batch_"


class RequestOutcome(StrEnum):
    """The outcome of a request whose batch has ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"  # the endpoint refused it, or every attempt failed
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ServiceReading:
    """The service at one moment."""

    batches: Mapping[BatchStatus, int]
    outcomes: Mapping[RequestOutcome, int]  # since the start of the process
    in_flight: int
    cap: int
    waiting: int
    files: int
    file_bytes: int


class _Readings:
    """A collector of one reading."""

    def __init__(self, reading: ServiceReading) -> None:
        self._reading = reading

    def collect(self) -> Iterator[Metric]:
        reading = self._reading
        batches = GaugeMetricFamily(PREFIX + "batches", "batches by status", labels=["status"])
        for status in BatchStatus:
            batches.add_metric([status.value], reading.batches.get(status, 0))
        yield batches
        requests = CounterMetricFamily(
            PREFIX + "requests", "requests of batches that have ended, by outcome", labels=["outcome"]
        )
        for outcome in RequestOutcome:
            requests.add_metric([outcome.value], reading.outcomes.get(outcome, 0))
        yield requests
        for name, help_text, value in (
            ("requests_in_flight", "requests at the endpoint", reading.in_flight),
            ("requests_in_flight_cap", "requests that may be at the endpoint now", reading.cap),
            ("requests_waiting", "requests of running batches without a result", reading.waiting),
            ("files", "files in the store", reading.files),
            ("file_bytes", "bytes of the files in the store", reading.file_bytes),
        ):
            yield GaugeMetricFamily(PREFIX + name, help_text, value=value)


def render_metrics(reading: ServiceReading) -> bytes:
    """The reading in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Readings(reading))
    return generate_latest(registry)
