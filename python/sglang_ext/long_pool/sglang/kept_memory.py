"""Memory that a member's kept rows and its instance's own prefix cache share: either makes way for any other work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, EvictResult

from sglang_ext.long_pool.member.kept_rows import KeptRows


def share_memory(tree: Any, kept: KeptRows) -> None:
    """Let SGLang's prefix cache `tree` evict kept rows, too, and count them among what it could evict.

    What has been used least recently goes first, of both together.
    """
    stock_evictable_size, stock_reset = tree.evictable_size, tree.reset
    kept.others_tokens = stock_evictable_size

    def with_kept_rows(stock_evict: Callable[..., EvictResult]) -> Callable[..., EvictResult]:
        def evict(params: EvictParams, **kwargs: Any) -> EvictResult:
            wanted = params.num_tokens
            freed = kept.evict_outlived(wanted)
            result = stock_evict(replace(params, num_tokens=max(0, wanted - freed)), **kwargs)
            kept.others_evicted_tokens += result.num_tokens_evicted
            freed += result.num_tokens_evicted
            result.num_tokens_evicted = freed + kept.evict(wanted - freed)
            return result

        return evict

    def reset() -> None:
        kept.flush()
        stock_reset()

    # Where it is the base class's, it calls `evict`.
    has_its_own = type(tree).evict_for_alloc is not BasePrefixCache.evict_for_alloc
    if has_its_own:
        tree.evict_for_alloc = with_kept_rows(tree.evict_for_alloc)
    tree.evict = with_kept_rows(tree.evict)
    tree.evictable_size = lambda: stock_evictable_size() + kept.evictable_tokens
    tree.reset = reset


def prefix_namespace(extra_key: str | None, cache_salt: str | None) -> str:
    """Return what prompts that may share a prefix have in common, in one line."""
    return hashlib.blake2b(json.dumps([extra_key, cache_salt]).encode(), digest_size=16).hexdigest()
