"""What connects to one router process, at each of its ports, and what holds for all of it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator

from sglang_ext_router.config import RouterConfig
from sglang_ext_router.http.access import PageGate, ReportGate
from sglang_ext_router.http.client_requests import Clients, ConnectionLimits, Gate, Request
from sglang_ext_router.http.http1 import ClientConnection
from sglang_ext_router.http.unread_replies import SHUTDOWN_TIMEOUT_S
from sglang_ext_router.observe.access_log import AccessLog

Dispatch = Callable[[ClientConnection, Request], None]


class ClientPorts:
    """Connections at the port for clients, at the one for reports and at the one for the live page.

    The latter two are optional: what they serve is at the first else.
    """

    def __init__(
        self, config: RouterConfig, loop: asyncio.AbstractEventLoop, gate: Gate, access_log: AccessLog | None
    ) -> None:
        limits = ConnectionLimits(
            max_header_bytes=config.max_header_size,
            max_pipelined_bytes=config.max_pipelined_size,
            max_buffered_bytes=config.max_buffered_size,
            max_connections=config.max_connections,
            header_timeout_s=config.header_timeout_secs,
            body_timeout_s=config.body_timeout_secs,
            keep_alive_timeout_s=config.keep_alive_timeout_secs,
            write_timeout_s=config.client_write_timeout_secs,
        )
        self._loop = loop
        self._header_timeout_s = config.header_timeout_secs
        self.clients = Clients(gate, limits, access_log)
        self.reports = Clients(ReportGate(), limits, access_log)
        self.pages = Clients(PageGate(), limits, access_log)

    async def listen(
        self,
        connection: Callable[[], ClientConnection],
        sock: socket.socket,
        backlog: int,
        tls: ssl.SSLContext | None = None,
    ) -> asyncio.Server:
        """Serve what connects to a bound socket, over TLS if there is a context."""
        return await self._loop.create_server(
            connection,
            sock=sock,
            backlog=backlog,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._header_timeout_s,
            ssl_shutdown_timeout=None if tls is None else SHUTDOWN_TIMEOUT_S,
        )

    def connection(self, dispatch: Dispatch, at: Clients) -> ClientConnection:
        """Protocol for a client that connects to one of the ports; `dispatch` serves its requests."""
        return ClientConnection(dispatch, at, self._loop)

    @property
    def open_connections(self) -> int:
        """At all ports."""
        return sum(1 for _ in self._all())

    @property
    def buffered_bytes(self) -> int:
        """Of requests, at all ports."""
        return self.clients.buffered_bytes + self.reports.buffered_bytes + self.pages.buffered_bytes

    def sweep(self, now_s: float) -> None:
        """Enforce time limits."""
        for connection in tuple(self._all()):
            connection.sweep(now_s)

    def drain(self) -> None:
        """Close each connection behind the reply that is under way on it."""
        for connection in tuple(self._all()):
            connection.drain()

    def close(self) -> None:
        """Close them all."""
        for connection in tuple(self._all()):
            connection.close()

    def _all(self) -> Iterator[ClientConnection]:
        for at in (self.clients, self.reports, self.pages):
            yield from at.open
