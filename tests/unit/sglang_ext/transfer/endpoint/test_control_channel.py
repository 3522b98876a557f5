"""Control messages survive the wire, and nothing else is taken for one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.identifiers import TransferAttempt
from sglang_ext.transfer.decide.protocol import (
    Grant,
    ReceiverAbort,
    ReceiverClosed,
    ReceiverReport,
    SenderReport,
    SenderStopped,
)
from sglang_ext.transfer.decide.shards import HeadLayout, KVShard, TokenSpan
from sglang_ext.transfer.endpoint.control_channel import CodecError, ControlMessage, decode, encode
from sglang_ext.transfer.endpoint.invitations import DecodeRank, Invitation, InvitationSeen
from sglang_ext.transfer.endpoint.peer_layouts import LayoutReply, LayoutRequest
from sglang_ext.transfer.pool_layout import ItemBuffer, PoolLayout

numbers = st.integers(0, (1 << 63) - 1)
transfers = numbers | st.builds(TransferAttempt, numbers, st.integers(1, 9))
texts = st.text(max_size=8)
shards = st.builds(
    KVShard,
    st.lists(st.builds(TokenSpan, numbers, numbers, numbers), max_size=3).map(tuple),
    *[numbers] * 4,
    st.booleans(),
)
grants = st.builds(
    Grant, numbers, numbers, st.none() | numbers, st.binary(), st.none() | numbers, st.lists(st.binary()).map(tuple)
)
buffers = st.builds(ItemBuffer, numbers, st.integers(0, 100).map(lambda heads: heads * 6), numbers)
layouts = st.builds(
    PoolLayout,
    texts,
    numbers,
    st.lists(st.lists(buffers, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3).map(tuple),
    numbers,
    st.sampled_from([1, 2, 3]),
    st.lists(buffers, max_size=2).map(tuple),
    st.lists(st.lists(buffers, max_size=2).map(tuple), max_size=2).map(tuple),
)
head_layouts = st.builds(
    lambda heads, tp_size: HeadLayout(heads, tp_size, heads * tp_size), st.integers(1, 8), st.integers(1, 8)
)
decode_ranks = st.builds(DecodeRank, numbers, head_layouts)
messages = st.one_of(
    st.builds(
        SenderReport,
        transfers,
        texts,
        numbers,
        st.none() | numbers,
        numbers,
        st.lists(shards, max_size=3).map(tuple),
        st.booleans(),
        *[numbers] * 3,
        st.floats(allow_nan=False),
        st.booleans(),
    ),
    st.builds(SenderStopped, transfers, texts, numbers, texts, st.booleans()),
    st.builds(
        ReceiverReport,
        transfers,
        texts,
        *[numbers] * 4,
        st.none() | grants,
        numbers,
        st.booleans(),
        st.booleans(),
        st.floats(allow_nan=False),
    ),
    st.builds(ReceiverAbort, transfers, texts, numbers, numbers, texts, st.booleans()),
    st.builds(ReceiverClosed, transfers, texts, numbers, numbers, st.booleans()),
    st.builds(LayoutRequest, texts),
    st.builds(
        Invitation,
        *(transfers, texts, shards, st.none() | texts, numbers, st.none() | decode_ranks, st.booleans()),
        st.none() | numbers,
    ),
    st.builds(InvitationSeen, transfers, texts, st.booleans()),
    st.builds(LayoutReply, texts, numbers, texts, texts, layouts),
)


@pytest.mark.slow
@given(messages)
def test_round_trip(message: ControlMessage) -> None:
    copy = decode(encode(message))
    assert copy == message
    assert type(copy) is type(message)
    if not isinstance(message, LayoutRequest | LayoutReply):
        assert not isinstance(copy, LayoutRequest | LayoutReply)
        assert type(copy.transfer_id) is type(message.transfer_id)


@pytest.mark.slow
@given(messages, st.data())
def test_a_damaged_frame_is_refused_or_is_another_message_of_the_right_types(
    message: ControlMessage, data: st.DataObject
) -> None:
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(CodecError):
        encode(decode(bytes(frame)))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "not a handshake message"),
        (b"GET / HTTP/1.1", "not a handshake message"),
        (b"SXHS\x04\x01\x90", "another version"),
        (b"SXHS\x05", "malformed"),
        (b"SXHS\x05\x90", "malformed"),
        (b"SXHS\x05\x91\xa4Oops", "malformed"),
        (encode(LayoutRequest("x"))[:-1], "malformed"),
        (encode(LayoutRequest("x")) + b"x", "malformed"),
        (encode(LayoutRequest("x")).replace(b"\x92", b"\x93") + b"\x01", "malformed"),
    ],
)
def test_what_is_no_message_is_named(frame: bytes, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        decode(frame)


def test_a_layout_that_contradicts_itself_is_refused() -> None:
    buffer = ItemBuffer(1, 6, 1)
    layout = PoolLayout("float32", 0, ((buffer, buffer),), 0, 3)
    frame = encode(LayoutReply("r", 1, "tcp", "a", layout))
    with pytest.raises(CodecError, match="malformed"):
        decode(frame.replace(b"head_count\x03", b"head_count\x04"))
