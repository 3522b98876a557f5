"""The handshake's transport over Mooncake's transfer engine: RDMA where there is such a network, else its TCP.

What Mooncake moves is one piece of memory at a time. Over TCP each costs it some 30 µs, and of more than 2,048 at once
it refuses some. So rows of host memory are gathered into staging memory, which travels in one piece, and the receiver
copies them to their places, under a permit. Both staging memories are registered with Mooncake. What the two sides send
each other goes over a socket of its own:

    `TransportGreeting` with the size of the staging memory   sender to receiver, once
    `TransportGreeting` with the address of that memory       receiver to sender, once

Requests and answers follow (`staged.py`).

Memory of a GPU is registered itself and written to where rows belong, in bounded batches. No permit is checked then:
slots of a lost sender stay in quarantine.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, join_rows
from sglang_ext.transfer.transports.connections import connect, listen, send_at_once
from sglang_ext.transfer.transports.link_records import (
    CopyRequest,
    RecordError,
    TransportGreeting,
    pack,
    receive_greeting,
)
from sglang_ext.transfer.transports.memory_regions import MemoryRegions, OutOfBoundsError
from sglang_ext.transfer.transports.row_moves import Bytes
from sglang_ext.transfer.transports.staged import HALVES, StagedLink, StagedTransport
from sglang_ext.transfer.transports.transport import GpuBuffers, TransferError

logger = logging.getLogger(__name__)

_PROTOCOL_VARIABLE = "MOONCAKE_PROTOCOL"  # as SGLang reads it
_MAX_STAGING_BYTES = 1 << 28
_MAX_PIECES = 512  # of a batch
_POLL_S = 0.0002
_DONE, _FAILED = 1, -1  # of Mooncake's answers; it tries for as long as it gives another one
# What a sender wrote before its connection ended may still come: longer than a write may take.
_RETIRED_S = 60.0


class _Retired(NamedTuple):
    """Staging memory whose connection has ended, and that may still be read or written."""

    staging: Bytes
    write: int | None  # that reads it
    until_s: float


class _Engine:
    """Mooncake's engine of this process, and the memory that it knows. Thread-safe."""

    def __init__(self, host: str, protocol: str, devices: str) -> None:
        """Raises ImportError without Mooncake, and ValueError where it does not start."""
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, devices):
            raise ValueError(f"Mooncake's transfer engine does not start at {host} with {protocol}")
        port = self._engine.get_rpc_port()
        self.session = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._lock = threading.Lock()
        self._retired: list[_Retired] = []

    def register(self, address: int, length_bytes: int) -> None:
        """Raises ConnectionError where Mooncake refuses it, or has been closed."""
        if self._open().register_memory(address, length_bytes):
            raise ConnectionError(f"Mooncake registers no {length_bytes} bytes at {address:#x}")

    def lend(self, size_bytes: int) -> Bytes:
        """Registered memory, until `retire`."""
        self.free_retired()
        staging = np.empty(size_bytes, np.uint8)
        self.register(staging.ctypes.data, size_bytes)
        return staging

    def retire(self, staging: Bytes, *, write: int | None = None, keep_s: float = 0.0) -> None:
        """It is used no more, but may be read by `write`, or be written to for `keep_s` to come."""
        with self._lock:
            if self._engine is None:
                return
            self._engine.unregister_memory(staging.ctypes.data)
            self._retired.append(_Retired(staging, write, time.monotonic() + keep_s))
        self.free_retired()

    def free_retired(self) -> None:
        """Free what is neither read nor written any more."""
        with self._lock:
            if self._engine is not None:
                now_s = time.monotonic()
                self._retired = [
                    retired._replace(
                        write=None if retired.write is None or self._has_ended(retired.write) else retired.write
                    )
                    for retired in self._retired
                ]
                self._retired = [
                    retired for retired in self._retired if retired.write is not None or retired.until_s > now_s
                ]

    @property
    def retired_count(self) -> int:
        """Staging memories that are kept for what may still come."""
        with self._lock:
            return len(self._retired)

    def submit(self, session: str, source: int, target: int, length_bytes: int) -> int:
        """Begin to write one piece; its number. Raises ConnectionError where the peer cannot be reached."""
        write: int = self._open().transfer_submit_write(session, source, target, length_bytes)
        if not write:
            raise ConnectionError(f"Mooncake does not reach {session}")
        return write

    def await_written(self, write: int, timeout_s: float) -> None:
        """Return when a piece is in the peer's memory. Raises TransferError when it will not be, and TimeoutError."""
        deadline_s = time.monotonic() + timeout_s
        while (state := self._open().transfer_check_status(write)) != _DONE:
            if state == _FAILED:
                raise TransferError("a KV write by Mooncake failed: the peer has gone, or refuses it")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"a KV write by Mooncake has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def write_pieces(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        """Return when all of them, at most 512, are in the peer's memory. Raises TransferError."""
        engine = self._open()
        batch = engine.batch_transfer_async_write(session, sources, targets, lengths)
        if not batch or engine.get_batch_transfer_status([batch]):
            raise TransferError(
                "a KV write by Mooncake failed: the peer has gone, or a piece lies outside of its memory"
            )

    def close(self) -> None:
        """Safe to call again."""
        with self._lock:
            self._engine = None
            self._retired = []

    def _open(self) -> Any:
        engine = self._engine
        if engine is None:
            raise ConnectionError("the transport is closed")
        return engine

    def _has_ended(self, write: int) -> bool:
        return self._engine.transfer_check_status(write) in (_DONE, _FAILED)


