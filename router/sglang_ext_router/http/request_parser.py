"""Turn the bytes of one client connection into requests: HTTP/1.1 without I/O, within limits.

The parser is driven like h11: `receive` takes bytes, `next_event` returns what they complete. A `Request` is whole and
within every limit. A `RequestRefusal` ends the connection: the parser takes no bytes after it. The gate judges a
request when its head is complete, before any of its body is kept.

    parser.receive(data)
    while (event := parser.next_event()) is not None:
        ...

A long body can bypass the HTTP parser: see `begin_long_body`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

import httptools

PARSED_AT_ONCE_BYTES = 4096  # of bytes that may hold many requests; the connection checks its limits after each piece
MAX_HEADERS = 1000
HEADER_COST_BYTES = 200  # memory of the objects that hold one header line, without its text
LONG_BYTES = 16 << 10  # of a body that has yet to arrive: from here on bypassing the HTTP parser pays off
# The buffer of a long body grows with the bytes received, not with the length announced: a head costs a client little.
FIRST_BUFFER_BYTES = 64 << 10
SMALL_PIECE_BYTES = 1024  # smaller pieces of a body are joined: as separate objects they take many times their size
_ALLOW = b"allow: GET, HEAD, POST, DELETE\r\n"
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})


class Request:
    """One request. Header names are lower case."""

    def __init__(self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], is_http_11: bool) -> None:
        self.method = method
        self.target = target  # as it came
        target, _, self.query = _origin_form(target).partition(b"?")
        self.path = unquote_to_bytes(target) if b"%" in target else target
        self.headers = headers
        self.is_http_11 = is_http_11
        self.body: bytes | bytearray = b""
        self.keep_alive = False
        self.max_body_bytes = 0  # set by the gate
        self.reply_headers = b""  # header lines to add to the reply, each ended by CRLF; set by the gate
        self.tenant = ""  # whose key it has; set by the gate where there are tenants
        self.size_bytes = 0  # its share of `BufferedBytes`

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header of this name, which is given in lower case."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def _origin_form(target: bytes) -> bytes:
    """Return path and query of a request's target; of the absolute form, which proxies use, without the server."""
    if not target.startswith(b"/"):
        scheme, separator, rest = target.partition(b"://")
        if separator and scheme.lower() in (b"http", b"https"):
            start = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
            target = rest[start:]
            if not target.startswith(b"/"):
                target = b"/" + target
    return target.partition(b"#")[0] if b"#" in target else target


class RequestRefusal(NamedTuple):
    """The reply to a request that is not served; it follows the replies to earlier requests and ends the connection.

    `extra` holds header lines to add, each ended by CRLF.
    """

    status: int
    message: str
    extra: bytes = b""


class ContinueExpected:
    """The client waits for `100 Continue` before it sends the body of the arriving request."""


Event = Request | RequestRefusal | ContinueExpected

