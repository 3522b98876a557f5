"""Frames of the TCP transport: a greeting, then batches of blocks or of rows, each answered by one status byte.

    greeting   magic (8 bytes), version (u16), reserved (6 bytes)          both directions, once
    batch      entries of the table (u32), rows (u32), payload length      writer to owner
               (u64), permit (u64; 0 for none)
               table of blocks, where `rows` is 0: entries × (address u64, length u64), or
               table of rows: entries × (address u64, stride u64, length u64), then rows × slot u32
               payload: the blocks' bytes in the order of the table, or for each entry `length` bytes of each row,
               which go to address + slot × stride
    status     one byte                                                    owner to writer

Integers are little-endian. A batch without entries is a probe.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from sglang_ext.transfer.pool_layout import RowSet, Slots
from sglang_ext.transfer.transports.memory_regions import Vectors

MAGIC = b"SGLXKV\r\n"
VERSION = 3
GREETING = struct.Struct("<8sH6x")
BATCH_HEADER = struct.Struct("<IIQQ")
BLOCK = struct.Struct("<QQ")
ROW_SET = struct.Struct("<QQQ")
SLOT_BYTES = 4


class WireError(Exception):
    """The peer sent something that this protocol does not allow."""


class Status(IntEnum):
    """What the owner of the memory answers to a batch."""

    DONE = 0x5A
    OUT_OF_BOUNDS = 0x01
    NOT_PERMITTED = 0x02


@dataclass(frozen=True)
class Limits:
    """What one batch may hold; both ends enforce it, so that no writer exhausts memory or holds a permit for long."""

    max_blocks: int = 1 << 16
    max_payload_bytes: int = 16 << 20


@dataclass(frozen=True)
class BatchHeader:
    """`entries` of a table of blocks, or of rows, where `row_count` is not 0."""

    entries: int
    row_count: int
    payload_bytes: int
    permit: int

    @property
    def table_bytes(self) -> int:
        if self.row_count:
            return self.entries * ROW_SET.size + self.row_count * SLOT_BYTES
        return self.entries * BLOCK.size


class RowBatch(NamedTuple):
    """The same rows of several buffers."""

    targets: tuple[RowSet, ...]
    slots: Slots


def encode_greeting() -> bytes:
    return GREETING.pack(MAGIC, VERSION)


def check_greeting(data: bytes) -> None:
    """Raise WireError unless `data` is the greeting of this protocol version."""
    magic, version = GREETING.unpack(data)
    if magic != MAGIC:
        raise WireError("the peer does not speak the KV transfer protocol of sglang-ext")
    if version != VERSION:
        raise WireError(f"the peer speaks KV transfer version {version}, this process version {VERSION}")


def encode_batch(targets: Vectors, limits: Limits, permit: int = 0) -> bytes:
    """Header and table of a batch that writes to `targets` in the peer's memory, under a permit where it asks for one.

    Raises WireError when the batch exceeds `limits`.
    """
    header = BatchHeader(len(targets), 0, int(targets[:, 1].sum()), permit)
    return _encode_header(header, limits) + targets.astype("<u8").tobytes()


def encode_rows(batch: RowBatch, limits: Limits, permit: int = 0) -> bytes:
    """The same for rows; at least one of them.

    Raises WireError when the batch exceeds `limits`.
    """
    payload_bytes = sum(target.length_bytes for target in batch.targets) * len(batch.slots)
    header = BatchHeader(len(batch.targets), len(batch.slots), payload_bytes, permit)
    flat = [number for target in batch.targets for number in target]
    return _encode_header(header, limits) + struct.pack(f"<{len(flat)}Q", *flat) + batch.slots.astype("<u4").tobytes()


def decode_header(data: bytes, limits: Limits) -> BatchHeader:
    """Parse a batch header. Raises WireError when it is malformed or exceeds `limits`."""
    header = BatchHeader(*BATCH_HEADER.unpack(data))
    _check_limits(header, limits)
    return header


def decode_table(data: bytes | bytearray, header: BatchHeader) -> Vectors:
    """Parse the table of a batch of blocks. Raises WireError when it contradicts the header."""
    _check_table(data, header)
    blocks = np.frombuffer(data, "<u8").reshape(-1, 2).astype(np.uint64)
    lengths = blocks[:, 1]
    if not lengths.all():
        raise WireError("a block is empty")
    # One alone that is too long could make the sum overflow.
    if lengths.max(initial=0) > header.payload_bytes or int(lengths.sum()) != header.payload_bytes:
        raise WireError("the blocks do not add up to the payload")
    return blocks


def decode_rows(data: bytes | bytearray, header: BatchHeader) -> RowBatch:
    """Parse the table of a batch of rows. Raises WireError when it contradicts the header."""
    _check_table(data, header)
    sets_bytes = header.entries * ROW_SET.size
    targets = tuple(RowSet(*numbers) for numbers in ROW_SET.iter_unpack(memoryview(data)[:sets_bytes]))
    if any(target.length_bytes == 0 for target in targets):
        raise WireError("a row is empty")
    if sum(target.length_bytes for target in targets) * header.row_count != header.payload_bytes:
        raise WireError("the rows do not add up to the payload")
    return RowBatch(targets, np.frombuffer(data, "<u4", header.row_count, sets_bytes))


def _encode_header(header: BatchHeader, limits: Limits) -> bytes:
    _check_limits(header, limits)
    return BATCH_HEADER.pack(header.entries, header.row_count, header.payload_bytes, header.permit)


def _check_table(data: bytes | bytearray, header: BatchHeader) -> None:
    if len(data) != header.table_bytes:
        raise WireError(f"a table of {len(data)} bytes, expected {header.table_bytes}")


def _check_limits(header: BatchHeader, limits: Limits) -> None:
    if header.entries > limits.max_blocks:
        raise WireError(f"a batch of {header.entries} blocks exceeds the limit of {limits.max_blocks}")
    if header.payload_bytes > limits.max_payload_bytes:
        raise WireError(f"a batch of {header.payload_bytes} bytes exceeds the limit of {limits.max_payload_bytes}")
    if bool(header.entries) != bool(header.payload_bytes) or header.row_count > header.payload_bytes:
        raise WireError("a batch has entries without payload or payload without entries")
