"""A client's connection: drives the parser, serves one request at a time, writes the replies.

Pipelined requests wait for their turn. Time limits are enforced here, so that a request is only seen elsewhere when it
has arrived whole and in time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from sglang_ext_router.http import replies
from sglang_ext_router.http.request_parser import (
    HEADER_COST_BYTES,
    OVERLOADED,
    PARSED_AT_ONCE_BYTES,
    BufferedBytes,
    ConnectionLimits,
    Gate,
    LongBody,
    Request,
    RequestParser,
    RequestRefusal,
)
from sglang_ext_router.http.unread_replies import ReadingWatch
from sglang_ext_router.observe.access_log import AccessLog

MAX_PIPELINED = 32
LAST_REQUEST_S = 1.0  # how long a request is accepted that a client sends before it sees the connection close
LINGER_S = 5.0  # how long a refused client that still sends may take to read the reason


class Call(Protocol):
    """Serves a request; called when the client leaves, and when its socket fills up and empties."""

    def on_client_gone(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Clients:
    """The open connections at one port of a router process, and the memory that their requests take."""

    __slots__ = ("access_log", "buffered", "gate", "is_ending", "limits", "open", "refusals", "refused")

    def __init__(self, gate: Gate, limits: ConnectionLimits, access_log: AccessLog | None = None) -> None:
        self.access_log = access_log
        self.gate = gate
        self.limits = limits
        self.open: set[ClientConnection] = set()
        self.buffered = BufferedBytes(limits.max_buffered_bytes)
        self.is_ending = False  # each connection closes after its next reply
        self.refused = 0  # connections beyond `max_connections`
        self.refusals: dict[str, int] = {}  # status → requests refused by their head, or incomplete

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes of requests that are received, wait, or are served."""
        return self.buffered.used_bytes

    def count_refusal(self, status: int) -> None:
        """Count a refused connection, or a refused request, which ends its connection."""
        key = str(status)
        self.refusals[key] = self.refusals.get(key, 0) + 1


