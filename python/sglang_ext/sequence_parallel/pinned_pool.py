"""KV memory whose slots stay taken while somebody reads them, whoever frees them meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from sglang_ext.sequence_parallel.shard import KvPool


class Pin(NamedTuple):
    """Pages that are being read."""

    pages: tuple[int, ...]


class PinnedPool:
    """See `sequence_parallel.shard.KvPool`. What is freed while it is pinned is free once it is not pinned any more."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.layers = pool.layers
        self.page_tokens = pool.page_tokens
        self._pins: Counter[int] = Counter()  # by page
        self._condemned: set[int] = set()

    @property
    def condemned_tokens(self) -> int:
        """Slots that nobody wants but a reader: the pool counts them as taken."""
        return len(self._condemned) * self.page_tokens

    def pin(self, slots: torch.Tensor) -> Pin:
        """Keep the pages of these slots until `unpin`."""
        pin = Pin(tuple(torch.unique(slots // self.page_tokens).tolist()))
        self._pins.update(pin.pages)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Nobody reads them any more; once for each pin."""
        self._pins.subtract(pin.pages)
        released = [page for page in pin.pages if self._pins[page] <= 0]
        for page in released:
            del self._pins[page]
        freed = [page for page in released if page in self._condemned]
        if freed:
            self._condemned.difference_update(freed)
            self._pool.free(self._slots(freed))

    def allocate(self, tokens: int) -> torch.Tensor:
        return self._pool.allocate(tokens)

    def free(self, slots: torch.Tensor) -> None:
        if self._pins:
            pages = slots // self.page_tokens
            is_pinned = torch.isin(pages, torch.tensor(list(self._pins), dtype=pages.dtype, device=pages.device))
            self._condemned.update(pages[is_pinned].tolist())
            slots = slots[~is_pinned]
        if slots.numel():
            self._pool.free(slots)

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return self._pool.read(layer, slots)

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        self._pool.write(layer, slots, kv)

    def empty_block(self, tokens: int) -> torch.Tensor:
        return self._pool.empty_block(tokens)

    def _slots(self, pages: list[int]) -> torch.Tensor:
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page_tokens
        return (first + torch.arange(self.page_tokens)).flatten()
