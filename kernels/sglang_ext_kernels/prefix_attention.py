"""Attention of a padded batch over its requests' prefixes in a paged pool and their new tokens, in plain torch.

What the kernels of an engine do in a captured pass; here for the CPU and for tests.
"""

from __future__ import annotations

import torch

from sglang_ext_kernels.attention_block import attention_block_reference
from sglang_ext_kernels.padded_batch import PaddedBatch


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
