"""The handshake's transport between processes of one machine: a sender stages rows in memory that both map.

The staging memory belongs to the sender's connection and the receiver copies out of it, so a sender that has lost
its right can damage nothing but its own staging. It has no name: its descriptor travels over the connection, a Unix
socket, and the kernel frees it with the last process.

    greeting   magic, size of the staging memory, its descriptor            sender to receiver, once
    request    length (u32), then msgpack of `_CopyRequest`                     sender to receiver
    answer     one byte                                                     receiver to sender

One half of the staging memory is filled while the receiver copies out of the other.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

import msgspec
import numpy as np

from sglang_ext.kv_transfer.errors import TransferError
from sglang_ext.kv_transfer.memory_regions import MemoryRegions, OutOfBoundsError
from sglang_ext.kv_transfer.permits import PermitError, Permits
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy, RowSet, cut_rows, group_by_slots
from sglang_ext.kv_transfer.row_moves import Bytes, Piece, RowWindow, SlotIndex, open_rows
from sglang_ext.kv_transfer.socket_io import receive_exactly

logger = logging.getLogger(__name__)

_MAGIC = b"SGLXSHM2"
_GREETING = struct.Struct("<8sQ")
_LENGTH = struct.Struct("<I")
_MAX_REQUEST_BYTES = 1 << 28
_HALVES = 2


class _Status(IntEnum):
    DONE = 0x5A
    NOT_PERMITTED = 0x01
    REFUSED = 0x02


class _CopyRequest(msgspec.Struct, array_like=True, frozen=True):
    """Rows from `staging_offset` on, one after the other and target by target, and where they go."""

    permit: int
    staging_offset: int
    targets: list[RowSet]
    slots: bytes  # u32, the same for all targets


class _Link:
    """A sender's connection and its staging memory."""

    def __init__(self, address: str, staging_bytes: int, timeout_s: float) -> None:
        self.unanswered = 0  # requests
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = os.memfd_create("sglang-ext-kv-staging")
        try:
            self.socket.settimeout(timeout_s)
            self.socket.connect(b"\0" + address.encode())
            os.ftruncate(descriptor, staging_bytes)
            self.staging = np.frombuffer(mmap.mmap(descriptor, staging_bytes), np.uint8)
            socket.send_fds(self.socket, [_GREETING.pack(_MAGIC, staging_bytes)], [descriptor])
        except BaseException:
            self.socket.close()
            raise
        finally:
            os.close(descriptor)

    def request_copy(self, request: _CopyRequest) -> None:
        body = msgspec.msgpack.encode(request)
        self.socket.sendall(_LENGTH.pack(len(body)) + body)
        self.unanswered += 1

    def await_answer(self) -> None:
        """Of the oldest request that has none. Raises TransferError when it has been refused."""
        status = receive_exactly(self.socket, 1)[0]
        self.unanswered -= 1
        if status == _Status.NOT_PERMITTED:
            raise TransferError("the peer does not allow this write any more")
        if status != _Status.DONE:
            raise TransferError("the peer refused an address outside its registered memory")


