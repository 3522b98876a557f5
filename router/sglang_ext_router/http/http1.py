"""A client's connection: requests in (`RequestParser`), one served at a time, replies out.

Pipelined requests wait their turn. Deadlines are checked here, so that nothing behind this module sees a request that
comes too slowly.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from sglang_ext_router.http import replies
from sglang_ext_router.http.client_requests import HEADER_COST_BYTES, OVERLOADED, Clients, Request, RequestRefusal
from sglang_ext_router.http.request_parser import PARSED_AT_ONCE_BYTES, RequestParser
from sglang_ext_router.http.unread_replies import ReadingWatch

MAX_PIPELINED = 32
LAST_REQUEST_S = 1.0  # for what a client sends before it sees the connection close
LINGER_S = 5.0  # for a refused client that still sends to read why


class Call(Protocol):
    """What serves a request; told when the client leaves or its socket fills up."""

    def on_client_gone(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


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
        self._parser = RequestParser(self, clients, loop)
        self._pending: deque[Request | RequestRefusal] = deque()
        self._pending_bytes = 0
        self._held = b""  # came while the pipeline was full, not parsed yet
        self._buffered_bytes = 0  # of this connection: the request being served, those that wait, what is arriving
        self._idle_since_s = loop.time()
        self._linger_until_s = 0.0
        self._is_reading = True
        self._is_write_paused = False
        self.is_stopped = False  # nothing more is parsed from this client
        self._is_draining = False
        self._has_announced_close = False  # by the head of the current reply
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
            self.is_stopped = True
            body = replies.error_json(503, "too many connections; try again later")
            self.write(replies.complete(503, body, b"application/json", b"retry-after: 1\r\n", False, True))
            self.transport.close()
            if self._reading.is_tls:
                self._loop.call_later(LINGER_S, self.transport.abort)  # nothing sweeps this one
            return
        clients.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_stopped = True
        self._clients.open.discard(self)
        self._forget_received()
        self.count_buffered(-self._buffered_bytes)  # the request being served
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
        if self.is_stopped:
            return
        parser = self._parser
        if self._held:
            self._hold(data)
        elif len(data) <= PARSED_AT_ONCE_BYTES:
            parser.feed(data)
            if parser.arriving is not None and self._is_next_to_serve():
                parser.receive_if_long()
        else:
            self._parse_slowly(data)
        if parser.arriving is not None and self.request is not None and self._is_pipeline_full:
            self._pause_reading()

    def _parse_slowly(self, data: bytes) -> None:
        """Parse piece by piece, until enough waits."""
        view = memoryview(data)
        start = 0
        while start < len(data) and not self.is_stopped:
            if self._is_pipeline_full:
                self._hold(data[start:])
                return
            start += self._parser.feed_piece(view[start:], self._is_next_to_serve())

    def _is_next_to_serve(self) -> bool:
        """Whether what arrives will be served once it is whole."""
        return self.request is None and not self._pending and not self.is_stopped

    def receive_by(self, receiver: asyncio.BufferedProtocol | None) -> None:
        """Let a receiver have what comes from the transport; None: no more."""
        transport = self.transport
        if transport.is_closing():
            return
        if self._is_reading:  # uvloop looks at the protocol when reading starts
            transport.pause_reading()
        transport.set_protocol(self if receiver is None else receiver)
        if self._is_reading:
            transport.resume_reading()

    def on_continue_expected(self) -> None:
        """A client waits for leave to send its body."""
        if self.call is None and not self._pending:
            self.write(replies.CONTINUE)

    def on_request(self, request: Request) -> None:
        """A request is whole: serve it, or let it wait its turn."""
        if self.request is None and not self._pending and not self._is_write_paused:
            self._serve(request)
            return
        # One that waits keeps its head too, in many small objects.
        head_bytes = len(request.target) + HEADER_COST_BYTES * len(request.headers)
        head_bytes += sum(len(name) + len(value) for name, value in request.headers)
        self.count_buffered(head_bytes)
        request.size_bytes += head_bytes
        self._pending.append(request)
        self._pending_bytes += request.size_bytes
        if self._is_pipeline_full:
            self._pause_reading()

    # -- what is buffered -------------------------------------------------------------------------------

    def _hold(self, data: bytes) -> None:
        """Keep what may not be parsed yet; little, as reading is paused."""
        if self._clients.buffered_bytes + len(data) > self._limits.max_buffered_bytes:
            self.refuse(OVERLOADED)
            return
        self._held += data
        self.count_buffered(len(data))

    # -- what is buffered -------------------------------------------------------------------------------

    def count_buffered(self, size_bytes: int) -> None:
        """Of this connection so much more, or less, is kept in memory."""
        self._buffered_bytes += size_bytes
        self._clients.buffered_bytes += size_bytes

    @property
    def _is_pipeline_full(self) -> bool:
        """Whether enough waits behind the request being served; the body of the next one counts too."""
        if self.request is None and not self._pending:
            return False
        return len(self._pending) >= MAX_PIPELINED or (
            self._pending_bytes + self._parser.body_bytes > self._limits.max_pipelined_bytes
        )

    def _pause_reading(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def _read_on(self) -> None:
        """Parse what was held, and read again, unless the pipeline is still full."""
        if self.is_stopped or self._is_pipeline_full:
            return
        held, self._held = self._held, b""
        if held:
            self.count_buffered(-len(held))
            self._parse_slowly(held)
        if not self._is_reading and not self._held and not self.is_stopped and not self._is_pipeline_full:
            self._is_reading = True
            if self._parser.since_s:
                self._parser.since_s = self._loop.time()  # it could not be sent until now
            self.transport.resume_reading()

    def _forget_arriving(self) -> None:
        """Drop what has arrived and is no whole request."""
        self._parser.forget()
        self.count_buffered(-len(self._held))
        self._held = b""

    def _forget_received(self) -> None:
        """Drop everything but the request being served."""
        self._forget_arriving()
        self._pending.clear()
        self.count_buffered(-self._pending_bytes)
        self._pending_bytes = 0

    # -- serving ----------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        self.request = request
        self._dispatch(self, request)

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Answer the current request whole and go on to the next."""
        request = self.request
        keep_alive = self.keeps_alive
        self._has_announced_close = not keep_alive
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
            self.count_buffered(-request.size_bytes)

    def finish(self, keep_alive: bool) -> None:
        """The reply to the current request is written; serve the next one or close.

        A connection whose client does not know yet that it closes stays open for a moment: its next request may be on
        its way.
        """
        has_announced_close, self._has_announced_close = self._has_announced_close, False
        self._end_request()
        if not keep_alive and has_announced_close:
            self.close()
        elif self._pending or not self._is_reading:
            self._loop.call_soon(self._next)  # not from here: a long pipeline must not grow the stack
        elif self.is_stopped:
            self.close()
        else:
            self._idle_since_s = self._loop.time()
            if self._is_draining:
                self._close_soon()

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
        if self._is_draining and not self._pending and not self._is_serving():
            self._close_soon()

    def _is_serving(self) -> bool:
        """Asked anew: a type checker, and what it compiles, take `request` for what it was before a call."""
        return self.request is not None

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection may stay open after the current reply."""
        request = self.request
        if request is None or not request.keep_alive:
            return False
        is_ending = self._is_draining or self.is_stopped or self._clients.is_ending
        return bool(self._pending) or bool(self._held) or not is_ending

    @property
    def reply_headers(self) -> bytes:
        """Header lines of the head of the current reply, which is written now."""
        request = self.request
        self._has_announced_close = not self.keeps_alive
        line = b"connection: close\r\n" if self._has_announced_close else b""
        return line if request is None or not request.reply_headers else line + request.reply_headers

    def refuse(self, refusal: RequestRefusal) -> None:
        """Answer what is not served, behind whatever is still being served, and close."""
        self.is_stopped = True
        self._forget_arriving()
        if self.request is not None or self._pending:
            self._pending.append(refusal)
        else:
            self._write_refusal(refusal)

    def _write_refusal(self, refusal: RequestRefusal) -> None:
        self._clients.count_refusal(refusal.status)
        if self._clients.access_log is not None:
            self._clients.access_log.add_refusal(self.transport, self._parser.target, refusal.status, refusal.message)
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
        self.is_stopped = True
        self._forget_received()
        if not self.transport.is_closing():  # asyncio's TLS does not bear a second time
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection so that the client sees the reply as incomplete."""
        self._end_request()
        self.is_stopped = True
        self._forget_received()
        self.transport.abort()

    def drain(self) -> None:
        """Serve what has been received, then close."""
        self._is_draining = True
        if self.request is None and not self._pending:
            self._close_soon()

    def _close_soon(self) -> None:
        """Close unless a request comes meanwhile; that is served, and its reply says that the connection closes."""
        self._loop.call_later(LAST_REQUEST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._is_serving() and not self._parser.in_message and not self._pending:
            self.close()

    def sweep(self, now_s: float) -> None:
        """Enforce the deadlines; called about once a second."""
        limits = self._limits
        if self._reading.is_stalled(now_s, self._is_serving(), self._is_draining):
            self.is_stopped = True
            self.transport.abort()  # a request that is being served learns of it when the connection is lost
        elif self._linger_until_s:
            if now_s > self._linger_until_s:
                self.close()
        elif self._parser.since_s and self._is_reading:
            limit_s = limits.header_timeout_s if self._parser.arriving is None else limits.body_timeout_s
            if now_s - self._parser.since_s > limit_s:
                self.refuse(RequestRefusal(408, f"request not complete after {limit_s:g} s"))
        elif self.request is None and not self._pending and now_s - self._idle_since_s > limits.keep_alive_timeout_s:
            self.close()
