"""An endpoint's reports on its transfers: plain records for polling and for metrics."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from sglang_ext.transfer.decide.protocol import SendRecord, TransferOutcome


class Stage(StrEnum):
    """Describes how far a transfer is. Bounded: these are metric labels."""

    HANDSHAKE = "handshake"  # sender: the receiver has not answered yet
    WAITING = "waiting"  # nothing has been granted yet
    TRANSFERRING = "transferring"
    COMPLETE = "complete"
    FAILED = "failed"


class TransferStatus(NamedTuple):
    """A transfer at this moment, on either side."""

    stage: Stage
    outcome: TransferOutcome | None  # once it is complete or has failed
    reason: str  # why it failed, for people
    is_released: bool  # whether its slots are neither read nor written any more, now or later


class SendResult(NamedTuple):
    """The record of a send that has ended, with what the machine cannot know."""

    record: SendRecord
    written_bytes: int


class EndpointTotals(NamedTuple):
    """Since the endpoint was made, and now."""

    written_bytes: int
    writes: int
    failed_writes: int
    dropped_messages: int
    malformed_messages: int
    sending: int  # requests, towards one receiver each
    receiving: int
    receiving_early: int  # shaken hands, no slots yet
    unsettled_permits: int
    free_backends: int
    silent_peers: int  # needed recently, and do not answer
