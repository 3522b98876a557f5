"""Writes by way of staging memory: a sender fills it with rows, the receiver copies them to their places.

A connection has staging memory of its own, at the receiver or where both see it, and the receiver copies out of it
under a permit: a sender that has lost its right can damage nothing but what it has staged itself. How bytes come into
that memory is what transports differ in.

    request    length (u32), then msgpack of `CopyRequest`                      sender to receiver
    answer     one byte                                                     receiver to sender

One half of the staging memory is filled while the receiver copies out of the other.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum

import msgspec
import numpy as np

from sglang_ext.transfer.errors import TransferError
from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, RowSet, cut_rows, group_by_slots
from sglang_ext.transfer.transports.idle_links import IdleLinks
from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError
from sglang_ext.transfer.transports.permits import PermitError, Permits
from sglang_ext.transfer.transports.row_moves import Bytes, Piece, RowWindow, SlotIndex, open_rows
from sglang_ext.transfer.transports.socket_io import receive_exactly

logger = logging.getLogger(__name__)

HALVES = 2
_LENGTH = struct.Struct("<I")
_MAX_REQUEST_BYTES = 1 << 28


class _Status(IntEnum):
    DONE = 0x5A
    NOT_PERMITTED = 0x01
    REFUSED = 0x02


class CopyRequest(msgspec.Struct, array_like=True, frozen=True):
    """Rows from `staging_offset` on, one after the other and target by target, and where they go."""

    permit: int
    staging_offset: int
    targets: list[RowSet]
    slots: bytes  # u32, the same for all targets


class StagedLink(ABC):
    """A sender's connection, and what it stages rows in. Its methods raise OSError when the peer has gone, and
    TransferError."""

    def __init__(self, connection: socket.socket, staging: Bytes) -> None:
        self.connection = connection
        self.staging = staging
        self._unanswered = 0  # requests

    @abstractmethod
    def make_room(self) -> None:
        """Return when the half of the staging memory may be filled whose turn it is."""

    @abstractmethod
    def send(self, request: CopyRequest, stop: int) -> None:
        """That half is filled from `request.staging_offset` to `stop`."""

    def drain(self) -> None:
        """Return when the receiver has stored all that was sent."""
        self._await_answers(0)

    def give_up(self) -> None:
        """After a write has failed: return when nothing of it is under way, as far as the peer still answers."""
        try:
            while self._unanswered:
                try:
                    self._await_answers(self._unanswered - 1)
                except TransferError:
                    pass
        except OSError:
            pass

    def close(self) -> None:
        """Drop it. Safe to call again."""
        shut(self.connection)

    def _request_copy(self, request: CopyRequest) -> None:
        body = msgspec.msgpack.encode(request)
        self.connection.sendall(_LENGTH.pack(len(body)) + body)
        self._unanswered += 1

    def _await_answers(self, left: int) -> None:
        """Until so many are missing, oldest first. Raises TransferError when one says that it has been refused."""
        while self._unanswered > left:
            status = receive_exactly(self.connection, 1)[0]
            self._unanswered -= 1
            if status == _Status.NOT_PERMITTED:
                raise TransferError("the peer does not allow this write any more")
            if status != _Status.DONE:
                raise TransferError("the peer refused an address outside its registered memory")


class StagedTransport(ABC):
    """Serves at a listening socket from construction to `close`."""

    name: str
    can_fence = True
    address: str

    def __init__(self, listener: socket.socket, staging_bytes: int) -> None:
        self._staging_bytes = staging_bytes
        self._regions = MemoryRegions()
        self._permits = Permits()
        self._idle: IdleLinks[StagedLink] = IdleLinks(StagedLink.close)
        self._lock = threading.Lock()
        self._closed = False
        self._inbound: set[socket.socket] = set()
        self._listener = listener

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        for buffer in buffers:
            self._regions.add(buffer.address, buffer.length_bytes)

    def allow(self, permit: int) -> None:
        self._permits.allow(permit)

    def revoke(self, permit: int) -> None:
        self._permits.revoke(permit)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sockets = list(self._inbound)
        self._idle.close()
        for connection in (self._listener, *sockets):
            shut(connection)

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        half_bytes = self._staging_bytes // HALVES
        try:
            with self._link(to) as link:
                half = 0
                for part in cut_rows(copies, half_bytes):
                    for batch in group_by_slots(part):
                        link.make_room()
                        self._send(link, half * half_bytes, permit, batch)
                        half = (half + 1) % HALVES
                link.drain()
        except (OutOfBoundsError, OSError) as error:
            raise TransferError(f"KV write to {to} failed: {error}") from error
        return sum(copy.total_bytes for copy in copies)

    # ---- what transports differ in ----

    @abstractmethod
    def _connect(self, to: str) -> StagedLink:
        """Raises OSError, or TransferError."""

    @abstractmethod
    def _staging_of(self, connection: socket.socket) -> AbstractContextManager[Bytes]:
        """Where a sender that has just connected stages its rows, as this side sees it, until the connection's end.
        Raises OutOfBoundsError where the sender's greeting makes no sense, and OSError."""

    # ---- sending ----

    def _send(self, link: StagedLink, staging_offset: int, permit: int, batch: Sequence[RowCopy]) -> None:
        """Copies of the same slots."""
        first, stop = batch[0], staging_offset
        with open_rows(self._regions, [copy.source for copy in batch], SlotIndex(first.source_slots)) as windows:
            for piece in _pieces(windows, staging_offset):
                piece.gather(link.staging)
                stop = piece.stop
        slots = first.target_slots.astype(np.uint32).tobytes()
        link.send(CopyRequest(permit, staging_offset, [copy.target for copy in batch], slots), stop)

    @contextmanager
    def _link(self, to: str) -> Iterator[StagedLink]:
        link = self._idle.take(to) or self._connect(to)
        try:
            yield link
        except BaseException as error:
            if not isinstance(error, OSError):
                link.give_up()
            link.close()
            self._idle.drop_ended()
            raise
        self._idle.keep(to, link)

    # ---- receiving ----

    def _start_serving(self) -> None:
        threading.Thread(target=self._accept, name=f"kv-{self.name}-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._inbound.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name=f"kv-{self.name}-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with self._staging_of(connection) as staging:
                while True:
                    connection.sendall(bytes([self._serve_request(connection, staging)]))
        except (OutOfBoundsError, msgspec.MsgspecError) as error:
            logger.warning("refused a KV writer: %s", error)
        except OSError:
            pass  # it has gone
        finally:
            with self._lock:
                self._inbound.discard(connection)
            shut(connection)

    def _serve_request(self, connection: socket.socket, staging: Bytes) -> _Status:
        size_bytes = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))[0]
        if size_bytes > _MAX_REQUEST_BYTES:
            raise OutOfBoundsError(f"a request of {size_bytes} bytes")
        request = msgspec.msgpack.decode(receive_exactly(connection, size_bytes), type=CopyRequest)
        try:
            with self._permits.use(request.permit, _nothing):
                self._scatter(staging, request)
        except PermitError:
            return _Status.NOT_PERMITTED
        except OutOfBoundsError as error:
            logger.warning("refused a KV write: %s", error)
            return _Status.REFUSED
        return _Status.DONE

    def _scatter(self, staging: Bytes, request: CopyRequest) -> None:
        slots = np.frombuffer(request.slots, np.uint32)
        if not len(slots):
            return
        with open_rows(self._regions, request.targets, SlotIndex(slots)) as windows:
            row_bytes = sum(target.length_bytes for target in request.targets)
            if request.staging_offset < 0 or request.staging_offset + row_bytes * len(slots) > len(staging):
                raise OutOfBoundsError("rows outside of the staging memory")
            for piece in _pieces(windows, request.staging_offset):
                piece.scatter(staging)


def _pieces(windows: Sequence[RowWindow], staging_offset: int) -> Iterator[Piece]:
    """All rows of each window, one after the other in staging memory."""
    for window in windows:
        piece = Piece(window, 0, window.count, staging_offset)
        yield piece
        staging_offset = piece.stop


def _nothing() -> None:
    """Copying waits for no peer, so there is nothing to interrupt."""


def shut(connection: socket.socket) -> None:
    """Close a socket and wake the threads that wait on it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
