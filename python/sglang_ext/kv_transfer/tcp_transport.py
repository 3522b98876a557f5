"""The handshake's transport over TCP: one-sided writes of the TCP engine, each under a permit of the receiver."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.kv_transfer.permits import Permits
from sglang_ext.kv_transfer.pool_layout import ItemBuffer, RowCopy, to_blocks
from sglang_ext.kv_transfer.tcp_engine import Block, EngineOptions, TcpTransferEngine


class TcpTransport:
    """Listens on `host` from construction to `close`."""

    name = "tcp"
    can_fence = True

    def __init__(self, host: str, options: EngineOptions | None = None) -> None:
        self._permits = Permits()
        self._engine = TcpTransferEngine(host, options, permits=self._permits)
        self.address = self._engine.session_id

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        for buffer in buffers:
            self._engine.register(buffer.address, buffer.length_bytes)

    def allow(self, permit: int) -> None:
        self._permits.allow(permit)

    def revoke(self, permit: int) -> None:
        self._permits.revoke(permit)

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        blocks: list[Block] = []
        for copy in copies:
            runs = to_blocks(copy)
            blocks += map(Block, runs.sources.tolist(), runs.targets.tolist(), runs.lengths.tolist())
        self._engine.write(to, blocks, permit=permit)
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        self._engine.close()
