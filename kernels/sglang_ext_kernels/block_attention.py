"""Attention over a part of the keys with its log-sum-exp, and the joining of parts: what a ring and a chunk consist of.

Softmax is exact however the keys are divided: `out = sum_i exp(lse_i - lse) out_i` with `lse = log sum_i exp(lse_i)`
(online softmax; Ring Attention, Tetris 3.2). Grouped-query attention: query head h reads key head
h // (query heads / key heads).

`attention_block` takes blocks that are seen whole or along the diagonal, `positioned_block` two shards of one prompt
given by explicit positions, `windowed_block` the same with sliding windows and capped scores in plain torch,
`attention_behind_prefix_` the new tokens of a prompt on a CPU. `gather_kv` takes a block
out of a paged pool, so that it can be sent, and `scatter_kv_` puts it into another: a view of some heads
(`keys[:, 2:4]`) is a pool, too, so slots and heads are taken in one pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ext_kernels import flashinfer_block, triton_support


def attention_block_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain mathematics in float32, for tests.

    `q` [Tq, H, D], `k` [Tk, Hkv, D], `v` [Tk, Hkv, Dv], `visible` [Tq, Tk] bool (None: everything). Returns the output
    [Tq, H, Dv] and the log-sum-exp [Tq, H], both float32; a query that sees nothing has 0 and -inf.
    """
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("qgrd,kgd->grqk", grouped, k.float()) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0)[..., None])
    out = torch.einsum("grqk,kgd->qgrd", weights, v.float()).reshape(tokens, heads, -1)
    return out, lse.permute(2, 0, 1).reshape(tokens, heads)


def attention_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by a fused kernel: every query must see at least one key.

    `is_causal`: query i sees keys 0 to i, both of one length. `mask` [Tq, Tk] of `q`'s dtype is added to the scores;
    on a CUDA device there is none, `positioned_block` takes its place. Returns output and log-sum-exp, shaped as in the
    reference, in float32; on a CUDA device the output may be in `q`'s dtype, which `merge_states_` takes as it is.
    Raises ValueError for a mask on a CUDA device.
    """
    if q.is_cuda:
        return _on_cuda(q, k, v, scale, is_causal, mask)
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    if is_causal or mask is not None or heads == kv_heads:
        out, lse = _fused_on_cpu(q.transpose(0, 1), k, v, scale, is_causal, mask)
        return out.transpose(0, 1).float(), lse.transpose(0, 1).float()
    # Heads that read the same keys become rows of one product: keys are read once, and the product is larger.
    group = heads // kv_heads
    grouped = q.view(tokens, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, size)
    out, lse = _fused_on_cpu(grouped, k, v, scale)
    out = out.view(kv_heads, group, tokens, -1).permute(2, 0, 1, 3)
    lse = lse.view(kv_heads, group, tokens).permute(2, 0, 1)
    return out.reshape(tokens, heads, -1).float(), lse.reshape(tokens, heads).float()


def _fused_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own kernel, which also gives the log-sum-exp: `q` [H, Tq, D]; returns [H, Tq, Dv] and [H, Tq]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        0.0,
        is_causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )
    return out[0], lse[0]


def _on_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """flashinfer where it has a kernel, else Triton's."""
    if mask is not None:
        raise ValueError("attention_block takes no mask on a CUDA device; give positions to positioned_block")
    if flashinfer_block.can_run(q, v):
        found = flashinfer_block.try_flashinfer_block(q, k, v, scale, is_causal)
        if found is not None:
            return found
    keys = torch.arange(k.shape[0], device=q.device)
    queries = keys if is_causal else torch.full((q.shape[0],), k.shape[0], device=q.device)
    return positioned_block(q, k, v, plan_block(queries, keys, default_sizes(q.shape[-1], q.dtype)), scale)


