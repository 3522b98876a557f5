# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (capitals are Triton's compile-time constants)
"""Triton kernels that move: tokens of a paged pool, and a ragged batch into static tensors.

Triton compiles a kernel again for a number that is 1 or a multiple of 16, and for a pointer that is not aligned. What
varies from batch to batch is therefore not specialised: it would be compiled while requests wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program that moves KV


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _move_kv(
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
    """See `sglang_ext_kernels.block_attention`; a slot's heads are contiguous, and so is `packed`."""
    tokens = slots.numel()
    width = keys.shape[1] * keys.shape[2]
    block = min(triton.next_power_of_2(width), 1024)
    rows = max(1, _ELEMENTS // block)
    _move_kv[(triton.cdiv(tokens, rows), triton.cdiv(width, block))](
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


_TOKENS = 1024
_REQUESTS = 256  # at least: as many as the largest shape of the default grid has slots for
_PREFIX_TOKENS = 1024


@triton.jit(do_not_specialize=["tokens", "padded"], do_not_specialize_on_alignment=["ids", "positions", "cache_slots"])
def _pad_tokens(
    ids, positions, cache_slots, static_ids, static_positions, static_cache_slots, tokens, padded, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < tokens
    inside = at < padded
    tl.store(static_ids + at, tl.load(ids + at, mask=is_real, other=0), mask=inside)
    tl.store(static_positions + at, tl.load(positions + at, mask=is_real, other=0), mask=inside)
    tl.store(static_cache_slots + at, tl.load(cache_slots + at, mask=is_real, other=0), mask=inside)


@triton.jit(
    do_not_specialize=["requests", "padded"], do_not_specialize_on_alignment=["rows", "new_lens", "prefix_lens"]
)
def _pad_requests(
    rows, new_lens, prefix_lens, static_rows, static_new, static_prefix, static_total, static_start, qo_indptr,
    kv_indptr, requests, padded, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    is_real = at < requests
    inside = at < padded
    new = tl.load(new_lens + at, mask=is_real, other=0).to(tl.int64)
    prefix = tl.load(prefix_lens + at, mask=is_real, other=0).to(tl.int64)
    qo_end = tl.cumsum(new, 0)
    kv_end = tl.cumsum(prefix, 0)
    tl.store(static_rows + at, tl.load(rows + at, mask=is_real, other=0).to(tl.int64), mask=inside)
    tl.store(static_new + at, new, mask=inside)
    tl.store(static_prefix + at, prefix, mask=inside)
    tl.store(static_total + at, new + prefix, mask=inside)
    tl.store(static_start + at, qo_end - new, mask=inside)
    tl.store(qo_indptr + at + 1, qo_end, mask=inside)
    tl.store(kv_indptr + at + 1, kv_end.to(tl.int32), mask=inside)
    tl.store(qo_indptr + at, qo_end - new, mask=at == 0)
    tl.store(kv_indptr + at, (kv_end - prefix).to(tl.int32), mask=at == 0)


@triton.jit(do_not_specialize=["table_stride"])
def _prefix_indices(table, table_stride, rows, prefix_lens, kv_indptr, kv_indices, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(prefix_lens + request)
    row = tl.load(rows + request).to(tl.int64)
    first = tl.load(kv_indptr + request).to(tl.int64)
    slot = tl.load(table + row * table_stride + at, mask=inside, other=0)
    tl.store(kv_indices + first + at, slot.to(tl.int64), mask=inside)


def pad_batch(live: tuple[torch.Tensor, ...], static: tuple[torch.Tensor, ...], longest_prefix_tokens: int) -> None:
    """See `sglang_ext_kernels.padded_batch`; the tensors of `RaggedBatch` and of `PaddedBatch`, in their order."""
    ids, positions, cache_slots, rows, new_lens, prefix_lens, table = live
    static_ids, static_positions, static_cache_slots = static[:3]
    static_rows, static_new, static_prefix, static_total, static_start, qo_indptr, kv_indptr, kv_indices = static[3:]
    padded_tokens, padded_requests, requests = static_ids.numel(), static_rows.numel(), rows.numel()
    _pad_tokens[(triton.cdiv(padded_tokens, _TOKENS),)](
        ids, positions, cache_slots, static_ids, static_positions, static_cache_slots, ids.numel(), padded_tokens,
        BLOCK=_TOKENS,
    )  # fmt: skip
    _pad_requests[(1,)](
        rows, new_lens, prefix_lens, static_rows, static_new, static_prefix, static_total, static_start, qo_indptr,
        kv_indptr, requests, padded_requests, BLOCK=max(_REQUESTS, triton.next_power_of_2(padded_requests)),
        num_warps=4,
    )  # fmt: skip
    if longest_prefix_tokens:
        _prefix_indices[(requests, triton.cdiv(longest_prefix_tokens, _PREFIX_TOKENS))](
            table, table.stride(0), static_rows, static_prefix, kv_indptr, kv_indices, BLOCK=_PREFIX_TOKENS
        )


@triton.jit(do_not_specialize=["table_stride", "pages_stride"])
def _fill_pages(pages, pages_stride, table, table_stride, rows, lens, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at * PAGE < tl.load(lens + request)
    row = tl.load(rows + request).to(tl.int64)
    slot = tl.load(table + row * table_stride + at * PAGE, mask=inside)
    tl.store(pages + request.to(tl.int64) * pages_stride + at, slot // PAGE, mask=inside)


def fill_page_table(
    pages: torch.Tensor, table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor, page_size: int
) -> None:
    """See `sglang_ext_kernels.padded_batch`. A program beyond the end of its request reads one number."""
    _fill_pages[(pages.shape[0], triton.cdiv(pages.shape[1], _PREFIX_TOKENS))](
        pages, pages.stride(0), table, table.stride(0), rows, lens, PAGE=page_size, BLOCK=_PREFIX_TOKENS
    )
