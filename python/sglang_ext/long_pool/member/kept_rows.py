"""KV rows of prompts that have ended, kept by the member that computed them: its part of the pool's prefix cache.

The coordinator says what is kept, who reads it and what is dropped (`Keep`, `Borrow`, `DropKept`). Other work of the
instance may have the memory at any time: what no request reads is evicted, whole prompts at a time, least recently used
first, and the coordinator is informed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix
from sglang_ext.long_pool.member.kv_streams import Reading
from sglang_ext.long_pool.member.shard import HeldRows, KvPool, rows_within


@dataclass(slots=True)
class _KeptPart:
    """Describes the rows that this member has of one prompt."""

    rows: HeldRows
    pages: torch.Tensor  # that the rows lie in
    sending: list[Reading]  # transfers that may still read the rows
    readers: set[int] = field(default_factory=set)  # requests
    is_dropped: bool = False  # free it once no request reads it
    used: int = 0  # number of its last use
    outlived_at: int = 0  # see `KeptRows.evict_outlived`

    @property
    def is_free(self) -> bool:
        return not self.readers and all(reading.is_settled for reading in self.sending)


class KeptRows:
    """All that one member keeps. Belongs to the thread of the engine's loop; the same on all ranks of an instance."""

    def __init__(self, pool: KvPool, on_lost: Callable[[tuple[int, ...]], None]) -> None:
        """`on_lost` is called with the prompts whose rows had to make way."""
        self._pool = pool
        self._on_lost = on_lost
        self._parts: dict[int, _KeptPart] = {}  # by prompt
        self._uses = 0
        # Of the engine's own prefix cache: what it could evict now, and what it has evicted ever.
        self.others_tokens: Callable[[], int] = lambda: 0
        self.others_evicted_tokens = 0

    @property
    def evictable_tokens(self) -> int:
        """Return the number of slots of rows that no request reads, in whole pages."""
        pages: int = sum(part.pages.numel() for part in self._parts.values() if part.is_free)
        return self._pool.page_tokens * pages

    def add(self, prompt: int, rows: HeldRows, sending: Sequence[Reading]) -> None:
        """Keep the rows of a prompt; the pages that they lie in are this object's from now on. `sending`: transfers
        that may still read them."""
        pages = torch.unique(rows.slots // self._pool.page_tokens)
        self._parts[prompt] = part = _KeptPart(rows, pages, list(sending))
        self._use(part)

    def borrow(self, request: int, prefix: Sequence[KeptPrefix]) -> list[HeldRows]:
        """Return what is here of a prefix, of each of its parts that is; it stays until `give_back`."""
        borrowed = []
        for prompt, end_tokens in reversed(prefix):
            part = self._parts.get(prompt)
            if part is None:
                continue
            part.readers.add(request)
            self._use(part)  # what others build on last: it shall be evicted after them
            rows = rows_within(part.rows, 0, end_tokens)
            if rows.slots.numel():
                borrowed.append(rows)
        return borrowed[::-1]

    def give_back(self, request: int, sending: Sequence[Reading] = ()) -> None:
        """The request reads nothing any more but what these transfers still send."""
        for prompt, part in list(self._parts.items()):
            if request in part.readers:
                part.readers.discard(request)
                part.sending += sending
                self._free_if_dropped(prompt, part)

    def drop(self, prompt: int) -> None:
        """The coordinator wants the rows of a prompt freed, once no request reads them."""
        part = self._parts.get(prompt)
        if part is not None:
            part.is_dropped = True
            self._free_if_dropped(prompt, part)

    def settle(self) -> None:
        """Transfers may have ended. Call it in every turn."""
        for prompt, part in list(self._parts.items()):
            if part.sending:
                part.sending = [reading for reading in part.sending if not reading.is_settled]
                self._free_if_dropped(prompt, part)

    def evict_outlived(self, tokens: int) -> int:
        """Evict up to about `tokens` of what was used less recently than all that the engine's own prefix cache has.

        That cache says nothing of ages. But once it has evicted as much as it had at the last use of a prompt, what
        it has now was used after it. Returns the tokens that are free now.
        """
        return self._evict(tokens, lambda part: part.outlived_at <= self.others_evicted_tokens)

    def evict(self, tokens: int) -> int:
        """Evict up to about `tokens`, least recently used first. Returns the tokens that are free now."""
        return self._evict(tokens, lambda part: True)

    def flush(self) -> None:
        """Evict everything. Call it only while no request reads anything."""
        lost = tuple(self._parts)
        self.clear()
        if lost:
            self._on_lost(lost)

    def clear(self) -> None:
        """Forget all without a word. What transfers still read of it is free once they end."""
        for part in self._parts.values():
            self._free(part)
        self._parts = {}

    def _evict(self, tokens: int, may_go: Callable[[_KeptPart], bool]) -> int:
        freed, lost = 0, []
        while freed < tokens:
            free = [(part.used, prompt) for prompt, part in self._parts.items() if part.is_free and may_go(part)]
            if not free:
                break
            _, prompt = min(free)
            part = self._parts.pop(prompt)
            self._free(part)
            freed += part.pages.numel() * self._pool.page_tokens
            lost.append(prompt)
        if lost:
            self._on_lost(tuple(lost))
        return freed

    def _use(self, part: _KeptPart) -> None:
        self._uses += 1
        part.used, part.outlived_at = self._uses, self.others_evicted_tokens + self.others_tokens()

    def _free_if_dropped(self, prompt: int, part: _KeptPart) -> None:
        if part.is_dropped and part.is_free:
            self._free(self._parts.pop(prompt))

    def _free(self, part: _KeptPart) -> None:
        page = self._pool.page_tokens
        self._pool.free((part.pages[:, None] * page + torch.arange(page, device=part.pages.device)).flatten())
