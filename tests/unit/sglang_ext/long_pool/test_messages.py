"""Every message survives its line; a line that is none is refused in one way."""

from __future__ import annotations

import asyncio
import io
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix
from sglang_ext.long_pool.decide.orders import (
    Borrow,
    Collect,
    DeclineReason,
    Drop,
    DropKept,
    GiveUp,
    Keep,
    MeasuredCost,
    MemberReport,
    RollBack,
    RunChunk,
)
from sglang_ext.long_pool.decide.sharding import ChunkLayout, KvMove
from sglang_ext.long_pool.link_frames import PeerAddress
from sglang_ext.long_pool.messages import (
    MAX_LINE_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Alive,
    CancelMessage,
    Challenge,
    ChunkOrder,
    CollectOrder,
    Computed,
    DeclineMessage,
    Destination,
    Heartbeat,
    Hello,
    KeptLost,
    KeyRequest,
    Message,
    MessageError,
    OfferMessage,
    Proof,
    Refusal,
    ReportMessage,
    StepDone,
    StepFailed,
    Streamed,
    StreamFailed,
    Transferred,
    VersionError,
    Welcome,
    decode,
    encode,
    read_head,
    read_message,
    receive_message,
)
from sglang_ext.long_pool.step_clock import StepTimes
from sglang_ext.transfer.decide.shards import HeadLayout

counts = st.integers(0, 2**50)
times = st.floats(0, 1e9)
texts = st.text(st.characters(categories=["L", "N", "P"], include_characters=" "), min_size=1, max_size=20)
reasons = st.text(max_size=30)
several = st.lists(counts, max_size=4).map(tuple)
token_ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9).map(lambda ids: array("i", ids))
ranges = st.builds(lambda start, length, step: range(start, start + length, step), counts, counts, st.integers(1, 9))
positions = st.lists(ranges, max_size=3).map(tuple)
moves = st.lists(st.builds(KvMove, counts, counts, counts, counts, positions), max_size=3).map(tuple)
layouts = st.builds(
    ChunkLayout, several, moves, st.lists(positions, max_size=3).map(tuple), st.lists(positions, max_size=3).map(tuple)
)
chunks = st.builds(RunChunk, counts, counts, layouts, counts, st.booleans())
addresses = st.lists(st.builds(PeerAddress, texts, counts), max_size=2).map(tuple)
peers = st.lists(addresses, max_size=3).map(tuple)
logits = st.none() | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=5).map(
    lambda values: array("f", values)
)
loads = st.floats(0, 1e6)
batch_costs = st.none() | st.builds(MeasuredCost, loads, loads, loads)
reports = st.builds(
    *(MemberReport, times, counts, st.none() | st.integers(1, 2**40), loads, st.none() | loads, loads, batch_costs),
    running_s=loads,
    short_backlog_s=loads,
)
layouts_of_heads = st.builds(
    lambda heads, ranks: HeadLayout(heads, ranks, heads * ranks), st.integers(1, 9), st.integers(1, 9)
)
destinations = st.lists(st.builds(Destination, counts, texts, counts, layouts_of_heads, counts), max_size=2).map(tuple)
lines_of_ranks = st.lists(texts, max_size=2).map(tuple)
messages = st.one_of(
    st.builds(
        *(Hello, st.just(PROTOCOL_VERSION), texts, texts, texts),
        *(st.integers(1, 200), st.integers(1, 128), reports, counts, addresses, lines_of_ranks, st.integers(1, 2**40)),
    ),
    st.builds(KeyRequest, st.just(PROTOCOL_VERSION), texts),
    st.builds(Challenge, texts),
    st.builds(Proof, texts),
    st.builds(Welcome, counts, texts, times),
    st.builds(Refusal, reasons),
    st.just(Heartbeat()),
    st.builds(ReportMessage, reports, counts),
    st.builds(Alive, times),
    st.builds(
        *(OfferMessage, counts, token_ids, counts, times, st.none() | st.floats(-1e9, 1e9), destinations),
        *(st.none() | st.integers(0, 2**63 - 1), st.booleans(), st.none() | texts),
    ),
    st.builds(CancelMessage, counts),
    st.builds(StepDone, counts, st.builds(StepTimes, times, times, times), counts, logits),
    st.builds(StreamFailed, counts),
    st.builds(KeptLost, several),
    st.builds(Keep, counts, several, counts, counts),
    st.builds(Borrow, counts, several, st.lists(st.builds(KeptPrefix, counts, counts), max_size=3).map(tuple), counts),
    st.builds(DropKept, counts, several),
    st.builds(Transferred, counts, times, times),
    st.builds(Computed, counts, logits),
    st.builds(StepFailed, counts, reasons, st.none() | counts, st.booleans(), st.none() | counts),
    st.builds(ChunkOrder, chunks, token_ids, destinations, peers),
    st.builds(GiveUp, counts, several),
    st.builds(Streamed, counts, counts, st.booleans()),
    st.builds(CollectOrder, st.builds(Collect, counts, counts, counts, several, moves, counts), peers),
    st.builds(RollBack, counts, counts, several),
    st.builds(Drop, counts, several),
    st.builds(DeclineMessage, counts, st.sampled_from(DeclineReason), times),
)


def read_all(stream: bytes) -> list[Message]:
    """As the thread of a member's link reads it."""
    reader, read = io.BufferedReader(io.BytesIO(stream)), []
    while (message := read_message(reader)) is not None:
        read.append(message)
    return read


