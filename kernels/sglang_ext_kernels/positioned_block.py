"""Attention between two shards given by explicit positions, causal across zigzag and striped shards.

A query at position p sees the keys at positions up to p. What holds for whole blocks of keys is found beforehand, once
for all layers: keys that a block of queries sees entirely need no mask, keys that it does not see are not read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ext_kernels import triton_support
from sglang_ext_kernels.attention_block import attention_block_reference


class BlockSizes(NamedTuple):
    """Rows that one program works on; powers of two, at least 16."""

    queries: int
    keys: int


class BlockPlan(NamedTuple):
    """Two shards' positions, and by block of queries how many leading blocks of keys it sees.

    `q_positions` [Tq] and `k_positions` [Tk], `by_all` (all queries see all keys) and `by_some` (the others are not
    seen by any) [blocks of queries]; int32 on the device of the tensors to come.
    """

    q_positions: torch.Tensor
    k_positions: torch.Tensor
    by_all: torch.Tensor
    by_some: torch.Tensor
    sizes: BlockSizes


def default_sizes(size: int, dtype: torch.dtype) -> BlockSizes:
    """What suits a Hopper GPU for heads of `size` elements."""
    if dtype == torch.float32:
        return BlockSizes(32, 32)
    return BlockSizes(128, 64) if size <= 128 else BlockSizes(64, 64)


def plan_block(q_positions: torch.Tensor, k_positions: torch.Tensor, sizes: BlockSizes) -> BlockPlan:
    """Plan for two shards. Positions are integers in any order; ascending ones are what makes it fast.

    Raises ValueError without queries or keys.
    """
    if not q_positions.numel() or not k_positions.numel():
        raise ValueError(f"a block needs queries and keys, got {q_positions.numel()} and {k_positions.numel()}")
    q_positions, k_positions = q_positions.int().contiguous(), k_positions.int().contiguous()
    q_low, q_high, _ = _extremes(q_positions, sizes.queries)
    k_low, k_high, k_count = _extremes(k_positions, sizes.keys)
    whole = (k_high[None, :] <= q_low[:, None]) & (k_count[None, :] == sizes.keys)
    by_all = whole.int().cumprod(dim=1).sum(dim=1)
    places = torch.arange(1, k_low.numel() + 1, device=k_low.device)
    by_some = torch.where(k_low[None, :] <= q_high[:, None], places[None, :], 0).amax(dim=1)
    return BlockPlan(q_positions, k_positions, by_all.int(), by_some.int(), sizes)


def positioned_block_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain mathematics in float32; shapes as in `attention_block_reference`."""
    return attention_block_reference(q, k, v, scale, k_positions[None, :] <= q_positions[:, None])


def positioned_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: BlockPlan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`q` [Tq, H, D], `k` [Tk, Hkv, D], `v` [Tk, Hkv, Dv], at the positions of `plan`.

    Returns the output [Tq, H, Dv] and the log-sum-exp [Tq, H], float32; a query that sees nothing has 0 and -inf.
    """
    if not triton_support.runs_on(q):
        return positioned_block_reference(q, k, v, plan.q_positions, plan.k_positions, scale)
    from sglang_ext_kernels.on_gpu import positioned_block as kernel

    q, k, v = (_with_contiguous_rows(x) for x in (q, k, v))
    return kernel.positioned_block(
        q,
        k,
        v,
        plan.q_positions,
        plan.k_positions,
        plan.by_all,
        plan.by_some,
        scale,
        plan.sizes.queries,
        plan.sizes.keys,
    )


def _extremes(positions: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lowest and highest position and number of rows of each block of `rows`."""
    blocks = -(-positions.numel() // rows)
    missing = blocks * rows - positions.numel()
    low = torch.nn.functional.pad(positions, (0, missing), value=torch.iinfo(torch.int32).max)
    high = torch.nn.functional.pad(positions, (0, missing), value=-1)
    counts = torch.full((blocks,), rows, device=positions.device)
    counts[-1] -= missing
    return low.view(blocks, rows).amin(dim=1), high.view(blocks, rows).amax(dim=1), counts


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