class SharedMemoryTransport:
    """Listens on an abstract Unix socket (Linux, one network namespace) from construction to `close`."""

    name = "shared_memory"
    can_fence = True

    def __init__(self, staging_bytes: int = 8 << 20, io_timeout_s: float = 30.0) -> None:
        self._staging_bytes = staging_bytes
        self._io_timeout_s = io_timeout_s
        self._regions = MemoryRegions()
        self._permits = Permits()
        self._lock = threading.Lock()
        self._closed = False
        self._idle: defaultdict[str, list[_Link]] = defaultdict(list)
        self._inbound: set[socket.socket] = set()
        self.address = f"sglang-ext-kv-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(b"\0" + self.address.encode())
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="kv-shm-accept", daemon=True).start()

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
            sockets = [*self._inbound, *(link.socket for links in self._idle.values() for link in links)]
            self._idle.clear()
        for connection in (self._listener, *sockets):
            _shut(connection)

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        half_bytes = self._staging_bytes // _HALVES
        try:
            with self._link(to) as link:
                half = 0
                for part in cut_rows(copies, half_bytes):
                    for batch in group_by_slots(part):
                        if link.unanswered == _HALVES:
                            link.await_answer()
                        self._send(link, half * half_bytes, permit, batch)
                        half = (half + 1) % _HALVES
                while link.unanswered:
                    link.await_answer()
        except (OutOfBoundsError, OSError) as error:
            raise TransferError(f"KV write to {to} failed: {error}") from error
        return sum(copy.total_bytes for copy in copies)

    # ---- sending ----

    def _send(self, link: _Link, staging_offset: int, permit: int, batch: Sequence[RowCopy]) -> None:
        """Copies of the same slots."""
        first = batch[0]
        with open_rows(self._regions, [copy.source for copy in batch], SlotIndex(first.source_slots)) as windows:
            for piece in _pieces(windows, staging_offset):
                piece.gather(link.staging)
        slots = first.target_slots.astype(np.uint32).tobytes()
        link.request_copy(_CopyRequest(permit, staging_offset, [copy.target for copy in batch], slots))

    @contextmanager
    def _link(self, to: str) -> Iterator[_Link]:
        with self._lock:
            if self._closed:
                raise ConnectionError("the transport is closed")
            idle = self._idle[to]
            link = idle.pop() if idle else None
        if link is None:
            link = _Link(to, self._staging_bytes, self._io_timeout_s)
        try:
            yield link
        except BaseException as error:
            if not isinstance(error, OSError):
                _let_finish(link)
            _shut(link.socket)
            raise
        if not self._keep(to, link):
            _shut(link.socket)

    def _keep(self, to: str, link: _Link) -> bool:
        """Put a link aside for the next write; False when the transport has been closed."""
        with self._lock:
            if not self._closed:
                self._idle[to].append(link)
            return not self._closed

    # ---- receiving ----

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
            threading.Thread(target=self._serve, args=(connection,), name="kv-shm-serve", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            staging = _receive_staging(connection)
            while True:
                size_bytes = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size))[0]
                if size_bytes > _MAX_REQUEST_BYTES:
                    raise OutOfBoundsError(f"a request of {size_bytes} bytes")
                request = msgspec.msgpack.decode(receive_exactly(connection, size_bytes), type=_CopyRequest)
                try:
                    with self._permits.use(request.permit, _nothing):
                        self._scatter(staging, request)
                    status = _Status.DONE
                except PermitError:
                    status = _Status.NOT_PERMITTED
                except OutOfBoundsError as error:
                    logger.warning("refused a KV write: %s", error)
                    status = _Status.REFUSED
                connection.sendall(bytes([status]))
        except (OutOfBoundsError, msgspec.MsgspecError) as error:
            logger.warning("refused a KV writer: %s", error)
        except OSError:
            pass  # it has gone
        finally:
            with self._lock:
                self._inbound.discard(connection)
            _shut(connection)

    def _scatter(self, staging: Bytes, request: _CopyRequest) -> None:
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


def _receive_staging(connection: socket.socket) -> Bytes:
    data, descriptors, _, _ = socket.recv_fds(connection, _GREETING.size, 1)
    try:
        if len(data) != _GREETING.size or len(descriptors) != 1:
            raise OutOfBoundsError("no staging memory in the greeting")
        magic, size_bytes = _GREETING.unpack(data)
        if magic != _MAGIC or not 0 < size_bytes <= os.fstat(descriptors[0]).st_size:
            raise OutOfBoundsError("the greeting makes no sense")
        return np.frombuffer(mmap.mmap(descriptors[0], size_bytes, prot=mmap.PROT_READ), np.uint8)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _let_finish(link: _Link) -> None:
    """After a write has failed: nothing of it may be under way when its sender is told."""
    try:
        while link.unanswered:
            try:
                link.await_answer()
            except TransferError:
                pass
    except OSError:
        pass


def _nothing() -> None:
    """Copying waits for no peer, so there is nothing to interrupt."""


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
