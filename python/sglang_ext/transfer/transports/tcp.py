"""One-sided writes over TCP: put bytes into another process's registered memory.

Each process owns one engine. `register` names the memory that others may write to (and from which this process may
send); `write` moves blocks and `write_rows` rows to a peer, named by its `session_id` ("host:port"), and return when
the peer has stored every byte. They go in batches of bounded size. Long runs of bytes go from and to the registered
memory directly; short rows are gathered into one staging buffer per connection, and scattered out of another one by
the peer. The handshake's transport is an engine whose writes come each under a permit of the receiver.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, cut_rows, group_by_slots
from sglang_ext.transfer.transports.connections import Inbound, connect, listen, send_at_once
from sglang_ext.transfer.transports.idle_links import IdleLinks
from sglang_ext.transfer.transports.link_records import (
    BATCH_DECODER,
    LENGTH,
    REFUSALS,
    Batch,
    BlockBatch,
    Limits,
    LinkStatus,
    RecordError,
    RowBatch,
    TransportGreeting,
    check_limits,
    pack,
    receive,
    receive_greeting,
    slot_bytes,
)
from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError, Vectors
from sglang_ext.transfer.transports.permits import PermitError, Permits
from sglang_ext.transfer.transports.row_moves import (
    RECEIVE_STAGING_BYTES,
    SEND_STAGING_BYTES,
    Bytes,
    RowWindow,
    SlotIndex,
    Unstaged,
    open_rows,
    stage_pieces,
)
from sglang_ext.transfer.transports.socket_io import (
    receive_exactly,
    receive_into,
    receive_vectors,
    send_vectors,
    shut,
    wake,
)
from sglang_ext.transfer.transports.transport import TransferError

__all__ = ["Block", "EngineOptions", "TcpTransferEngine", "TransferError"]

logger = logging.getLogger(__name__)

_LOCAL_SEND_BYTES = 512 << 10

_Blocks: TypeAlias = "npt.NDArray[np.uint64]"  # of shape [n, 3]: the numbers of a `Block`


class Block(NamedTuple):
    """Copy `length_bytes` from a local address to an address of the peer."""

    source: int
    target: int
    length_bytes: int


class _StagedConnection:
    """A connection, and where it stages short rows: a writer before it sends them, an owner once it has them."""

    def __init__(self, connection: socket.socket, staging_bytes: int) -> None:
        self.connection = connection
        self.staging_bytes = staging_bytes
        self._staging: Bytes | None = None

    @property
    def staging(self) -> Bytes:
        """Made when it is first needed, and kept as long as the connection."""
        if self._staging is None:
            self._staging = np.empty(self.staging_bytes, np.uint8)
        return self._staging

    def close(self) -> None:
        """Safe to call again."""
        shut(self.connection)


class _Turns:
    """A limit on the batches that go to one peer at a time."""

    def __init__(self, count: int) -> None:
        self.free = threading.BoundedSemaphore(count)
        self.users = 0  # that have their turn, or wait for it


@dataclass(frozen=True)
class EngineOptions:
    connect_timeout_s: float = field(default=5.0, metadata={"help": "give up connecting to a peer after this"})
    io_timeout_s: float = field(
        default=5.0, metadata={"help": "give up a batch when no byte moves for this long, at either end"}
    )
    max_inbound_connections: int = field(default=256, metadata={"help": "writers served at a time, one thread each"})
    max_connections_per_peer: int = field(default=8, metadata={"help": "concurrent batches to one peer"})
    limits: Limits = field(default_factory=Limits)


class TcpTransferEngine:
    """Listens on `host` at a free port from construction to `close`.

    With `permits`, peers may write only under a permit that holds; without, to any registered memory.
    """

    def __init__(self, host: str, options: EngineOptions | None = None, permits: Permits | None = None) -> None:
        self._options = options or EngineOptions()
        self._permits = permits
        self._regions = MemoryRegions()
        listener, self.session_id = listen(host)
        self._inbound = Inbound(listener, "kv-tcp", self._serve, self._options.max_inbound_connections)
        self._lock = threading.Lock()
        self._idle: IdleLinks[_StagedConnection] = IdleLinks(_StagedConnection.close)
        self._turns: dict[str, _Turns] = {}  # of peers that are being written to
        self._inbound.start()

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
        sources, targets, lengths = zip(*blocks, strict=True) if blocks else ((), (), ())
        self.write_blocks(session_id, sources, targets, lengths, permit=permit)

    def write_blocks(
        self,
        session_id: str,
        sources: Sequence[int],
        targets: Sequence[int],
        lengths: Sequence[int],
        *,
        permit: int = 0,
    ) -> None:
        """The same for blocks whose addresses and lengths come apart. Raises ValueError when they differ in number."""
        if not len(sources) == len(targets) == len(lengths):
            raise ValueError(f"{len(sources)} sources, {len(targets)} targets and {len(lengths)} lengths of blocks")
        blocks = np.column_stack([np.asarray(numbers, np.uint64) for numbers in (sources, targets, lengths)])
        for batch in _batches(blocks[blocks[:, 2] > 0], self._options.limits):
            self._write_blocks(session_id, batch, permit)

    def write_rows(self, session_id: str, copies: Sequence[RowCopy], *, permit: int = 0) -> None:
        """The same for rows."""
        limits = self._options.limits
        for part in cut_rows(copies, limits.max_payload_bytes):
            for batch in group_by_slots(part):
                for first in range(0, len(batch), limits.max_blocks):
                    self._write_rows(session_id, batch[first : first + limits.max_blocks], permit)

    def probe(self, session_id: str) -> None:
        """Ask whether the peer answers. Raises TransferError if it does not."""
        self.write(session_id, [])

    def close(self) -> None:
        """Stop listening and close every connection. Safe to call again."""
        self._inbound.close()
        self._idle.close()

    # Writing side ----------------------------------------------------------------------------------------

    def _write_blocks(self, session_id: str, batch: _Blocks, permit: int) -> None:
        sources, targets = batch[:, [0, 2]], batch[:, [1, 2]]
        with self._failures(session_id), self._regions.hold(sources):
            head = self._packed(BlockBatch(permit, targets.astype("<u8").tobytes()))
            self._deliver(session_id, lambda link: _send_blocks(link, head, sources))

    def _write_rows(self, session_id: str, batch: Sequence[RowCopy], permit: int) -> None:
        first = batch[0]
        rows = RowBatch(permit, [copy.target for copy in batch], slot_bytes(first.target_slots))
        index = SlotIndex(first.source_slots)
        with self._failures(session_id), open_rows(self._regions, [copy.source for copy in batch], index) as windows:
            head = self._packed(rows)
            self._deliver(session_id, lambda link: _send_rows(link, head, windows))

    def _packed(self, batch: Batch) -> bytes:
        check_limits(batch, self._options.limits)
        return pack(batch)

    @staticmethod
    @contextmanager
    def _failures(session_id: str) -> Iterator[None]:
        try:
            yield
        except (OutOfBoundsError, RecordError, OSError) as error:
            raise TransferError(f"KV write to {session_id} failed: {error}") from error

    def _deliver(self, session_id: str, send: Callable[[_StagedConnection], None]) -> None:
        with self._turn(session_id):
            reused = self._idle.take(session_id)
            if reused is not None:
                try:
                    self._send_frame(session_id, reused, send)
                    return
                except ConnectionError:
                    # The peer dropped an idle connection. Writing the same bytes again is harmless.
                    self._idle.drop_ended()
            self._send_frame(session_id, _StagedConnection(self._connect(session_id), SEND_STAGING_BYTES), send)

    def _send_frame(self, session_id: str, link: _StagedConnection, send: Callable[[_StagedConnection], None]) -> None:
        try:
            send(link)
            status = receive_exactly(link.connection, 1)[0]
        except BaseException:
            link.close()
            raise
        if status != LinkStatus.DONE:
            link.close()
            raise RecordError(REFUSALS.get(status, f"the peer answered with the unknown status {status}"))
        self._idle.keep(session_id, link)

    def _connect(self, session_id: str) -> socket.socket:
        connection = connect(session_id, self._options.connect_timeout_s)
        try:
            if connection.getsockname()[0] == connection.getpeername()[0]:
                # What is on its way to a peer on this machine stays in the processor's cache; the network would want
                # as much as it takes.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOCAL_SEND_BYTES)
            connection.settimeout(self._options.io_timeout_s)
            connection.sendall(pack(TransportGreeting(TcpTransport.name)))
            receive_greeting(connection, TcpTransport.name)
        except BaseException:
            shut(connection)
            raise
        return connection

    @contextmanager
    def _turn(self, session_id: str) -> Iterator[None]:
        with self._lock:
            if self._inbound.is_closed:
                raise ConnectionError("the engine is closed")
            turns = self._turns.setdefault(session_id, _Turns(self._options.max_connections_per_peer))
            turns.users += 1
        try:
            if not turns.free.acquire(timeout=self._options.io_timeout_s):
                raise TimeoutError(f"no free connection within {self._options.io_timeout_s:g} s")
            try:
                yield
            finally:
                turns.free.release()
        finally:
            with self._lock:
                turns.users -= 1
                if not turns.users:
                    del self._turns[session_id]

    # Owning side -----------------------------------------------------------------------------------------

    def _serve(self, connection: socket.socket) -> None:
        peer = "a peer"
        try:
            peer = connection.getpeername()[0]
            send_at_once(connection)
            connection.settimeout(self._options.io_timeout_s)
            receive_greeting(connection, TcpTransport.name)
            connection.sendall(pack(TransportGreeting(TcpTransport.name)))
            link = _StagedConnection(connection, RECEIVE_STAGING_BYTES)
            while self._serve_batch(link):
                pass
        except (RecordError, OutOfBoundsError, PermitError) as error:
            logger.warning("refused a KV write from %s: %s", peer, error)
        except OSError as error:
            if not self._inbound.is_closed:
                logger.warning("lost a KV writer at %s: %s", peer, error)

    def _serve_batch(self, link: _StagedConnection) -> bool:
        """Receive one batch; False when the writer closed the connection between batches."""
        connection = link.connection
        # Idle connections are kept: a writer may pause for as long as it likes between batches.
        connection.settimeout(None)
        first = connection.recv(1)
        if not first:
            return False
        connection.settimeout(self._options.io_timeout_s)
        length = first + receive_exactly(connection, LENGTH.size - 1)
        batch = receive(connection, BATCH_DECODER, self._options.limits.max_record_bytes, length)
        check_limits(batch, self._options.limits)
        try:
            self._receive_payload(link, batch)
        except OutOfBoundsError:
            connection.sendall(bytes([LinkStatus.OUT_OF_BOUNDS]))
            raise
        except PermitError:
            connection.sendall(bytes([LinkStatus.NOT_PERMITTED]))
            raise
        connection.sendall(bytes([LinkStatus.DONE]))
        return True

    def _receive_payload(self, link: _StagedConnection, batch: Batch) -> None:
        with self._permission(batch, link.connection):
            if isinstance(batch, RowBatch):
                with open_rows(self._regions, batch.targets, SlotIndex(batch.row_slots)) as windows:
                    _receive_rows(link, windows)
            else:
                targets = batch.blocks
                with self._regions.hold(targets):
                    receive_vectors(link.connection, targets)

    def _permission(self, batch: Batch, connection: socket.socket) -> AbstractContextManager[None]:
        """`Permits.revoke` closes the connection while a payload is on its way. A probe needs no permit."""
        if self._permits is None or (isinstance(batch, BlockBatch) and not batch.table):
            return nullcontext()
        return self._permits.use(batch.permit, lambda: wake(connection))


def _batches(blocks: _Blocks, limits: Limits) -> Iterator[_Blocks]:
    """The same bytes in the same order, cut so that each batch keeps to the limits; one without blocks for none."""
    if len(blocks) and int(blocks[:, 2].max()) > limits.max_payload_bytes:
        blocks = _cut(blocks, limits.max_payload_bytes)
    ends = np.cumsum(blocks[:, 2])
    first, sent_bytes = 0, 0
    while first < len(blocks) or not first:
        stop = int(np.searchsorted(ends, sent_bytes + limits.max_payload_bytes, "right"))
        stop = min(stop, first + limits.max_blocks)
        yield blocks[first:stop]
        if stop == first:
            return
        first, sent_bytes = stop, int(ends[stop - 1])


def _cut(blocks: _Blocks, max_bytes: int) -> _Blocks:
    """The same bytes in the same order, as blocks of at most `max_bytes`."""
    return np.array(
        [
            (source + start, target + start, min(max_bytes, length - start))
            for source, target, length in blocks.tolist()
            for start in range(0, length, max_bytes)
        ],
        np.uint64,
    )


def _send_blocks(link: _StagedConnection, head: bytes, sources: Vectors) -> None:
    send_vectors(link.connection, np.concatenate([_vector(head), sources]))


def _send_rows(link: _StagedConnection, head: bytes, windows: Sequence[RowWindow]) -> None:
    unsent = [_vector(head)]
    for step in stage_pieces(windows, link.staging_bytes):
        if isinstance(step, Unstaged):
            unsent.append(step.vectors())
            continue
        for rows in step:
            rows.gather(link.staging)
        if unsent:
            send_vectors(link.connection, np.concatenate(unsent))
        # Python's calls wait until much can be moved before they try: that suits a buffer that is used again.
        link.connection.sendall(link.staging.data[: step[-1].stop])
        unsent = []
    if unsent:
        send_vectors(link.connection, np.concatenate(unsent))


def _receive_rows(link: _StagedConnection, windows: Sequence[RowWindow]) -> None:
    for step in stage_pieces(windows, link.staging_bytes):
        if isinstance(step, Unstaged):
            receive_vectors(link.connection, step.vectors())
        else:
            receive_into(link.connection, [link.staging.data[: step[-1].stop]])
            for rows in step:
                rows.scatter(link.staging)


def _vector(buffer: bytes | Bytes) -> Vectors:
    """A buffer, which its caller keeps, as the one piece of memory that it is."""
    flat = np.frombuffer(buffer, np.uint8)
    return np.array([(flat.ctypes.data, len(flat))], np.uint64)


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
        self._engine.write_rows(to, copies, permit=permit)
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        self._engine.close()
