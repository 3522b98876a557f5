# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (capitals are Triton's compile-time constants)
"""Heads of tokens to or from pieces, each piece contiguous: one launch for all pieces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096


@triton.jit
def _move_heads(
    kv,
    flat,
    table,
    tokens,
    token_stride,
    head_stride,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    dims = tl.arange(0, SIZE_BLOCK)
    inside = (row < tokens)[:, None] & (dims[None, :] < SIZE)
    # of this head: where it is in kv, heads before its piece, its place in the piece, heads of the piece
    entry = table + tl.program_id(1) * 4
    head = tl.load(entry).to(tl.int64)
    before = tl.load(entry + 1).to(tl.int64)
    place = tl.load(entry + 2).to(tl.int64)
    count = tl.load(entry + 3).to(tl.int64)
    kv_at = kv + row[:, None] * token_stride + head * head_stride + dims[None, :]
    flat_at = flat + (before * tokens + row[:, None] * count + place) * SIZE + dims[None, :]
    if IS_SPLIT:
        tl.store(flat_at, tl.load(kv_at, mask=inside), mask=inside)
    else:
        tl.store(kv_at, tl.load(flat_at, mask=inside), mask=inside)


def move_heads(kv: torch.Tensor, flat: torch.Tensor, table: torch.Tensor, is_split: bool) -> None:
    """See `sglang_ext_kernels.head_reshard`; `table` is int32 [heads, 4] as the kernel reads it."""
    tokens, _, size = kv.shape
    block = triton.next_power_of_2(size)
    rows = max(1, _ELEMENTS // block)
    _move_heads[(triton.cdiv(tokens, rows), table.shape[0])](
        kv,
        flat,
        table,
        tokens,
        kv.stride(0),
        kv.stride(1),
        SIZE=size,
        SIZE_BLOCK=block,
        ROWS=rows,
        IS_SPLIT=is_split,
    )
