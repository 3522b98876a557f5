"""A client's connection: HTTP/1.1 in (httptools), one request served at a time, replies out.

Pipelined requests wait their turn. Limits and deadlines are checked here, so that nothing behind this
module sees a request that is malformed, too large or too slow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import httptools

from sglang_ext_router import replies

MAX_PIPELINED = 32


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


class _RefusedError(Exception):
    """Raised inside a parser callback to stop parsing; the reply is already written."""


class ClientConnection(asyncio.Protocol):
    """Parses, queues pipelined requests, hands one at a time to `dispatch`, which returns its Call."""

    def __init__(
        self,
        dispatch: Callable[[ClientConnection, Request], Call | None],
        connections: set[ClientConnection],
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._dispatch = dispatch
        self._connections = connections
        self._limits = limits
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Request] = deque()
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
        self._is_reading = True
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
        if self.call is not None:
            self.call.pause()

    def resume_writing(self) -> None:
        if self.call is not None:
            self.call.resume()

    def data_received(self, data: bytes) -> None:
        if self._stopped:
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Served as plain HTTP/1.1; what follows could be another protocol, so it is not read.
            self._stopped = True
            if self.request is None:
                self.close()
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

    # -- parser callbacks -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._body = []
        self._body_bytes = 0
        self._in_message = True
        self._head_done = False

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._head_done = True
        # The first read may hold body too; only a head that was really that large is refused.
        size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > self._limits.max_header_bytes:
            self._stop(431, f"request head larger than {self._limits.max_header_bytes} bytes")
        self._head_bytes = 0
        expects = False
        hosts = 0
        for name, value in self._headers:
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
        self._in_message = False
        self._head_done = False
        self._head_bytes = 0
        self._since_s = 0.0
        parser = self._parser
        body = self._body
        request = Request(
            parser.get_method(),
            self._target,
            self._headers,
            body[0] if len(body) == 1 else b"".join(body),
            parser.should_keep_alive(),
            parser.get_http_version() == "1.1",
        )
        self._body = []
        if self.request is None:
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
        call = self._dispatch(self, request)
        if self.request is request:  # not answered at once
            self.call = call

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Answer the current request whole and go on to the next."""
        request = self.request
        keep_alive = request is not None and request.keep_alive and not self._is_draining
        send_body = request is None or request.method != b"HEAD"
        self.write(replies.complete(status, body, content_type, extra, keep_alive, send_body))
        self.finish(keep_alive)

    def respond_error(self, status: int, message: str, param: str | None = None, extra: bytes = b"") -> None:
        self.respond(status, replies.error_json(status, message, param), extra=extra)

    def finish(self, keep_alive: bool) -> None:
        """The reply to the current request is written; serve the next one or close."""
        self.call = None
        self.request = None
        if not keep_alive or self._is_draining or self._stopped:
            self.close()
            return
        self._idle_since_s = self._loop.time()
        if self._pending:
            # From the loop, not from here: a long pipeline must not grow the stack.
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self.request is not None or not self._pending or self.transport.is_closing():
            return
        request = self._pending.popleft()
        self._pending_bytes -= len(request.body)
        if not self._is_reading and not self._stopped:
            self._is_reading = True
            self.transport.resume_reading()
        self._serve(request)

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may stay open after the current reply."""
        return self.request is not None and self.request.keep_alive and not self._is_draining

    def refuse(self, status: int, message: str) -> None:
        """Answer a request that cannot be parsed, behind whatever is still being served, and close."""
        self._stopped = True
        self._in_message = False
        self._since_s = 0.0
        if self.request is not None:
            # A reply is under way: it goes first; the bad request only costs the connection afterwards.
            self._pending.clear()
            self.request.keep_alive = False
            return
        body = replies.error_json(status, message)
        self.write(replies.complete(status, body, b"application/json", b"", False, True))
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
        if self._since_s:
            limit_s = limits.body_timeout_s if self._head_done else limits.header_timeout_s
            if now_s - self._since_s > limit_s:
                self.refuse(408, f"request not complete after {limit_s:g} s")
        elif self.request is None and now_s - self._idle_since_s > limits.keep_alive_timeout_s:
            self.close()
