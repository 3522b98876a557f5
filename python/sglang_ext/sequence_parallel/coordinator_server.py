"""A long pool's coordinator over TCP: connections, the clock and the store of the meshes around a `PoolExchange`."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from sglang_ext.policy.cdsp.coordination import BuildMesh
from sglang_ext.sequence_parallel.exchange_records import Outgoing, ProtocolError
from sglang_ext.sequence_parallel.messages import (
    Hello,
    MessageError,
    Refusal,
    VersionError,
    Welcome,
    decode,
    encode,
)
from sglang_ext.sequence_parallel.pool_exchange import PoolExchange
from sglang_ext.sequence_parallel.pool_records import PoolStatus, PrefillRecord
from sglang_ext.sequence_parallel.step_watch import give_up

logger = logging.getLogger(__name__)

TICK_S = 0.1
HELLO_TIMEOUT_S = 10.0
# A line is at most an offer: a prompt of ten million tokens.
MAX_LINE_BYTES = 2**27
_STORE_TIMEOUT_S = 30.0
_LINGER_S = 1.0
_EPOCH = re.compile(r"mesh/(\d+)/")


class ListenError(RuntimeError):
    """An address cannot be had; the text is one line for the user."""


class MeshStore:
    """Where members find each other's addresses; served by threads of its own."""

    def __init__(self, host: str, port: int) -> None:
        """`port` 0: any free one. ListenError."""
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as listening:
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind(address)
                listening.listen()
                self.port = int(listening.getsockname()[1])
                # From here on the descriptor is the store's, also where it fails.
                self._store = dist.TCPStore(
                    listening.getsockname()[0],
                    self.port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=_STORE_TIMEOUT_S),
                    master_listen_fd=listening.detach(),
                )
        except (OSError, UnicodeError, RuntimeError) as error:
            raise ListenError(f"--host {host} --store-port {port}: {_reason(error)}") from None

    def give_up(self, epoch: int, sequence: int) -> None:
        """Tell all members that compute this step to stop."""
        give_up(self._store, epoch, sequence)

    def forget_before(self, epoch: int) -> None:
        """Nobody connects in earlier epochs any more; the one before may still hear that its steps are given up."""
        for key in self._store.list_keys():
            if (found := _EPOCH.match(key)) and int(found[1]) < epoch - 1:
                self._store.delete_key(key)


class _Connection(NamedTuple):
    writer: asyncio.StreamWriter
    name: str


class CoordinatorServer:
    """One long pool. Everything but reading happens at once, in the event loop's thread."""

    def __init__(self, exchange: PoolExchange, store: MeshStore, silence_s: float) -> None:
        self._exchange = exchange
        self._store = store
        self._silence_s = silence_s
        self._connections: dict[int, _Connection] = {}
        self._handlers: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def exchange(self) -> PoolExchange:
        return self._exchange

    def status(self) -> PoolStatus:
        """The pool, now."""
        return self._exchange.status(time.monotonic())

    async def listen(self, host: str, port: int) -> int:
        """Accept members; the port. ListenError."""
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=MAX_LINE_BYTES)
        except (OSError, UnicodeError) as error:
            raise ListenError(f"--host {host} --port {port}: {_reason(error)}") from None
        return int(self._server.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Let time pass, for ever."""
        while True:
            await asyncio.sleep(TICK_S)
            self._deliver(self._exchange.tick(time.monotonic()))

    async def close(self) -> None:
        """End all connections: every member goes on alone."""
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
        except (MessageError, ProtocolError, ValueError, OSError) as error:
            reason = f"{type(error).__name__}: {error}"
            if instance is None:
                logger.warning("cdsp: %s is no member: %s", _peer_of(writer), reason)
        except asyncio.CancelledError:
            pass  # close
        finally:
            writer.close()
            if instance is not None:
                self._deliver(self._exchange.lose(instance, reason, time.monotonic()))
            await _closed(writer)
            self._handlers.discard(handler)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The number of a new member; None for one that has been refused."""
        try:
            hello = decode(await asyncio.wait_for(reader.readline(), HELLO_TIMEOUT_S))
        except VersionError as error:
            self._refuse(writer, Refusal(str(error)))
            return None
        except TimeoutError:
            raise ProtocolError("no hello") from None
        if not isinstance(hello, Hello):
            raise ProtocolError(f"{type(hello).__name__} instead of a hello")
        answer = self._exchange.greet(hello)
        if isinstance(answer, Refusal):
            self._refuse(writer, answer)
            return None
        instance = answer.instance
        # The address by which this member has reached us is one by which it reaches the store.
        store_host = str(writer.get_extra_info("sockname")[0])
        writer.write(encode(Welcome(instance, store_host, self._store.port, self._silence_s)))
        self._connections[instance] = _Connection(writer, hello.name)
        logger.info("cdsp: instance %d has joined: %s on %s, %s", instance, hello.name, hello.node, hello.model)
        self._deliver(self._exchange.join(instance, hello, time.monotonic()))
        return instance

    async def _listen_to(self, instance: int, reader: asyncio.StreamReader) -> None:
        while (line := await reader.readline()) and instance in self._connections:
            self._deliver(self._exchange.take(instance, decode(line), time.monotonic()))

    def _deliver(self, messages: Sequence[Outgoing]) -> None:
        epochs: set[int] = set()
        for instance, message in messages:
            connection = self._connections.get(instance)
            if connection is not None:
                # Never waited for: one that does not read is silent before long.
                connection.writer.write(encode(message))
            if isinstance(message, BuildMesh):
                epochs.add(message.epoch)
        for epoch in epochs:
            self._store.forget_before(epoch)
        events = self._exchange.take_events()
        for given_up in events.given_up:
            self._store.give_up(*given_up)
        for instance, reason in events.lost:
            connection = self._connections.pop(instance, None)
            if connection is not None:
                connection.writer.transport.abort()
                logger.warning("cdsp: instance %d (%s) %s", instance, connection.name, reason)
        for record in events.ended:
            _log_end(record)

    def _refuse(self, writer: asyncio.StreamWriter, refusal: Refusal) -> None:
        writer.write(encode(refusal))
        logger.warning("cdsp: %s is refused: %s", _peer_of(writer), refusal.reason)


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Until what was written has gone, or nobody reads it."""
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


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


def _peer_of(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if peer else "somebody"
