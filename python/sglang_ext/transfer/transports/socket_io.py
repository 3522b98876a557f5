"""Buffers and pieces of memory, scattered or not, whole over a socket, without copying them.

Python's own calls want an object for each piece, which for short ones costs more than moving it; `send_vectors` and
`receive_vectors` hand an array of addresses to the kernel. Sockets have a timeout, or none: no call waits longer for
its peer to move anything.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.transports.memory_regions import Vectors

# Linux accepts 1024 buffers per call (UIO_MAXIOV).
MAX_BUFFERS_PER_CALL = 1024

_LIBC = ctypes.CDLL(None, use_errno=True)
_VectorCall = Callable[[int, int, int], int]  # descriptor, address of the vectors, their number: bytes moved


def _vector_call(name: str) -> _VectorCall:
    function = getattr(_LIBC, name)
    function.restype = ctypes.c_ssize_t
    function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
    call: _VectorCall = function
    return call


_WRITEV, _READV = _vector_call("writev"), _vector_call("readv")


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


def wake(connection: socket.socket) -> None:
    """Let threads that wait on a socket find it at its end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def shut(connection: socket.socket) -> None:
    """Close a socket and wake the threads that wait on it."""
    wake(connection)
    connection.close()


def _advance(views: Sequence[memoryview], position: int, offset: int, moved_bytes: int) -> tuple[int, int]:
    """Return where the next byte lies after `moved_bytes` bytes from `offset` in `views[position]`."""
    offset += moved_bytes
    while position < len(views) and offset >= len(views[position]):
        offset -= len(views[position])
        position += 1
    return position, offset


def send_vectors(connection: socket.socket, vectors: Vectors) -> None:
    """Send the memory at `vectors`, which must stay what it is meanwhile."""
    _move_vectors(connection, vectors, _WRITEV, select.POLLOUT)


def receive_vectors(connection: socket.socket, vectors: Vectors) -> None:
    """Fill the memory at `vectors`. Raises ConnectionError when the peer closes before that is full."""
    _move_vectors(connection, vectors, _READV, select.POLLIN)


def _move_vectors(connection: socket.socket, vectors: Vectors, call: _VectorCall, event: int) -> None:
    left = np.ascontiguousarray(vectors)
    ends: npt.NDArray[np.uint64] | None = None
    position, moved_bytes = 0, 0
    while position < len(left):
        # Asked for each time: a number of a socket that has been closed may be another file's.
        descriptor = connection.fileno()
        count = call(descriptor, left[position:].ctypes.data, min(len(left) - position, MAX_BUFFERS_PER_CALL))
        if count < 0:
            _wait(connection, descriptor, event, ctypes.get_errno())
            continue
        if not count:
            raise ConnectionError("the peer closed the connection")
        if ends is None:
            ends = np.cumsum(left[:, 1])
            if count == ends[-1]:
                return
            left = left.copy()
        moved_bytes += count
        position = int(np.searchsorted(ends, moved_bytes, "right"))
        if position < len(left):
            rest_bytes = int(ends[position]) - moved_bytes
            left[position, 0] += left[position, 1] - np.uint64(rest_bytes)
            left[position, 1] = rest_bytes


def _wait(connection: socket.socket, descriptor: int, event: int, number: int) -> None:
    """Return when a call that has failed with the error `number` may be tried again, else raise that error."""
    if number == errno.EINTR:
        return
    if number not in (errno.EAGAIN, errno.EWOULDBLOCK):
        raise OSError(number, os.strerror(number))
    poll = select.poll()
    poll.register(descriptor, event)
    timeout_s = connection.gettimeout()
    if not poll.poll(None if timeout_s is None else timeout_s * 1000):
        raise TimeoutError("timed out")
