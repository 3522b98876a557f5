"""Connections to instances: pooled, kept alive, one request at a time each.

A connection parses what comes back only as far as needed: status, start of the body, end of the message.
Once its reply is being relayed, bytes go to the client as they came.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from sglang_ext_router.decide.pd_actions import Leg
from sglang_ext_router.instances.workers import Worker
from sglang_ext_router.request.migration import SentStream

CONNECT_TIMEOUT_S = 5.0
# uvicorn closes a connection that was idle for 5 s; one about to be closed is not used any more.
REUSE_IDLE_S = 4.0
# A kept connection that ends within this time of a request, unanswered, was most likely closing already.
RESEND_WITHIN_S = 1.0
MAX_IDLE_CONNECTIONS = 512
NO_ATTEMPT = -1  # of a call that is no leg of a request
_DECODE = Leg.DECODE
MAX_HELD_BYTES = 1 << 20  # of a reply that is not relayed yet
# A peer that vanished (its machine lost power, a firewall forgot the connection) acknowledges nothing.
UNACKNOWLEDGED_TIMEOUT_MS = 20_000
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 5, 3, 3
_NEVER_S = float("-inf")


class LegOwner(Protocol):
    """Receives the events of a leg. `leg` is the connection; it belongs to the owner until it ends or is aborted."""

    def on_leg_head(self, leg: UpstreamConnection) -> None: ...

    def on_leg_body(self, leg: UpstreamConnection) -> None: ...

    def on_leg_complete(self, leg: UpstreamConnection) -> None: ...

    def on_leg_lost(self, leg: UpstreamConnection) -> None: ...

    def on_leg_stale(self, leg: UpstreamConnection) -> None:
        """A kept connection was closed instead of answered; whether the instance took the request is not known."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to one instance."""

    __slots__ = (
        "_body_before",
        "_head_reported",
        "_is_between_chunks",
        "_is_fresh",
        "_kept",
        "_last_body",
        "_parser",
        "_pool",
        "_request",
        "_request_body",
        "_request_end",
        "_tail",
        "attempt",
        "body_reported",
        "body_started",
        "chunks",
        "has_connected",
        "idle_since_s",
        "is_complete",
        "is_paused",
        "keeps_reply",
        "kind",
        "longest_gap_s",
        "owner",
        "raw",
        "received_s",
        "reply_keeps_alive",
        "reports_body",
        "sent",
        "sent_s",
        "sink",
        "status",
        "transport",
    )

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._request = self._request_end = b""
        self._request_body: memoryview | None = None
        self._is_fresh = True  # has not answered a request yet
        self.transport: asyncio.Transport | None = None
        self.owner: LegOwner | None = None
        self.kind = Leg.PREFILL
        self.attempt = 0
        self.reports_body = False  # whether the owner gets `on_leg_body`
        self.has_connected = False
        self.received_s = _NEVER_S  # when its last bytes came, or reading went on
        self.is_paused = False
        self.idle_since_s = 0.0
        self.sent_s = 0.0
        self.reset()

    def reset(self) -> None:
        self.status = 0
        self.raw = b""  # the reply so far, until it is relayed
        self._body_before = b""  # what came of the body before its end
        self._last_body = b""  # end of what came of the body
        self.chunks = 0  # of a chunked body, whole ones
        self.longest_gap_s = 0.0  # between two pieces of a reply that is relayed
        self._is_between_chunks = False
        self._tail = b""  # end of what was relayed after `raw`
        self.body_started = False
        self.is_complete = False
        self.sink: Callable[[bytes], None] | None = None  # takes the rest of the reply as it comes
        self.sent: SentStream | None = None  # keeps what the sink takes
        self.keeps_reply = False  # the whole reply is in `raw` once it is complete
        self._kept: list[bytes] = []  # what came of it behind the head; joined once, as it may be large
        self.reply_keeps_alive = False
        self._head_reported = False
        self.body_reported = False

    @property
    def worker(self) -> Worker:
        return self._pool.worker

    def send(self, request: bytes, body: memoryview | None, end: bytes) -> None:
        """Send a request now or once connected: one text, or with a long body its head, the body, and what ends it."""
        self._request, self._request_body, self._request_end = request, body, end
        if self.transport is not None:
            self._write(self.transport)

    def _write(self, transport: asyncio.Transport) -> None:
        if self._request_body is None:
            transport.write(self._request)
        else:
            transport.writelines((self._request, self._request_body, self._request_end))
            self._request_body = None

    def abort(self) -> None:
        """Give the leg up: its owner gets no further event."""
        self._take_owner()
        if self.transport is not None:
            self.transport.abort()

    def lose(self) -> None:
        """Its instance does not answer: close the connection, and report the leg as lost."""
        owner = self._take_owner()
        if self.transport is not None:
            self.transport.abort()
        if owner is not None:
            owner.on_leg_lost(self)

    def _take_owner(self) -> LegOwner | None:
        """Take the owner away, which gets no further event, and return it."""
        owner, self.owner = self.owner, None
        if owner is not None:
            self._pool.active.discard(self)
        return owner

    # -- transport --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.has_connected = True
        if self.owner is None:  # aborted while it was connecting
            self.transport.abort()
        else:
            watch_peer(transport.get_extra_info("socket"))
            self._write(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        owner = self.owner
        if owner is None:
            self._pool.discard(self)
            return
        self._take_owner()
        is_stale = not self._is_fresh and not self.raw and self._pool.loop.time() - self.sent_s <= RESEND_WITHIN_S
        if is_stale:
            owner.on_leg_stale(self)
        else:
            owner.on_leg_lost(self)

    def connect_failed(self) -> None:
        owner = self._take_owner()
        if owner is not None:
            owner.on_leg_lost(self)

    def data_received(self, data: bytes) -> None:
        now_s = self._pool.loop.time()
        owner = self.owner
        if owner is None:  # an instance spoke without being asked
            assert self.transport is not None
            self.transport.abort()
            return
        sink = self.sink
        if sink is not None:
            sink(data)
            if self.sent is not None:
                self.sent.keep(data)
            gap_s = now_s - self.received_s
            if gap_s > self.longest_gap_s:
                self.longest_gap_s = gap_s
            self.received_s = now_s
            self._tail = data if len(data) >= 3 else (self._tail + data)[-3:]
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                self.lose()
                return
            if self.is_complete:
                self._end(owner)
            return
        self.received_s = now_s
        if self.keeps_reply and self.status == 200:
            self._kept.append(data)
        else:
            self.raw = self.raw + data if self.raw else data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.lose()
            return
        if self.is_complete and self._kept:
            self.raw = b"".join((self.raw, *self._kept))
            self._kept.clear()
        if self.status and not self._head_reported:
            self._head_reported = True
            owner.on_leg_head(self)
        if self.body_started and not self.body_reported and self.reports_body and self.owner is owner:
            self.body_reported = True
            owner.on_leg_body(self)
        if self.is_complete and self.owner is owner:
            self._end(owner)
        elif self.sink is None and len(self.raw) > MAX_HELD_BYTES and not self.keeps_reply and self.status < 400:
            self.raw = self.raw[-MAX_HELD_BYTES // 2 :]  # a prefill's reply, of which only the end is read

    def eof_received(self) -> bool | None:
        """Let asyncio close the connection: connection_lost reports it to the owner."""
        return None

    def _end(self, owner: LegOwner) -> None:
        self._take_owner()
        self._is_fresh = False
        if self.status == 200 and self.attempt != NO_ATTEMPT:
            self._pool.answered_s = self.received_s
        owner.on_leg_complete(self)
        self._pool.release(self)

    # -- parser callbacks -------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.body_started = True
        self._is_between_chunks = False
        self._body_before = self._last_body
        self._last_body = body if len(body) > 1 else self._last_body[-1:] + body

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True
        self.chunks += 1

    def on_message_complete(self) -> None:
        self.is_complete = True
        self.reply_keeps_alive = self._parser.should_keep_alive()

    # -- backpressure -----------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        self.is_paused = True
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        self.is_paused = False
        self.received_s = self._pool.loop.time()
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def body_so_far(self) -> bytes:
        """The start of a chunked reply's first chunk, as far as it is here."""
        raw = self.raw
        size_line = raw.find(b"\r\n\r\n") + 4
        start = raw.find(b"\r\n", size_line)
        return b"" if start < 0 else raw[start + 2 : start + 66]

    def end_of_body(self) -> bytes:
        """The last two pieces that came of the body: of a stream most likely its last event, and `[DONE]`."""
        return self._body_before + self._last_body if self._body_before else self._last_body

    @property
    def has_all_events(self) -> bool:
        """Return whether the last event of a stream has come; the end of its body may follow."""
        return self._last_body.endswith(b"data: [DONE]\n\n")

    def tail_ends_an_event(self) -> bool:
        """Return whether the relayed bytes end at a chunk border behind a whole event, so that one more event fits."""
        # Behind a chunk there must not even be a part of the next one's size.
        is_at_border = self._is_between_chunks and (self._tail or self.raw).endswith(b"\n\r\n")
        return is_at_border and self._last_body.endswith(b"\n\n")


class UpstreamPool:
    """The connections to one instance; the last one used is used first."""

    def __init__(self, worker: Worker, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext) -> None:
        self.worker = worker
        self._tls = tls if worker.is_tls else None
        self.loop = loop
        self.active: set[UpstreamConnection] = set()  # with a request under way
        self._idle: list[UpstreamConnection] = []
        self._is_closed = False
        self.answered_s = _NEVER_S  # when a request was last answered whole
        self._tasks: set[asyncio.Task[None]] = set()

    def start(
        self,
        owner: LegOwner,
        kind: Leg,
        attempt: int,
        request: bytes,
        on_new_connection: bool,
        body: memoryview | None,
        end: bytes,
    ) -> UpstreamConnection:
        """Send a request; `owner` gets the events of the reply."""
        idle = self._idle
        connection: UpstreamConnection | None = None
        while idle and not on_new_connection:
            candidate = idle.pop()
            assert candidate.transport is not None
            if candidate.transport.is_closing():
                continue
            if self.loop.time() - candidate.idle_since_s > REUSE_IDLE_S:
                candidate.transport.close()
                continue
            connection = candidate
            connection.reset()
            break
        if connection is None:
            connection = UpstreamConnection(self)
            self._connect(connection)
        connection.owner = owner
        connection.kind = kind
        connection.reports_body = kind is _DECODE
        connection.attempt = attempt
        connection.sent_s = self.loop.time()
        self.active.add(connection)
        connection.send(request, body, end)
        return connection

    def _connect(self, connection: UpstreamConnection) -> None:
        task = self.loop.create_task(self._open(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, connection: UpstreamConnection) -> None:
        worker = self.worker
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.loop.create_connection(lambda: connection, worker.host, worker.port, ssl=self._tls)
        except OSError:  # TimeoutError is one
            if not connection.has_connected:
                connection.connect_failed()

    def release(self, connection: UpstreamConnection) -> None:
        """A request ended; keep its connection unless the instance wants it closed."""
        transport = connection.transport
        if transport is None or transport.is_closing():
            return
        if not connection.reply_keeps_alive or self._is_closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            transport.close()
            return
        if (
            transport.get_write_buffer_size()
        ):  # it answered before it had all; a request behind that might wait for ever
            transport.abort()
            return
        transport.resume_reading()
        connection.is_paused = False
        connection.raw = connection._last_body = connection._body_before = b""
        connection._request = connection._request_end = b""
        connection.sink = connection.sent = None
        connection.idle_since_s = self.loop.time()
        self._idle.append(connection)

    def discard(self, connection: UpstreamConnection) -> None:
        try:
            self._idle.remove(connection)
        except ValueError:
            pass

    @property
    def last_received_s(self) -> float:
        """Return when any of its open connections last received something."""
        return max((connection.received_s for connection in (*self.active, *self._idle)), default=_NEVER_S)

    @property
    def last_worked_s(self) -> float:
        """Return when the instance last sent a part of a reply, or ended one: its scheduler works."""
        legs = (leg.received_s for leg in self.active if leg.body_started and leg.attempt != NO_ATTEMPT)
        return max(self.answered_s, max(legs, default=_NEVER_S))

    @property
    def open_connections(self) -> int:
        """Return the number of connections with a request under way, or kept."""
        return len(self.active) + len(self._idle)

    def lose_all(self) -> None:
        """The instance does not answer: every request that it has is lost, and no connection is kept."""
        for connection in tuple(self.active):
            connection.lose()
        for connection in tuple(self._idle):
            connection.abort()

    def close(self) -> None:
        """Close idle connections now and the others when their request has ended."""
        self._is_closed = True
        for connection in self._idle:
            if connection.transport is not None:
                connection.transport.close()
        self._idle.clear()


def watch_peer(connected: socket.socket) -> None:
    """Have the kernel end a connection whose peer has vanished, with or without data on its way."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_TIMEOUT_MS),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)


class UpstreamPools:
    """A pool per instance that has been sent anything."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext) -> None:
        """`tls` is for `https://` instances."""
        self._loop = loop
        self._tls = tls
        self._pools: dict[int, UpstreamPool] = {}

    def start(
        self,
        worker: Worker,
        owner: LegOwner,
        kind: Leg,
        attempt: int,
        request: bytes,
        on_new_connection: bool = False,
        body: memoryview | None = None,
        end: bytes = b"",
    ) -> UpstreamConnection:
        """Send a request to an instance; `owner` gets the events of the reply. See `UpstreamConnection.send`."""
        pool = self._pools.get(worker.id)
        if pool is None:
            pool = self._pools[worker.id] = UpstreamPool(worker, self._loop, self._tls)
        return pool.start(owner, kind, attempt, request, on_new_connection, body, end)

    def last_received_s(self, worker: Worker) -> float:
        """Return when a connection to the instance last received something; minus infinity if none has."""
        pool = self._pools.get(worker.id)
        return _NEVER_S if pool is None else pool.last_received_s

    def last_worked_s(self, worker: Worker) -> float:
        """Return when the instance last sent a part of a reply to a request; minus infinity if it has sent none."""
        pool = self._pools.get(worker.id)
        return _NEVER_S if pool is None else pool.last_worked_s

    @property
    def open_connections(self) -> int:
        """Connections to instances, with a request under way or kept."""
        return sum(pool.open_connections for pool in self._pools.values())

    def lose_all(self, worker: Worker) -> None:
        """The instance does not answer: its legs are lost, all at once."""
        pool = self._pools.get(worker.id)
        if pool is not None:
            pool.lose_all()

    def drop(self, worker: Worker) -> None:
        """The instance was removed: close what is idle."""
        pool = self._pools.pop(worker.id, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
