"""A long pool's coordinator: connections of members over TCP and the clock around a `PoolProtocol`.

Over HTTP it shows the pool's status and metrics, and takes prompts that routers announce.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import orjson
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from sglang_ext.long_pool.coordinator.pool_history import PoolStatus, PrefillEnd, PrefillRecord
from sglang_ext.long_pool.coordinator.pool_protocol import PoolProtocol, PoolProtocolError
from sglang_ext.long_pool.coordinator.ticket_desk import TICKETS_PATH, TicketDesk
from sglang_ext.long_pool.coordinator.tickets import TicketEnd
from sglang_ext.long_pool.decide.orders import DeclineReason
from sglang_ext.long_pool.link_frames import POOL_ID_BYTES, reason_of
from sglang_ext.long_pool.messages import (
    FIRST_LINE_BYTES,
    KEY_PROTOCOL,
    AddressedMessage,
    Challenge,
    Hello,
    KeyRequest,
    MessageError,
    Proof,
    Refusal,
    VersionError,
    Welcome,
    encode,
    receive_message,
)
from sglang_ext.shared_key import Callee, WrongKeyError

logger = logging.getLogger(__name__)

TICK_S = 0.1
HELLO_TIMEOUT_S = 10.0
_LINGER_S = 1.0
# What a caller that bounds its number gets of requests that have ended.
RECENT_BYTES = 2**20
SHOWN_STEPS = 100  # of each request


class ListenError(RuntimeError):
    """An address cannot be had; the text is one line for the user."""

    def __init__(self, option: str, error: Exception) -> None:
        super().__init__(f"{option}: {reason_of(error)}")


class _MemberConnection(NamedTuple):
    writer: asyncio.StreamWriter
    name: str


class CoordinatorServer:
    """One long pool. Everything but reading happens at once, in the event loop's thread."""

    def __init__(self, protocol: PoolProtocol, member_timeout_s: float, key: bytes = b"") -> None:
        """`key`: the pool's, which every member must know."""
        self._protocol = protocol
        self._key = key
        self._pool_id = secrets.token_bytes(POOL_ID_BYTES).hex()
        self._member_timeout_s = member_timeout_s
        self._connections: dict[int, _MemberConnection] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.desk = TicketDesk(protocol, self._deliver)

    @property
    def protocol(self) -> PoolProtocol:
        return self._protocol

    def status(self) -> PoolStatus:
        """The pool, now."""
        return self._protocol.status(time.monotonic())

    async def listen(self, host: str, port: int) -> int:
        """Accept members; the port. ListenError."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=FIRST_LINE_BYTES)
        except (OSError, UnicodeError) as error:
            raise ListenError(f"--host {host} --port {port}", error) from None
        return int(self._server.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Let time pass, for ever."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            if time.monotonic() - before_s > TICK_S + self._member_timeout_s / 4:
                await asyncio.sleep(TICK_S)  # this process stood still: what came meanwhile is read before any is lost
            self._deliver(self._protocol.tick(time.monotonic()))

    async def close(self) -> None:
        """End all connections: every member goes on by itself, every announced prompt another way."""
        if self._server is not None:
            self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        instance: int | None = None
        reason = "has closed the connection"
        try:
            instance = await self._greet(reader, writer)
            if instance is not None:
                await self._listen_to(instance, reader)
        except (MessageError, PoolProtocolError, ValueError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            if instance is None:
                logger.warning("cdsp: %s is no member: %s", _peer_of(writer), reason)
        except asyncio.CancelledError:
            pass  # close
        finally:
            writer.close()
            if instance is not None:
                self._deliver(self._protocol.lose(instance, reason, time.monotonic()))
            await _closed(writer)
            self._handlers.discard(handler)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The number of a new member; None where it has been refused."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                if not await self._is_proven(reader, writer):
                    self._refuse(writer, Refusal("the coordinator has another key (--key-file)"))
                    return None
                hello = await receive_message(reader)
        except VersionError as error:
            self._refuse(writer, Refusal(str(error)))
            return None
        except TimeoutError:
            raise PoolProtocolError("no hello") from None
        if not isinstance(hello, Hello):
            raise PoolProtocolError(f"{type(hello).__name__} instead of a hello")
        answer = self._protocol.greet(hello)
        if isinstance(answer, Refusal):
            self._refuse(writer, answer)
            return None
        instance = answer.instance
        writer.write(encode(Welcome(instance, self._pool_id, self._member_timeout_s)))
        self._connections[instance] = _MemberConnection(writer, hello.name)
        logger.info("cdsp: instance %d has joined: %s on %s, %s", instance, hello.name, hello.node, hello.model)
        self._deliver(self._protocol.join(instance, hello, time.monotonic()))
        return instance

    async def _is_proven(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the caller knows the pool's key, which it is shown that we know."""
        call = await receive_message(reader, 0, FIRST_LINE_BYTES)
        if not isinstance(call, KeyRequest):
            raise PoolProtocolError(f"{type(call).__name__} instead of a request for the key's proof")
        callee = Callee(self._key, KEY_PROTOCOL, bytes.fromhex(call.opening))
        writer.write(encode(Challenge(callee.challenge.hex())))
        proof = await receive_message(reader, 0, FIRST_LINE_BYTES)
        if not isinstance(proof, Proof):
            raise PoolProtocolError(f"{type(proof).__name__} instead of a proof")
        try:
            callee.check(bytes.fromhex(proof.answer))
        except WrongKeyError:
            return False
        return True

    async def _listen_to(self, instance: int, reader: asyncio.StreamReader) -> None:
        while (message := await receive_message(reader)) is not None and instance in self._connections:
            self._deliver(self._protocol.take(instance, message, time.monotonic()))

    def _deliver(self, messages: Sequence[AddressedMessage]) -> None:
        for instance, message in messages:
            connection = self._connections.get(instance)
            if connection is not None:
                # Never waited for: a member that does not read is silent before long.
                connection.writer.write(encode(message))
        events = self._protocol.take_events()
        for instance, reason in events.lost:
            connection = self._connections.pop(instance, None)
            if connection is not None:
                connection.writer.transport.abort()
                logger.warning("cdsp: instance %d (%s) %s", instance, connection.name, reason)
        for instance, reason in events.failed:
            logger.warning("cdsp: instance %d has failed in %s", instance, reason)
        self.desk.settle(events.bound, events.unserved)
        for record in events.ended:
            _log_end(record)

    def _refuse(self, writer: asyncio.StreamWriter, refusal: Refusal) -> None:
        writer.write(encode(refusal))
        logger.warning("cdsp: %s is refused: %s", _peer_of(writer), refusal.reason)


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Wait until everything written has gone, or the peer does not read it in time."""
    try:
        await asyncio.wait_for(writer.wait_closed(), _LINGER_S)
    except (OSError, TimeoutError):
        writer.transport.abort()


def _log_end(record: PrefillRecord) -> None:
    chunks = record.chunks
    logger.info(
        "cdsp: request=%d outcome=%s owner=%d tokens=%d cached_tokens=%d chunks=%d groups=%s failed_steps=%d "
        "seconds=%.3f",
        record.request,
        record.outcome,
        record.owner,
        record.tokens,
        record.cached_tokens,
        len(chunks),
        "/".join(",".join(map(str, chunk.members)) for chunk in chunks) or "-",
        sum(step.has_failed for step in record.steps),
        (record.ended_s or record.offered_s) - record.offered_s,
    )


def _peer_of(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if peer else "an unknown peer"


def make_app(protocol: PoolProtocol, status: Callable[[], PoolStatus], desk: TicketDesk) -> web.Application:
    """The routes. Their handlers are to be cancelled when a connection ends (`handler_cancellation` of the runner)."""
    registry = CollectorRegistry()
    registry.register(_PoolCollector(protocol, status))

    encoder = StatusEncoder()

    async def get_status(request: web.Request) -> web.Response:
        recent = request.query.get("recent")
        if recent is not None and not (recent.isdecimal() and len(recent) < 10):
            raise web.HTTPBadRequest(text=f"recent: {recent[:40]!r} is no number of prompts")
        body = encoder.encode(status(), None if recent is None else int(recent))
        return web.Response(body=body, content_type="application/json")

    async def get_metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def get_health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/status", get_status)
    app.router.add_get("/metrics", get_metrics)
    app.router.add_get("/health", get_health)
    app.router.add_post(TICKETS_PATH, desk.post)
    return app


class StatusEncoder:
    """The pool as JSON; every request with `times`, where its time went. What has ended is encoded once."""

    def __init__(self) -> None:
        self._ended: dict[int, tuple[object, bytes]] = {}  # by request, and of which state

    def encode(self, status: PoolStatus, recent: int | None = None) -> bytes:
        """`recent`: this many requests that have ended, the latest, as far as `RECENT_BYTES` hold them; None: all that
        are remembered."""
        parts = {
            field.name: orjson.dumps(getattr(status, field.name))
            for field in fields(status)
            if field.name not in ("requests", "recent")
        }
        parts["requests"] = _array([_encode(record) for record in status.requests])
        parts["recent"] = _array(self._latest(status.recent, recent))
        parts["ended_rooms"] = orjson.dumps(
            [{"room": record.room, "outcome": record.outcome} for record in status.recent if record.room is not None]
        )
        return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in parts.items()) + b"}"

    def _latest(self, records: Sequence[PrefillRecord], count: int | None) -> list[bytes]:
        known, self._ended = self._ended, {}
        latest: list[bytes] = []
        left_bytes = RECENT_BYTES
        for record in reversed(records):
            # All that changes afterwards.
            last = record.steps[-1] if record.steps else None
            state = record.transfer_s, len(record.steps), last and (last.ended_s, last.moved_tokens)
            before = known.get(record.request)
            text = before[1] if before is not None and before[0] == state else None
            if count is None or (len(latest) < count and left_bytes > 0):
                text = text or _encode(record)
                left_bytes -= len(text)
                if count is None or left_bytes >= 0:
                    latest.append(text)
            if text is not None:
                self._ended[record.request] = state, text
        return latest[::-1]


def _encode(record: PrefillRecord) -> bytes:
    """Encode a request; of very many steps only the latest are included, its times cover all."""
    times, left_out = record.times, max(0, len(record.steps) - SHOWN_STEPS)
    if left_out:
        record = replace(record, steps=record.steps[left_out:])
    return orjson.dumps(record)[:-1] + b',"steps_left_out":%d,"times":%b}' % (left_out, orjson.dumps(times))


def _array(parts: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(parts) + b"]"


class _PoolCollector(Collector):
    """Reads counts when it is asked."""

    def __init__(self, protocol: PoolProtocol, status: Callable[[], PoolStatus]) -> None:
        self._protocol = protocol
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status, history = self._status(), self._protocol.history
        yield _gauge("members", "Instances of the long pool", len(status.members))
        ready = sum(member.is_ready for member in status.members)
        yield _gauge("members_ready", "Of these, members that are counted upon for new chunks", ready)
        yield _gauge("requests", "Prefills that members share or that wait for it", len(status.requests))
        yield _gauge("cost_scale", "What the given costs are multiplied with, from measured chunks", status.cost_scale)
        yield _gauge("arrivals_per_second", "Long prefills offered, recently", status.arrivals_per_s)
        yield _counter("members_lost", "Members whose connection has ended", history.members_lost)
        yield _counter("steps_failed", "Steps that a member could not do", history.steps_failed)
        yield _counter("computed_tokens", "Tokens of chunks that were done", history.tokens_computed)
        yield _counter(
            "collected_seconds",
            "Time of prefills that were collected or streamed, from the offer on",
            history.prefill_s,
        )
        yield _counter("collect_seconds", "Time in which all KV went to its own instance", history.collect_s)
        transferred = CounterMetricFamily(
            "sglang_ext:cdsp_transfer_seconds",
            "From the offer of a prefill until all its KV was at decode, by whether its last token had been computed",
            labels=["part"],
        )
        for part, seconds in history.transfer_s.items():
            transferred.add_metric([part], seconds)
        yield transferred
        yield _counter("transfers", "Prefills that were offered and whose KV is at decode", history.transfers)
        yield SummaryMetricFamily(
            "sglang_ext:cdsp_first_step_wait_seconds",
            "From the offer of a prefill to its first step",
            count_value=history.first_waits,
            sum_value=history.first_wait_s,
        )
        spent = CounterMetricFamily(
            "sglang_ext:cdsp_member_seconds", "Members' time in chunks, by what it was spent on", labels=["activity"]
        )
        for activity, seconds in history.member_s.items():
            spent.add_metric([activity], seconds)
        yield spent
        ended = CounterMetricFamily(
            "sglang_ext:cdsp_requests_ended", "Prefills that were offered, by how that ended", labels=["outcome"]
        )
        for outcome in (*PrefillEnd, *DeclineReason):
            ended.add_metric([outcome], history.outcomes[outcome])
        yield ended
        yield _gauge("kept_prompts", "Prompts whose KV members keep as a prefix cache of the pool", status.prompts_kept)
        yield _gauge("kept_tokens", "Tokens of these", sum(member.kept_tokens for member in status.members))
        yield _counter("prefix_hits", "Prefills that began behind KV that members had kept", history.prefix_hits)
        yield _counter("prefix_hit_tokens", "Tokens of these that were not computed again", history.prefix_hit_tokens)
        pulls = CounterMetricFamily(
            "sglang_ext:cdsp_pulls", "Kept prompts that were brought to one instance, or were to be", labels=["outcome"]
        )
        pulls.add_metric(["done"], history.pulls_done)
        pulls.add_metric(["given_up"], history.pulls_given_up)
        yield pulls
        yield _counter("pulled_tokens", "Tokens of prompts that were brought to one instance", history.pulled_tokens)
        yield _gauge(
            "tickets_waiting", "Prompts announced by routers that no instance was named for", status.tickets_waiting
        )
        tickets = CounterMetricFamily(
            "sglang_ext:cdsp_tickets_ended", "Prompts announced by routers, by what became of them", labels=["outcome"]
        )
        for end in TicketEnd:
            tickets.add_metric([end], self._protocol.tickets.ends[end])
        yield tickets
        chunks = CounterMetricFamily("sglang_ext:cdsp_chunks", "Chunks that were done", labels=["sp_size"])
        for size, count in sorted(history.chunks.items()):
            chunks.add_metric([str(size)], count)
        yield chunks


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"sglang_ext:cdsp_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"sglang_ext:cdsp_{name}", text, value)
