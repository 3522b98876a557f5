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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, join_rows
from sglang_ext.transfer.transports.transport import GpuBuffers, TransferError

_HOST_MEMORY, _DEVICE_MEMORY = "DRAM", "VRAM"
_MAX_PIECES = 1 << 14  # posted at a time
# Looked at soon and then less often: a piece of some megabytes takes a tenth of a millisecond between GPUs.
_FIRST_POLL_S, _POLL_S = 0.00001, 0.0002
_PEER_IDLE_S = 300.0  # a peer that was not written to for this long is forgotten when a new one comes


@dataclass
class _Peer:
    """An agent that is written to."""

    name: str
    device: int
    used_s: float
    users: int = 0  # writes under way
    is_lost: bool = False  # one of them has failed: what is known of it may be no longer true


class NixlTransport:
    """One agent per process. Raises ImportError where NIXL is not installed."""

    name = "nixl"
    can_fence = False

    def __init__(self, io_timeout_s: float = 30.0, device_memory: GpuBuffers | None = None) -> None:
        """`io_timeout_s`: what one post of at most 16,384 pieces may take. `device_memory`: which buffers are a GPU's;
        what is in one here is in one at the peer."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"sglang-ext-{uuid4().hex}", nixl_agent_config(backends=["UCX"]))
        self._io_timeout_s = io_timeout_s
        self._device = 0 if device_memory is None else device_memory.device
        self._on_device = () if device_memory is None else device_memory.buffers
        self._lock = threading.Lock()  # an agent belongs to one thread at a time
        self._registered: list[Any] = []
        self._peers: dict[str, _Peer] = {}  # by address
        self._closed = False
        self.address = self._metadata()

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        """The address is another one afterwards."""
        on_device = set(self._on_device)
        with self._lock:
            for kind, device in ((_DEVICE_MEMORY, self._device), (_HOST_MEMORY, 0)):
                of_kind = [buffer for buffer in buffers if (buffer in on_device) == (kind == _DEVICE_MEMORY)]
                regions = [(buffer.address, buffer.length_bytes, device, "") for buffer in of_kind]
                if regions:
                    self._registered.append(self._agent.register_memory(regions, kind))
            self.address = self._metadata()

    def allow(self, permit: int) -> None:
        """Nothing checks it."""

    def revoke(self, permit: int) -> None:
        """Nothing checks it."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        for kind in (_DEVICE_MEMORY, _HOST_MEMORY):
            pieces = join_rows(copy for copy in copies if self._kind_of(copy.source_address) == kind)
            for first in range(0, len(pieces), _MAX_PIECES):
                self._post(to, kind, pieces[first : first + _MAX_PIECES])
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for name in {peer.name for peer in self._peers.values()}:
                self._agent.remove_remote_agent(name)
            for registered in self._registered:
                self._agent.deregister_memory(registered)
            del self._agent

    def _metadata(self) -> str:
        return f"{self._device}:{base64.b85encode(self._agent.get_agent_metadata()).decode()}"

    def _kind_of(self, address: int) -> str:
        is_on_device = any(
            buffer.address <= address < buffer.address + buffer.length_bytes for buffer in self._on_device
        )
        return _DEVICE_MEMORY if is_on_device else _HOST_MEMORY

    def _post(self, to: str, kind: str, pieces: npt.NDArray[np.uint64]) -> None:
        """Return when all pieces are in the peer's memory."""
        try:
            with self._writing_to(to) as peer:
                self._write_to(peer, kind, pieces)
        except TransferError:
            raise
        except Exception as error:  # NIXL's errors have no class in common
            is_outside = type(error).__name__ == "nixlNotFoundError"
            reason = "a piece lies outside of the registered memory" if is_outside else str(error)
            raise TransferError(f"a KV write by NIXL failed: {reason}") from error

    def _write_to(self, peer: _Peer, kind: str, pieces: npt.NDArray[np.uint64]) -> None:
        here, there = (0, 0) if kind == _HOST_MEMORY else (self._device, peer.device)
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed")
            sources = self._agent.get_xfer_descs(_described(pieces[:, 0], pieces[:, 2], here), kind)
            targets = self._agent.get_xfer_descs(_described(pieces[:, 1], pieces[:, 2], there), kind)
            handle = self._agent.initialize_xfer("WRITE", sources, targets, peer.name)
            state = self._agent.transfer(handle)
        try:
            deadline_s = time.monotonic() + self._io_timeout_s
            poll_s = _FIRST_POLL_S
            while state == "PROC":
                if time.monotonic() > deadline_s:
                    raise TransferError(f"a KV write by NIXL has not ended within {self._io_timeout_s:g} s")
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _POLL_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferError("a KV write by NIXL failed: the peer has gone, or refuses it")

    @contextmanager
    def _writing_to(self, address: str) -> Iterator[_Peer]:
        """A peer, which is not forgotten meanwhile; but afterwards, where it fails."""
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed")
            peer = self._peers.get(address)
            if peer is None:
                self._forget_idle()
                peer = self._peers[address] = self._added(address)
            peer.users += 1
        try:
            yield peer
        except BaseException:
            peer.is_lost = True
            raise
        finally:
            with self._lock:
                peer.users -= 1
                peer.used_s = time.monotonic()
                if peer.is_lost and not peer.users and address in self._peers:
                    self._forget(address)

    def _forget_idle(self) -> None:
        limit_s = time.monotonic() - _PEER_IDLE_S
        for address in [
            known_address for known_address, peer in self._peers.items() if not peer.users and peer.used_s < limit_s
        ]:
            self._forget(address)

    def _forget(self, address: str) -> None:
        peer = self._peers.pop(address)
        # An agent that has registered more memory has another address.
        if not self._closed and all(known.name != peer.name for known in self._peers.values()):
            self._agent.remove_remote_agent(peer.name)

    def _added(self, address: str) -> _Peer:
        number, _, encoded = address.partition(":")
        try:
            device, metadata = int(number), base64.b85decode(encoded)
        except (ValueError, binascii.Error) as error:
            raise TransferError(f"not an address of NIXL: {error}") from error
        name = self._agent.add_remote_agent(metadata)
        return _Peer(name.decode() if isinstance(name, bytes) else str(name), device, time.monotonic())


def _described(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64], device: int
) -> npt.NDArray[np.uint64]:
    """Return pieces as NIXL takes them: address, length, device."""
    return np.stack([addresses, lengths, np.full_like(lengths, device)], axis=1)
