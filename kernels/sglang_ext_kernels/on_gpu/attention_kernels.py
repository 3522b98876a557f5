# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (capitals are Triton's compile-time constants)
"""Triton kernels of attention: one shard's queries over another's keys by explicit positions, and the joining of parts.

Attention is the usual online softmax, twice: over the key blocks that all queries of a block see, without a mask, and
over the keys that some see. Scores are in units of log2, as the hardware has exp2. Joining reads both parts in one
pass and writes one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attend(
    acc,
    weight,
    highest,
    q,
    q_at,
    k,
    v,
    k_positions,
    k_tokens,
    start,
    end,
    k_stride,
    v_stride,
    scale_log2,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    V_SIZE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take the key blocks from `start` to `end` into the accumulators."""
    columns = tl.arange(0, KEYS)
    dims = tl.arange(0, SIZE_BLOCK)
    v_dims = tl.arange(0, V_SIZE_BLOCK)
    for block in range(start, end):
        first = block * KEYS
        in_row = columns < k_tokens - first
        # times a stride a row may exceed 32 bits: the block's place is a 64-bit scalar, rows count from there
        place = tl.cast(first, tl.int64)
        k_block = tl.load(
            k + place * k_stride + (columns[None, :] * k_stride + dims[:, None]),
            mask=in_row[None, :] & (dims[:, None] < SIZE),
            other=0.0,
        )
        scores = tl.dot(q, k_block, input_precision=PRECISION) * scale_log2
        if IS_MASKED:
            k_at = tl.load(k_positions + first + columns, mask=in_row, other=0)
            is_visible = (k_at[None, :] <= q_at[:, None]) & in_row[None, :]
            scores = tl.where(is_visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # a query that has seen nothing keeps -inf, and -inf minus -inf must not be
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - safe[:, None])
        rescale = tl.exp2(highest - safe)
        weight = weight * rescale + tl.sum(weights, 1)
        v_block = tl.load(
            v + place * v_stride + (columns[:, None] * v_stride + v_dims[None, :]),
            mask=in_row[:, None] & (v_dims[None, :] < V_SIZE),
            other=0.0,
        )
        acc = acc * rescale[:, None] + tl.dot(weights.to(v_block.dtype), v_block, input_precision=PRECISION)
        highest = new_highest
    return acc, weight, highest


