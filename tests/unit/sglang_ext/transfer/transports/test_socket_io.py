"""Whole buffers and pieces of memory over a socket, however little of them each call moves."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.transfer.transports import socket_io
from sglang_ext.transfer.transports.row_moves import Vectors
from support.examples import examples
from support.running_time import running_s

pieces = st.lists(st.binary(min_size=1, max_size=3000), min_size=1, max_size=60)


def vectors(total: bytearray, sizes: list[int]) -> Vectors:
    """The same as `split`, as addresses."""
    first = np.frombuffer(total, np.uint8).ctypes.data
    starts = [0, *accumulate(sizes)][:-1]
    return np.array([(first + start, size) for start, size in zip(starts, sizes, strict=True)], np.uint64)


def split(total: bytearray, sizes: list[int]) -> list[memoryview]:
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(total)[start : start + size])
        start += size
    return views


@settings(max_examples=examples(40), deadline=None)
@given(pieces, st.integers(1, 7))
def test_scattered_bytes_arrive_in_order(data: list[bytes], receivers: int) -> None:
    sent = b"".join(data)
    received, kept = bytearray(len(sent)), bytearray(sent)
    step = max(1, len(sent) // receivers)
    sizes = [min(step, len(sent) - start) for start in range(0, len(sent), step)]
    left, right = socket.socketpair()
    with left, right:
        # A buffer much smaller than the data makes the kernel accept it in pieces.
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sizes_sent = [len(piece) for piece in data]
        writer = threading.Thread(target=socket_io.send_vectors, args=(left, vectors(kept, sizes_sent)))
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


@pytest.mark.slow
def test_calls_that_end_inside_a_buffer_continue_there(connection: tuple[socket.socket, socket.socket]) -> None:
    left, right = connection
    sent = random.Random(1).randbytes(3 << 20)
    sizes = [700_001, 1, 333_333, len(sent) - 1_033_335]
    received, kept = bytearray(len(sent)), bytearray(sent)
    writer = threading.Thread(target=socket_io.send_vectors, args=(left, vectors(kept, sizes)))
    writer.start()
    socket_io.receive_into(right, split(received, sizes[::-1]))
    writer.join()
    assert bytes(received) == sent


def test_more_buffers_than_one_call_takes() -> None:
    count = 3 * socket_io.MAX_BUFFERS_PER_CALL + 5
    data = bytes(i % 251 for i in range(count))
    received, kept = bytearray(count), bytearray(data)
    left, right = socket.socketpair()
    with left, right:
        writer = threading.Thread(target=socket_io.send_vectors, args=(left, vectors(kept, [1] * count)))
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


WAYS = [
    (socket_io.receive_vectors, vectors),
    (socket_io.receive_into, split),
]


@pytest.mark.parametrize(("receive", "received_as"), WAYS, ids=["vectors", "buffers"])
@pytest.mark.parametrize("timeout_s", [10.0, None])
def test_thousands_of_pieces_of_any_size_arrive(
    connection: tuple[socket.socket, socket.socket],
    receive: Callable[..., None],
    received_as: Callable[[bytearray, list[int]], Any],
    timeout_s: float | None,
) -> None:
    """Both ends are cut differently, and calls end anywhere, also within a piece that they have ended in before."""
    left, right = connection
    for end in connection:
        end.settimeout(timeout_s)
    draw = random.Random(2)
    sizes = [draw.choice([1, 17, 256, 600]) for _ in range(2500)] + [100_000]
    data = bytearray(draw.randbytes(sum(sizes)))
    received = bytearray(len(data))
    writer = threading.Thread(target=socket_io.send_vectors, args=(left, vectors(data, sizes)))
    writer.start()
    receive(right, received_as(received, sizes[::-1]))
    writer.join()
    assert received == data


@pytest.mark.slow
def test_vectors_wait_no_longer_than_the_timeout(connection: tuple[socket.socket, socket.socket]) -> None:
    left, right = connection
    left.settimeout(0.2)
    data = bytearray(32 << 20)
    start_s = running_s()
    with pytest.raises(TimeoutError):
        socket_io.send_vectors(left, vectors(data, [len(data)]))
    left.shutdown(socket.SHUT_WR)
    while right.recv(1 << 20):
        pass
    left.settimeout(0.2)
    with pytest.raises(TimeoutError):
        socket_io.receive_vectors(left, vectors(data, [8]))
    assert running_s() - start_s < 5


def test_vectors_of_a_connection_that_ends(connection: tuple[socket.socket, socket.socket]) -> None:
    left, right = connection
    data = bytearray(8)
    left.sendall(b"abc")
    left.close()
    with pytest.raises(ConnectionError):
        socket_io.receive_vectors(right, vectors(data, [4, 4]))
    with pytest.raises(OSError):
        socket_io.send_vectors(left, vectors(data, [8]))


def test_a_reader_of_vectors_is_woken_when_its_socket_is_shut(connection: tuple[socket.socket, socket.socket]) -> None:
    """As a permit that is taken back does it."""
    _, right = connection
    ended = threading.Event()

    def read() -> None:
        with pytest.raises(ConnectionError):
            socket_io.receive_vectors(right, vectors(bytearray(8), [8]))
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    right.shutdown(socket.SHUT_RDWR)
    reader.join()
    assert ended.is_set()