class _MooncakeLink(StagedLink):
    """While Mooncake sends one half of the staging memory the receiver empties the other."""

    def __init__(self, engine: _Engine, address: str, staging_bytes: int, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._session, _, server = address.partition(" ")
        self._writing: tuple[int, CopyRequest] | None = None
        connection = connect(server, timeout_s)
        try:
            connection.sendall(pack(TransportGreeting(MooncakeTransport.name, staging_bytes)))
            self._remote = receive_greeting(connection, MooncakeTransport.name).staging_address
            staging = engine.lend(staging_bytes)
        except BaseException:
            connection.close()
            raise
        super().__init__(connection, staging)

    def make_room(self) -> None:
        """The write before the last one has ended, and it read this half."""

    def send(self, request: CopyRequest, stop: int) -> None:
        self._finish_write()
        self._await_answers(HALVES - 1)  # so the receiver's half is empty
        first = request.staging_offset
        source = self.staging.ctypes.data + first
        self._writing = self._engine.submit(self._session, source, self._remote + first, stop - first), request

    def drain(self) -> None:
        self._finish_write()
        super().drain()

    def give_up(self) -> None:
        try:
            self._await_write()
        except (TransferError, OSError):
            pass
        super().give_up()

    def close(self) -> None:
        super().close()
        writing, self._writing = self._writing, None
        self._engine.retire(self.staging, write=None if writing is None else writing[0])

    def _finish_write(self) -> None:
        request = self._await_write()
        if request is not None:
            self._request_copy(request)

    def _await_write(self) -> CopyRequest | None:
        """Return what the receiver may copy now, if anything is new to it."""
        if self._writing is None:
            return None
        write, request = self._writing
        try:
            self._engine.await_written(write, self._timeout_s)
        except TransferError:
            self._writing = None
            raise
        self._writing = None
        return request


class MooncakeTransport(StagedTransport):
    """Moves host memory. One engine per process; listens on `host`.

    Raises ImportError without Mooncake, and ValueError where it does not start.
    """

    name = "mooncake"

    def __init__(self, host: str, staging_bytes: int = 8 << 20, io_timeout_s: float = 30.0) -> None:
        self._io_timeout_s = io_timeout_s
        self._engine = _Engine(host, os.environ.get(_PROTOCOL_VARIABLE, "tcp"), "")
        listener, place = listen(host)
        self.address = f"{self._engine.session} {place}"
        super().__init__(listener, staging_bytes)
        self._inbound.start()

    @property
    def retired_count(self) -> int:
        """Staging memories whose connection has ended and that may still be written to, or read."""
        self._engine.free_retired()
        return self._engine.retired_count

    def close(self) -> None:
        super().close()
        self._engine.close()

    def _connect(self, to: str) -> StagedLink:
        return _MooncakeLink(self._engine, to, self._staging_bytes, self._io_timeout_s)

    @contextmanager
    def _staging_of(self, connection: socket.socket) -> Iterator[Bytes]:
        send_at_once(connection)
        connection.settimeout(self._io_timeout_s)
        size_bytes = receive_greeting(connection, self.name).staging_bytes
        if not 0 < size_bytes <= _MAX_STAGING_BYTES:
            raise RecordError(f"staging memory of {size_bytes} bytes: the limit is {_MAX_STAGING_BYTES}")
        staging = self._engine.lend(size_bytes)
        try:
            connection.sendall(pack(TransportGreeting(self.name, staging_address=staging.ctypes.data)))
            connection.settimeout(None)  # a sender may pause for as long as it likes
            yield staging
        finally:
            self._engine.retire(staging, keep_s=_RETIRED_S)


class MooncakeDeviceTransport:
    """Moves a GPU's memory, and the metadata in the host's: a sender writes into the receiver's memory."""

    name = "mooncake"
    can_fence = False

    def __init__(self, host: str, device_memory: GpuBuffers) -> None:
        """Raises as `MooncakeTransport`."""
        protocol = os.environ.get(_PROTOCOL_VARIABLE, "rdma")
        self._engine = _Engine(host, protocol, device_memory.network_devices)
        self._regions = MemoryRegions()
        self.address = self._engine.session

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        for buffer in buffers:
            self._engine.register(buffer.address, buffer.length_bytes)
            self._regions.add(buffer.address, buffer.length_bytes)

    def allow(self, permit: int) -> None:
        """Nothing checks it."""

    def revoke(self, permit: int) -> None:
        """Nothing checks it."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        pieces = join_rows(copies)
        try:
            with self._regions.hold(pieces[:, [0, 2]]):
                for first in range(0, len(pieces), _MAX_PIECES):
                    sources, targets, lengths = pieces[first : first + _MAX_PIECES].T.tolist()
                    self._engine.write_pieces(to, sources, targets, lengths)
        except (OutOfBoundsError, OSError) as error:
            raise TransferError(f"KV write to {to} failed: {error}") from error
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        self._engine.close()
