"""Attention of a padded batch: new tokens over their requests' prefixes, which lie in a pool, and over themselves.

A few new tokens behind a long prefix make few programs, each of which would read all of it: `splits_of` says among how
many a prefix is divided, from what a captured shape can hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ext_kernels import triton_support
from sglang_ext_kernels.block_attention import attention_block_reference
from sglang_ext_kernels.padded_batch import PaddedBatch

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
) -> None:
    """Compute `prefix_attention_reference`, by Triton where it runs; `longest_tokens`: limit of a request."""
    if not triton_support.runs_on(q):
        prefix_attention_reference(out, q, k, v, k_pool, v_pool, batch, scale)
        return
    from sglang_ext_kernels.on_gpu import prefix_kernels as kernel

    kernel.split_prefix_attention(
        out, q, k, v, k_pool, v_pool, batch.qo_indptr, batch.kv_indptr, batch.kv_indices, scale, longest_tokens, *sizes
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
) -> None:
    """Write to `out` [T, H, D], rows of padded tokens apart, what `q` [T, H, D] attends to.

    `k` and `v` [T, Hkv, D] are of the new tokens, `k_pool` and `v_pool` [slots, Hkv, D] hold the prefixes.
    """
    q_ends, kv_ends = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
    for request in range(len(q_ends) - 1):
        new, prefix = slice(*q_ends[request : request + 2]), slice(*kv_ends[request : request + 2])
        if new.stop == new.start:
            continue
        slots = batch.kv_indices[prefix]
        tokens = new.stop - new.start
        visible = torch.ones(tokens, slots.numel() + tokens, dtype=torch.bool, device=q.device).tril(slots.numel())
        keys, values = torch.cat([k_pool[slots], k[new]]), torch.cat([v_pool[slots], v[new]])
        out[new] = attention_block_reference(q[new], keys, values, scale, visible)[0].to(out.dtype)
