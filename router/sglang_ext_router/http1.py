"""A client's connection: HTTP/1.1 in (httptools), one request served at a time, replies out.

Pipelined requests wait their turn. Limits and deadlines are checked here, so that nothing behind this
module sees a request that is malformed, too large or too slow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import httptools

from sglang_ext_router import replies

MAX_PIPELINED = 32
_UPGRADE_HEADERS = frozenset({b"upgrade", b"connection", b"http2-settings"})
LINGER_S = 5.0  # for a refused client that still sends to read why


class Request:
    """One parsed request. Header names are lower case."""

    __slots__ = ("body", "headers", "is_http_11", "keep_alive", "method", "path", "target")

    def __init__(
        self,
        method: bytes,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        keep_alive: bool,
        is_http_11: bool,
    ) -> None:
        self.method = method
        self.target = target
        end = target.find(b"?")
        self.path = target if end < 0 else target[:end]
        self.headers = headers
        self.body = body
        self.keep_alive = keep_alive
        self.is_http_11 = is_http_11

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None


class Call(Protocol):
    """What serves a request; told when the client leaves or its socket fills up."""

    def on_client_gone(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Sizes in bytes, times in seconds."""

    max_header_bytes: int
    max_body_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_timeout_s: float


class _ParseRefusal(NamedTuple):
    """A reply to what could not be parsed, which waits for the replies before it."""

    status: int
    message: str


class _RefusedError(Exception):
    """Raised inside a parser callback to stop parsing; the reply is already written."""