async def receive_all(stream: bytes) -> list[Message]:
    """As the coordinator's event loop reads it."""
    reader, received = asyncio.StreamReader(limit=100), []  # most lines are longer
    reader.feed_data(stream)
    reader.feed_eof()
    while (message := await receive_message(reader)) is not None:
        received.append(message)
    return received


@pytest.mark.slow
@given(st.lists(messages, max_size=4))
def test_every_message_comes_out_as_it_went_in(several: list[Message]) -> None:
    stream = b"".join(map(encode, several))
    for again in (read_all(stream), asyncio.run(receive_all(stream))):
        assert again == several
        assert list(map(type, again)) == list(map(type, several))


@pytest.mark.slow
@given(st.lists(messages, min_size=1, max_size=3), st.data())
def test_a_stream_that_ends_within_a_message(several: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(encode, several))
    cut = data.draw(st.integers(len(stream) - len(encode(several[-1])) + 1, len(stream) - 1))
    # The newline alone may be missing.
    is_whole = stream[cut:] == b"\n"
    for read in (read_all, lambda part: asyncio.run(receive_all(part))):
        if is_whole:
            assert read(stream[:cut]) == several
        else:
            with pytest.raises(MessageError):
                read(stream[:cut])


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (b'["Heartbeat",[],%d]\n' % (MAX_PAYLOAD_BYTES + 1), "bytes of payload; at most"),
        (b'["Heartbeat",[],-1]\n', ">= 0"),
        (b'["Heartbeat",[],1,1]\n', "at most length 3"),
        (b'["OfferMessage",[1,null,0,0.0,null,[],null,true],3]\nabc', "multiple"),
        (b'["OfferMessage",[1,null,0,0.0,null,[],null,true],8]\nabc', "3 of 8 bytes"),
        (b" " * (MAX_LINE_BYTES + 2), "a line "),
    ],
)
def test_payloads_and_lines_that_are_not_taken(stream: bytes, reason: str) -> None:
    with pytest.raises(MessageError, match=reason):
        read_all(stream)
    with pytest.raises(MessageError, match=reason):
        asyncio.run(receive_all(stream))


def test_token_ids_are_little_endian() -> None:
    assert encode(OfferMessage(1, array("i", [1, -2]), 0, 0.0, None)).endswith(b",8]\n\1\0\0\0\xfe\xff\xff\xff")


@given(st.binary(max_size=60))
def test_noise(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(read_head(line))


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=8), max_leaves=20)


@pytest.mark.slow
@given(
    st.sampled_from([*(kind.__name__ for kind in (Hello, OfferMessage, ChunkOrder, Collect, ReportMessage))]), values
)
def test_what_has_the_form_of_a_message_but_not_its_content(name: str, content: object) -> None:
    try:
        decode(read_head(json.dumps([name, content]).encode()))
    except MessageError:
        pass


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[" * 100_000,
        b'["Nothing",[]]',
    ],
)
def test_lines_that_would_do_harm(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(read_head(line))


REPORT = b'["ReportMessage",[[0.5,4096,null],7]]'
OFFER = b'["OfferMessage",[1,null,0,0.5,null,[[3,"host:1",0,{"kv_heads":2,"tp_size":1,"stored_kv_heads":2},0]],9,true]]'
ORDER = b'["ChunkOrder",[[1,1,[[0],[[0,1,0,4,[[0,4,1]]]],[[]],[[[4,9,1]]]],0,false],null,[],[[["host",1]]]]]'
HELLO = b'["Hello",[%d,"a","n","m",2,1,[0,1,null],0,[]]]' % PROTOCOL_VERSION


@pytest.mark.parametrize("line", [REPORT, OFFER, ORDER, HELLO])
def test_lines_that_are_good(line: bytes) -> None:
    decode(read_head(line))


@pytest.mark.parametrize(
    ("line", "good", "bad"),
    [
        *((REPORT, b"0.5", bad) for bad in (b"NaN", b"1e999", b"-1", b"Infinity", b"null", b'"1"')),
        *((REPORT, b"4096", bad) for bad in (b"-1", b"1.5", b"null")),
        *((REPORT, b"null", bad) for bad in (b"0", b"-1")),
        *((OFFER, b"0.5", bad) for bad in (b"-1", b"Infinity")),
        *((OFFER, b'"host:1"', bad) for bad in (b'""', b'"a\\nb"', b'"\\u2028"', b"1")),
        *((OFFER, b'"kv_heads":2', bad) for bad in (b'"kv_heads":0', b'"kv_heads":3')),
        *((ORDER, b"[0,4,1]", bad) for bad in (b"[0,4,0]", b"[-1,4,1]", b"[0,4]", b"[4,0,-1]", b"null")),
        *((ORDER, b'"host"', bad) for bad in (b'""', b'"a\\u0000"')),
        *((HELLO, b'"a"', bad) for bad in (b'""', b'"a\\nb"', b'"a\\u0085"')),
        *((HELLO, b'"m",2', bad) for bad in (b'"m",0', b'"m",-1', b'"m",true')),
    ],
)
def test_a_value_that_would_do_harm_is_refused(line: bytes, good: bytes, bad: bytes) -> None:
    assert good in line
    with pytest.raises(MessageError):
        decode(read_head(line.replace(good, bad, 1)))


def test_a_hello_of_another_version_is_known_as_such_whatever_else_it_says() -> None:
    with pytest.raises(VersionError, match=f"version 99 instead of {PROTOCOL_VERSION}"):
        decode(read_head(b'["Hello",[99,{"name":"later"}]]'))
