"""KV of tokens that lie anywhere in a paged pool, to one block that can be sent, and back.

Rebalancing sends such blocks from one instance's pool to another's, one layer at a time.
"""

from __future__ import annotations

import torch

from sglang_ext_kernels import triton_support


def gather_kv(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy the tokens at `slots` [T] out of a layer's pool, `keys` and `values` [pool slots, H, D]: [2, T, H, D].

    Raises ValueError when keys and values differ in shape.
    """
    _check(keys, values)
    packed = torch.empty((2, slots.numel(), *keys.shape[1:]), dtype=keys.dtype, device=keys.device)
    if slots.numel() and _can_run(keys, values):
        from sglang_ext_kernels.on_gpu import paged_kv as kernel

        kernel.move_kv(keys, values, slots, packed, is_gather=True)
    else:
        torch.index_select(keys, 0, slots, out=packed[0])
        torch.index_select(values, 0, slots, out=packed[1])
    return packed


def scatter_kv_(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, packed: torch.Tensor) -> None:
    """Write `packed` [2, T, H, D] to the distinct `slots` [T] of a layer's pool, which is changed in place.

    Raises ValueError when the shapes do not fit.
    """
    _check(keys, values)
    if packed.shape != (2, slots.numel(), *keys.shape[1:]):
        raise ValueError(
            f"{tuple(packed.shape)} is not KV of {slots.numel()} tokens of a pool of {tuple(keys.shape[1:])}"
        )
    if slots.numel() and _can_run(keys, values):
        from sglang_ext_kernels.on_gpu import paged_kv as kernel

        kernel.move_kv(keys, values, slots, packed.contiguous(), is_gather=False)
    else:
        keys.index_copy_(0, slots, packed[0])
        values.index_copy_(0, slots, packed[1])


def _check(keys: torch.Tensor, values: torch.Tensor) -> None:
    if keys.shape != values.shape or keys.dim() != 3:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not of one pool [slots, H, D]")


def _can_run(*pools: torch.Tensor) -> bool:
    """Whether a slot's heads are contiguous, as the kernel wants them."""
    return all(
        triton_support.runs_on(pool) and pool.stride(2) == 1 and pool.stride(1) == pool.shape[2] for pool in pools
    )
