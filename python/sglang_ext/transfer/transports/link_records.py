"""Records on the connections of all transports: a length (u32, little-endian), then msgpack of the record.

Both ends send a `TransportGreeting` first. TCP sends batches, each followed by its payload: the bytes of a `BlockBatch`
in the order of its table, or of a `RowBatch` target by target. Transports that stage rows in memory send a
`CopyRequest`. The receiver answers each of them with one byte, a `LinkStatus`.

Records check themselves when they are made and when they arrive; what they refuse never reaches memory.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np

from sglang_ext.transfer.pool_layout import RowSet, Slots
from sglang_ext.transfer.transports.memory_regions import Vectors
from sglang_ext.transfer.transports.socket_io import receive_exactly

PROTOCOL = "sglang-ext KV"
VERSION = 4
LENGTH = struct.Struct("<I")
MAX_GREETING_BYTES = 256
_BLOCK_BYTES, _MAX_ROW_SET_BYTES, _SLOT_BYTES = 16, 28, 4
_MAX_FIELD_BYTES = 64  # of a batch without its table and slots

_Record = TypeVar("_Record")


class RecordError(Exception):
    """The peer sent something that this protocol does not allow."""


class LinkStatus(IntEnum):
    """The answer of the memory's owner to a batch or a request."""

    DONE = 0x5A
    OUT_OF_BOUNDS = 0x01
    NOT_PERMITTED = 0x02


REFUSALS: dict[int, str] = {
    LinkStatus.OUT_OF_BOUNDS: "the peer refused an address outside its registered memory",
    LinkStatus.NOT_PERMITTED: "the peer does not allow this write any more",
}


@dataclass(frozen=True)
class Limits:
    """The largest batch. Both ends enforce it, so that no writer exhausts memory or holds a permit for long."""

    max_blocks: int = 1 << 16
    max_payload_bytes: int = 16 << 20

    @property
    def max_record_bytes(self) -> int:
        """An upper bound on the encoded record of a batch within the limits: no row is shorter than a byte."""
        return _MAX_FIELD_BYTES + self.max_blocks * _MAX_ROW_SET_BYTES + self.max_payload_bytes * _SLOT_BYTES


class LinkRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A record that travels as an array of its fields."""


class TransportGreeting(LinkRecord, frozen=True):
    """The first record in either direction. Peers of another protocol or version are refused."""

    transport: str
    staging_bytes: int = 0  # from a sender: the size of its staging memory, where the transport stages rows
    staging_address: int = 0  # from a receiver over Mooncake: where its staging memory lies
    protocol: str = PROTOCOL
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.protocol != PROTOCOL:
            raise ValueError("the peer does not speak the KV transfer protocol of sglang-ext")
        if self.version != VERSION:
            raise ValueError(f"the peer speaks KV transfer version {self.version}, this process version {VERSION}")


class BlockBatch(LinkRecord, frozen=True, tag="blocks"):
    """Blocks of the peer's memory, written under a permit where the peer asks for one (0: none).

    `table` holds an address and a length (u64 each) per block. A batch without blocks is a probe.
    """

    permit: int
    table: bytes

    def __post_init__(self) -> None:
        if len(self.table) % _BLOCK_BYTES:
            raise ValueError(f"a table of {len(self.table)} bytes does not hold whole blocks")

    @property
    def blocks(self) -> Vectors:
        return np.frombuffer(self.table, "<u8").reshape(-1, 2).astype(np.uint64)


class RowBatch(LinkRecord, frozen=True, tag="rows"):
    """The same rows of several buffers of the peer; `slots` are u32, at least one."""

    permit: int
    targets: list[RowSet]
    slots: bytes

    def __post_init__(self) -> None:
        if not self.targets or not self.slots or len(self.slots) % _SLOT_BYTES:
            raise ValueError("a batch of rows needs targets and whole slots")
        if any(target.length_bytes < 1 for target in self.targets):
            raise ValueError("a row is empty")

    @property
    def row_slots(self) -> Slots:
        return np.frombuffer(self.slots, "<u4")


class CopyRequest(LinkRecord, frozen=True):
    """Copy rows out of staging memory, from `staging_offset` on, row by row and target by target."""

    permit: int
    staging_offset: int
    targets: list[RowSet]
    slots: bytes  # u32, the same for all targets

    def __post_init__(self) -> None:
        if self.staging_offset < 0 or len(self.slots) % _SLOT_BYTES:
            raise ValueError("a request needs whole slots and an offset in the staging memory")

    @property
    def row_slots(self) -> Slots:
        return np.frombuffer(self.slots, "<u4")


Batch: TypeAlias = BlockBatch | RowBatch
BATCH_DECODER: msgspec.msgpack.Decoder[Batch] = msgspec.msgpack.Decoder(BlockBatch | RowBatch)
COPY_DECODER = msgspec.msgpack.Decoder(CopyRequest)
GREETING_DECODER = msgspec.msgpack.Decoder(TransportGreeting)
_ENCODER = msgspec.msgpack.Encoder()


def pack(record: LinkRecord) -> bytes:
    """Return a record as it travels."""
    body = _ENCODER.encode(record)
    return LENGTH.pack(len(body)) + body


def slot_bytes(slots: Slots) -> bytes:
    """Return slots as a record holds them."""
    return slots.astype("<u4").tobytes()


def receive(
    connection: socket.socket,
    decoder: msgspec.msgpack.Decoder[_Record],
    max_bytes: int,
    length: bytes | bytearray | None = None,
) -> _Record:
    """Receive one record; `length` where its first four bytes have been read already.

    Raises RecordError for a record that is malformed or longer than `max_bytes`, and OSError when the peer has gone.
    """
    size_bytes: int = LENGTH.unpack(length or receive_exactly(connection, LENGTH.size))[0]
    if size_bytes > max_bytes:
        raise RecordError(f"a record of {size_bytes} bytes exceeds the limit of {max_bytes}")
    try:
        return decoder.decode(receive_exactly(connection, size_bytes))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordError(f"a malformed record: {error}") from error


def receive_greeting(connection: socket.socket, transport: str, length: bytes | None = None) -> TransportGreeting:
    """Receive the peer's greeting. Raises RecordError unless it is one of this transport and version."""
    try:
        greeting = receive(connection, GREETING_DECODER, MAX_GREETING_BYTES, length)
    except RecordError as error:
        raise RecordError(f"the peer does not speak KV transfer version {VERSION} of sglang-ext: {error}") from error
    if greeting.transport != transport:
        raise RecordError(f"the peer sends over {greeting.transport}, this process receives over {transport}")
    return greeting


def check_limits(batch: Batch, limits: Limits) -> None:
    """Raise RecordError when a batch exceeds `limits`, or holds an empty block."""
    if isinstance(batch, RowBatch):
        count = len(batch.targets)
        payload_bytes = sum(target.length_bytes for target in batch.targets) * (len(batch.slots) // _SLOT_BYTES)
    else:
        lengths = batch.blocks[:, 1]
        if not lengths.all():
            raise RecordError("a block is empty")
        count = len(lengths)
        # A single block that is too long could make the sum overflow.
        longest_bytes = int(lengths.max(initial=0))
        payload_bytes = int(lengths.sum()) if longest_bytes <= limits.max_payload_bytes else longest_bytes
    if count > limits.max_blocks:
        raise RecordError(f"a batch of {count} blocks exceeds the limit of {limits.max_blocks}")
    if payload_bytes > limits.max_payload_bytes:
        raise RecordError(f"a batch of {payload_bytes} bytes exceeds the limit of {limits.max_payload_bytes}")