@triton.jit(do_not_specialize=["q_tokens", "k_tokens"])
def _positioned_block(
    q,
    k,
    v,
    q_positions,
    k_positions,
    seen_by_all,
    seen_by_some,
    out,
    lse,
    q_tokens,
    k_tokens,
    scale_log2,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    V_SIZE_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the last queries see most: started first, they do not finish last
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = block * QUERIES + tl.arange(0, QUERIES)
    in_row = row < q_tokens
    dims = tl.arange(0, SIZE_BLOCK)
    v_dims = tl.arange(0, V_SIZE_BLOCK)
    row_64 = row.to(tl.int64)
    q_block = tl.load(
        q + row_64[:, None] * q_stride + head * q_head_stride + dims[None, :],
        mask=in_row[:, None] & (dims[None, :] < SIZE),
        other=0.0,
    )
    q_at = tl.load(q_positions + row, mask=in_row, other=-1)
    k_head = k + (head // GROUP) * k_head_stride
    v_head = v + (head // GROUP) * v_head_stride
    acc = tl.zeros([QUERIES, V_SIZE_BLOCK], dtype=tl.float32)
    weight = tl.zeros([QUERIES], dtype=tl.float32)
    highest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    by_all = tl.load(seen_by_all + block)
    by_some = tl.load(seen_by_some + block)
    acc, weight, highest = _attend(
        acc, weight, highest, q_block, q_at, k_head, v_head, k_positions, k_tokens, 0, by_all,
        k_stride, v_stride, scale_log2, SIZE, V_SIZE, SIZE_BLOCK, V_SIZE_BLOCK, KEYS, False, PRECISION,
    )  # fmt: skip
    acc, weight, highest = _attend(
        acc, weight, highest, q_block, q_at, k_head, v_head, k_positions, k_tokens, by_all, by_some,
        k_stride, v_stride, scale_log2, SIZE, V_SIZE, SIZE_BLOCK, V_SIZE_BLOCK, KEYS, True, PRECISION,
    )  # fmt: skip
    sees = weight > 0
    acc = acc / tl.where(sees, weight, 1.0)[:, None]
    log2_sum = tl.where(sees, highest + tl.log2(tl.where(sees, weight, 1.0)), float("-inf"))
    tl.store(
        out + (row_64[:, None] * HEADS + head) * V_SIZE + v_dims[None, :],
        acc,
        mask=in_row[:, None] & (v_dims[None, :] < V_SIZE),
    )
    tl.store(lse + row_64 * HEADS + head, log2_sum * 0.6931471805599453, mask=in_row)


def positioned_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    seen_by_all: torch.Tensor,
    seen_by_some: torch.Tensor,
    scale: float,
    queries_per_block: int,
    keys_per_block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `sglang_ext_kernels.block_attention`; the last dimension of q, k and v must be contiguous."""
    tokens, heads, size = q.shape
    v_size = v.shape[-1]
    out = torch.empty((tokens, heads, v_size), dtype=torch.float32, device=q.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    _positioned_block[(seen_by_some.numel(), heads)](
        q,
        k,
        v,
        q_positions,
        k_positions,
        seen_by_all,
        seen_by_some,
        out,
        lse,
        tokens,
        k.shape[0],
        scale * 1.4426950408889634,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        HEADS=heads,
        GROUP=heads // k.shape[1],
        SIZE=size,
        V_SIZE=v_size,
        SIZE_BLOCK=triton.next_power_of_2(size),
        V_SIZE_BLOCK=triton.next_power_of_2(v_size),
        QUERIES=queries_per_block,
        KEYS=keys_per_block,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=8 if queries_per_block >= 128 else 4,
        num_stages=_stages(size, q.dtype),
    )
    return out, lse


def _stages(size: int, dtype: torch.dtype) -> int:
    """Key blocks on their way: of wide heads a third one does not fit into shared memory."""
    if dtype == torch.float32:
        return 2 if size <= 128 else 1
    return 3 if size <= 128 else 2


_ROWS = 8


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lse", "other_lse"])
def _merge_states(
    out, lse, other_out, other_lse, rows, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_row = row < rows
    dims = tl.arange(0, SIZE_BLOCK)
    a = tl.load(lse + row, mask=in_row, other=float("-inf"))
    b = tl.load(other_lse + row, mask=in_row, other=float("-inf"))
    highest = tl.maximum(a, b)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    a_weight = tl.exp(a - safe)
    b_weight = tl.exp(b - safe)
    total = a_weight + b_weight
    divisor = tl.where(total > 0, total, 1.0)
    at = row[:, None] * SIZE + dims[None, :]
    inside = in_row[:, None] & (dims[None, :] < SIZE)
    joined = tl.load(out + at, mask=inside, other=0.0) * (a_weight / divisor)[:, None]
    joined += tl.load(other_out + at, mask=inside, other=0.0) * (b_weight / divisor)[:, None]
    tl.store(out + at, joined, mask=inside)
    tl.store(lse + row, tl.where(total > 0, safe + tl.log(divisor), float("-inf")), mask=in_row)


def merge_states_(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """See `sglang_ext_kernels.block_attention`; all contiguous."""
    rows, size = lse.numel(), out.shape[-1]
    if rows:
        _merge_states[(triton.cdiv(rows, _ROWS),)](
            out, lse, other_out, other_lse, rows, SIZE=size, SIZE_BLOCK=triton.next_power_of_2(size), ROWS=_ROWS
        )
