# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (capitals are Triton's compile-time constants)
"""Triton kernels of the attention of a few new tokens behind long prefixes: programs share a prefix, parts are joined.

A few new tokens make few programs, and each would read its prefix from end to end. So the query heads that read the
same keys are rows of one tile, which reads them once, and a prefix is divided among several programs. A single program
writes the result; else each program leaves its part, and a second kernel joins the parts of a row. The number of
programs follows from the length of the prefix, which both kernels read, so a captured pass adapts by itself. Behind a
sliding window the prefix is what the first new token sees of it, and blocks that no row of a tile sees are not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _keys_per_split(prefix, splits, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """Keys of a prefix that one program takes: whole blocks, and no fewer than what is worth a program."""
    return tl.maximum(tl.cdiv(tl.cdiv(prefix, splits), KEYS) * KEYS, LEAST)


@triton.jit
def _take(
    acc, weight, highest, q, k_block, v_block, is_visible, scale, CAP_LOG2: tl.constexpr, PRECISION: tl.constexpr
):
    """Take one block of keys into the accumulators; scores are in units of log2."""
    scores = tl.dot(q, k_block, input_precision=PRECISION) * scale
    if CAP_LOG2 > 0:
        scores = CAP_LOG2 * (2 * tl.sigmoid(2 * scores) - 1)
    scores = tl.where(is_visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # a row that has seen nothing keeps -inf, and -inf minus -inf must not be
    safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(highest - safe)
    weight = weight * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None] + tl.dot(weights.to(v_block.dtype), v_block, input_precision=PRECISION)
    return acc, weight, new_highest


@triton.jit(do_not_specialize=["padded_tokens", "splits"])
def _split_prefix(
    q,
    k,
    v,
    k_pool,
    v_pool,
    qo_indptr,
    kv_indptr,
    kv_indices,
    sinks,
    out,
    parts,
    parts_lse,
    padded_tokens,
    splits,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_pool_stride,
    k_pool_head_stride,
    v_pool_stride,
    v_pool_head_stride,
    out_stride,
    out_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP_LOG2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    request = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    first = tl.load(qo_indptr + request).to(tl.int32)
    new = tl.load(qo_indptr + request + 1).to(tl.int32) - first
    if tile * ROWS >= new * GROUP:
        return
    prefix_first = tl.load(kv_indptr + request).to(tl.int64)
    prefix = (tl.load(kv_indptr + request + 1).to(tl.int64) - prefix_first).to(tl.int32)
    per_split = _keys_per_split(prefix, splits, KEYS, LEAST)
    # the first split also has the new tokens' own square
    if (split > 0) & (split * per_split >= prefix):
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    in_row = token < new
    dims = tl.arange(0, SIZE_BLOCK)
    columns = tl.arange(0, KEYS)
    in_dims = dims < SIZE
    q_row = (first + token).to(tl.int64)
    q_block = tl.load(
        q + (q_row * q_stride + head * q_head_stride)[:, None] + dims[None, :],
        mask=in_row[:, None] & in_dims[None, :],
        other=0.0,
    )
    acc = tl.zeros([ROWS, SIZE_BLOCK], dtype=tl.float32)
    weight = tl.zeros([ROWS], dtype=tl.float32)
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    k_heads = k_pool + kv_head * k_pool_head_stride
    v_heads = v_pool + kv_head * v_pool_head_stride
    begin = split * per_split
    end = tl.minimum(prefix, begin + per_split)
    if WINDOW >= 0:
        begin = tl.maximum(begin, prefix + tile * ROWS // GROUP - WINDOW)
    for start in range(begin, end, KEYS):
        in_keys = start + columns < end
        is_visible = in_keys[None, :]
        if WINDOW >= 0:
            is_visible = is_visible & (start + columns[None, :] >= prefix + token[:, None] - WINDOW)
        slots = tl.load(kv_indices + prefix_first + start + columns, mask=in_keys, other=0).to(tl.int64)
        k_block = tl.load(
            k_heads + (slots * k_pool_stride)[None, :] + dims[:, None],
            mask=in_keys[None, :] & in_dims[:, None],
            other=0.0,
        )
        v_block = tl.load(
            v_heads + (slots * v_pool_stride)[:, None] + dims[None, :],
            mask=in_keys[:, None] & in_dims[None, :],
            other=0.0,
        )
        acc, weight, highest = _take(
            acc, weight, highest, q_block, k_block, v_block, is_visible, scale, CAP_LOG2, PRECISION
        )
    if split == 0:
        seen = tl.minimum(new, (tile * ROWS + ROWS - 1) // GROUP + 1)
        first_seen = 0
        if WINDOW >= 0:
            first_seen = tl.maximum(0, tile * ROWS // GROUP - WINDOW)
        for start in range(first_seen, seen, KEYS):
            at = start + columns
            in_keys = at < seen
            key_row = (first + at).to(tl.int64)
            k_block = tl.load(
                k + (key_row * k_stride)[None, :] + kv_head * k_head_stride + dims[:, None],
                mask=in_keys[None, :] & in_dims[:, None],
                other=0.0,
            )
            v_block = tl.load(
                v + (key_row * v_stride)[:, None] + kv_head * v_head_stride + dims[None, :],
                mask=in_keys[:, None] & in_dims[None, :],
                other=0.0,
            )
            is_visible = in_keys[None, :] & (at[None, :] <= token[:, None])
            if WINDOW >= 0:
                is_visible = is_visible & (at[None, :] >= token[:, None] - WINDOW)
            acc, weight, highest = _take(
                acc, weight, highest, q_block, k_block, v_block, is_visible, scale, CAP_LOG2, PRECISION
            )
    is_whole = prefix <= per_split
    if sinks is not None:
        sink = tl.load(sinks + head, mask=in_row, other=0.0).to(tl.float32) * 1.4426950408889634
        weight = weight + tl.where(is_whole, tl.exp2(sink - highest), 0.0)
    if WINDOW >= 0:
        # A part of a prefix may lie before the windows of some rows.
        weight = tl.where(weight == 0.0, 1.0, weight)
    acc = acc / weight[:, None]
    inside = in_row[:, None] & in_dims[None, :]
    if is_whole:
        tl.store(
            out + (q_row * out_stride + head * out_head_stride)[:, None] + dims[None, :],
            acc.to(out.dtype.element_ty),
            mask=inside,
        )
    else:
        part = (split.to(tl.int64) * padded_tokens + q_row) * (KV_HEADS * GROUP) + head
        tl.store(parts + (part * SIZE)[:, None] + dims[None, :], acc, mask=inside)
        tl.store(parts_lse + part, highest + tl.log2(weight), mask=in_row)


@triton.jit(do_not_specialize=["padded_tokens", "splits"])
def _join_splits(
    qo_indptr,
    kv_indptr,
    sinks,
    out,
    parts,
    parts_lse,
    padded_tokens,
    splits,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
):
    request = tl.program_id(1)
    first = tl.load(qo_indptr + request).to(tl.int32)
    new = tl.load(qo_indptr + request + 1).to(tl.int32) - first
    prefix = tl.load(kv_indptr + request + 1).to(tl.int32) - tl.load(kv_indptr + request).to(tl.int32)
    per_split = _keys_per_split(prefix, splits, KEYS, LEAST)
    if (tl.program_id(0) * ROWS >= new * HEADS) | (prefix <= per_split):
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_row = row < new * HEADS
    dims = tl.arange(0, SIZE_BLOCK)
    inside = in_row[:, None] & (dims < SIZE)[None, :]
    part = first.to(tl.int64) * HEADS + row
    acc = tl.zeros([ROWS, SIZE_BLOCK], dtype=tl.float32)
    weight = tl.zeros([ROWS], dtype=tl.float32)
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for split in range(tl.cdiv(prefix, per_split)):
        at = tl.cast(split, tl.int64) * padded_tokens * HEADS + part
        lse = tl.load(parts_lse + at, mask=in_row, other=0.0)
        new_highest = tl.maximum(highest, lse)
        rescale = tl.exp2(highest - new_highest)
        share = tl.exp2(lse - new_highest)
        value = tl.load(parts + (at * SIZE)[:, None] + dims[None, :], mask=inside, other=0.0)
        acc = acc * rescale[:, None] + value * share[:, None]
        weight = weight * rescale + share
        highest = new_highest
    if sinks is not None:
        sink = tl.load(sinks + row % HEADS, mask=in_row, other=0.0).to(tl.float32) * 1.4426950408889634
        weight = weight + tl.exp2(sink - highest)
    token = (first + row // HEADS).to(tl.int64)
    tl.store(
        out + (token * out_stride + (row % HEADS) * out_head_stride)[:, None] + dims[None, :],
        (acc / weight[:, None]).to(out.dtype.element_ty),
        mask=inside,
    )


JOINED_ROWS = 8
LOG2_E = 1.4426950408889634


def split_prefix_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    longest_tokens: int,
    splits: int,
    rows: int,
    keys: int,
    min_keys: int,
    window: int | None,
    cap: float,
    sinks: torch.Tensor | None,
) -> None:
    """See `sglang_ext_kernels.prefix_attention`; the last dimension of each must be contiguous."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    requests = qo_indptr.numel() - 1
    parts = torch.empty((splits, tokens, heads, size), dtype=torch.float32, device=q.device)
    parts_lse = torch.empty((splits, tokens, heads), dtype=torch.float32, device=q.device)
    size_block = triton.next_power_of_2(size)
    _split_prefix[(triton.cdiv(longest_tokens * group, rows), requests * kv_heads, splits)](
        q,
        k,
        v,
        k_pool,
        v_pool,
        qo_indptr,
        kv_indptr,
        kv_indices,
        sinks,
        out,
        parts,
        parts_lse,
        tokens,
        splits,
        scale / cap if cap > 0 else scale * LOG2_E,
        *(stride for x in (q, k, v, k_pool, v_pool, out) for stride in x.stride()[:2]),
        KV_HEADS=kv_heads,
        GROUP=group,
        SIZE=size,
        SIZE_BLOCK=size_block,
        ROWS=rows,
        KEYS=keys,
        LEAST=min_keys,
        WINDOW=-1 if window is None else window,
        CAP_LOG2=cap * LOG2_E,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        # Measured on an H200 (bench/results/gpu-prefix-sizes-2026-11-26.json).
        num_warps=8 if rows >= 128 or size > 128 else 4,
        num_stages=3 if size <= 128 and q.dtype != torch.float32 else 2,
    )
    if splits == 1:
        return
    _join_splits[(triton.cdiv(longest_tokens * heads, JOINED_ROWS), requests)](
        qo_indptr,
        kv_indptr,
        sinks,
        out,
        parts,
        parts_lse,
        tokens,
        splits,
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        SIZE=size,
        SIZE_BLOCK=size_block,
        ROWS=JOINED_ROWS,
        KEYS=keys,
        LEAST=min_keys,
    )