CONTINUE_EXPECTED: Final = ContinueExpected()
OVERLOADED: Final = RequestRefusal(
    503, "too much is buffered for other requests; try again later", b"retry-after: 1\r\n"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the connections at one port: sizes in bytes, times in seconds."""

    max_header_bytes: int
    max_pipelined_bytes: int  # of one connection
    max_buffered_bytes: int  # of all connections: requests that are received, wait, or are served
    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_timeout_s: float
    write_timeout_s: float


class BufferedBytes:
    """Memory that the requests of all connections at one port take, and its limit."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0


class Gate(Protocol):
    """Decides by its head whether a request is allowed."""

    def check_head(self, request: Request) -> RequestRefusal | None:
        """Return the refusal of a request, or set its `max_body_bytes` and return None."""

    def refuse_body(self, request: Request) -> RequestRefusal:
        """Return the refusal of a body on a request whose `max_body_bytes` is 0."""


class LongBody:
    """Buffer of a body that bypasses the HTTP parser: received into the place from which it is read and sent.

    The HTTP parser makes four copies: the transport's, two while parsing, and the copy that joins the pieces.
    """

    __slots__ = ("buffer", "length_bytes", "received_bytes")

    def __init__(self, length_bytes: int, pieces: list[bytes | bytearray | memoryview]) -> None:
        """Start a body of `length_bytes` with the `pieces` that have arrived, which are less than all of it."""
        self.length_bytes = length_bytes
        self.received_bytes = sum(map(len, pieces))
        self.buffer = bytearray(min(length_bytes, max(FIRST_BUFFER_BYTES, 2 * self.received_bytes)))
        start = 0
        for piece in pieces:
            end = start + len(piece)
            self.buffer[start:end] = piece
            start = end

    def free_space(self) -> memoryview:
        """Return where the next bytes go; it ends with the body, as another request may follow."""
        buffer = self.buffer
        size = len(buffer)
        if self.received_bytes == size:
            buffer += bytes(min(size, self.length_bytes - size))
        return memoryview(buffer)[self.received_bytes :]


class _RefusedError(Exception):
    """Raised inside a callback of httptools to stop parsing; the refusal is already among the events."""


class RequestParser:
    """Parser of one connection's requests. Its clock and its transport are the connection's business."""

    def __init__(self, gate: Gate, max_header_bytes: int, buffered: BufferedBytes) -> None:
        self._gate = gate
        self._max_header_bytes = max_header_bytes
        self._buffered = buffered
        self._parser = httptools.HttpRequestParser(self)
        self._events: deque[Event] = deque()
        self._is_refused = False
        self.target = b""  # of the request that is arriving, or arrived last
        self._headers: list[tuple[bytes, bytes]] = []
        self.arriving: Request | None = None  # the request whose head is complete and whose body is not
        self._body: list[bytes | bytearray] = []
        self.long_body: LongBody | None = None  # receives the rest of the arriving body
        self.body_bytes = 0  # received of the arriving body
        self._reserved_bytes = 0  # of the long body's buffer, beyond what it has received
        self._body_length = 0  # as announced; 0 for a chunked body
        self._head_bytes = 0
        self._head_counted_bytes = 0  # share of an incomplete head in `BufferedBytes`
        self.in_message = False  # a request has begun to arrive
        self._quiet_bytes = 0  # received since the last piece of a body: chunk sizes and trailers

    def next_event(self) -> Event | None:
        """Return the next event of the bytes received so far, or None."""
        return self._events.popleft() if self._events else None

    # -- bytes in -----------------------------------------------------------------------------------------

    def receive_piece(self, data: memoryview, may_bypass: bool) -> int:
        """Parse the first piece of `data` and return its length: a small one, or all that is known to be body.

        With `may_bypass` the rest of a long body goes to `long_body`.
        """
        size = PARSED_AT_ONCE_BYTES
        if self.arriving is not None:
            left = self._body_length - self.body_bytes
            if may_bypass and left >= LONG_BYTES:
                self._begin_long_body(self.arriving, data[:left])
                return left
            size = max(size, left)
        self.receive(bytes(data[:size]))
        return size

    def receive(self, data: bytes) -> None:
        """Parse all of `data`."""
        if self._is_refused:
            return
        while True:
            if self.arriving is None:
                self._head_bytes += len(data)
            body_bytes = self.body_bytes
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._parser.get_method() == b"CONNECT":
                    self._refuse(RequestRefusal(405, "CONNECT is not served", _ALLOW))
                    return
                # Parse the head again without its request for another protocol, then the bytes after it.
                head, rest = self._head_without_upgrade(), data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
                self._head_bytes = 0
                self.receive(head)
                if self._is_refused or not rest:
                    return
                data = rest
                continue
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, _RefusedError):
                    raise
                return
            except httptools.HttpParserError:
                self._refuse(RequestRefusal(400, "malformed HTTP request"))
                return
            break
        if not self.in_message:
            return
        limit = self._max_header_bytes
        if self.arriving is None:
            if self._head_bytes > limit:
                self._refuse(RequestRefusal(431, f"request head larger than {limit} bytes"))
                return
            counted = self._head_bytes + HEADER_COST_BYTES * len(self._headers)
            self._buffered.used_bytes += counted - self._head_counted_bytes
            self._head_counted_bytes = counted
            if self._buffered.used_bytes > self._buffered.limit_bytes:
                self._refuse(OVERLOADED)
            return
        self._quiet_bytes = 0 if self.body_bytes != body_bytes else self._quiet_bytes + len(data)
        if self._quiet_bytes > limit:
            self._refuse(RequestRefusal(431, f"trailers larger than {limit} bytes"))

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/1.1\r\n" % (self._parser.get_method(), self.target)]
        lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in _UPGRADE_HEADERS]
        return b"".join(lines) + b"\r\n"

    def forget(self) -> None:
        """Drop the request that is arriving and the events that have not been fetched."""
        counted_bytes = self.body_bytes + self._reserved_bytes + self._head_counted_bytes
        for event in self._events:
            if isinstance(event, Request):
                counted_bytes += event.size_bytes
        self._buffered.used_bytes -= counted_bytes
        self._events.clear()
        self.long_body = None
        self.arriving = None
        self._body = []
        self.body_bytes = self._reserved_bytes = self._head_counted_bytes = 0
        self.in_message = False

    # -- a long body --------------------------------------------------------------------------------------

    def begin_long_body(self) -> None:
        """Let the rest of the arriving body bypass the HTTP parser if it is long.

        `long_body` then has the buffer for it; `receive_long_body` counts what is put there. Only for a request that
        will be served at once: until its body is complete no other bytes of the connection can be parsed.
        """
        if self.arriving is not None and self._body_length - self.body_bytes >= LONG_BYTES:
            self._begin_long_body(self.arriving, None)

    def _begin_long_body(self, arriving: Request, piece: memoryview | None) -> None:
        arriving.keep_alive = arriving.is_http_11 and self._parser.should_keep_alive()
        self._parser = httptools.HttpRequestParser(self)  # for what follows the body
        pieces: list[bytes | bytearray | memoryview] = list(self._body)
        self._body = []
        if piece is not None:
            pieces.append(piece)
            self._buffered.used_bytes += len(piece)
            self.body_bytes += len(piece)
        if self.body_bytes == self._body_length:
            self._complete(arriving, b"".join(pieces))
            return
        self.long_body = LongBody(self._body_length, pieces)
        self._reserve(self.long_body)

    def receive_long_body(self, size_bytes: int) -> None:
        """Count `size_bytes` more of the arriving body, which are in the buffer of `long_body`."""
        long_body, arriving = self.long_body, self.arriving
        if long_body is None or arriving is None:
            return
        long_body.received_bytes += size_bytes
        self._buffered.used_bytes += size_bytes
        self.body_bytes += size_bytes
        self._reserve(long_body)
        if self.body_bytes == long_body.length_bytes:
            self.long_body = None
            self._complete(arriving, long_body.buffer)

    def _reserve(self, long_body: LongBody) -> None:
        """Count all of a long body's buffer, as all of it takes memory."""
        reserved_bytes = len(long_body.buffer) - self.body_bytes
        self._buffered.used_bytes += reserved_bytes - self._reserved_bytes
        self._reserved_bytes = reserved_bytes
        if reserved_bytes and self._buffered.used_bytes > self._buffered.limit_bytes:
            self._refuse(OVERLOADED)

    # -- callbacks of httptools ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
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
        if self.arriving is not None:  # a trailer, which must not count as a header
            return
        if len(self._headers) >= MAX_HEADERS:
            self._stop(RequestRefusal(431, f"more than {MAX_HEADERS} headers"))
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        limit = self._max_header_bytes
        if self._head_bytes > limit:
            # The bytes read may include some of the body: measure the head itself.
            size = len(self.target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > limit:
                self._stop(RequestRefusal(431, f"request head larger than {limit} bytes"))
        if parser.should_upgrade():
            return  # httptools stops after the head: see `receive`
        is_http_11 = parser.get_http_version() == "1.1"
        request = Request(parser.get_method(), self.target, self._headers, is_http_11)
        self.arriving = request
        self._head_bytes = 0
        if self._head_counted_bytes:
            self._buffered.used_bytes -= self._head_counted_bytes
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
        refusal = self._gate.check_head(request)
        if refusal is not None:
            self._stop(refusal)
        self._body_length = length
        self._check_size(request, length, length)
        if expects:
            self._events.append(CONTINUE_EXPECTED)

    def on_body(self, body: bytes) -> None:
        size = len(body)
        arriving = self.arriving
        assert arriving is not None
        self._check_size(arriving, self.body_bytes + size, size)
        self.body_bytes += size
        self._buffered.used_bytes += size
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
            return  # its head is parsed again without the upgrade
        body, self._body = self._body, []
        request.keep_alive = request.is_http_11 and self._parser.should_keep_alive()
        self._complete(request, body[0] if len(body) == 1 else b"".join(body))

    def _complete(self, request: Request, body: bytes | bytearray) -> None:
        self.arriving = None
        self.in_message = False
        self._head_bytes = 0
        request.body = body
        request.size_bytes = self.body_bytes
        self.body_bytes = 0
        self._events.append(request)

    # -- refusals -----------------------------------------------------------------------------------------

    def _refuse(self, refusal: RequestRefusal) -> None:
        self._is_refused = True
        self._events.append(refusal)

    def _stop(self, refusal: RequestRefusal) -> None:
        """Refuse from inside a callback of httptools."""
        self._refuse(refusal)
        raise _RefusedError

    def _check_size(self, request: Request, body_bytes: int, more_bytes: int) -> None:
        """Refuse a body of `body_bytes` that is too large, or `more_bytes` for which no memory is left."""
        limit = request.max_body_bytes
        if body_bytes > limit:
            if not limit:
                self._stop(self._gate.refuse_body(request))
            self._stop(RequestRefusal(413, f"request body larger than {limit} bytes"))
        if self._buffered.used_bytes + more_bytes > self._buffered.limit_bytes:
            self._stop(OVERLOADED)