class ClientConnection(asyncio.Protocol):
    """Parses, queues pipelined requests, hands one at a time to `dispatch`.

    That one answers at once, or puts what serves the request into `call`, which may hand it on.
    """

    def __init__(
        self,
        dispatch: Callable[[ClientConnection, Request], None],
        connections: set[ClientConnection],
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._dispatch = dispatch
        self._connections = connections
        self._limits = limits
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request | _ParseRefusal] = deque()
        self._pending_bytes = 0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._in_message = False
        self._head_done = False
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
        self.write: Callable[[bytes], None]

    # -- transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.write = self.transport.write
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stopped = True
        self._connections.discard(self)
        self._pending.clear()
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
        if not self._head_done:
            self._head_bytes += len(data)
        body_bytes = self._body_bytes
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _RefusedError):
                raise
            return
        except httptools.HttpParserError:
            self.refuse(400, "malformed HTTP request")
            return
        if self._in_message:
            if not self._head_done and self._head_bytes > self._limits.max_header_bytes:
                self.refuse(431, f"request head larger than {self._limits.max_header_bytes} bytes")
            elif not self._since_s:
                self._since_s = self._loop.time()
            if self._head_done:
                self._quiet_bytes = 0 if self._body_bytes != body_bytes else self._quiet_bytes + len(data)
                if self._quiet_bytes > self._limits.max_header_bytes:
                    self.refuse(431, f"trailers larger than {self._limits.max_header_bytes} bytes")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Serve the request as HTTP/1.1: read its head again without the wish for another protocol."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refuse(405, "CONNECT is not served")
            return
        lines = [b"%b %b HTTP/1.1\r\n" % (method, self._target)]
        lines += [b"%b: %b\r\n" % pair for pair in self._headers if pair[0] not in _UPGRADE_HEADERS]
        self._parser = httptools.HttpRequestParser(self)
        self._head_bytes = 0
        self.data_received(b"".join(lines) + b"\r\n" + rest)

    # -- parser callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._body = []
        self._body_bytes = 0
        self._quiet_bytes = 0
        self._in_message = True
        self._head_done = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:  # a trailer: it must not pass for a header
            return
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_done = True
        if self._head_bytes > self._limits.max_header_bytes:
            # What was read may hold body too; only a head that is really that large is refused.
            size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if size > self._limits.max_header_bytes:
                self._stop(431, f"request head larger than {self._limits.max_header_bytes} bytes")
        self._head_bytes = 0
        expects = False
        hosts = 0
        for name, value in self._headers:
            if name == b"content-length" and len(value) > 20:
                self._stop(400, "malformed Content-Length")
            if name == b"content-length" and int(value) > self._limits.max_body_bytes:
                self._stop(413, f"request body larger than {self._limits.max_body_bytes} bytes")
            elif name == b"expect" and value.lower() == b"100-continue":
                expects = True
            elif name == b"host":
                hosts += 1
        if hosts > 1:
            self._stop(400, "more than one Host header")
        if expects and self.call is None and not self._pending:
            self.write(replies.CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._stop(413, f"request body larger than {self._limits.max_body_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        parser = self._parser
        if parser.should_upgrade():
            return  # the parser stops behind the head: see _decline_upgrade
        self._in_message = False
        self._head_done = False
        self._head_bytes = 0
        self._since_s = 0.0
        body = self._body
        is_http_11 = parser.get_http_version() == "1.1"
        request = Request(
            parser.get_method(),
            self._target,
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
            is_http_11 and parser.should_keep_alive(),
            is_http_11,
        )
        self._body = []
        if self.request is None and not self._pending and not self._is_write_paused:
            self._serve(request)
            return
        self._pending.append(request)
        self._pending_bytes += len(request.body)
        if len(self._pending) >= MAX_PIPELINED or self._pending_bytes > self._limits.max_body_bytes:
            self._is_reading = False
            self.transport.pause_reading()

    def _stop(self, status: int, message: str) -> None:
        self.refuse(status, message)
        raise _RefusedError

    # -- serving ----------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        self.request = request
        self._dispatch(self, request)

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Answer the current request whole and go on to the next."""
        request = self.request
        keep_alive = self.keeps_alive
        send_body = request is None or request.method != b"HEAD"
        self.write(replies.complete(status, body, content_type, extra, keep_alive, send_body))
        self.finish(keep_alive)

    def respond_error(self, status: int, message: str, param: str | None = None, extra: bytes = b"") -> None:
        self.respond(status, replies.error_json(status, message, param), extra=extra)

    def finish(self, keep_alive: bool) -> None:
        """The reply to the current request is written; serve the next one or close."""
        self.call = None
        self.request = None
        if not keep_alive:
            self.close()
        elif self._pending:
            # From the loop, not from here: a long pipeline must not grow the stack.
            self._loop.call_soon(self._next)
        elif self._stopped or (self._is_draining and not self._in_message):
            self.close()
        else:
            self._idle_since_s = self._loop.time()

    def _next(self) -> None:
        if self.request is not None or not self._pending or self._is_write_paused or self.transport.is_closing():
            return
        request = self._pending.popleft()
        if isinstance(request, _ParseRefusal):
            self._write_refusal(request)
            return
        self._pending_bytes -= len(request.body)
        if not self._is_reading and not self._stopped:
            self._is_reading = True
            self.transport.resume_reading()
        self._serve(request)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may stay open after the current reply."""
        request = self.request
        if request is None or not request.keep_alive:
            return False
        return bool(self._pending) or not (self._is_draining or self._stopped)

    def refuse(self, status: int, message: str) -> None:
        """Answer a request that cannot be parsed, behind whatever is still being served, and close."""
        self._stopped = True
        self._in_message = False
        self._since_s = 0.0
        refusal = _ParseRefusal(status, message)
        if self.request is not None or self._pending:
            self._pending.append(refusal)
        else:
            self._write_refusal(refusal)

    def _write_refusal(self, refusal: _ParseRefusal) -> None:
        body = replies.error_json(refusal.status, refusal.message)
        self.write(replies.complete(refusal.status, body, b"application/json", b"", False, True))
        # Closing while the client still sends would reset the connection, and the reply be lost with it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger_until_s = self._loop.time() + LINGER_S
        else:
            self.close()

    def close(self) -> None:
        self._stopped = True
        self._pending.clear()
        self.transport.close()

    def abort(self) -> None:
        """Cut the connection so that the client sees the reply as incomplete."""
        self.call = None
        self.request = None
        self._stopped = True
        self._pending.clear()
        self.transport.abort()

    def drain(self) -> None:
        """Serve what has been received, then close."""
        self._is_draining = True
        if self.request is None and not self._in_message and not self._pending:
            self.close()

    def sweep(self, now_s: float) -> None:
        """Enforce the deadlines; called about once a second."""
        limits = self._limits
        if self._linger_until_s:
            if now_s > self._linger_until_s:
                self.close()
        elif self._since_s and self._is_reading:
            limit_s = limits.body_timeout_s if self._head_done else limits.header_timeout_s
            if now_s - self._since_s > limit_s:
                self.refuse(408, f"request not complete after {limit_s:g} s")
        elif self.request is None and not self._pending and now_s - self._idle_since_s > limits.keep_alive_timeout_s:
            self.close()
