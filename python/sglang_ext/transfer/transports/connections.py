"""Connections between transports: made to a peer, and accepted from peers, each served by a thread of its own."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from sglang_ext.transfer.transports.link_records import RecordError
from sglang_ext.transfer.transports.socket_io import shut

logger = logging.getLogger(__name__)


def listen(host: str) -> tuple[socket.socket, str]:
    """Listen at a free port of `host`; return the socket, and its address as HOST:PORT. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=128)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connect to HOST:PORT. Raises OSError, and RecordError where that is no address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise RecordError(f"{address!r} is not a host:port pair")
    connection = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    send_at_once(connection)
    return connection


def send_at_once(connection: socket.socket) -> None:
    """Send small records without delay, and notice the end of a peer whose machine has gone, too."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class Inbound:
    """The connections of peers that write, from `start` to `close`. Thread-safe."""

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        serve: Callable[[socket.socket], None],
        max_connections: int | None = None,
    ) -> None:
        """`serve` returns at the end of a connection, which is closed then; `name` is that of the threads."""
        self._listener = listener
        self._name = name
        self._serve = serve
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.is_closed = False

    @property
    def connections(self) -> list[socket.socket]:
        """Return the connections that are being served."""
        with self._lock:
            return list(self._connections)

    def start(self) -> None:
        """Accept from now on."""
        threading.Thread(target=self._accept, name=f"{self._name}-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening and close every connection. Safe to call again."""
        self.is_closed = True
        for connection in (self._listener, *self.connections):
            shut(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            with self._lock:
                is_full = len(self._connections) == self._max_connections
                is_refused = is_full or self.is_closed
                if not is_refused:
                    self._connections.add(connection)
            if is_full:
                logger.warning("refused a KV writer from %s: too many connections", peer[0])
            if is_refused:
                shut(connection)
                continue
            thread = threading.Thread(target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True)
            thread.start()

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            shut(connection)
