"""ZMTP against ZeroMQ's own sockets, and against bytes that come in any pieces."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext_router.decide.zmtp import (
    GREETING,
    SocketKind,
    ZmtpError,
    ZmtpReader,
    frame,
    message,
    ready,
    subscription,
)

PARTS = st.lists(st.binary(max_size=300), min_size=1, max_size=4)


@given(st.lists(PARTS, max_size=5), st.lists(st.integers(1, 400), min_size=1))
def test_messages_come_whole_in_any_pieces(messages: list[list[bytes]], sizes: list[int]) -> None:
    reader = ZmtpReader()
    stream = GREETING + ready(SocketKind.SUB) + b"".join(message(*parts) for parts in messages)
    read: list[list[bytes]] = []
    at = turn = 0
    while at < len(stream):
        read += reader.feed(stream[at : at + sizes[turn % len(sizes)]])
        at += sizes[turn % len(sizes)]
        turn += 1
    assert read == messages
    assert reader.is_greeted
    assert reader.is_ready


@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(data: bytes, is_greeted: bool) -> None:
    try:
        ZmtpReader(max_frame_bytes=100).feed(GREETING + data if is_greeted else data)
    except ZmtpError:
        pass


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 400 Bad Request", "does not speak"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "older than 3"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "security CURVE"),
        (GREETING + frame(b"\x05ERROR\x04nope", 4), "refuses: nope"),
        (GREETING + frame(bytes(2000)), "longer than 1000"),
        (GREETING + frame(b"", 1) * 20, "more than 16 frames"),
    ],
)
def test_what_is_refused(data: bytes, error: str) -> None:
    with pytest.raises(ZmtpError, match=error):
        ZmtpReader(max_frame_bytes=1000).feed(data)


def test_a_ping_is_answered() -> None:
    reader = ZmtpReader()
    assert reader.feed(GREETING + frame(b"\x04PING\x00\x0acontext", 4)) == []
    assert reader.replies == frame(b"\x04PONGcontext", 4)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def opened(peer: zmq.Socket[bytes]) -> socket.socket:
    return socket.create_connection(("127.0.0.1", peer.bind_to_random_port("tcp://127.0.0.1")))


def exchange(connection: socket.socket, kind: SocketKind) -> ZmtpReader:
    connection.settimeout(10)
    connection.sendall(GREETING + ready(kind))
    reader = ZmtpReader()
    while not reader.is_ready:
        assert reader.feed(connection.recv(4096)) == []
    return reader


def receive(connection: socket.socket, reader: ZmtpReader, count: int) -> list[list[bytes]]:
    read: list[list[bytes]] = []
    while len(read) < count:
        data = connection.recv(65536)
        assert data
        read += reader.feed(data)
    return read


def test_it_subscribes_to_a_real_publisher(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with context.socket(zmq.XPUB) as publisher, opened(publisher) as connection:
        reader = exchange(connection, SocketKind.SUB)
        connection.sendall(subscription(b"kv"))
        assert publisher.recv() == b"\x01kv"
        batches = [[b"kv", number.to_bytes(8, "big"), bytes(300 * number)] for number in range(5)]
        publisher.send_multipart([b"other", b"1"])
        for batch in batches:
            publisher.send_multipart(batch)
        assert receive(connection, reader, 5) == batches


def test_it_asks_a_real_router_for_a_replay(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with context.socket(zmq.ROUTER) as router, opened(router) as connection:
        reader = exchange(connection, SocketKind.DEALER)
        connection.sendall(message(b"", (7).to_bytes(8, "big")))
        client, delimiter, first = router.recv_multipart()
        assert (delimiter, int.from_bytes(first, "big")) == (b"", 7)
        router.send_multipart((client, b"", b"kv", first, b"batch"))
        assert receive(connection, reader, 1) == [[b"", b"kv", first, b"batch"]]
