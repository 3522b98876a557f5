"""The handshake's protocol: messages between sender and receiver, actions of their state machines, records of the end.

Messages are whole states, never changes, so that loss and order do not matter: every number in a report only grows
during a request, so the newest report holds all that older ones held; a duplicate, a late or a lost message does no
harm. Actions are small frozen records, to be carried out in order by the machine's driver.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from sglang_ext.identifiers import TransferId
from sglang_ext.transfer.decide.shards import KVShard


class TransferOutcome(StrEnum):
    """Describes how a transfer ended. Bounded: these are metric labels."""

    COMPLETE = "complete"
    ABORTED = "aborted"  # this side gave it up on request
    REMOTE_ABORT = "remote_abort"  # the other side did
    PEER_LOST = "peer_lost"
    STALLED = "stalled"
    REFUSED = "refused"  # what was offered is not what was asked for
    WRITE_FAILED = "write_failed"
    RESTARTED = "restarted"  # this attempt: the request is sent again


class ReceiveRecord(NamedTuple):
    """The decode side of a request."""

    transfer_id: TransferId
    outcome: TransferOutcome
    reason: str
    senders: int
    chunks: int  # stored
    tokens: int  # of the request that had to come
    handshake_wait_s: float | None  # slots known → first handshake, None when there was none; 0 when it came first
    backend_wait_s: float  # summed over chunks: known and wanted → granted
    transfer_s: float | None  # first grant → end, None without a grant
    repeated_reports: int  # without anything new


class SendRecord(NamedTuple):
    """The prefill side of a request, towards one receiver."""

    transfer_id: TransferId
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


class ControlRecord(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A message between endpoints, which travels as an array of its class name and fields."""


class Grant(NamedTuple):
    """The right to write one chunk. Slots are 32-bit little-endian token slots, one per token of the shard in its
    order: spans as listed, positions ascending within each."""

    chunk: int  # index among this sender's chunks
    permit: int  # names the right; never used twice by this receiver
    backend: int | None  # which of the receiver's backends takes it, None where it needs none
    slots: bytes
    aux_slot: int | None  # where the metadata go, for the chunk that brings them
    state_slots: tuple[bytes, ...]  # per kind of extra state, for the chunks that bring some


class SenderReport(ControlRecord, frozen=True):
    """Sender to receiver. The first one is the handshake."""

    transfer_id: TransferId
    sender: str  # where its answers go
    sender_epoch: int  # another number after a restart
    sender_count: int | None  # how many senders the request has, where that is known
    first_chunk: int  # index of chunks[0]: what comes before has been accepted
    chunks: tuple[KVShard, ...]
    is_last: bool  # no chunk follows these
    grants_seen: int
    stored: int  # chunks of which every byte is in the receiver's memory
    written_parts: int  # progress within chunks
    sent_s: float  # by the sender's clock; echoed in the answer, means nothing to the receiver
    is_helper: bool = False  # not the request's own prefill instance: its loss ends the attempt, not the request

    @property
    def offered(self) -> int:
        return self.first_chunk + len(self.chunks)


class SenderStopped(ControlRecord, frozen=True):
    """Sender to receiver: no write of this request is under way, and none will be."""

    transfer_id: TransferId
    sender: str
    sender_epoch: int
    reason: str
    restarts: bool = False  # the request is to be sent again


class ReceiverReport(ControlRecord, frozen=True):
    """Receiver to sender: the answer to a report, and sent unasked when a chunk is granted."""

    transfer_id: TransferId
    receiver: str
    receiver_epoch: int
    sender_epoch: int
    accepted: int  # chunks known
    granted: int
    grant: Grant | None  # the latest one, until the sender has seen it
    stored: int  # chunks known to be stored
    is_last_known: bool
    is_complete: bool  # the whole request is: nothing more is wanted
    echoed_sent_s: float  # `sent_s` of the newest report received: how old the receiver's knowledge of the sender is


class ReceiverAbort(ControlRecord, frozen=True):
    """Receiver to sender: stop, and answer `SenderStopped` when no write is under way any more."""

    transfer_id: TransferId
    receiver: str
    receiver_epoch: int
    sender_epoch: int
    reason: str
    restarts: bool = False  # the request is to be sent again


class ReceiverClosed(ControlRecord, frozen=True):
    """Receiver to sender: `SenderStopped` has arrived."""

    transfer_id: TransferId
    receiver: str
    receiver_epoch: int
    sender_epoch: int
    is_complete: bool = False  # it came after the end: everything had been stored


class PeerProbe(ControlRecord, frozen=True):
    """Either way: are you there?"""

    sender: str  # where the answer goes


class PeerAlive(ControlRecord, frozen=True):
    """The answer, of any endpoint."""

    peer: str
    epoch: int  # another number after a restart


ToReceiver: TypeAlias = SenderReport | SenderStopped
ToSender: TypeAlias = ReceiverReport | ReceiverAbort | ReceiverClosed
Message: TypeAlias = ToReceiver | ToSender


class Send(NamedTuple):
    """Send a message; it may be lost."""

    to: str
    message: Message


class Allow(NamedTuple):
    """Let the sender write under this permit, to the slots that its grant names."""

    permit: int
    transfer_id: TransferId
    sender: str
    shard: KVShard
    grant: Grant


class Fence(NamedTuple):
    """Bar further writes under this permit, then call `on_fenced`; never call it where that cannot be done."""

    permit: int


class Retire(NamedTuple):
    """The permit is used up: every write under it has ended."""

    permit: int


class Ready(NamedTuple):
    """All KV of the request is in its slots."""

    transfer_id: TransferId


class Failing(NamedTuple):
    """The request has failed. Its slots must not be used for anything else before `Released`."""

    transfer_id: TransferId
    outcome: TransferOutcome
    reason: str


class Released(NamedTuple):
    """No write to the failed request's slots can happen any more."""

    transfer_id: TransferId


class Received(NamedTuple):
    """The record of a request that has ended on the decode side."""

    record: ReceiveRecord


class UseGrant(NamedTuple):
    """Remember where a chunk goes; `WritePart` follows for what is ready."""

    grant: Grant


class WritePart(NamedTuple):
    """Write a part under the permit of its chunk, then call `on_written` or `on_write_failed`."""

    chunk: int
    part: int
    permit: int


class SendEnded(NamedTuple):
    """No part is being read or will be: the source slots may be used for something else."""

    record: SendRecord


ReceiverAction: TypeAlias = Send | Allow | Fence | Retire | Ready | Failing | Released | Received
ReceiverActions: TypeAlias = tuple[ReceiverAction, ...]
SenderAction: TypeAlias = Send | UseGrant | WritePart | SendEnded
SenderActions: TypeAlias = tuple[SenderAction, ...]
