"""Attention of a padded batch: new tokens over their requests' prefixes, which lie in a pool, and over themselves.

A few new tokens behind a long prefix make few programs, each of which would read all of it: `splits_of` says among how
many a prefix is divided, from what a captured shape can hold. Layers may have sliding windows, capped
scores and sinks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ext_kernels import triton_support
from sglang_ext_kernels.block_attention import add_sinks_, windowed_block
from sglang_ext_kernels.padded_batch import PaddedBatch, Prefixes

# Of a Hopper GPU: two programs of 64 rows run on each of its 132 multiprocessors.
PROGRAMS = 264
MAX_SPLITS = 32
# Of a prefix, what a program takes at least: fewer keys are read sooner than parts are joined.
MIN_KEYS = 128


class SplitSizes(NamedTuple):
    """Describes how attention is divided among programs: a prefix into `splits`, rows (query heads of a key head x
    tokens) and keys into blocks."""

    splits: int
    rows: int
    keys: int
    min_keys: int = MIN_KEYS


def splits_of(
    longest_tokens: int, requests: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype
) -> SplitSizes:
    """Return the number of splits for batches of up to `requests` of `longest_tokens` new tokens each.

    One split where there are programs enough without.
    """
    rows = longest_tokens * (heads // kv_heads)
    if dtype == torch.float32:
        block = SplitSizes(1, 32, 32)
    elif size > 128:
        block = SplitSizes(1, 64, 32)
    else:
        block = SplitSizes(1, 64, 64)
    programs = requests * kv_heads * -(-rows // block.rows)
    return block._replace(splits=max(1, min(MAX_SPLITS, PROGRAMS // programs)))


def split_prefix_attention_(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: PaddedBatch,
    scale: float,
    longest_tokens: int,
    sizes: SplitSizes,
    *,
    prefixes: Prefixes | None = None,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute `prefix_attention_reference`, by Triton where it runs; `longest_tokens`: limit of a request."""
    prefixes = prefixes or Prefixes(batch.kv_indptr, batch.kv_indices)
    if not triton_support.runs_on(q):
        prefix_attention_reference(
            out, q, k, v, k_pool, v_pool, batch, scale, prefixes=prefixes, window=window, cap=cap, sinks=sinks
        )
        return
    from sglang_ext_kernels.on_gpu import prefix_kernels as kernel

    kernel.split_prefix_attention(
        *(out, q, k, v, k_pool, v_pool, batch.qo_indptr, *prefixes, scale, longest_tokens, *sizes),
        window=window,
        cap=cap,
        sinks=sinks,
    )


def prefix_attention_reference(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: PaddedBatch,
    scale: float,
    *,
    prefixes: Prefixes | None = None,
    window: int | None = None,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write to `out` [T, H, Dv], rows of padded tokens apart, what `q` [T, H, D] attends to.

    `k` [T, Hkv, D] and `v` [T, Hkv, Dv] are of the new tokens, `k_pool` [slots, Hkv, D] and `v_pool` [slots, Hkv, Dv]
    hold the prefixes: those of the batch, or `prefixes`, the last tokens of each. A token sees itself and `window`
    tokens before it (None: all), of which `prefixes` must have all that are cached. Scores are cap * tanh(score / cap)
    where `cap` is above 0. `sinks` [H]: a score of each head that takes part in the softmax and has no value.
    """
    q_ends = batch.qo_indptr.tolist()
    indptr, indices = prefixes or (batch.kv_indptr, batch.kv_indices)
    kv_ends = indptr.tolist()
    for request in range(len(q_ends) - 1):
        new, prefix = slice(*q_ends[request : request + 2]), slice(*kv_ends[request : request + 2])
        if new.stop == new.start:
            continue
        slots = indices[prefix]
        keys, values = torch.cat([k_pool[slots], k[new]]), torch.cat([v_pool[slots], v[new]])
        positions = torch.arange(keys.shape[0], device=q.device)
        attended, lse = windowed_block(
            q[new], keys, values, positions[slots.numel() :], positions, scale, window=window, cap=cap
        )
        if sinks is not None:
            add_sinks_(attended, lse, sinks)
        out[new] = attended.to(out.dtype)
