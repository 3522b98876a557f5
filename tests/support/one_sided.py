"""A one-sided transport within this process: a write is a copy, which the memory's owner does not notice."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

from sglang_ext.transfer.pool_layout import ItemBuffer, RowCopy, join_rows
from sglang_ext.transfer.transports.transport import TransferError


class OneSidedTransport:
    """See `transport.Transport`; all of them reach each other."""

    name = "one_sided"
    can_fence = False
    _numbers = itertools.count(1)
    _by_address: dict[str, OneSidedTransport] = {}  # noqa: RUF012

    def __init__(self, before_write: Callable[[], None] = lambda: None) -> None:
        self.address = f"memory{next(self._numbers)}"
        self._by_address[self.address] = self
        self._buffers: list[ItemBuffer] = []
        self._before_write = before_write
        self.pieces = 0  # written
        self.is_closed = False

    def register(self, buffers: Sequence[ItemBuffer]) -> None:
        self._buffers += buffers

    def allow(self, permit: int) -> None: ...

    def revoke(self, permit: int) -> None: ...

    def write(self, to: str, permit: int, copies: Sequence[RowCopy]) -> int:
        self._before_write()
        peer = self._by_address[to]
        if self.is_closed or peer.is_closed:
            raise TransferError("the peer has gone")
        for source, target, length in join_rows(copies).tolist():
            if not self._holds(source, length) or not peer._holds(target, length):
                raise TransferError("a piece lies outside of the registered memory")
            ctypes.memmove(target, source, length)
            self.pieces += 1
        return sum(copy.total_bytes for copy in copies)

    def close(self) -> None:
        self.is_closed = True

    def _holds(self, address: int, length: int) -> bool:
        return any(
            buffer.address <= address and address + length <= buffer.address + buffer.length_bytes
            for buffer in self._buffers
        )
