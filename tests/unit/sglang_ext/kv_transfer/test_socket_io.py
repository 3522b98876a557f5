"""Moving scattered buffers over a socket, whatever pieces the kernel makes of them."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.kv_transfer import socket_io

pieces = st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=60)


def split(total: bytearray, sizes: list[int]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(total)[start : start + size])
        start += size
    return views


@settings(max_examples=40, deadline=None)
@given(pieces, st.integers(1, 7))
def test_scattered_bytes_arrive_in_order(data: list[bytes], receivers: int) -> None:
    sent = b"".join(data)
    received = bytearray(len(sent))
    step = max(1, len(sent) // receivers)
    sizes = [min(step, len(sent) - start) for start in range(0, len(sent), step)]
    left, right = socket.socketpair()
    with left, right:
        # A buffer much smaller than the data makes the kernel accept it in pieces.
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        writer = threading.Thread(target=socket_io.send_all, args=(left, [memoryview(piece) for piece in data]))
        writer.start()
        socket_io.receive_into(right, split(received, sizes))
        writer.join()
    assert bytes(received) == sent


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection with a timeout, on which calls move only what fits now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    with left, right:
        for end in (left, right):
            end.settimeout(10)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        yield left, right


def test_calls_that_end_inside_a_buffer_continue_there(connection: tuple[socket.socket, socket.socket]) -> None:
    left, right = connection
    sent = random.Random(1).randbytes(3 << 20)
    sizes = [700_001, 1, 333_333, len(sent) - 1_033_335]
    received = bytearray(len(sent))
    writer = threading.Thread(target=socket_io.send_all, args=(left, split(bytearray(sent), sizes)))
    writer.start()
    socket_io.receive_into(right, split(received, sizes[::-1]))
    writer.join()
    assert bytes(received) == sent


def test_more_buffers_than_one_call_takes() -> None:
    count = 3 * socket_io.MAX_BUFFERS_PER_CALL + 5
    data = bytes(i % 251 for i in range(count))
    received = bytearray(count)
    left, right = socket.socketpair()
    with left, right:
        writer = threading.Thread(target=socket_io.send_all, args=(left, split(bytearray(data), [1] * count)))
        writer.start()
        socket_io.receive_into(right, split(received, [1] * count))
        writer.join()
    assert bytes(received) == data


def test_end_of_stream_in_the_middle_is_an_error() -> None:
    left, right = socket.socketpair()
    with right:
        with left:
            left.sendall(b"abc")
        with pytest.raises(ConnectionError):
            socket_io.receive_exactly(right, 4)
