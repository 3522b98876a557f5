"""Receives a long body from a client straight into the buffer that it is read from and sent from.

The ordinary way makes four copies of it: the transport's, two on the way through the parser, and one that joins the
pieces. Here the kernel writes each piece to its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

LONG_BYTES = 16 << 10  # still to come: then it is worth while
FIRST_BYTES = 1 << 20  # of the buffer; it grows with what has come, not with what is announced


class BodyOwner(Protocol):
    """The client's connection. It hears of every piece, and of everything else that happens to its transport."""

    def on_body_received(self, size_bytes: int) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of its owner as the transport's protocol until the body is there."""

    def __init__(self, owner: BodyOwner, length: int, pieces: Sequence[bytes | memoryview]) -> None:
        """`length` of the whole body in bytes, of which `pieces` have come; more has to come."""
        self._owner = owner
        self._length = length
        self.received = sum(map(len, pieces))
        self.buffer = bytearray(min(length, max(FIRST_BYTES, 2 * self.received)))
        start = 0
        for piece in pieces:
            end = start + len(piece)
            self.buffer[start:end] = piece
            start = end

    @property
    def is_complete(self) -> bool:
        return self.received == self._length

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next piece goes: never beyond the body, as another request may follow."""
        buffer = self.buffer
        size = len(buffer)
        if self.received == size:
            buffer += bytes(min(size, self._length - size))
        return memoryview(buffer)[self.received :]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        self._owner.on_body_received(nbytes)

    def eof_received(self) -> bool | None:
        """Let the transport close: the owner hears of it."""
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()
