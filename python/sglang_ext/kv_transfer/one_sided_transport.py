"""The handshake's transport over an engine of one-sided writes such as mooncake's: raw addresses, no permits.

Such an engine cannot bar a sender from writing, so slots of a lost sender stay in quarantine (`quarantine_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_ext.kv_transfer.errors import TransferError
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy, to_blocks


class OneSidedEngine(Protocol):
    """What SGLang's `MooncakeTransferEngine` offers; each method returns 0 for success."""

    def batch_register(self, ptrs: list[int], lengths: list[int]) -> int: ...

    def batch_deregister(self, ptrs: list[int]) -> int: ...

    def batch_transfer_sync(
        self, session_id: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int: ...

    def get_session_id(self) -> str: ...


class OneSidedTransport:
    """Uses `engine`, which stays the caller's; `close` takes back what was registered."""

    can_fence = False

    def __init__(self, name: str, engine: OneSidedEngine) -> None:
        self.name = name
        self.address = engine.get_session_id()
        self._engine = engine
        self._registered: list[int] = []

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        addresses = [buffer.address for buffer in buffers]
        if self._engine.batch_register(addresses, [buffer.length_bytes for buffer in buffers]):
            raise TransferError(f"{self.name} cannot register the KV pool")
        self._registered += addresses

    def allow(self, permit: int) -> None:
        """Nothing can be allowed or barred."""

    def revoke(self, permit: int) -> None:
        """Nothing can be allowed or barred."""

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        sources: list[int] = []
        targets: list[int] = []
        lengths: list[int] = []
        for copy in copies:
            blocks = to_blocks(copy)
            sources += blocks.sources.tolist()
            targets += blocks.targets.tolist()
            lengths += blocks.lengths.tolist()
        if sources and self._engine.batch_transfer_sync(to, sources, targets, lengths):
            raise TransferError(f"KV write to {to} over {self.name} failed")
        return sum(lengths)

    def close(self) -> None:
        registered, self._registered = self._registered, []
        if registered:
            self._engine.batch_deregister(registered)
