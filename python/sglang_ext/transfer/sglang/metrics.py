"""Metrics of a rank's endpoint for Prometheus, in addition to SGLang's own. Labels are bounded: sides and outcomes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from sglang_ext.transfer.decide.protocol import ReceiveRecord
from sglang_ext.transfer.endpoint.handshake_endpoint import HandshakeEndpoint
from sglang_ext.transfer.endpoint.transfer_status import EndpointTotals, SendResult

_INTERVAL_S = 1.0
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_SEND, _RECEIVE = "send", "receive"
_COUNTERS = {
    "written_bytes": "Bytes of KV and metadata written to decode instances",
    "writes": "Writes to decode instances",
    "failed_writes": "Writes that failed; their requests failed with them",
    "dropped_messages": "Control messages that could not be queued for their peer",
    "malformed_messages": "Control messages that made no sense",
}
_GAUGES = {
    "sending": "Requests being sent, towards one decode rank each",
    "receiving": "Requests with slots that wait for KV or get it",
    "receiving_early": "Requests that have shaken hands before they have slots",
    "unsettled_permits": "Grants under which a prefill rank may be writing",
    "silent_peers": "Ranks of other instances, needed in the last minutes, that do not answer",
}


class TransferMetrics:
    """Registered once per process; gauges are summed over the ranks of an instance."""

    def __init__(self, receive_backends: int | None) -> None:
        # SGLang sets PROMETHEUS_MULTIPROC_DIR before it starts its schedulers; the client reads it on import.
        from prometheus_client import Counter, Gauge, Histogram

        def histogram(name: str, help_text: str) -> Histogram:
            return Histogram(f"sglang_ext:transfer_{name}", help_text, ["side"], buckets=_SECONDS)

        self._requests = Counter("sglang_ext:transfer_requests", "Transfers that have ended", ["side", "outcome"])
        self._handshake_wait = histogram("handshake_wait_seconds", "Time that the other side let this one wait")
        self._grant_wait = histogram("grant_wait_seconds", "Time that chunks of a request waited for a backend")
        self._exposed_wait = histogram("exposed_wait_seconds", "The part of it that computing did not hide")
        self._transfer = histogram("seconds", "Time from the first grant to the end")
        self._overlapped = Counter(
            "sglang_ext:transfer_overlapped_parts", "Parts that had been written before all of their chunk was computed"
        )
        self._counters = {name: Counter(f"sglang_ext:transfer_{name}", text) for name, text in _COUNTERS.items()}
        gauges = dict(_GAUGES)
        if receive_backends is not None:
            gauges["free_backends"] = "Receive backends that no request holds"
        self._gauges = {
            name: Gauge(f"sglang_ext:transfer_{name}", text, multiprocess_mode="livesum")
            for name, text in gauges.items()
        }
        self._seen = dict.fromkeys(_COUNTERS, 0)

    def publish(self, records: Iterable[ReceiveRecord | SendResult], totals: EndpointTotals) -> None:
        """Take note of transfers that have ended since the last call, and of the totals now."""
        for record in records:
            if isinstance(record, SendResult):
                sent = record.record
                self._note(_SEND, sent.outcome, sent.handshake_wait_s, sent.grant_wait_s, sent.transfer_s)
                self._exposed_wait.labels(_SEND).observe(sent.exposed_wait_s)
                self._overlapped.inc(sent.overlapped_parts)
            else:
                waited_s = record.handshake_wait_s
                self._note(_RECEIVE, record.outcome, waited_s, record.backend_wait_s, record.transfer_s)
        values = totals._asdict()
        for name, counter in self._counters.items():
            counter.inc(values[name] - self._seen[name])
            self._seen[name] = values[name]
        for name, gauge in self._gauges.items():
            gauge.set(values[name])

    def _note(
        self, side: str, outcome: str, handshake_wait_s: float | None, grant_wait_s: float, transfer_s: float | None
    ) -> None:
        self._requests.labels(side, outcome).inc()
        self._grant_wait.labels(side).observe(grant_wait_s)
        if handshake_wait_s is not None:
            self._handshake_wait.labels(side).observe(handshake_wait_s)
        if transfer_s is not None:
            self._transfer.labels(side).observe(transfer_s)


def start_publishing(endpoint: HandshakeEndpoint, receive_backends: int | None) -> None:
    """Publish once a second from a thread that ends with the process."""
    metrics = TransferMetrics(receive_backends)

    def run() -> None:
        while True:
            time.sleep(_INTERVAL_S)
            metrics.publish(endpoint.drain_records(), endpoint.totals())

    threading.Thread(target=run, name="kv-transfer-metrics", daemon=True).start()
