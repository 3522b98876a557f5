"""Describes what two members of a long pool say to each other over a link: a greeting, then frames; bytes of fixed
layout."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from sglang_ext.long_pool.wire_types import Count, Line
from sglang_ext.shared_key import CHALLENGE_BYTES, CODE_BYTES, NONCE_BYTES, Callee, Caller, WrongKeyError

POOL_ID_BYTES = 16
_VERSION = 2
_PROTOCOL = "long pool link"
_MAGIC = b"sxpl"
_GREETING_TIMEOUT_S = 5.0
_GREETING = struct.Struct(f"<4sI{POOL_ID_BYTES}sqIqI")
_HEAD = struct.Struct("<BQIQ")  # kind, step, tag, bytes that follow
# Of anything but data: the rest goes into tensors that are there.
_MOST_WORD_BYTES = 2**20
_BUFFER_BYTES = 2**22
_WELCOME = b"ok"
_KEEPALIVE_S = 10


class LinkError(Exception):
    """A link cannot be made, or has ended; the text is one line."""


class PeerId(NamedTuple):
    """A rank of an instance."""

    instance: int
    rank: int


class PeerAddress(NamedTuple):
    """Describes where a rank of an instance waits for its peers."""

    host: Line
    port: Count


class Greeting(NamedTuple):
    """Describes who calls whom."""

    pool_id: bytes
    caller: PeerId
    callee: PeerId


class FrameKind(IntEnum):
    """Describes what a frame is."""

    DATA = 0
    GIVE_UP = 1  # the step has come to nothing; its data say why
    ALIVE = 2  # of a rank to its instance's first one; tag 1: it waits for a peer


class Frame(NamedTuple):
    """One of them. Of data that has been read only `size_bytes` is known."""

    kind: FrameKind
    sequence: int
    tag: int
    data: memoryview
    size_bytes: int = 0


def send_greeting(connection: socket.socket, greeting: Greeting, key: bytes) -> None:
    """The calling side: returns once the other side has accepted. Raises LinkError, OSError."""
    connection.settimeout(_GREETING_TIMEOUT_S)
    words = _GREETING.pack(_MAGIC, _VERSION, greeting.pool_id, *greeting.caller, *greeting.callee)
    caller = Caller(key, _PROTOCOL, words)
    connection.sendall(words + caller.opening)
    try:
        connection.sendall(caller.answer(_read(connection, CHALLENGE_BYTES)))
    except WrongKeyError:
        raise LinkError("it has another key") from None
    if _read(connection, len(_WELCOME)) != _WELCOME:
        raise LinkError("it has refused")
    _prepare(connection)


def answer_greeting(connection: socket.socket, key: bytes, is_expected: Callable[[Greeting], bool]) -> Greeting:
    """The called side: who calls, once both have proved that they know the key. Raises LinkError, OSError."""
    connection.settimeout(_GREETING_TIMEOUT_S)
    words = _read(connection, _GREETING.size)
    magic, version, pool_id, from_instance, from_rank, to_instance, to_rank = _GREETING.unpack(words)
    if magic != _MAGIC or version != _VERSION:
        raise LinkError(f"version {_VERSION} is wanted, not what begins with {words[:8]!r}")
    greeting = Greeting(pool_id, PeerId(from_instance, from_rank), PeerId(to_instance, to_rank))
    if not is_expected(greeting):
        raise LinkError(f"{greeting.caller} is not expected at {greeting.callee}")
    callee = Callee(key, _PROTOCOL, _read(connection, NONCE_BYTES), words)
    connection.sendall(callee.challenge)
    try:
        callee.check(_read(connection, CODE_BYTES))
    except WrongKeyError:
        raise LinkError(f"{greeting.caller} has another key") from None
    connection.sendall(_WELCOME)
    _prepare(connection)
    return greeting


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Blocks until the system has all of it. Raises OSError."""
    head = _HEAD.pack(frame.kind, frame.sequence, frame.tag, frame.data.nbytes)
    sent = connection.sendmsg([head, frame.data]) - len(head)
    if sent < 0:
        connection.sendall(head[sent:])
        sent = 0
    if sent < frame.data.nbytes:
        connection.sendall(frame.data[sent:])


def read_head(connection: socket.socket) -> Frame:
    """The next frame; the bytes of one with data follow, those of others are read. Raises LinkError, OSError."""
    kind, sequence, tag, size_bytes = _HEAD.unpack(_read(connection, _HEAD.size))
    try:
        kind = FrameKind(kind)
    except ValueError:
        raise LinkError(f"a frame of kind {kind}") from None
    if kind is FrameKind.DATA:
        return Frame(kind, sequence, tag, memoryview(b""), size_bytes)
    if size_bytes > _MOST_WORD_BYTES:
        raise LinkError(f"a word of {size_bytes} bytes")
    return Frame(kind, sequence, tag, memoryview(_read(connection, size_bytes)), size_bytes)


def read_exactly(connection: socket.socket, into: memoryview) -> None:
    """Fill it. Raises LinkError at the end of the connection, OSError."""
    done = 0
    while done < len(into):
        count = connection.recv_into(into[done:])
        if not count:
            raise LinkError("it has closed the connection")
        done += count


def keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Have it end by itself where the peer's host has vanished: idle or not, after `timeout_s` without an answer.

    A peer that only does not read for this long is the same: it must be longer than what any peer may do meanwhile.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(1000 * timeout_s), 2**31 - 1))


def close_connection(connection: socket.socket) -> None:
    """End it, also for threads that wait in it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was never connected, or the other side was faster
    connection.close()


def reason_of(error: BaseException) -> str:
    """One line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.partition("\n")[0]


def _read(connection: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    read_exactly(connection, memoryview(data))
    return bytes(data)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
