"""SGLang's prefix cache and kept rows make way for other work in the order of their last use, both together."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.long_pool.decide.kept_prompts import KeptPrefix
from sglang_ext.long_pool.member.kept_rows import KeptRows
from sglang_ext.long_pool.member.shard import HeldRows

pytestmark = pytest.mark.usefixtures("sglang_imported")
TOKENS = 100


class Memory:
    """An instance's memory with both caches."""

    def __init__(self) -> None:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        from sglang_ext.long_pool.sglang.engine import share_memory

        self.allocator = TokenToKVPoolAllocator(TOKENS, torch.float32, "cpu", None, need_sort=False)
        parameters = CacheInitParams(
            disable=False, req_to_token_pool=None, token_to_kv_pool_allocator=self.allocator, page_size=1
        )
        self.tree = RadixCache(parameters)
        self.lost: list[int] = []
        pool: Any = SimpleNamespace(page_tokens=1, free=self.allocator.free)
        self.kept = KeptRows(pool, self.lost.extend)
        share_memory(self.tree, self.kept)

    def cache(self, first: int, tokens: int) -> None:
        """A prompt of SGLang's own."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", range(first, first + tokens)), None)
        self.tree.insert(InsertParams(key=key, value=self.allocator.alloc(tokens)))

    def keep(self, prompt: int, tokens: int) -> None:
        self.kept.add(prompt, HeldRows((range(tokens),), self.allocator.alloc(tokens)), ())

    def want(self, tokens: int) -> bool:
        """Other work takes memory, and gives it back."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        evict_from_tree_cache(self.tree, tokens)
        slots = self.allocator.alloc(tokens)
        if slots is not None:
            self.allocator.free(slots)
        return slots is not None

    @property
    def free_tokens(self) -> int:
        return int(self.allocator.available_size() + self.tree.evictable_size())


def test_what_was_used_least_recently_makes_way_first() -> None:
    memory = Memory()
    memory.keep(1, 30)
    memory.cache(0, 30)
    memory.keep(2, 30)
    assert memory.free_tokens == TOKENS
    assert memory.want(11)
    assert memory.lost == [1], "older than all that the tree has"
    assert memory.want(41)
    assert (memory.lost, memory.tree.evictable_size()) == ([1], 30), "of the tree, which is older than the other prompt"
    assert memory.want(71)
    assert memory.lost == [1, 2]
    assert (memory.free_tokens, memory.want(TOKENS)) == (TOKENS, True)


def test_a_use_makes_a_prompt_young_again() -> None:
    memory = Memory()
    memory.keep(1, 30)
    memory.cache(0, 30)
    assert len(memory.kept.borrow(7, [KeptPrefix(1, 20)])) == 1
    assert memory.free_tokens == TOKENS - 30, "it is read"
    assert not memory.want(71)
    memory.kept.give_back(7)
    memory.cache(100, 30)
    assert memory.want(61)
    assert memory.lost == [1]


def test_a_flush_takes_both() -> None:
    memory = Memory()
    memory.keep(1, 30)
    memory.cache(0, 30)
    memory.tree.reset()
    assert memory.lost == [1]
    assert memory.kept.evictable_tokens == 0


@pytest.mark.parametrize("other", [("a", None), (None, "b"), ("b", "a"), ("ab", None), (None, None)])
def test_namespaces(other: tuple[str | None, str | None]) -> None:
    from sglang_ext.long_pool.sglang.engine import prefix_namespace

    assert (prefix_namespace("a", "b") == prefix_namespace(*other)) == (other == ("a", "b"))
    assert prefix_namespace("\n", "\u2028").isalnum()
