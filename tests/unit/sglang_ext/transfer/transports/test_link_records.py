"""Records on a transport's connection: what is accepted, and that nothing else is."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.pool_layout import RowSet
from sglang_ext.transfer.transports.link_records import (
    BATCH_DECODER,
    COPY_DECODER,
    LENGTH,
    Batch,
    BlockBatch,
    CopyRequest,
    Limits,
    LinkRecord,
    RecordError,
    RowBatch,
    TransportGreeting,
    check_limits,
    pack,
    receive,
    receive_greeting,
    slot_bytes,
)

LIMITS = Limits()
numbers = st.integers(0, 2**64 - 1)
permits = numbers
slots = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40).map(lambda some: slot_bytes(np.array(some, "u4")))
targets = st.lists(st.builds(RowSet, numbers, numbers, st.integers(1, 2**12)), min_size=1, max_size=20)
tables = st.lists(st.tuples(numbers, numbers), max_size=40).map(
    lambda blocks: np.array(blocks, "<u8").reshape(-1, 2).tobytes()
)
batches: st.SearchStrategy[Batch] = st.builds(BlockBatch, permits, tables) | st.builds(
    RowBatch, permits, targets, slots
)


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(5)
        yield left, right


def test_a_greeting_arrives(link: tuple[socket.socket, socket.socket]) -> None:
    greeting = TransportGreeting("mooncake", 1 << 28, 2**63)
    link[0].sendall(pack(greeting))
    assert receive_greeting(link[1], "mooncake") == greeting


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak"),
        (pack(TransportGreeting("tcp")).replace(b"\x04", b"\x09"), "version 9"),
        (pack(TransportGreeting("tcp")).replace(b"KV", b"VK"), "does not speak"),
        (pack(TransportGreeting("shared_memory")), "sends over shared_memory"),
        (pack(BlockBatch(0, b"")), "malformed"),
    ],
)
def test_a_foreign_greeting_is_refused(link: tuple[socket.socket, socket.socket], sent: bytes, reason: str) -> None:
    link[0].sendall(sent)
    with pytest.raises(RecordError, match=reason):
        receive_greeting(link[1], "tcp")


def test_a_record_above_the_limit_is_refused_by_its_length(link: tuple[socket.socket, socket.socket]) -> None:
    link[0].sendall(LENGTH.pack(LIMITS.max_record_bytes + 1))
    with pytest.raises(RecordError, match="exceeds the limit"):
        receive(link[1], BATCH_DECODER, LIMITS.max_record_bytes)


@pytest.mark.slow
@given(batches)
def test_batches_arrive_as_they_were_sent(batch: Batch) -> None:
    assert BATCH_DECODER.decode(pack(batch)[LENGTH.size :]) == batch


@pytest.mark.slow
@given(batches, st.data())
def test_a_damaged_batch_is_refused_or_within_limits(batch: Batch, data: st.DataObject) -> None:
    record = bytearray(pack(batch)[LENGTH.size :])
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        received = BATCH_DECODER.decode(record)
        check_limits(received, LIMITS)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecordError):
        return
    if isinstance(received, RowBatch):
        assert len(received.row_slots) <= LIMITS.max_payload_bytes
        assert all(target.length_bytes > 0 for target in received.targets)
    else:
        assert sum(received.blocks[:, 1].tolist()) <= LIMITS.max_payload_bytes


def blocks(*some: tuple[int, int]) -> BlockBatch:
    return BlockBatch(0, np.array(some, "<u8").tobytes())


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (blocks((4096, 8), (0, 0)), "a block is empty"),
        (blocks((4096, 2**64 - 8), (0, 16)), "exceeds"),
        (blocks((4096, LIMITS.max_payload_bytes), (0, 1)), "exceeds"),
        (BlockBatch(0, np.ones((LIMITS.max_blocks + 1, 2), "<u8").tobytes()), "blocks exceeds"),
        (RowBatch(0, [RowSet(4096, 8, LIMITS.max_payload_bytes)] * 2, bytes(4)), "exceeds"),
        (RowBatch(0, [RowSet(4096, 8, 1)] * (LIMITS.max_blocks + 1), bytes(4)), "blocks exceeds"),
    ],
    ids=["empty block", "a sum that overflows", "payload", "blocks", "rows", "targets"],
)
def test_a_batch_beyond_the_limits_is_refused(batch: Batch, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        check_limits(batch, LIMITS)


def test_the_largest_batches_fit_into_a_record() -> None:
    far = 2**64 - 1
    rows = RowBatch(far, [RowSet(far, far, 2**32)] * LIMITS.max_blocks, bytes(4))
    assert len(pack(rows)) <= LIMITS.max_record_bytes
    assert (
        len(pack(RowBatch(far, [RowSet(far, far, 1)], bytes(4 * LIMITS.max_payload_bytes)))) <= LIMITS.max_record_bytes
    )


@pytest.mark.parametrize(
    ("decoder", "fields"),
    [
        (BATCH_DECODER, ["blocks", 0, bytes(15)]),
        (BATCH_DECODER, ["rows", 0, [], bytes(4)]),
        (BATCH_DECODER, ["rows", 0, [[0, 8, 8]], b""]),
        (BATCH_DECODER, ["rows", 0, [[0, 8, 8]], bytes(3)]),
        (BATCH_DECODER, ["rows", 0, [[0, 8, 0]], bytes(4)]),
        (BATCH_DECODER, ["rows", 0, [[0, 8, -8]], bytes(4)]),
        (BATCH_DECODER, ["rows", 0, [[0, 8]], bytes(4)]),
        (BATCH_DECODER, ["blocks", 0, b"", 1]),
        (COPY_DECODER, [0, -1, [[0, 8, 8]], bytes(4)]),
        (COPY_DECODER, [0, 0, [[0, 8, 8]], bytes(3)]),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(
    decoder: msgspec.msgpack.Decoder[LinkRecord], fields: list[object]
) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decoder.decode(msgspec.msgpack.encode(fields))


def test_a_request_holds_its_slots() -> None:
    request = CopyRequest(3, 0, [RowSet(0, 8, 8)], slot_bytes(np.array([7, 1 << 31], np.uint32)))
    assert COPY_DECODER.decode(pack(request)[LENGTH.size :]).row_slots.tolist() == [7, 1 << 31]
