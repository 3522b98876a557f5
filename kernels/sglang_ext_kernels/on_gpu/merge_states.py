# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803 (capitals are Triton's compile-time constants)
"""Joining two partial attention outputs: one pass that reads both and writes one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 8


@triton.jit
def _merge(out, lse, other_out, other_lse, rows, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, ROWS: tl.constexpr):
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
    """See `sglang_ext_kernels.merge_states`; all contiguous."""
    rows, size = lse.numel(), out.shape[-1]
    if rows:
        _merge[(triton.cdiv(rows, _ROWS),)](
            out, lse, other_out, other_lse, rows, SIZE=size, SIZE_BLOCK=triton.next_power_of_2(size), ROWS=_ROWS
        )
