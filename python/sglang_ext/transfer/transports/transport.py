"""The interface of what moves the bytes of a granted chunk. `registry.py` makes the implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy


class TransferError(Exception):
    """A write did not happen, or it is unknown whether all of it did."""


class GpuBuffers(NamedTuple):
    """The buffers that lie in the memory of a GPU."""

    device: int  # the GPU's number in this process
    buffers: tuple[ItemBuffer, ...]
    network_devices: str = ""  # that move this memory, as `--disaggregation-ib-device` names them; empty: all


class Transport(Protocol):
    """Moves rows between instances. Thread-safe; a sender calls `write`, a receiver the methods about permits."""

    name: str
    address: str  # where senders write to; senders get it with the receiver's layout, after `register`
    can_fence: bool  # whether `revoke` can stop a write

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        """Let `write` read these buffers and, under a permit, peers write to them. The caller keeps them alive."""

    def allow(self, permit: int) -> None:
        """Let peers write under this permit from now on."""

    def revoke(self, permit: int) -> None:
        """Return when no write under this permit is under way or will be. Without `can_fence`, do nothing."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        """Copy rows to the peer, and return the number of bytes once the peer has stored them all.

        Raises TransferError otherwise; some rows may then have been written.
        """

    def close(self) -> None:
        """Stop serving and writing. A second call does nothing."""
