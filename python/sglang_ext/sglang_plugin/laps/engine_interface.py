"""What SGLang 0.5.17 and 0.5.23 have under different names, of what the two queues use. They share the rest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


def prefix_tokens(request: Any) -> int:
    """Tokens of an SGLang request whose KV is there: found in the cache, and computed by its chunks so far."""
    if hasattr(request, "prefix_len"):
        return int(request.prefix_len)
    return len(request.prefix_indices)  # before 0.5.23: the slots themselves


def match_prefix(request: Any, tree_cache: Any) -> None:
    """Look a waiting request up in the prefix cache; it remembers what was found. Nothing is locked."""
    _match()(request, tree_cache)


@cache
def _match() -> Callable[[Any, Any], object]:
    try:
        from sglang.srt.mem_cache.common import match_kv_cache
    except ImportError:
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        return lambda request, tree_cache: match_prefix_for_req(tree_cache, request, include_req=True)
    match: Callable[[Any, Any], object] = match_kv_cache
    return match
