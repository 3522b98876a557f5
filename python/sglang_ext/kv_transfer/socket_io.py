"""Blocking socket helpers that move whole buffers, scattered or not, without copying them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

# Linux accepts 1024 buffers per call (UIO_MAXIOV).
MAX_BUFFERS_PER_CALL = 1024


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
