"""The ports of one router process, their connections, and the limits that all of them share."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator

from sglang_ext_router.config import RouterConfig
from sglang_ext_router.http.access import PAGE_PATHS, REPORT_PATHS, PathGate
from sglang_ext_router.http.http1 import ClientConnection, Clients
from sglang_ext_router.http.request_parser import ConnectionLimits, Gate, Request
from sglang_ext_router.http.unread_replies import SHUTDOWN_TIMEOUT_S
from sglang_ext_router.observe.access_log import AccessLog

Dispatch = Callable[[ClientConnection, Request], None]


class ClientPorts:
    """Connections at the port for clients, the port for reports and the port for the live page.

    The latter two are optional: without them the port for clients serves reports and page.
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
        self.reports = Clients(PathGate(REPORT_PATHS, "reports are"), limits, access_log)
        self.pages = Clients(PathGate(PAGE_PATHS, "the live page is"), limits, access_log)

    async def listen(
        self,
        connection: Callable[[], ClientConnection],
        sock: socket.socket,
        backlog: int,
        tls: ssl.SSLContext | None = None,
    ) -> asyncio.Server:
        """Accept connections at a bound socket, over TLS if there is a context."""
        return await self._loop.create_server(
            connection,
            sock=sock,
            backlog=backlog,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._header_timeout_s,
            ssl_shutdown_timeout=None if tls is None else SHUTDOWN_TIMEOUT_S,
        )

    def connection(self, dispatch: Dispatch, at: Clients) -> ClientConnection:
        """Return the protocol of a new connection at one of the ports; `dispatch` serves its requests."""
        return ClientConnection(dispatch, at, self._loop)

    @property
    def open_connections(self) -> int:
        """Return the number of open connections at all ports."""
        return sum(1 for _ in self._all())

    @property
    def buffered_bytes(self) -> int:
        """Return the bytes that requests take in memory, at all ports."""
        return self.clients.buffered_bytes + self.reports.buffered_bytes + self.pages.buffered_bytes

    def sweep(self, now_s: float) -> None:
        """Enforce the time limits of all connections; called about once a second."""
        for connection in tuple(self._all()):
            connection.sweep(now_s)

    def drain(self) -> None:
        """Close each connection after the requests that it has received are served."""
        for connection in tuple(self._all()):
            connection.drain()

    def close(self) -> None:
        """Close all connections at once."""
        for connection in tuple(self._all()):
            connection.close()

    def _all(self) -> Iterator[ClientConnection]:
        for at in (self.clients, self.reports, self.pages):
            yield from at.open
