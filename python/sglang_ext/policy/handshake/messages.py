"""What sender and receiver tell each other: whole states, never changes, so that loss and order do not matter.

Every number in a report only grows during a request, so the newest report holds all that older ones held; a
duplicate, a late or a lost message does no harm.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sglang_ext.policy.handshake.rooms import Room
from sglang_ext.policy.handshake.shards import KVShard


class Grant(NamedTuple):
    """The right to write one chunk. Slots are 32-bit little-endian token slots, one per token of the shard in its
    order: spans as listed, positions ascending within each."""

    chunk: int  # index among this sender's chunks
    permit: int  # names the right; never used twice by this receiver
    backend: int | None  # which of the receiver's backends takes it, None where it needs none
    slots: bytes
    aux_slot: int | None  # where the metadata go, for the chunk that brings them
    state_slots: tuple[bytes, ...]  # per kind of extra state, with the metadata


class SenderReport(NamedTuple):
    """Sender to receiver. The first one is the handshake."""

    room: Room
    sender: str  # where its answers go
    sender_epoch: int  # another number after a restart
    sender_count: int | None  # how many senders the request has, where that is known
    first_chunk: int  # index of chunks[0]: what comes before has been accepted
    chunks: tuple[KVShard, ...]
    is_last: bool  # no chunk follows these
    grants_seen: int
    stored: int  # chunks of which every byte is in the receiver's memory
    written_parts: int  # progress within chunks
    said_s: float  # by the sender's clock; comes back in the answer, means nothing to the receiver
    is_helper: bool = False  # not the request's own prefill instance: its loss ends the attempt, not the request

    @property
    def offered(self) -> int:
        return self.first_chunk + len(self.chunks)


class SenderStopped(NamedTuple):
    """Sender to receiver: no write of this request is under way, and none will be."""

    room: Room
    sender: str
    sender_epoch: int
    reason: str
    restarts: bool = False  # the request is to be sent anew


class ReceiverReport(NamedTuple):
    """Receiver to sender: the answer to a report, and sent unasked when a chunk is granted."""

    room: Room
    receiver: str
    receiver_epoch: int
    sender_epoch: int
    accepted: int  # chunks known
    granted: int
    grant: Grant | None  # the latest one, until the sender has seen it
    stored: int  # chunks known to be stored
    is_last_known: bool
    is_complete: bool  # the whole request is: nothing more is wanted
    heard_said_s: float  # `said_s` of the newest report heard: how old the receiver's knowledge of the sender is


class ReceiverAbort(NamedTuple):
    """Receiver to sender: stop, and say `SenderStopped` when no write is under way any more."""

    room: Room
    receiver: str
    receiver_epoch: int
    sender_epoch: int
    reason: str
    restarts: bool = False  # the request is to be sent anew


class ReceiverClosed(NamedTuple):
    """Receiver to sender: `SenderStopped` has arrived."""

    room: Room
    receiver: str
    receiver_epoch: int
    sender_epoch: int
    is_complete: bool = False  # it came after the end: everything had been stored


ToReceiver: TypeAlias = SenderReport | SenderStopped
ToSender: TypeAlias = ReceiverReport | ReceiverAbort | ReceiverClosed
Message: TypeAlias = ToReceiver | ToSender
