"""The handshake's transport over NIXL (UCX): a sender writes into the receiver's memory, which takes no part in it.

What a receiver has registered, and how it is reached, is in the metadata of its agent: the transport's address. Rows
that follow each other on both sides are one piece, and a write posts all of its pieces at once. No permit is checked: a
write that has begun cannot be cut off by the receiver, so slots of a lost sender stay in quarantine.

UCX chooses devices and ways by itself (`UCX_NET_DEVICES`, `UCX_TLS`).
"""

from __future__ import annotations

import base64
import binascii
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from sglang_ext.kv_transfer.errors import TransferError
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy

_HOST_MEMORY = "DRAM"
_MAX_PIECES = 1 << 14  # posted at a time
_POLL_S = 0.0002


class NixlTransport:
    """One agent per process. Raises ImportError where NIXL is not installed."""

    name = "nixl"
    can_fence = False

    def __init__(self, io_timeout_s: float = 30.0) -> None:
        """`io_timeout_s`: what one post of at most 16,384 pieces may take."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"sglang-ext-{uuid4().hex}", nixl_agent_config(backends=["UCX"]))
        self._io_timeout_s = io_timeout_s
        self._lock = threading.Lock()  # an agent belongs to one thread at a time
        self._registered: list[Any] = []
        self._peers: dict[str, str] = {}  # agents' names by address
        self._closed = False
        self.address = self._metadata()

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        """Host memory. The address is another one afterwards."""
        regions = [(buffer.address, buffer.length_bytes, 0, "") for buffer in buffers]
        with self._lock:
            self._registered.append(self._agent.register_memory(regions, _HOST_MEMORY))
            self.address = self._metadata()

    def allow(self, permit: int) -> None:
        """Nothing checks it."""

    def revoke(self, permit: int) -> None:
        """Nothing checks it."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        pieces = join_rows(copies)
        for first in range(0, len(pieces), _MAX_PIECES):
            self._post(to, pieces[first : first + _MAX_PIECES])
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for peer in self._peers.values():
                self._agent.remove_remote_agent(peer)
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            del self._agent

    def _metadata(self) -> str:
        return base64.b85encode(self._agent.get_agent_metadata()).decode()

    def _post(self, to: str, pieces: npt.NDArray[np.uint64]) -> None:
        """Return when all pieces are in the peer's memory."""
        try:
            with self._lock:
                if self._closed:
                    raise TransferError("the transport is closed")
                sources = self._agent.get_xfer_descs(_described(pieces[:, 0], pieces[:, 2]), _HOST_MEMORY)
                targets = self._agent.get_xfer_descs(_described(pieces[:, 1], pieces[:, 2]), _HOST_MEMORY)
                handle = self._agent.initialize_xfer("WRITE", sources, targets, self._peer(to))
                state = self._agent.transfer(handle)
            try:
                deadline_s = time.monotonic() + self._io_timeout_s
                while state == "PROC":
                    if time.monotonic() > deadline_s:
                        raise TransferError(f"a KV write by NIXL has not ended within {self._io_timeout_s:g} s")
                    time.sleep(_POLL_S)
                    with self._lock:
                        state = self._agent.check_xfer_state(handle)
            finally:
                with self._lock:
                    self._agent.release_xfer_handle(handle)
        except TransferError:
            raise
        except Exception as error:  # NIXL's errors have no class in common
            is_outside = type(error).__name__ == "nixlNotFoundError"
            reason = "a piece lies outside of the registered memory" if is_outside else str(error)
            raise TransferError(f"a KV write by NIXL failed: {reason}") from error
        if state != "DONE":
            raise TransferError("a KV write by NIXL failed: the peer has gone, or refuses it")

    def _peer(self, address: str) -> str:
        name = self._peers.get(address)
        if name is None:
            try:
                metadata = base64.b85decode(address)
            except (ValueError, binascii.Error) as error:
                raise TransferError(f"not an address of NIXL: {error}") from error
            told = self._agent.add_remote_agent(metadata)
            name = self._peers[address] = told.decode() if isinstance(told, bytes) else str(told)
        return name


def join_rows(copies: Iterable[RowCopy]) -> npt.NDArray[np.uint64]:
    """Source, target and length of pieces [n, 3]: rows that follow each other on both sides are one."""
    found = [_pieces(copy) for copy in copies if len(copy.source_slots)]
    return np.concatenate(found) if found else np.empty((0, 3), np.uint64)


def _pieces(copy: RowCopy) -> npt.NDArray[np.uint64]:
    length = copy.length_bytes
    sources = copy.source_address + copy.source_slots.astype(np.int64) * copy.source_stride
    targets = copy.target_address + copy.target_slots.astype(np.int64) * copy.target_stride
    breaks = (np.diff(sources) != length) | (np.diff(targets) != length)
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    rows = np.diff(np.concatenate((starts, [len(sources)])))
    return np.stack([sources[starts], targets[starts], rows * length], axis=1).astype(np.uint64)


def _described(addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """As NIXL takes them: address, length, device."""
    return np.stack([addresses, lengths, np.zeros_like(lengths)], axis=1)
