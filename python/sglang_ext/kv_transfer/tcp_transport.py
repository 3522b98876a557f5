"""One-sided writes over TCP: put bytes into another process's registered memory.

Each process owns one engine. `register` names the memory that others may write to (and from which this process may
send); `write` moves blocks to a peer, named by its `session_id` ("host:port"), and returns when the peer has stored
every byte. Payload goes from and to the registered memory directly, without a copy in this process. The handshake's
transport is an engine whose writes come each under a permit of the receiver.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.kv_transfer import wire
from sglang_ext.kv_transfer.errors import TransferError
from sglang_ext.kv_transfer.memory_regions import MemoryRegions, OutOfBoundsError, Span
from sglang_ext.kv_transfer.permits import PermitError, Permits
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy, to_blocks
from sglang_ext.kv_transfer.wire import receive_exactly, receive_into, send_all

__all__ = ["Block", "EngineOptions", "TcpTransferEngine", "TransferError"]

logger = logging.getLogger(__name__)

_REFUSALS: dict[int, str] = {
    wire.Status.OUT_OF_BOUNDS: "the peer refused an address outside its registered memory",
    wire.Status.NOT_PERMITTED: "the peer does not allow this write any more",
}


class Block(NamedTuple):
    """Copy `length_bytes` from a local address to an address of the peer."""

    source: int
    target: int
    length_bytes: int


@dataclass(frozen=True)
class EngineOptions:
    connect_timeout_s: float = field(default=5.0, metadata={"help": "give up connecting to a peer after this"})
    io_timeout_s: float = field(
        default=5.0, metadata={"help": "give up a batch when no byte moves for this long, at either end"}
    )
    max_inbound_connections: int = field(default=256, metadata={"help": "writers served at a time, one thread each"})
    max_connections_per_peer: int = field(default=8, metadata={"help": "concurrent batches to one peer"})
    limits: wire.Limits = field(default_factory=wire.Limits)


class TcpTransferEngine:
    """Listens on `host` at a free port from construction to `close`.

    With `permits`, peers may write only under a permit that holds; without, to any registered memory.
    """

    def __init__(self, host: str, options: EngineOptions | None = None, permits: Permits | None = None) -> None:
        self._options = options or EngineOptions()
        self._permits = permits
        self._regions = MemoryRegions()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        self.session_id = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        self._lock = threading.Lock()
        self._closed = False
        self._inbound: set[socket.socket] = set()
        self._idle: defaultdict[str, list[socket.socket]] = defaultdict(list)
        self._slots: dict[str, threading.BoundedSemaphore] = {}
        threading.Thread(target=self._accept, name="kv-tcp-accept", daemon=True).start()

    def register(self, address: int, length_bytes: int) -> None:
        """Let peers write to [address, address + length_bytes), and `write` read from it."""
        self._regions.add(address, length_bytes)

    def unregister(self, address: int) -> None:
        """Forget the region that starts at `address`, after transfers in progress ended. KeyError if unknown."""
        self._regions.remove(address)

    def write(self, session_id: str, blocks: Sequence[Block], *, permit: int = 0) -> None:
        """Copy `blocks` to the peer, under its permit where it wants one; returns when it has stored them all.

        Raises TransferError otherwise. The blocks may then be partly written.
        """
        sources = [Span(block.source, block.length_bytes) for block in blocks if block.length_bytes]
        targets = [Span(block.target, block.length_bytes) for block in blocks if block.length_bytes]
        try:
            with self._regions.views(sources) as views:
                head = memoryview(wire.encode_batch(targets, self._options.limits, permit))
                self._deliver(session_id, [head, *views])
        except (OutOfBoundsError, wire.WireError, OSError) as error:
            raise TransferError(f"KV write to {session_id} failed: {error}") from error

    def probe(self, session_id: str) -> None:
        """Ask whether the peer answers. Raises TransferError if it does not."""
        self.write(session_id, [])

    def close(self) -> None:
        """Stop listening and close every connection. Safe to call again."""
        with self._lock:
            self._closed = True
            connections = [*self._inbound, *(sock for idle in self._idle.values() for sock in idle)]
            self._idle.clear()
        _shut(self._listener)
        for connection in connections:
            _shut(connection)

    # Writing side ----------------------------------------------------------------------------------------

    def _deliver(self, session_id: str, frame: Sequence[memoryview]) -> None:
        with self._slot(session_id):
            reused = self._take_idle(session_id)
            if reused is not None:
                try:
                    self._write_frame(session_id, reused, frame)
                    return
                except ConnectionError:
                    # The peer dropped an idle connection. Writing the same bytes again is harmless.
                    pass
            self._write_frame(session_id, self._connect(session_id), frame)

    def _write_frame(self, session_id: str, connection: socket.socket, frame: Sequence[memoryview]) -> None:
        try:
            send_all(connection, frame)
            status = receive_exactly(connection, 1)[0]
        except BaseException:
            _shut(connection)
            raise
        if status != wire.Status.DONE:
            _shut(connection)
            raise wire.WireError(_REFUSALS.get(status, f"the peer answered with the unknown status {status}"))
        with self._lock:
            if not self._closed:
                self._idle[session_id].append(connection)
                return
        _shut(connection)

    def _connect(self, session_id: str) -> socket.socket:
        host, _, port = session_id.rpartition(":")
        if not host or not port.isdigit():
            raise wire.WireError(f"{session_id!r} is not a host:port pair")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=self._options.connect_timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(self._options.io_timeout_s)
            connection.sendall(wire.encode_greeting())
            wire.check_greeting(bytes(receive_exactly(connection, wire.GREETING.size)))
        except BaseException:
            _shut(connection)
            raise
        return connection

    def _take_idle(self, session_id: str) -> socket.socket | None:
        with self._lock:
            idle = self._idle.get(session_id)
            return idle.pop() if idle else None

    @contextmanager
    def _slot(self, session_id: str) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ConnectionError("the engine is closed")
            slots = self._slots.setdefault(
                session_id, threading.BoundedSemaphore(self._options.max_connections_per_peer)
            )
        if not slots.acquire(timeout=self._options.io_timeout_s):
            raise TimeoutError(f"no free connection within {self._options.io_timeout_s:g} s")
        try:
            yield
        finally:
            slots.release()

    # Owning side -----------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._inbound) >= self._options.max_inbound_connections
                if not self._closed and not full:
                    self._inbound.add(connection)
            if self._closed or full:
                if full:
                    logger.warning("refused a KV writer from %s: too many connections", peer[0])
                _shut(connection)
                continue
            threading.Thread(target=self._serve, args=(connection, peer[0]), name="kv-tcp-serve", daemon=True).start()

    def _serve(self, connection: socket.socket, peer: str) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(self._options.io_timeout_s)
            wire.check_greeting(bytes(receive_exactly(connection, wire.GREETING.size)))
            connection.sendall(wire.encode_greeting())
            while self._serve_batch(connection):
                pass
        except (wire.WireError, OutOfBoundsError, PermitError) as error:
            logger.warning("refused a KV write from %s: %s", peer, error)
        except OSError as error:
            if not self._closed:
                logger.warning("lost a KV writer at %s: %s", peer, error)
        finally:
            with self._lock:
                self._inbound.discard(connection)
            _shut(connection)

    def _serve_batch(self, connection: socket.socket) -> bool:
        """Receive one batch; False when the writer closed the connection between batches."""
        # Idle connections are kept: a writer may pause for as long as it likes between batches.
        connection.settimeout(None)
        first = connection.recv(1)
        if not first:
            return False
        connection.settimeout(self._options.io_timeout_s)
        rest = receive_exactly(connection, wire.BATCH_HEADER.size - 1)
        header = wire.decode_header(first + rest, self._options.limits)
        targets = wire.decode_table(receive_exactly(connection, header.table_bytes), header)
        try:
            with self._permission(header, connection), self._regions.views(targets) as views:
                receive_into(connection, views)
        except OutOfBoundsError:
            connection.sendall(bytes([wire.Status.OUT_OF_BOUNDS]))
            raise
        except PermitError:
            connection.sendall(bytes([wire.Status.NOT_PERMITTED]))
            raise
        connection.sendall(bytes([wire.Status.DONE]))
        return True

    def _permission(self, header: wire.BatchHeader, connection: socket.socket) -> AbstractContextManager[None]:
        """`Permits.revoke` closes the connection while a payload is on its way."""
        if self._permits is None or not header.block_count:
            return nullcontext()
        return self._permits.use(header.permit, lambda: _wake(connection))


def _shut(connection: socket.socket) -> None:
    """Close a socket and wake the threads that wait on it."""
    _wake(connection)
    connection.close()


def _wake(connection: socket.socket) -> None:
    """Let threads that wait on a socket find it at its end."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


class TcpTransport:
    """Listens on `host` from construction to `close`."""

    name = "tcp"
    can_fence = True

    def __init__(self, host: str, options: EngineOptions | None = None) -> None:
        self._permits = Permits()
        self._engine = TcpTransferEngine(host, options, permits=self._permits)
        self.address = self._engine.session_id

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        for buffer in buffers:
            self._engine.register(buffer.address, buffer.length_bytes)

    def allow(self, permit: int) -> None:
        self._permits.allow(permit)

    def revoke(self, permit: int) -> None:
        self._permits.revoke(permit)

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        blocks: list[Block] = []
        for copy in copies:
            runs = to_blocks(copy)
            blocks += map(Block, runs.sources.tolist(), runs.targets.tolist(), runs.lengths.tolist())
        self._engine.write(to, blocks, permit=permit)
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        self._engine.close()
