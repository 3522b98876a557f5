"""The handshake's transport between processes of one machine: a sender stages rows in memory that both map.

The staging memory belongs to the sender's connection and the receiver copies out of it, so a sender that has lost
its right can damage nothing but its own staging. It has no name: its descriptor travels over the connection, a Unix
socket, and the kernel frees it with the last process.

    greeting   magic, size of the staging memory, its descriptor            sender to receiver, once
    request    length (u32), then msgpack of `_CopyRequest`                     sender to receiver
    answer     one byte                                                     receiver to sender
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
import numpy.typing as npt

from sglang_ext.kv_transfer.errors import TransferError
from sglang_ext.kv_transfer.memory_regions import MemoryRegions, OutOfBoundsError, Span
from sglang_ext.kv_transfer.permits import PermitError, Permits
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy
from sglang_ext.kv_transfer.wire import receive_exactly

logger = logging.getLogger(__name__)

_MAGIC = b"SGLXSHM1"
_GREETING = struct.Struct("<8sQ")
_LENGTH = struct.Struct("<I")
_MAX_REQUEST_BYTES = 1 << 28


class _Status(IntEnum):
    DONE = 0x5A
    NOT_PERMITTED = 0x01
    REFUSED = 0x02


class _Scatter(msgspec.Struct, array_like=True, frozen=True):
    """Rows in staging memory, one after the other, and where they go."""

    staging_offset: int
    address: int
    stride: int
    length_bytes: int
    slots: bytes  # u32


class _CopyRequest(msgspec.Struct, array_like=True, frozen=True):
    permit: int
    scatters: list[_Scatter]


class _Link:
    """A sender's connection and its staging memory."""

    def __init__(self, address: str, staging_bytes: int, timeout_s: float) -> None:
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
        status = receive_exactly(self.socket, 1)[0]
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

    # ---- sending ----

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        try:
            with self._link(to) as link:
                for batch in self._batches(copies):
                    scatters = [self._stage(link, offset, copy) for offset, copy in batch]
                    link.request_copy(_CopyRequest(permit, scatters))
        except (OutOfBoundsError, OSError) as error:
            raise TransferError(f"KV write to {to} failed: {error}") from error
        return sum(copy.total_bytes for copy in copies)

    def _batches(self, copies: Sequence[RowCopy]) -> Iterator[list[tuple[int, RowCopy]]]:
        """Pieces of the copies that fill the staging memory, with their places in it."""
        batch: list[tuple[int, RowCopy]] = []
        used_bytes = 0
        for copy in copies:
            if copy.length_bytes > self._staging_bytes:
                raise TransferError(f"a row of {copy.length_bytes} bytes exceeds the staging memory")
            first = 0
            while first < len(copy.source_slots):
                rows = min(len(copy.source_slots) - first, (self._staging_bytes - used_bytes) // copy.length_bytes)
                if not rows:
                    yield batch
                    batch, used_bytes = [], 0
                    continue
                piece = slice(first, first + rows)
                part = copy._replace(source_slots=copy.source_slots[piece], target_slots=copy.target_slots[piece])
                batch.append((used_bytes, part))
                used_bytes += part.total_bytes
                first += rows
        yield batch

    def _stage(self, link: _Link, offset: int, copy: RowCopy) -> _Scatter:
        staged = link.staging[offset : offset + copy.total_bytes].reshape(-1, copy.length_bytes)
        with _rows(
            self._regions, copy.source_address, copy.source_stride, copy.length_bytes, copy.source_slots
        ) as rows:
            memory, index = rows
            np.take(memory, index, axis=0, out=staged)
        slots = copy.target_slots.astype(np.uint32).tobytes()
        return _Scatter(offset, copy.target_address, copy.target_stride, copy.length_bytes, slots)

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
        except BaseException:
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
                        for scatter in request.scatters:
                            self._scatter(staging, scatter)
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

    def _scatter(self, staging: npt.NDArray[np.uint8], scatter: _Scatter) -> None:
        slots = np.frombuffer(scatter.slots, np.uint32)
        stop = scatter.staging_offset + len(slots) * scatter.length_bytes
        if scatter.staging_offset < 0 or scatter.length_bytes < 1 or stop > len(staging):
            raise OutOfBoundsError("rows outside of the staging memory")
        staged = staging[scatter.staging_offset : stop].reshape(-1, scatter.length_bytes)
        with _rows(self._regions, scatter.address, scatter.stride, scatter.length_bytes, slots) as (memory, index):
            memory[index] = staged


@contextmanager
def _rows(
    regions: MemoryRegions, address: int, stride: int, length_bytes: int, slots: npt.NDArray[np.uint32]
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
    """The rows between the lowest and the highest slot as a matrix of bytes, and which of them are meant."""
    if not len(slots):
        yield np.zeros((0, length_bytes), np.uint8), np.zeros(0, np.int64)
        return
    if stride < length_bytes:
        raise OutOfBoundsError("rows overlap")
    low, high = int(slots.min()), int(slots.max())
    span = Span(address + low * stride, (high - low) * stride + length_bytes)
    with regions.views([span]) as (view,):
        flat = np.frombuffer(view, np.uint8)
        shape = (high - low + 1, length_bytes)
        yield np.lib.stride_tricks.as_strided(flat, shape, (stride, 1)), slots.astype(np.int64) - low


def _receive_staging(connection: socket.socket) -> npt.NDArray[np.uint8]:
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


def _nothing() -> None:
    """Copying waits for no peer, so there is nothing to interrupt."""


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
