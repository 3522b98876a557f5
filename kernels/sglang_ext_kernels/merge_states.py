"""Joining attention over two disjoint sets of keys: softmax is exact however the keys are divided.

`out = sum_i exp(lse_i - lse) out_i` with `lse = log sum_i exp(lse_i)` (online softmax; Ring Attention, Tetris 3.2).
"""

from __future__ import annotations

import torch

from sglang_ext_kernels import triton_support


def merge_states_(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Take a further block into `out` [T, H, D] and `lse` [T, H], both float32 and changed in place.

    A query that has seen nothing yet has lse -inf; one that saw nothing in either keeps output 0.
    """
    if triton_support.runs_on(out) and out.is_contiguous() and lse.is_contiguous():
        from sglang_ext_kernels.on_gpu import merge_states as kernel

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
    out.addcmul_(other_out, torch.exp(other_lse - safe)[..., None])
    lse.copy_(joined)
