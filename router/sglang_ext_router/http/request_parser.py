"""Makes requests of the bytes that a client sends: HTTP/1.1 by httptools, within limits, long bodies past the parser.

Nothing behind this module sees a request that is malformed or too large. Whether a request is allowed at all is asked
once its head is here, before any of its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import httptools

from sglang_ext_router.http.client_requests import HEADER_COST_BYTES, OVERLOADED, Clients, Request, RequestRefusal

if TYPE_CHECKING:
    from sglang_ext_router.http.http1 import ClientConnection

PARSED_AT_ONCE_BYTES = 4096  # of what is not known to be body: then it is seen whether the pipeline is full
MAX_HEADERS = 1000
LONG_BYTES = 16 << 10  # of a body still to come: then the way past the parser is worth while
FIRST_BUFFER_BYTES = 64 << 10  # it grows with what has come, not with what is announced: a head alone costs little
SMALL_PIECE_BYTES = 1024  # of a body: kept one by one, they would take many times the memory that is counted
_ALLOW = b"allow: GET, HEAD, POST, DELETE\r\n"
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


class _RefusedError(Exception):
    """Raised inside a parser callback to stop parsing; the reply is already written."""


class RequestParser:
    """Tells its connection of every whole request (`on_request`), and refuses what is none."""

    __slots__ = (
        "_body",
        "_body_length",
        "_clients",
        "_head_bytes",
        "_head_counted_bytes",
        "_headers",
        "_limits",
        "_loop",
        "_parser",
        "_quiet_bytes",
        "_receiver",
        "_reserved_bytes",
        "arriving",
        "body_bytes",
        "connection",
        "in_message",
        "since_s",
        "target",
    )

    def __init__(self, connection: ClientConnection, clients: Clients, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self._clients = clients
        self._limits = clients.limits
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self.target = b""  # of the request that is arriving, or came last
        self._headers: list[tuple[bytes, bytes]] = []
        self.arriving: Request | None = None  # its head is here
        self._body: list[bytes | bytearray] = []
        self._receiver: BodyReceiver | None = None  # of a long body
        self.body_bytes = 0  # of what is arriving
        self._reserved_bytes = 0  # of its buffer, beyond what has come
        self._body_length = 0  # as announced; 0 for a body in chunks
        self._head_bytes = 0
        self._head_counted_bytes = 0  # of a head that has not arrived whole, among what is buffered
        self.in_message = False
        self.since_s = 0.0  # start of a message that has not arrived whole; 0 when there is none
        self._quiet_bytes = 0  # since the last piece of a body: chunk sizes and trailers

    # -- bytes in -----------------------------------------------------------------------------------------

    def feed_piece(self, data: memoryview, is_next: bool) -> int:
        """Parse a small piece of what may hold many requests, all that is known to be body; how much was taken.

        `is_next`: what arrives will be served at once, as nothing is before it.
        """
        size = PARSED_AT_ONCE_BYTES
        if self.arriving is not None:
            left = self._body_length - self.body_bytes
            if is_next and left >= LONG_BYTES:
                self._receive_body(self.arriving, data[:left])
                return left
            size = max(size, left)
        self.feed(bytes(data[:size]))
        return size

    def receive_if_long(self) -> None:
        """What is to come of the arriving body goes past the parser if it is much; it will be served at once."""
        if self.arriving is not None and self._body_length - self.body_bytes >= LONG_BYTES:
            self._receive_body(self.arriving, None)

    def feed(self, data: bytes) -> None:
        """Parse all of it."""
        while True:
            if self.arriving is None:
                self._head_bytes += len(data)
            body_bytes = self.body_bytes
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._parser.get_method() == b"CONNECT":
                    self.connection.refuse(RequestRefusal(405, "CONNECT is not served", _ALLOW))
                    return
                # The head again, without the wish for another protocol, and then what is behind it.
                head, rest = self._head_without_upgrade(), data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
                self._head_bytes = 0
                self.feed(head)
                if self.connection.is_stopped or not rest:
                    return
                data = rest
                continue
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, _RefusedError):
                    raise
                return
            except httptools.HttpParserError:
                self.connection.refuse(RequestRefusal(400, "malformed HTTP request"))
                return
            break
        if not self.in_message:
            return
        limit = self._limits.max_header_bytes
        if not self.since_s:
            self.since_s = self._loop.time()
        if self.arriving is None:
            if self._head_bytes > limit:
                self.connection.refuse(RequestRefusal(431, f"request head larger than {limit} bytes"))
                return
            counted = self._head_bytes + HEADER_COST_BYTES * len(self._headers)
            self._count_buffered(counted - self._head_counted_bytes)
            self._head_counted_bytes = counted
            if self._clients.buffered_bytes > self._limits.max_buffered_bytes:
                self.connection.refuse(OVERLOADED)
            return
        self._quiet_bytes = 0 if self.body_bytes != body_bytes else self._quiet_bytes + len(data)
        if self._quiet_bytes > limit:
            self.connection.refuse(RequestRefusal(431, f"trailers larger than {limit} bytes"))

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/1.1\r\n" % (self._parser.get_method(), self.target)]
        lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in _UPGRADE_HEADERS]
        return b"".join(lines) + b"\r\n"

    def forget(self) -> None:
        """Drop what has arrived and is no whole request."""
        self._count_buffered(-(self.body_bytes + self._reserved_bytes + self._head_counted_bytes))
        if self._receiver is not None:
            self._receiver = None
            self.connection.receive_by(None)
        self.arriving = None
        self._body = []
        self.body_bytes = self._reserved_bytes = self._head_counted_bytes = 0
        self.in_message = False
        self.since_s = 0.0

    # -- a long body --------------------------------------------------------------------------------------

    def _receive_body(self, arriving: Request, piece: memoryview | None) -> None:
        """Take the rest of the arriving body, which starts with `piece`, past the parser."""
        length = self._body_length
        arriving.keep_alive = arriving.is_http_11 and self._parser.should_keep_alive()
        self._parser = httptools.HttpRequestParser(self)  # which begins behind the body
        pieces: list[bytes | bytearray | memoryview] = list(self._body)
        self._body = []
        if piece is not None:
            pieces.append(piece)
            self._count_buffered(len(piece))
            self.body_bytes += len(piece)
        if self.body_bytes == length:
            self._complete(arriving, b"".join(pieces))
            return
        receiver = self._receiver = BodyReceiver(self, length, pieces)
        self.connection.receive_by(receiver)
        self._reserve(len(receiver.buffer))

    def on_body_received(self, size_bytes: int) -> None:
        """The next piece of the arriving body is in its buffer."""
        receiver, arriving = self._receiver, self.arriving
        if receiver is None or arriving is None:
            return  # refused: what still comes is not wanted
        self._count_buffered(size_bytes)
        self.body_bytes += size_bytes
        self._reserve(len(receiver.buffer))
        if receiver.is_complete:
            self._receiver = None
            self.connection.receive_by(None)
            self._complete(arriving, receiver.buffer)

    def _reserve(self, buffer_bytes: int) -> None:
        """Count a body's buffer whole, as it is taken from memory whole."""
        reserved_bytes = buffer_bytes - self.body_bytes
        self._count_buffered(reserved_bytes - self._reserved_bytes)
        self._reserved_bytes = reserved_bytes
        if reserved_bytes and self._clients.buffered_bytes > self._limits.max_buffered_bytes:
            self.connection.refuse(OVERLOADED)

    # -- parser callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.connection.is_stopped:
            raise _RefusedError
        self.target = b""
        self._headers = []
        self._body = []
        self.body_bytes = 0
        self._quiet_bytes = 0
        self.in_message = True
        self.arriving = None

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.arriving is not None:  # a trailer: it must not pass for a header
            return
        if len(self._headers) >= MAX_HEADERS:
            self._stop(RequestRefusal(431, f"more than {MAX_HEADERS} headers"))
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        limits = self._limits
        if self._head_bytes > limits.max_header_bytes:
            # What was read may hold body too; only a head that is really that large is refused.
            size = len(self.target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > limits.max_header_bytes:
                self._stop(RequestRefusal(431, f"request head larger than {limits.max_header_bytes} bytes"))
        if parser.should_upgrade():
            return  # the parser stops behind the head: see _parse
        is_http_11 = parser.get_http_version() == "1.1"
        request = Request(parser.get_method(), self.target, self._headers, is_http_11)
        self.arriving = request
        self._head_bytes = 0
        if self._head_counted_bytes:
            self._count_buffered(-self._head_counted_bytes)
            self._head_counted_bytes = 0
        length = 0
        expects = False
        hosts = 0
        for name, value in self._headers:
            if name == b"content-length":
                if len(value) > 20:
                    self._stop(RequestRefusal(400, "malformed Content-Length"))
                length = int(value)
            elif name == b"expect" and value.lower() == b"100-continue":
                expects = True
            elif name == b"host":
                hosts += 1
        if hosts > 1:
            self._stop(RequestRefusal(400, "more than one Host header"))
        refusal = self._clients.gate.check_head(request)
        if refusal is not None:
            self._stop(refusal)
        self._body_length = length
        self._check_size(request, length, length)
        if expects:
            self.connection.on_continue_expected()

    def on_body(self, body: bytes) -> None:
        size = len(body)
        arriving = self.arriving
        assert arriving is not None
        self._check_size(arriving, self.body_bytes + size, size)
        self.body_bytes += size
        self._count_buffered(size)
        pieces = self._body
        if not pieces or size >= SMALL_PIECE_BYTES:
            pieces.append(body)
            return
        last = pieces[-1]
        if isinstance(last, bytearray):
            last += body
        else:
            pieces.append(bytearray(body))

    def on_message_complete(self) -> None:
        request = self.arriving
        if request is None:
            return  # to be upgraded
        body, self._body = self._body, []
        request.keep_alive = request.is_http_11 and self._parser.should_keep_alive()
        self._complete(request, body[0] if len(body) == 1 else b"".join(body))

    def _complete(self, request: Request, body: bytes | bytearray) -> None:
        self.arriving = None
        self.in_message = False
        self._head_bytes = 0
        self.since_s = 0.0
        request.body = body
        request.size_bytes = self.body_bytes
        self.body_bytes = 0
        self.connection.on_request(request)

    def _stop(self, refusal: RequestRefusal) -> None:
        self.connection.refuse(refusal)
        raise _RefusedError

    # -- what is buffered ---------------------------------------------------------------------------------

    def _check_size(self, request: Request, body_bytes: int, more_bytes: int) -> None:
        """Refuse a body of that size, or so much more to buffer."""
        if body_bytes > request.max_body_bytes:
            limit = request.max_body_bytes
            if not limit:
                self._stop(self._clients.gate.refuse_body(request))
            self._stop(RequestRefusal(413, f"request body larger than {limit} bytes"))
        if self._clients.buffered_bytes + more_bytes > self._limits.max_buffered_bytes:
            self._stop(OVERLOADED)

    def _count_buffered(self, size_bytes: int) -> None:
        self.connection.count_buffered(size_bytes)


class BodyReceiver(asyncio.BufferedProtocol):
    """Receives a long body straight into the buffer that it is read from and sent from.

    It takes the place of the connection as the transport's protocol until the body is there. The ordinary way makes
    four copies: the transport's, two on the way through the parser, and one that joins the pieces.
    """

    def __init__(self, owner: RequestParser, length: int, pieces: Sequence[bytes | bytearray | memoryview]) -> None:
        """`length` of the whole body in bytes, of which `pieces` have come; more has to come."""
        self._owner = owner
        self._connection = owner.connection
        self._length = length
        self.received = sum(map(len, pieces))
        self.buffer = bytearray(min(length, max(FIRST_BUFFER_BYTES, 2 * self.received)))
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
        """Let the transport close: the connection hears of it."""
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
