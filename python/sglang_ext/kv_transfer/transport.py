"""What moves the bytes of a granted chunk: one small interface, and which implementations this machine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy


class GpuBuffers(NamedTuple):
    """Which of the buffers are no host memory."""

    device: int  # its number in this process
    buffers: tuple[ItemBuffer, ...]


class Transport(Protocol):
    """One per process; thread-safe. A sender calls `write`, a receiver the methods about permits."""

    name: str
    address: str  # where senders write to; they get it with the receiver's layout, after `register`
    can_fence: bool  # whether `revoke` keeps its promise

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        """Let `write` read these and, under a permit, peers write to them. The caller keeps them alive."""

    def allow(self, permit: int) -> None:
        """Peers may write under this permit from now on."""

    def revoke(self, permit: int) -> None:
        """Return when no write under this permit is under way or will be, where `can_fence`; else do nothing."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        """Copy rows to the peer; returns the number of bytes when it has stored them all.

        Raises TransferError otherwise; some rows may then have been written.
        """

    def close(self) -> None:
        """Stop serving and writing. Safe to call again."""


TRANSPORTS = ("tcp", "shared_memory", "nixl")  # what `create_transport` makes
_WITHOUT_ADAPTER = ("mooncake", "nccl")


def why_unavailable(name: str) -> str | None:
    """One line that says why a transport cannot be used here, or None when it can."""
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        return "handshake transport nixl needs NIXL (pip install 'sglang-ext[nixl]')"
    if name in TRANSPORTS:
        return None
    choice = f"choose one of {', '.join(TRANSPORTS)}"
    if name in _WITHOUT_ADAPTER:
        return f"handshake transport {name} has no adapter in this version; {choice}"
    return f"there is no handshake transport {name!r}; {choice}"


def create_transport(name: str, host: str, device_memory: GpuBuffers | None = None) -> Transport:
    """One of TRANSPORTS, listening on `host`. Raises ValueError, in one line, for another name, or one that does not
    move `device_memory`."""
    problem = why_unavailable(name)
    if problem is not None:
        raise ValueError(problem)
    if device_memory is not None and name != "nixl":
        raise ValueError(f"handshake transport {name} moves host memory only; choose nixl on a GPU")
    if name == "tcp":
        from sglang_ext.kv_transfer.tcp_transport import TcpTransport

        return TcpTransport(host)
    if name == "nixl":
        from sglang_ext.kv_transfer.nixl_transport import NixlTransport

        return NixlTransport(device_memory=device_memory)
    from sglang_ext.kv_transfer.shared_memory_transport import SharedMemoryTransport

    return SharedMemoryTransport()
