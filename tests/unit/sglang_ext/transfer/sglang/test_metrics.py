"""What Prometheus hears of transfers: each once, and gauges as they are."""

from __future__ import annotations

from sglang_ext.transfer.decide.protocol import ReceiveRecord, SendRecord, TransferOutcome
from sglang_ext.transfer.endpoint.transfer_status import EndpointTotals, SendResult
from sglang_ext.transfer.sglang.metrics import TransferMetrics

TOTALS = EndpointTotals(1000, 5, 1, 2, 3, 4, 5, 6, 7, 8, 9)
SENT = SendResult(SendRecord(1, "d", TransferOutcome.COMPLETE, "", 1, 2, 1, 0.5, 2.0, 1.0, 3.0, 0), 1000)
RECEIVED = ReceiveRecord(2, TransferOutcome.PEER_LOST, "gone", 1, 0, 8, None, 0.25, None, 0)


def value(name: str, **labels: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value(f"sglang_ext:transfer_{name}", labels) or 0.0


def test_totals_and_records() -> None:
    metrics = TransferMetrics(receive_backends=2)
    metrics.publish([SENT, RECEIVED], TOTALS)
    metrics.publish([], TOTALS._replace(written_bytes=1500, receiving=0))
    assert value("written_bytes_total") == 1500
    assert value("failed_writes_total") == 1
    assert (value("sending"), value("receiving"), value("free_backends"), value("silent_peers")) == (4, 0, 8, 9)
    assert value("requests_total", side="send", outcome="complete") == 1
    assert value("requests_total", side="receive", outcome="peer_lost") == 1
    assert value("handshake_wait_seconds_sum", side="send") == 0.5
    assert value("handshake_wait_seconds_count", side="receive") == 0
    assert value("grant_wait_seconds_sum", side="receive") == 0.25
    assert value("exposed_wait_seconds_sum", side="send") == 1.0
    assert value("seconds_sum", side="send") == 3.0
    assert value("seconds_count", side="receive") == 0
