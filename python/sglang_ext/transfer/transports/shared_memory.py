"""The handshake's transport between processes of one machine: a sender stages rows in memory that both map.

The staging memory has no name: its descriptor travels over the connection, a Unix socket, and the kernel frees it with
the last process.

    `TransportGreeting` with the descriptor of the staging memory   sender to receiver, once

Requests and answers follow (`staged.py`).
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from sglang_ext.transfer.transports.link_records import (
    LENGTH,
    CopyRequest,
    RecordError,
    TransportGreeting,
    pack,
    receive_greeting,
)
from sglang_ext.transfer.transports.row_moves import Bytes
from sglang_ext.transfer.transports.staged import HALVES, StagedLink, StagedTransport


class _SharedMemoryLink(StagedLink):
    """Makes the staging memory, and hands it to the receiver."""

    def __init__(self, address: str, staging_bytes: int, timeout_s: float) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = os.memfd_create("sglang-ext-kv-staging")
        try:
            connection.settimeout(timeout_s)
            connection.connect(b"\0" + address.encode())
            os.ftruncate(descriptor, staging_bytes)
            staging = np.frombuffer(mmap.mmap(descriptor, staging_bytes), np.uint8)
            socket.send_fds(
                connection, [pack(TransportGreeting(SharedMemoryTransport.name, staging_bytes))], [descriptor]
            )
        except BaseException:
            connection.close()
            raise
        finally:
            os.close(descriptor)
        super().__init__(connection, staging)

    def make_room(self) -> None:
        self._await_answers(HALVES - 1)

    def send(self, request: CopyRequest, stop: int) -> None:
        self._request_copy(request)


class SharedMemoryTransport(StagedTransport):
    """Listens on an abstract Unix socket (Linux, one network namespace)."""

    name = "shared_memory"

    def __init__(self, staging_bytes: int = 8 << 20, io_timeout_s: float = 30.0) -> None:
        self._io_timeout_s = io_timeout_s
        self.address = f"sglang-ext-kv-{os.getpid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0" + self.address.encode())
        listener.listen(128)
        super().__init__(listener, staging_bytes)
        self._inbound.start()

    def _connect(self, to: str) -> StagedLink:
        return _SharedMemoryLink(to, self._staging_bytes, self._io_timeout_s)

    @contextmanager
    def _staging_of(self, connection: socket.socket) -> Iterator[Bytes]:
        length, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 1)
        try:
            if len(length) != LENGTH.size or len(descriptors) != 1:
                raise RecordError("the greeting came without staging memory")
            size_bytes = receive_greeting(connection, self.name, length).staging_bytes
            if not 0 < size_bytes <= os.fstat(descriptors[0]).st_size:
                raise RecordError(f"the greeting names {size_bytes} bytes of staging memory, which are not there")
            staging = np.frombuffer(mmap.mmap(descriptors[0], size_bytes, prot=mmap.PROT_READ), np.uint8)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        yield staging
