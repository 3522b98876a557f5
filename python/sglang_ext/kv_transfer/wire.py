"""Frames of the TCP transport: a greeting, then batches of blocks, each answered by one status byte.

    greeting   magic (8 bytes), version (u16), reserved (6 bytes)          both directions, once
    batch      block count (u32), reserved (u32), payload length (u64),    writer to owner
               permit (u64; 0 for none)
               block count × (address u64, length u64)
               payload: the blocks' bytes, in the order of the table
    status     one byte                                                    owner to writer

Integers are little-endian. A batch without blocks is a probe. Sockets block; buffers, scattered or not, are moved whole
and without copying them.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from sglang_ext.kv_transfer.memory_regions import Span

MAGIC = b"SGLXKV\r\n"
VERSION = 2
GREETING = struct.Struct("<8sH6x")
BATCH_HEADER = struct.Struct("<IIQQ")
BLOCK = struct.Struct("<QQ")

# Linux accepts 1024 buffers per call (UIO_MAXIOV).
MAX_BUFFERS_PER_CALL = 1024


class WireError(Exception):
    """The peer sent something that this protocol does not allow."""


class Status(IntEnum):
    """What the owner of the memory answers to a batch."""

    DONE = 0x5A
    OUT_OF_BOUNDS = 0x01
    NOT_PERMITTED = 0x02


@dataclass(frozen=True)
class Limits:
    """What one batch may hold; both ends enforce it, so that a peer cannot exhaust memory."""

    max_blocks: int = 1 << 20
    max_payload_bytes: int = 1 << 36


@dataclass(frozen=True)
class BatchHeader:
    block_count: int
    payload_bytes: int
    permit: int

    @property
    def table_bytes(self) -> int:
        return self.block_count * BLOCK.size


def encode_greeting() -> bytes:
    return GREETING.pack(MAGIC, VERSION)


def check_greeting(data: bytes) -> None:
    """Raise WireError unless `data` is the greeting of this protocol version."""
    magic, version = GREETING.unpack(data)
    if magic != MAGIC:
        raise WireError("the peer does not speak the KV transfer protocol of sglang-ext")
    if version != VERSION:
        raise WireError(f"the peer speaks KV transfer version {version}, this process version {VERSION}")


def encode_batch(spans: Sequence[Span], limits: Limits, permit: int = 0) -> bytes:
    """Header and table of a batch that writes to `spans` of the peer's memory, under a permit where it asks for one.

    Raises WireError when the batch exceeds `limits`.
    """
    payload_bytes = sum(span.length_bytes for span in spans)
    _check_limits(len(spans), payload_bytes, limits)
    flat = [number for span in spans for number in span]
    return BATCH_HEADER.pack(len(spans), 0, payload_bytes, permit) + struct.pack(f"<{len(flat)}Q", *flat)


def decode_header(data: bytes, limits: Limits) -> BatchHeader:
    """Parse a batch header. Raises WireError when it is malformed or exceeds `limits`."""
    block_count, reserved, payload_bytes, permit = BATCH_HEADER.unpack(data)
    if reserved:
        raise WireError("a reserved field of the batch header is set")
    _check_limits(block_count, payload_bytes, limits)
    return BatchHeader(block_count, payload_bytes, permit)


def decode_table(data: bytes | bytearray, header: BatchHeader) -> list[Span]:
    """Parse the block table. Raises WireError when it contradicts the header."""
    if len(data) != header.table_bytes:
        raise WireError(f"block table of {len(data)} bytes, expected {header.table_bytes}")
    spans = [Span(address, length) for address, length in BLOCK.iter_unpack(data)]
    if any(span.length_bytes == 0 for span in spans):
        raise WireError("a block is empty")
    if sum(span.length_bytes for span in spans) != header.payload_bytes:
        raise WireError("the blocks do not add up to the payload")
    return spans


def _check_limits(block_count: int, payload_bytes: int, limits: Limits) -> None:
    if block_count > limits.max_blocks:
        raise WireError(f"a batch of {block_count} blocks exceeds the limit of {limits.max_blocks}")
    if payload_bytes > limits.max_payload_bytes:
        raise WireError(f"a batch of {payload_bytes} bytes exceeds the limit of {limits.max_payload_bytes}")
    if bool(block_count) != bool(payload_bytes):
        raise WireError("a batch has blocks without payload or payload without blocks")


def receive_exactly(connection: socket.socket, size_bytes: int) -> bytearray:
    """Read `size_bytes` bytes. Raises ConnectionError when the peer closes before that."""
    data = bytearray(size_bytes)
    receive_into(connection, [memoryview(data)])
    return data


def receive_into(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill `views` in order. Raises ConnectionError when the peer closes before they are full."""
    position, offset = 0, 0
    while position < len(views):
        window = list(views[position : position + MAX_BUFFERS_PER_CALL])
        window[0] = window[0][offset:]
        if not window[0]:
            position, offset = position + 1, 0
            continue
        received = connection.recvmsg_into(window)[0]
        if not received:
            raise ConnectionError("the peer closed the connection")
        position, offset = _advance(views, position, offset, received)


def send_all(connection: socket.socket, views: Sequence[memoryview]) -> None:
    """Send `views` in order."""
    position, offset = 0, 0
    while position < len(views):
        window = list(views[position : position + MAX_BUFFERS_PER_CALL])
        window[0] = window[0][offset:]
        sent = connection.sendmsg(window)
        position, offset = _advance(views, position, offset, sent)


def _advance(views: Sequence[memoryview], position: int, offset: int, moved_bytes: int) -> tuple[int, int]:
    """Where the next byte lies after `moved_bytes` bytes from `offset` in `views[position]`."""
    offset += moved_bytes
    while position < len(views) and offset >= len(views[position]):
        offset -= len(views[position])
        position += 1
    return position, offset