class ClientConnection(asyncio.Protocol):
    """Queues the requests of one connection and hands one at a time to `dispatch`.

    `dispatch` responds at once, or sets `call` to what serves the request.
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
        self._buffered = clients.buffered
        self._loop = loop
        self._parser = RequestParser(clients.gate, clients.limits.max_header_bytes, clients.buffered)
        self._receiver: BodyReceiver | None = None  # has the transport's bytes, of a long body
        self._arriving_since_s = 0.0  # when the arriving request began; 0 when there is none
        self._pending: deque[Request | RequestRefusal] = deque()
        self._pending_bytes = 0
        self._held = b""  # received while the pipeline was full, not parsed yet
        self._idle_since_s = loop.time()
        self._linger_until_s = 0.0
        self._is_reading = True
        self._is_write_paused = False
        self.is_stopped = False  # nothing more is parsed from this client
        self._is_draining = False
        self._has_announced_close = False  # in the head of the current reply
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
        request, self.request = self.request, None
        if request is not None:
            self._buffered.used_bytes -= request.size_bytes
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
            parser.receive(data)
            self._handle_events()
            if parser.arriving is not None and self._is_next_to_serve():
                parser.begin_long_body()
                self._handle_events()
        else:
            self._parse_slowly(data)
        if parser.arriving is not None and self.request is not None and self._is_pipeline_full:
            self._pause_reading()

    def _parse_slowly(self, data: bytes) -> None:
        """Parse piece by piece until the pipeline is full."""
        view = memoryview(data)
        start = 0
        while start < len(data) and not self.is_stopped:
            if self._is_pipeline_full:
                self._hold(data[start:])
                return
            start += self._parser.receive_piece(view[start:], self._is_next_to_serve())
            self._handle_events()

    def _is_next_to_serve(self) -> bool:
        """Return whether the arriving request will be served as soon as it is complete."""
        return self.request is None and not self._pending and not self.is_stopped

    def receive_long_body(self, body: LongBody, size_bytes: int) -> None:
        """Handle `size_bytes` that the transport has put into the buffer of a long body."""
        if self._parser.long_body is body:
            self._parser.receive_long_body(size_bytes)
            self._handle_events()

    def _handle_events(self) -> None:
        """Act on what the parser has found in the bytes it was given last."""
        parser = self._parser
        if self._receiver is not None and parser.long_body is None:
            self._receive_by(None)
        while not self.is_stopped:
            event = parser.next_event()
            if event is None:
                break
            if isinstance(event, Request):
                self._arriving_since_s = 0.0
                self._queue(event)
            elif isinstance(event, RequestRefusal):
                self.refuse(event)
            elif self.call is None and not self._pending:
                self.write(replies.CONTINUE)
        if self.is_stopped:
            self._forget_arriving()
            return
        if not parser.in_message:
            self._arriving_since_s = 0.0
        elif not self._arriving_since_s:
            self._arriving_since_s = self._loop.time()
        if parser.long_body is not None and self._receiver is None:
            self._receive_by(BodyReceiver(self, parser.long_body))

    def _receive_by(self, receiver: BodyReceiver | None) -> None:
        """Direct the transport's bytes to a receiver, or back to this connection."""
        self._receiver = receiver
        transport = self.transport
        if transport.is_closing():
            return
        if self._is_reading:  # uvloop looks at the protocol only when reading starts
            transport.pause_reading()
        transport.set_protocol(self if receiver is None else receiver)
        if self._is_reading:
            transport.resume_reading()

    def _queue(self, request: Request) -> None:
        """Serve a complete request, or let it wait for its turn."""
        if self.request is None and not self._pending and not self._is_write_paused:
            self._serve(request)
            return
        # A waiting request keeps its head too, in many small objects.
        head_bytes = len(request.target) + HEADER_COST_BYTES * len(request.headers)
        head_bytes += sum(len(name) + len(value) for name, value in request.headers)
        self._buffered.used_bytes += head_bytes
        request.size_bytes += head_bytes
        self._pending.append(request)
        self._pending_bytes += request.size_bytes
        if self._is_pipeline_full:
            self._pause_reading()

    # -- flow control -----------------------------------------------------------------------------------

    def _hold(self, data: bytes) -> None:
        """Keep bytes that may not be parsed yet; they are few, as reading is paused."""
        if self._buffered.used_bytes + len(data) > self._buffered.limit_bytes:
            self.refuse(OVERLOADED)
            return
        self._held += data
        self._buffered.used_bytes += len(data)

    @property
    def _is_pipeline_full(self) -> bool:
        """Return whether waiting requests have reached their limits; a body that is arriving counts too."""
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
        """Parse the held bytes and resume reading, unless the pipeline is still full."""
        if self.is_stopped or self._is_pipeline_full:
            return
        held, self._held = self._held, b""
        if held:
            self._buffered.used_bytes -= len(held)
            self._parse_slowly(held)
        if not self._is_reading and not self._held and not self.is_stopped and not self._is_pipeline_full:
            self._is_reading = True
            if self._arriving_since_s:
                self._arriving_since_s = self._loop.time()  # the client could not send the rest until now
            self.transport.resume_reading()

    def _forget_arriving(self) -> None:
        """Drop what has arrived of an incomplete request."""
        self._parser.forget()
        self._arriving_since_s = 0.0
        self._buffered.used_bytes -= len(self._held)
        self._held = b""
        if self._receiver is not None:
            self._receive_by(None)

    def _forget_received(self) -> None:
        """Drop everything but the request being served."""
        self._forget_arriving()
        self._pending.clear()
        self._buffered.used_bytes -= self._pending_bytes
        self._pending_bytes = 0

    # -- serving ----------------------------------------------------------------------------------------

    def _serve(self, request: Request) -> None:
        self.request = request
        self._dispatch(self, request)

    def respond(self, status: int, body: bytes, content_type: bytes = b"application/json", extra: bytes = b"") -> None:
        """Send the whole reply to the current request and go on to the next."""
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
        """Reply to the current request with an error in OpenAI's shape and go on to the next."""
        path = b"" if self.request is None else self.request.path
        self.respond(status, replies.path_error_json(path, status, message, param, code), extra=extra)

    def _end_request(self) -> None:
        request, self.request = self.request, None
        self.call = None
        self._reading.on_reply()
        if request is not None:
            self._buffered.used_bytes -= request.size_bytes

    def finish(self, keep_alive: bool) -> None:
        """Serve the next request or close, now that the reply to the current one is written.

        A connection stays open for a moment if its client does not know yet that it closes: the next request may be
        on its way.
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
        """Return whether a request is being served.

        A function, as the type checker and the compiled code assume that a call leaves `request` as it was.
        """
        return self.request is not None

    @property
    def keeps_alive(self) -> bool:
        """Return whether the connection may stay open after the current reply."""
        request = self.request
        if request is None or not request.keep_alive:
            return False
        is_ending = self._is_draining or self.is_stopped or self._clients.is_ending
        return bool(self._pending) or bool(self._held) or not is_ending

    @property
    def reply_headers(self) -> bytes:
        """Return header lines for the head of the current reply, which the caller writes at once."""
        request = self.request
        self._has_announced_close = not self.keeps_alive
        line = b"connection: close\r\n" if self._has_announced_close else b""
        return line if request is None or not request.reply_headers else line + request.reply_headers

    def refuse(self, refusal: RequestRefusal) -> None:
        """Reply with a refusal after the replies to earlier requests, and close."""
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
        body = replies.path_error_json(self._parser.target, refusal.status, refusal.message)
        self.write(replies.complete(refusal.status, body, b"application/json", refusal.extra, False, True))
        # Closing while the client still sends would reset the connection, and the reply would be lost.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        if not self._is_reading:
            self._is_reading = True
            self.transport.resume_reading()
        self._linger_until_s = self._loop.time() + LINGER_S

    def close(self) -> None:
        """Drop the requests that wait and close once everything written has been sent."""
        self.is_stopped = True
        self._forget_received()
        if not self.transport.is_closing():  # asyncio's TLS fails on a second close
            self.transport.close()

    def abort(self) -> None:
        """Cut the connection so that the client sees the reply as incomplete."""
        self._end_request()
        self.is_stopped = True
        self._forget_received()
        self.transport.abort()

    def drain(self) -> None:
        """Serve the requests that have been received, then close."""
        self._is_draining = True
        if self.request is None and not self._pending:
            self._close_soon()

    def _close_soon(self) -> None:
        """Close unless a request arrives meanwhile; its reply then announces the close."""
        self._loop.call_later(LAST_REQUEST_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if not self._is_serving() and not self._parser.in_message and not self._pending:
            self.close()

    def sweep(self, now_s: float) -> None:
        """Enforce the time limits; called about once a second."""
        limits = self._limits
        if self._reading.is_stalled(now_s, self._is_serving(), self._is_draining):
            self.is_stopped = True
            self.transport.abort()  # `connection_lost` then ends the request that is being served
        elif self._linger_until_s:
            if now_s > self._linger_until_s:
                self.close()
        elif self._arriving_since_s and self._is_reading:
            limit_s = limits.header_timeout_s if self._parser.arriving is None else limits.body_timeout_s
            if now_s - self._arriving_since_s > limit_s:
                self.refuse(RequestRefusal(408, f"request not complete after {limit_s:g} s"))
        elif self.request is None and not self._pending and now_s - self._idle_since_s > limits.keep_alive_timeout_s:
            self.close()


class BodyReceiver(asyncio.BufferedProtocol):
    """Takes the place of a connection as the transport's protocol until a long body is complete."""

    def __init__(self, connection: ClientConnection, body: LongBody) -> None:
        self._connection = connection
        self._body = body

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._body.free_space()

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.receive_long_body(self._body, nbytes)

    def eof_received(self) -> bool | None:
        """Let the transport close; `connection_lost` then informs the connection."""
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
