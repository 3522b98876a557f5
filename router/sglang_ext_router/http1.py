"""A client's connection: HTTP/1.1 in (httptools), one request served at a time, replies out.

Pipelined requests wait their turn. Limits and deadlines are checked here, so that nothing behind this
module sees a request that is malformed, too large or too slow; whether a request is allowed at all is asked
once its head is here, before any of its body.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from sglang_ext_router import replies
from sglang_ext_router.client_requests import Clients, Request, RequestRefusal
from sglang_ext_router.unread_replies import ReadingWatch

MAX_PIPELINED = 32
PARSED_AT_ONCE_BYTES = 4096  # of what is not known to be body: then it is seen whether the pipeline is full
MAX_HEADERS = 1000
HEADER_COST_BYTES = 200  # of the objects that hold one, beside its text
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})
LINGER_S = 5.0  # for a refused client that still sends to read why


class Call(Protocol):
    """What serves a request; told when the client leaves or its socket fills up."""

    def on_client_gone(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


_OVERLOADED = RequestRefusal(503, "too much is buffered for other requests; try again later", b"retry-after: 1\r\n")


class _RefusedError(Exception):
    """Raised inside a parser callback to stop parsing; the reply is already written."""


class ClientConnection(asyncio.Protocol):
    """Parses, queues pipelined requests, hands one at a time to `dispatch`.

    That one answers at once, or puts what serves the request into `call`, which may hand it on.
    """

    def __init__(
        self,
        dispatch: Callable[[ClientConnection, Request], None],
        clients: Clients,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._dispatch = dispatch
        self._clients = clients
        self._limits = clients.limits
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request | RequestRefusal] = deque()
        self._pending_bytes = 0
        self._held = b""  # came while the pipeline was full, not parsed yet
        self._buffered_bytes = 0  # of this connection: the request being served, those that wait, what is arriving
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._arriving: Request | None = None  # its head is here
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_length = 0  # as announced; 0 for a body in chunks
        self._head_bytes = 0
        self._head_counted_bytes = 0  # of a head that has not arrived whole, among what is buffered
        self._in_message = False
        self._since_s = 0.0  # start of a message that has not arrived whole; 0 when there is none
        self._idle_since_s = loop.time()
        self._quiet_bytes = 0  # since the last piece of a body: chunk sizes and trailers
        self._linger_until_s = 0.0
        self._is_reading = True
        self._is_write_paused = False
        self._stopped = False  # nothing more is parsed from this client
        self._is_draining = False
        self.call: Call | None = None
        self.request: Request | None = None
        self.transport: asyncio.Transport
        self._reading: ReadingWatch
        self.write: Callable[[bytes], None]

    # -- transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.write = self.transport.write
        self._reading = ReadingWatch(self.transport, self._limits.write_timeout_s)
        clients = self._clients
        if len(clients.open) >= self._limits.max_connections:
            clients.refused += 1
            clients.count_refusal(503)
            self._stopped = True
            body = replies.error_json(503, "too many connections; try again later")
            self.write(replies.complete(503, body, b"application/json", b"retry-after: 1\r\n", False, True))
            self.transport.close()
            if self._reading.is_tls:
                self._loop.call_later(LINGER_S, self.transport.abort)  # nothing sweeps this one
            return
        clients.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stopped = True
        self._clients.open.discard(self)
        self._forget_received()
        self._count_buffered(-self._buffered_bytes)  # the request being served
        self.request = None
        call, self.call = self.call, None
        if call is not None:
            call.on_client_gone()

    def pause_writing(self) -> None:
        self._is_write_paused = True
        if self.call is not None:
            self.call.pause()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        if self.call is not None:
            self.call.resume()
        else:
            self._next()

    def data_received(self, data: bytes) -> None:
        if self._stopped:
            return
        if self._held:
            self._hold(data)
        elif len(data) <= PARSED_AT_ONCE_BYTES:
            self._parse(data)
        else:
            self._parse_slowly(data)

    def _parse_slowly(self, data: bytes) -> None:
        """Parse piece by piece: a small piece of what may hold many requests, all that is known to be body."""
        view = memoryview(data)
        start = 0
        while start < len(data) and not self._stopped:
            if self._is_pipeline_full:
                self._hold(data[start:])
                return
            size = PARSED_AT_ONCE_BYTES
            if self._arriving is not None:
                size = max(size, self._body_length - self._body_bytes)
            self._parse(bytes(view[start : start + size]))
            start += size

    def _hold(self, data: bytes) -> None:
        """Keep what may not be parsed yet; little, as reading is paused."""
        if self._clients.buffered_bytes + len(data) > self._limits.max_buffered_bytes:
            self.refuse(_OVERLOADED)
            return
        self._held += data
        self._count_buffered(len(data))

    def _parse(self, data: bytes) -> None:
        while True:
            if self._arriving is None:
                self._head_bytes += len(data)
            body_bytes = self._body_bytes
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._parser.get_method() == b"CONNECT":
                    self.refuse(RequestRefusal(405, "CONNECT is not served", b"allow: GET, HEAD, POST, DELETE\r\n"))
                    return
                # The head again, without the wish for another protocol, and then what is behind it.
                head, rest = self._head_without_upgrade(), data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
                self._head_bytes = 0
                self._parse(head)
                if self._stopped or not rest:
                    return
                data = rest
                continue
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, _RefusedError):
                    raise
                return
            except httptools.HttpParserError:
                self.refuse(RequestRefusal(400, "malformed HTTP request"))
                return
            break
        if not self._in_message:
            return
        limit = self._limits.max_header_bytes
        if not self._since_s:
            self._since_s = self._loop.time()
        if self._arriving is None:
            if self._head_bytes > limit:
                self.refuse(RequestRefusal(431, f"request head larger than {limit} bytes"))
                return
            counted = self._head_bytes + HEADER_COST_BYTES * len(self._headers)
            self._count_buffered(counted - self._head_counted_bytes)
            self._head_counted_bytes = counted
            if self._clients.buffered_bytes > self._limits.max_buffered_bytes:
                self.refuse(_OVERLOADED)
            return
        self._quiet_bytes = 0 if self._body_bytes != body_bytes else self._quiet_bytes + len(data)
        if self._quiet_bytes > limit:
            self.refuse(RequestRefusal(431, f"trailers larger than {limit} bytes"))
        elif self.request is not None and self._is_pipeline_full:
            self._pause_reading()

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/1.1\r\n" % (self._parser.get_method(), self._target)]
        lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in _UPGRADE_HEADERS]
        return b"".join(lines) + b"\r\n"

    # -- parser callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._stopped:
            raise _RefusedError
        self._target = b""
        self._headers = []
        self._body = []
        self._body_bytes = 0
        self._quiet_bytes = 0
        self._in_message = True
        self._arriving = None

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arriving is not None:  # a trailer: it must not pass for a header
            return
        if len(self._headers) >= MAX_HEADERS:
            self._stop(RequestRefusal(431, f"more than {MAX_HEADERS} headers"))
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        limits = self._limits
        if self._head_bytes > limits.max_header_bytes:
            # What was read may hold body too; only a head that is really that large is refused.
            size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > limits.max_header_bytes:
                self._stop(RequestRefusal(431, f"request head larger than {limits.max_header_bytes} bytes"))
        if parser.should_upgrade():
            return  # the parser stops behind the head: see _parse
        is_http_11 = parser.get_http_version() == "1.1"
        request = Request(parser.get_method(), self._target, self._headers, is_http_11)
        self._arriving = request
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
        if expects and self.call is None and not self._pending:
            self.write(replies.CONTINUE)

    def on_body(self, body: bytes) -> None:
        size = len(body)
        arriving = self._arriving
        assert arriving is not None
        self._check_size(arriving, self._body_bytes + size, size)
        self._body_bytes += size
        self._count_buffered(size)
        self._body.append(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        request = self._arriving
        if request is None:
            return  # to be upgraded
        self._arriving = None
        self._in_message = False
        self._head_bytes = 0
        self._since_s = 0.0
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        request.keep_alive = request.is_http_11 and parser.should_keep_alive()
        request.size_bytes = self._body_bytes
        self._body = []
        self._body_bytes = 0
        if self.request is None and not self._pending and not self._is_write_paused:
            self._serve(request)
            return
        # One that waits keeps its head too, in many small objects.
        head_bytes = len(request.target) + HEADER_COST_BYTES * len(request.headers)
        head_bytes += sum(len(name) + len(value) for name, value in request.headers)
        self._count_buffered(head_bytes)
        request.size_bytes += head_bytes
        self._pending.append(request)
        self._pending_bytes += request.size_bytes
        if self._is_pipeline_full:
            self._pause_reading()

    def _stop(self, refusal: RequestRefusal) -> None:
        self.refuse(refusal)
        raise _RefusedError

    # -- what is buffered -------------------------------------------------------------------------------

    def _check_size(self, request: Request, body_bytes: int, more_bytes: int) -> None:
        """Refuse a body of that size, or so much more to buffer."""
        if body_bytes > request.max_body_bytes:
            limit = request.max_body_bytes
            if not limit:
                self._stop(self._clients.gate.refuse_body(request))
            self._stop(RequestRefusal(413, f"request body larger than {limit} bytes"))
        if self._clients.buffered_bytes + more_bytes > self._limits.max_buffered_bytes:
            self._stop(_OVERLOADED)

    def _count_buffered(self, size_bytes: int) -> None:
        self._buffered_bytes += size_bytes
        self._clients.buffered_bytes += size_bytes

    @property
    def _is_pipeline_full(self) -> bool:
        """Whether enough waits behind the request being served; the body of the next one counts too."""
        if self.request is None and not self._pending:
            return False
        return len(self._pending) >= MAX_PIPELINED or (
            self._pending_bytes + self._body_bytes > self._limits.max_pipelined_bytes
        )

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def _read_on(self) -> None:
        """Parse what was held, and read again, unless the pipeline is still full."""
        if self._stopped or self._is_pipeline_full:
            return
        held, self._held = self._held, b""
        if held:
            self._count_buffered(-len(held))
            self._parse_slowly(held)
        if not self._is_reading and not self._held and not self._stopped and not self._is_pipeline_full:
            self._is_reading = True
            if self._since_s:
                self._since_s = self._loop.time()  # it could not be sent until now
            self.transport.resume_reading()

    def _forget_arriving(self) -> None:
        """Drop what has arrived and is no whole request."""
        self._count_buffered(-(self._body_bytes + len(self._held) + self._head_counted_bytes))
        self._arriving = None
        self._body = []
        self._held = b""
        self._body_bytes = self._head_counted_bytes = 0
        self._in_message = False
        self._since_s = 0.0

    def _forget_received(self) -> None:
        """Drop everything but the request being served."""
        self._forget_arriving()
        self._pending.clear()
        self._count_buffered(-self._pending_bytes)
        self._pending_bytes = 0

    # -- serving ----------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        self.request = request
        self._dispatch(self, request)

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Answer the current request whole and go on to the next."""
        request = self.request
        keep_alive = self.keeps_alive
        send_body = True
        if request is not None:
            send_body = request.method != b"HEAD"
            extra += request.reply_headers
        self.write(replies.complete(status, body, content_type, extra, keep_alive, send_body))
        self.finish(keep_alive)

    def respond_error(
        self, status: int, message: str, param: str | None = None, extra: bytes = b"", code: str | None = None
    ) -> None:
        self.respond(status, replies.error_json(status, message, param, code), extra=extra)

    def _end_request(self) -> None:
        request, self.request = self.request, None
        self.call = None
        self._reading.note_reply()
        if request is not None:
            self._count_buffered(-request.size_bytes)

    def finish(self, keep_alive: bool) -> None:
        """The reply to the current request is written; serve the next one or close."""
        self._end_request()
        if not keep_alive:
            self.close()
        elif self._pending or not self._is_reading:
            self._loop.call_soon(self._next)  # not from here: a long pipeline must not grow the stack
        elif self._stopped or (self._is_draining and not self._in_message):
            self.close()
        else:
            self._idle_since_s = self._loop.time()

    def _next(self) -> None:
        if self.request is not None or self._is_write_paused or self.transport.is_closing():
            return
        if self._pending:
            request = self._pending.popleft()
            if isinstance(request, RequestRefusal):
                self._write_refusal(request)
                return
            self._pending_bytes -= request.size_bytes
            self._serve(request)
        self._read_on()
        if self._is_draining and not self._in_message and not self._pending and not self._is_serving():
            self.close()

    def _is_serving(self) -> bool:
        """Asked anew: a type checker, and what it compiles, take `request` for what it was before a call."""
        return self.request is not None

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may stay open after the current reply."""
        request = self.request
        if request is None or not request.keep_alive:
            return False
        return bool(self._pending) or bool(self._held) or not (self._is_draining or self._stopped)

    @property
    def reply_headers(self) -> bytes:
        """Header lines that the current reply gets on this connection."""
        request = self.request
        line = b"" if self.keeps_alive else b"connection: close\r\n"
        return line if request is None or not request.reply_headers else line + request.reply_headers

    def refuse(self, refusal: RequestRefusal) -> None:
        """Answer what is not served, behind whatever is still being served, and close."""
        self._stopped = True
        self._forget_arriving()
        if self.request is not None or self._pending:
            self._pending.append(refusal)
        else:
            self._write_refusal(refusal)

    def _write_refusal(self, refusal: RequestRefusal) -> None:
        self._clients.count_refusal(refusal.status)
        if self._clients.access_log is not None:
            self._clients.access_log.add_refusal(self.transport, self._target, refusal.status, refusal.message)
        body = replies.error_json(refusal.status, refusal.message)
        self.write(replies.complete(refusal.status, body, b"application/json", refusal.extra, False, True))
        # Closing while the client still sends would reset the connection, and the reply be lost with it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if not self._is_reading:
            self._is_reading = True
            self.transport.resume_reading()
        self._linger_until_s = self._loop.time() + LINGER_S

    def close(self) -> None:
        self._stopped = True
        self._forget_received()
        if not self.transport.is_closing():  # asyncio's TLS does not bear a second time
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection so that the client sees the reply as incomplete."""
        self._end_request()
        self._stopped = True
        self._forget_received()
        self.transport.abort()

    def drain(self) -> None:
        """Serve what has been received, then close."""
        self._is_draining = True
        if self.request is None and not self._in_message and not self._pending:
            self.close()

    def sweep(self, now_s: float) -> None:
        """Enforce the deadlines; called about once a second."""
        limits = self._limits
        if self._reading.is_stalled(now_s, self._is_serving(), self._is_draining):
            self._stopped = True
            self.transport.abort()  # a request that is being served learns of it when the connection is lost
        elif self._linger_until_s:
            if now_s > self._linger_until_s:
                self.close()
        elif self._since_s and self._is_reading:
            limit_s = limits.header_timeout_s if self._arriving is None else limits.body_timeout_s
            if now_s - self._since_s > limit_s:
                self.refuse(RequestRefusal(408, f"request not complete after {limit_s:g} s"))
        elif self.request is None and not self._pending and now_s - self._idle_since_s > limits.keep_alive_timeout_s:
            self.close()
