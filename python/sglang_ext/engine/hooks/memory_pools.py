"""AFTER `Scheduler.get_internal_state`: what each memory pool of an instance has free, in `GET /server_info`.

A model with windows or recurrent states takes slots of several pools for a request, and the scarcest limits how many
requests run. SGLang reports tokens of the first pool only.
"""

from __future__ import annotations

from typing import Any

MEMORY_KEY = "sglang_ext_memory"


def add_memory(output: Any, scheduler: Any, *arguments: Any, **options: Any) -> Any:
    """Return SGLang's `output` with the pools in it."""
    output.internal_state[MEMORY_KEY] = memory_pools(scheduler)
    return output


def memory_pools(scheduler: Any) -> dict[str, dict[str, int]]:
    """Return, by pool, its slots: in all, free, cached (free on demand) and locked (cached, and a request reads them).

    What is left belongs to requests. A slot is a request's row in `rows`, a token in `kv` and `windows`, a request's
    state or a cached one in `states`.
    """
    stats, tree = scheduler.pool_stats_observer.get_pool_stats(), scheduler.tree_cache
    rows = scheduler.req_to_token_pool
    has_parts = stats.is_hybrid_swa or stats.is_hybrid_ssm
    locked = tree.full_protected_size() if has_parts else tree.protected_size()
    pools = {
        "rows": _slots(rows.size + rows.pre_alloc_size, len(rows.free_slots)),
        "kv": _slots(stats.full_capacity, stats.full_available_size, stats.full_evictable_size, locked),
    }
    if stats.is_hybrid_swa:
        windows = stats.swa_capacity, stats.swa_available_size, stats.swa_evictable_size
        pools["windows"] = _slots(*windows, tree.swa_protected_size())
    if stats.is_hybrid_ssm:
        states = rows.mamba_pool.size, stats.mamba_available_size, stats.mamba_evictable_size
        pools["states"] = _slots(*states, tree.mamba_protected_size())
    return pools


def _slots(total: int, free: int, cached: int = 0, locked: int = 0) -> dict[str, int]:
    return {"total": int(total), "free": int(free), "cached": int(cached), "locked": int(locked)}
