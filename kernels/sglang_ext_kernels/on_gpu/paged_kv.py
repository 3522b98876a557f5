# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (capitals are Triton's compile-time constants)
"""Rows of a KV pool to one contiguous block and back: keys and values in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096


@triton.jit
def _move(
    keys,
    values,
    slots,
    packed_keys,
    packed_values,
    tokens,
    key_stride,
    value_stride,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_GATHER: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * WIDTH_BLOCK + tl.arange(0, WIDTH_BLOCK)
    in_row = row < tokens
    inside = in_row[:, None] & (column[None, :] < WIDTH)
    slot = tl.load(slots + row, mask=in_row, other=0).to(tl.int64)
    key_at = keys + slot[:, None] * key_stride + column[None, :]
    value_at = values + slot[:, None] * value_stride + column[None, :]
    place = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    packed_key_at = packed_keys + place
    packed_value_at = packed_values + place
    if IS_GATHER:
        key = tl.load(key_at, mask=inside)
        value = tl.load(value_at, mask=inside)
        tl.store(packed_key_at, key, mask=inside)
        tl.store(packed_value_at, value, mask=inside)
    else:
        key = tl.load(packed_key_at, mask=inside)
        value = tl.load(packed_value_at, mask=inside)
        tl.store(key_at, key, mask=inside)
        tl.store(value_at, value, mask=inside)


def move_kv(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor, is_gather: bool
) -> None:
    """See `sglang_ext_kernels.paged_kv`; a slot's heads are contiguous, and so is `packed`."""
    tokens = slots.numel()
    width = keys.shape[1] * keys.shape[2]
    block = min(triton.next_power_of_2(width), 1024)
    rows = max(1, _ELEMENTS // block)
    _move[(triton.cdiv(tokens, rows), triton.cdiv(width, block))](
        keys,
        values,
        slots,
        packed[0],
        packed[1],
        tokens,
        keys.stride(0),
        values.stride(0),
        WIDTH=width,
        WIDTH_BLOCK=block,
        ROWS=rows,
        IS_GATHER=is_gather,
        num_warps=8,
    )
