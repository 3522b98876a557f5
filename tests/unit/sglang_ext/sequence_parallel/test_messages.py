"""Every message survives its line; a line that is none is refused in one way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.cdsp.orders import (
    BuildMesh,
    Collect,
    Decline,
    DeclineReason,
    Drop,
    MemberReport,
    RollBack,
    RunChunk,
)
from sglang_ext.policy.cdsp.sharding import ChunkLayout, KvMove
from sglang_ext.policy.handshake.shards import HeadLayout
from sglang_ext.sequence_parallel.messages import (
    PROTOCOL_VERSION,
    CancelMessage,
    ChunkOrder,
    Destination,
    Heartbeat,
    Hello,
    MeshBuilt,
    MeshFailed,
    Message,
    MessageError,
    OfferMessage,
    Refusal,
    ReportMessage,
    StepDone,
    StepFailed,
    Streamed,
    VersionError,
    Welcome,
    decode,
    encode,
)
from sglang_ext.sequence_parallel.step_clock import StepTimes

counts = st.integers(0, 2**50)
times = st.floats(0, 1e9)
texts = st.text(st.characters(categories=["L", "N", "P"], include_characters=" "), min_size=1, max_size=20)
reasons = st.text(max_size=30)
several = st.lists(counts, max_size=4).map(tuple)
ranges = st.builds(lambda start, length, step: range(start, start + length, step), counts, counts, st.integers(1, 9))
positions = st.lists(ranges, max_size=3).map(tuple)
moves = st.lists(st.builds(KvMove, counts, counts, counts, counts, positions), max_size=3).map(tuple)
layouts = st.builds(
    ChunkLayout, several, moves, st.lists(positions, max_size=3).map(tuple), st.lists(positions, max_size=3).map(tuple)
)
chunks = st.builds(RunChunk, counts, counts, counts, layouts, counts)
reports = st.builds(MemberReport, times, counts)
layouts_of_heads = st.builds(
    lambda heads, ranks: HeadLayout(heads, ranks, heads * ranks), st.integers(1, 9), st.integers(1, 9)
)
destinations = st.lists(st.builds(Destination, counts, texts, counts, layouts_of_heads, counts), max_size=2).map(tuple)
messages = st.one_of(
    st.builds(
        *(Hello, st.just(PROTOCOL_VERSION), texts, texts, texts),
        *(st.integers(1, 200), st.integers(1, 128), reports, counts),
    ),
    st.builds(Welcome, counts, texts, counts, times),
    st.builds(Refusal, reasons),
    st.just(Heartbeat()),
    st.builds(ReportMessage, reports),
    st.builds(
        *(OfferMessage, counts, several, counts, times, st.none() | st.floats(-1e9, 1e9), destinations),
        st.none() | st.integers(0, 2**63 - 1),
    ),
    st.builds(CancelMessage, counts),
    st.builds(StepDone, counts, st.builds(StepTimes, times, times, times)),
    st.builds(StepFailed, counts, reasons),
    st.builds(MeshBuilt, counts),
    st.builds(MeshFailed, counts, reasons),
    st.builds(BuildMesh, counts, several),
    st.builds(ChunkOrder, chunks, several, destinations),
    st.builds(Streamed, counts, counts, st.booleans()),
    st.builds(Collect, counts, counts, counts, counts, several, moves, counts),
    st.builds(RollBack, counts, counts, several),
    st.builds(Drop, counts, several),
    st.builds(Decline, counts, counts, st.sampled_from(DeclineReason)),
)


@given(messages)
def test_every_message_comes_out_as_it_went_in(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    again = decode(line)
    assert again == message
    assert type(again) is type(message)


@given(st.binary(max_size=60))
def test_noise(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line)


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=8), max_leaves=20)


@given(
    st.sampled_from([*(kind.__name__ for kind in (Hello, OfferMessage, ChunkOrder, Collect, ReportMessage))]), values
)
def test_what_has_the_form_of_a_message_but_not_its_content(name: str, content: object) -> None:
    try:
        decode(json.dumps([name, content]).encode())
    except MessageError:
        pass


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[" * 100_000,
        b'["Nothing",[]]',
        b'["Report",[[NaN,1]]]',
        b'["Report",[[1e999,1]]]',
        b'["Report",[[-1,1]]]',
        b'["Report",[[1,-1]]]',
        b'["OfferMessage",[1,[1e999],0,0,null]]',
        b'["OfferMessage",[1,[1],0,0,Infinity]]',
        b'["OfferMessage",[1,[1],0,-1,null]]',
        b'["ChunkOrder",[[1,1,1,[[0],[],[[]],[[[0,4,0]]]],0],[]]]',
        b'["ChunkOrder",[[1,1,1,[[0],[],[[]],[[[4,0,-1]]]],0],[]]]',
        b'["Hello",[1,"a\\nb","n","m",2,1,[0,1]]]',
        b'["Hello",[1,"","n","m",2,1,[0,1]]]',
        b'["Hello",[1,"a","n","m",0,1,[0,1]]]',
    ],
)
def test_lines_that_would_do_harm(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line)


def test_a_hello_of_another_version_is_known_as_such_whatever_else_it_says() -> None:
    with pytest.raises(VersionError, match=f"version 7 instead of {PROTOCOL_VERSION}"):
        decode(b'["Hello",[7,{"name":"later"}]]')
