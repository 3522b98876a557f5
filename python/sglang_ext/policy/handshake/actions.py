"""What the two state machines tell their driver to do: small frozen records, to be carried out in order."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sglang_ext.policy.handshake.messages import Grant, Message
from sglang_ext.policy.handshake.records import ReceiveRecord, SendRecord, TransferOutcome
from sglang_ext.policy.handshake.rooms import Room
from sglang_ext.policy.handshake.shards import KVShard


class Send(NamedTuple):
    """Send a message; it may be lost."""

    to: str
    message: Message


class Allow(NamedTuple):
    """From now on the sender may write under this permit, to the slots that its grant names."""

    permit: int
    room: Room
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

    room: Room


class Failing(NamedTuple):
    """The request has failed. Its slots must not be used for anything else before `Released`."""

    room: Room
    outcome: TransferOutcome
    reason: str


class Released(NamedTuple):
    """No write to the failed request's slots can happen any more."""

    room: Room


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


class ChunkStored(NamedTuple):
    """The receiver has every byte of this chunk."""

    chunk: int


class SendEnded(NamedTuple):
    """No part is being read or will be: the source slots may be used for something else."""

    record: SendRecord


ReceiverAction: TypeAlias = Send | Allow | Fence | Retire | Ready | Failing | Released | Received
ReceiverActions: TypeAlias = tuple[ReceiverAction, ...]
SenderAction: TypeAlias = Send | UseGrant | WritePart | ChunkStored | SendEnded
SenderActions: TypeAlias = tuple[SenderAction, ...]