def merge_states_(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Take a further block into `out` [T, H, D] and `lse` [T, H], both float32 and changed in place.

    `other_out` may be in half precision: it is widened as it is read. A query that has seen nothing yet has lse -inf;
    a row that saw nothing in either keeps output 0.
    """
    if triton_support.runs_on(out) and out.is_contiguous() and lse.is_contiguous():
        from sglang_ext_kernels.on_gpu import attention_kernels as kernel

        kernel.merge_states_(out, lse, other_out.contiguous(), other_lse.contiguous())
    else:
        merge_states_reference_(out, lse, other_out, other_lse)


def merge_states_reference_(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """The same in plain torch, for the CPU and for tests."""
    joined = torch.logaddexp(lse, other_lse)
    safe = torch.where(torch.isneginf(joined), torch.zeros_like(joined), joined)
    out.mul_(torch.exp(lse - safe)[..., None])
    out.addcmul_(other_out.to(out.dtype), torch.exp(other_lse - safe)[..., None])
    lse.copy_(joined)


_ROWS = 128  # queries whose scores are in memory at a time


def windowed_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of layers that are not plainly causal, at the cost of what each block of queries may see.

    `q` [Tq, H, D] at `q_positions` [Tq], `k` [Tk, Hkv, D] and `v` [Tk, Hkv, Dv] at `k_positions` [Tk], in any order. A
    token sees itself and `window` tokens before it (None: all). Scores are cap * tanh(score / cap) where `cap` is above
    0. Returns the output [Tq, H, Dv] and the log-sum-exp [Tq, H], float32; a query that sees nothing has 0 and -inf.
    """
    tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    q_at, q_order = torch.sort(q_positions)
    k_at, k_order = torch.sort(k_positions)
    if not torch.equal(k_at, k_positions):
        k, v = k[k_order], v[k_order]
    # [KV heads, group, …]: no key is copied for the heads that share it.
    queries = q[q_order].view(tokens, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3).float()
    keys, values = k.permute(1, 2, 0)[:, None].float(), v.transpose(0, 1)[:, None].float()
    out = q.new_zeros((tokens, heads, v.shape[-1]), dtype=torch.float32)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    for start in range(0, tokens, _ROWS):
        rows = slice(start, min(tokens, start + _ROWS))
        at = q_at[rows, None]
        first = 0 if window is None else int(torch.searchsorted(k_at, at[0] - window))
        end = int(torch.searchsorted(k_at, at[-1], right=True))
        if first >= end:
            continue
        scores = (queries[:, :, rows] @ keys[..., first:end]).mul_(scale)
        if cap > 0:
            scores.div_(cap).tanh_().mul_(cap)
        columns = k_at[first:end]
        is_hidden = columns > at
        if window is not None:
            is_hidden |= columns < at - window
        scores.masked_fill_(is_hidden, -torch.inf)
        highest = scores.amax(-1, keepdim=True)
        highest.masked_fill_(highest == -torch.inf, 0.0)  # of a query that sees nothing
        weights = scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        attended = (weights @ values[:, :, first:end]).div_(total.clamp(min=torch.finfo(torch.float32).tiny))
        out[q_order[rows]] = attended.permute(2, 0, 1, 3).reshape(-1, heads, v.shape[-1])
        lse[q_order[rows]] = (highest + total.log())[..., 0].permute(2, 0, 1).reshape(-1, heads)
    return out, lse


def add_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let a score without a value take part in each head's softmax: `sinks` [H], once for `out` [T, H, D] and `lse`
    [T, H] of all keys, both float32 and changed in place."""
    joined = torch.logaddexp(lse, sinks.float())
    out.mul_(torch.exp(lse - joined)[..., None])
    lse.copy_(joined)


def attention_behind_prefix_(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> None:
    """Write to `out` [T, H, D] what the last T tokens of one prompt see of all of it, on a CPU.

    `q` [T, H, D] is of these tokens, `k` and `v` [P + T, Hkv, D] are of the prefix and of these tokens. It costs
    T (P + T/2) products where attention over the whole prompt costs (P + T)²/2: the prefix is seen whole, so only the
    new tokens' own square is causal, and the two are joined by their log-sum-exp. Behind a prefix half precision is
    computed in float32 and rounded once.
    """
    prefix = k.shape[0] - q.shape[0]
    if prefix and q.dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    new_out, new_lse = attention_block(q, k[prefix:], v[prefix:], scale, is_causal=True)
    if prefix:
        seen_out, seen_lse = attention_block(q, k[:prefix], v[:prefix], scale)
        new_out.lerp_(seen_out, torch.sigmoid(seen_lse - new_lse)[..., None])
    out.copy_(new_out)


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
    """Return the block sizes for heads of `size` elements on a Hopper GPU."""
    if dtype == torch.float32:
        return BlockSizes(32, 32) if size <= 128 else BlockSizes(16, 16)
    return BlockSizes(128, 64)


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
    from sglang_ext_kernels.on_gpu import attention_kernels as kernel

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


def gather_kv(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy the tokens at `slots` [T] out of a layer's pool, `keys` and `values` [pool slots, H, D]: [2, T, H, D].

    Raises ValueError when keys and values differ in shape.
    """
    _check_pool(keys, values)
    packed = torch.empty((2, slots.numel(), *keys.shape[1:]), dtype=keys.dtype, device=keys.device)
    if slots.numel() and _has_contiguous_slots(keys, values):
        from sglang_ext_kernels.on_gpu import moving_kernels as kernel

        kernel.move_kv(keys, values, slots, packed, is_gather=True)
    else:
        torch.index_select(keys, 0, slots, out=packed[0])
        torch.index_select(values, 0, slots, out=packed[1])
    return packed


def scatter_kv_(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """Write `packed` [2, T, H, D] to the distinct `slots` [T] of a layer's pool, which is changed in place.

    Raises ValueError when the shapes do not fit.
    """
    _check_pool(keys, values)
    if packed.shape != (2, slots.numel(), *keys.shape[1:]):
        raise ValueError(
            f"{tuple(packed.shape)} is not KV of {slots.numel()} tokens of a pool of {tuple(keys.shape[1:])}"
        )
    if slots.numel() and _has_contiguous_slots(keys, values):
        from sglang_ext_kernels.on_gpu import moving_kernels as kernel

        kernel.move_kv(keys, values, slots, packed.contiguous(), is_gather=False)
    else:
        keys.index_copy_(0, slots, packed[0])
        values.index_copy_(0, slots, packed[1])


def _check_pool(keys: torch.Tensor, values: torch.Tensor) -> None:
    if keys.shape != values.shape or keys.dim() != 3:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of one pool [slots, H, D]")


def _has_contiguous_slots(*pools: torch.Tensor) -> bool:
    """Return whether a slot's heads are contiguous, as the kernel wants them."""
    return all(
        triton_support.runs_on(pool) and pool.stride(2) == 1 and pool.stride(1) == pool.shape[2] for pool in pools
    )
