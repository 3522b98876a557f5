"""What a transfer took, for metrics: one record per request and side when it ends."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sglang_ext.policy.handshake.rooms import Room


class TransferOutcome(StrEnum):
    """How a transfer ended. Bounded: these are metric labels."""

    COMPLETE = "complete"
    ABORTED = "aborted"  # this side gave it up because it was told to
    REMOTE_ABORT = "remote_abort"  # the other side did
    PEER_LOST = "peer_lost"
    STALLED = "stalled"
    REFUSED = "refused"  # what was offered is not what was asked for
    WRITE_FAILED = "write_failed"
    RESTARTED = "restarted"  # this attempt: the request is sent anew


class ReceiveRecord(NamedTuple):
    """The decode side of a request."""

    room: Room
    outcome: TransferOutcome
    reason: str
    senders: int
    chunks: int  # stored
    tokens: int  # of the request that had to come
    handshake_wait_s: float | None  # slots known → first handshake, None when there was none; 0 when it came first
    backend_wait_s: float  # summed over chunks: known and wanted → granted
    transfer_s: float | None  # first grant → end, None without a grant
    repeated_reports: int  # that said nothing new


class SendRecord(NamedTuple):
    """The prefill side of a request, towards one receiver."""

    room: Room
    receiver: str
    outcome: TransferOutcome
    reason: str
    chunks: int  # stored
    parts: int  # written
    overlapped_parts: int  # written before all of their chunk had been computed
    handshake_wait_s: float | None  # first report → first answer
    grant_wait_s: float  # summed over chunks: offered → granted
    exposed_wait_s: float  # summed over chunks: first part ready → granted; what computing did not hide
    transfer_s: float | None  # first grant → end
    retransmissions: int
