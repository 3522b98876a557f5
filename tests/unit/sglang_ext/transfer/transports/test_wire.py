"""Frames of the TCP transport: what is accepted, and that nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.pool_layout import RowSet
from sglang_ext.transfer.transports import wire
from sglang_ext.transfer.transports.memory_regions import Span

LIMITS = wire.Limits()
spans = st.lists(st.builds(Span, st.integers(0, 2**64 - 1), st.integers(1, 2**18)), max_size=40)


def test_greeting_round_trip() -> None:
    wire.check_greeting(wire.encode_greeting())


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak"),
        (wire.GREETING.pack(wire.MAGIC, wire.VERSION + 1), f"version {wire.VERSION + 1}"),
    ],
)
def test_foreign_greeting_is_refused(greeting: bytes, reason: str) -> None:
    with pytest.raises(wire.WireError, match=reason):
        wire.check_greeting(greeting)


@given(spans, st.integers(0, (1 << 64) - 1))
def test_batch_round_trip(targets: list[Span], permit: int) -> None:
    table = np.array(targets, np.uint64).reshape(-1, 2)
    frame = wire.encode_batch(table, LIMITS, permit)
    header = wire.decode_header(frame[: wire.BATCH_HEADER.size], LIMITS)
    assert header.payload_bytes == sum(span.length_bytes for span in targets)
    assert header.permit == permit
    np.testing.assert_array_equal(wire.decode_table(frame[wire.BATCH_HEADER.size :], header), table)


row_sets = st.builds(RowSet, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 2**12))


@pytest.mark.slow
@given(
    st.lists(row_sets, min_size=1, max_size=20),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40),
    st.integers(0, (1 << 64) - 1),
)
def test_rows_round_trip(targets: list[RowSet], slots: list[int], permit: int) -> None:
    frame = wire.encode_rows(wire.RowBatch(tuple(targets), np.array(slots, np.uint32)), LIMITS, permit)
    header = wire.decode_header(frame[: wire.BATCH_HEADER.size], LIMITS)
    assert header.payload_bytes == sum(target.length_bytes for target in targets) * len(slots)
    assert (header.permit, header.table_bytes) == (permit, len(frame) - wire.BATCH_HEADER.size)
    batch = wire.decode_rows(frame[wire.BATCH_HEADER.size :], header)
    assert (batch.targets, batch.slots.tolist()) == (tuple(targets), slots)


@pytest.mark.parametrize(
    ("table", "header"),
    [
        (wire.ROW_SET.pack(4096, 8, 8) + bytes(4), wire.BatchHeader(1, 1, 9, 0)),
        (wire.ROW_SET.pack(4096, 8, 0) + bytes(4), wire.BatchHeader(1, 1, 8, 0)),
        (wire.ROW_SET.pack(4096, 8, 8) + bytes(3), wire.BatchHeader(1, 1, 8, 0)),
    ],
    ids=["sum", "empty row", "length"],
)
def test_rows_that_contradict_their_header_are_refused(table: bytes, header: wire.BatchHeader) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_rows(table, header)


@pytest.mark.parametrize(
    "header",
    [
        wire.BATCH_HEADER.pack(LIMITS.max_blocks + 1, 0, 1, 0),
        wire.BATCH_HEADER.pack(1, 0, LIMITS.max_payload_bytes + 1, 0),
        wire.BATCH_HEADER.pack(0, 0, 1, 0),
        wire.BATCH_HEADER.pack(1, 0, 0, 0),
        wire.BATCH_HEADER.pack(1, 7, 1, 0),
    ],
    ids=["blocks", "payload", "payload without blocks", "blocks without payload", "more rows than bytes"],
)
def test_bad_header_is_refused(header: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_header(header, LIMITS)


@pytest.mark.parametrize(
    ("table", "header"),
    [
        (wire.BLOCK.pack(4096, 8), wire.BatchHeader(1, 0, 9, 0)),
        (wire.BLOCK.pack(4096, 8) + wire.BLOCK.pack(0, 0), wire.BatchHeader(2, 0, 8, 0)),
        (wire.BLOCK.pack(4096, 8), wire.BatchHeader(2, 0, 8, 0)),
        (wire.BLOCK.pack(4096, 2**64 - 8) + wire.BLOCK.pack(0, 16), wire.BatchHeader(2, 0, 8, 0)),
    ],
    ids=["sum", "empty block", "length", "a sum that overflows"],
)
def test_table_that_contradicts_its_header_is_refused(table: bytes, header: wire.BatchHeader) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_table(table, header)


@given(st.binary(min_size=wire.BATCH_HEADER.size, max_size=wire.BATCH_HEADER.size))
def test_any_header_is_within_limits_or_refused(data: bytes) -> None:
    try:
        header = wire.decode_header(data, LIMITS)
    except wire.WireError:
        return
    assert header.entries <= LIMITS.max_blocks
    assert header.row_count <= header.payload_bytes <= LIMITS.max_payload_bytes
