"""Connections to what an instance publishes by ZeroMQ: each is made again when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import cast

from sglang_ext_router.decide.zmtp import GREETING, SocketKind, ZmtpError, ZmtpReader, ready

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.8  # before a connection is tried again


async def connections(
    loop: asyncio.AbstractEventLoop,
    host: str,
    port: int,
    kind: SocketKind,
    on_message: Callable[[list[bytes]], None],
    is_back: asyncio.Event,
) -> AsyncIterator[PublisherConnection]:
    """Yield one open connection after the other; the caller waits until one is closed before it asks for the next.

    `is_back` is set where there is reason to try again at once.
    """
    pause_s = FIRST_PAUSE_S
    while True:
        connection = PublisherConnection(loop, kind, on_message)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await loop.create_connection(lambda made=connection: made, host, port)  # type: ignore[misc]
                await connection.opened
        except (OSError, ZmtpError) as error:  # TimeoutError is an OSError
            connection.close()
            logger.debug("nothing is published at %s, port %d: %s", host, port, error)
        except asyncio.CancelledError:
            connection.close()
            raise
        else:
            pause_s = FIRST_PAUSE_S
            yield connection
        is_back.clear()
        try:
            async with asyncio.timeout(pause_s):
                await is_back.wait()
        except TimeoutError:
            pass
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class PublisherConnection(asyncio.Protocol):
    """One connection to a publisher. `opened` is done when messages may be sent, `closed` when no more come."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: SocketKind, on_message: Callable[[list[bytes]], None]
    ) -> None:
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._kind = kind
        self._on_message = on_message
        self._reader = ZmtpReader()
        self._transport: asyncio.Transport | None = None
        self._is_left = False  # perhaps before it was connected

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        self._is_left = True
        if not self.opened.done():
            self.opened.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no common class
        if self._is_left:
            self._transport.abort()
            return
        self._transport.write(GREETING + ready(self._kind))

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        try:
            messages = reader.feed(data)
        except ZmtpError as error:
            if not self.opened.done():
                self.opened.set_exception(error)
            else:
                logger.warning("a publisher is left: %s", error)
            self.close()
            return
        if reader.replies:
            self.send(reader.replies)
            reader.replies = b""
        if reader.is_ready and not self.opened.done():
            self.opened.set_result(None)
        for parts in messages:
            self._on_message(parts)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if not self.opened.done():
            self.opened.set_exception(ConnectionResetError("closed during the handshake"))
        if not self.closed.done():
            self.closed.set_result(None)
