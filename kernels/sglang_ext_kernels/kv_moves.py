"""KV from where it lies to a block that can be sent, and back: tokens of a paged pool, runs of a rank's heads.

Rebalancing sends blocks of tokens from one instance's pool to another's, one layer at a time. Between tensor
parallelism n and m a rank's heads become one contiguous piece per receiver; which heads go where is decided elsewhere
(`sglang_ext.policy.handshake.shards`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_ext_kernels import triton_support


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
    """Whether a slot's heads are contiguous, as the kernel wants them."""
    return all(
        triton_support.runs_on(pool) and pool.stride(2) == 1 and pool.stride(1) == pool.shape[2] for pool in pools
    )


class HeadPiece(NamedTuple):
    """Consecutive heads of a rank that travel together."""

    first_head: int  # in the rank's memory
    head_count: int


def split_heads(kv: torch.Tensor, pieces: Sequence[HeadPiece]) -> list[torch.Tensor]:
    """The pieces of `kv` [T, H, D], each contiguous [T, heads of the piece, D]; views of one new tensor.

    A head may be in several pieces. Raises ValueError for a piece that is not in `kv`.
    """
    _check_pieces(kv, pieces)
    tokens, _, size = kv.shape
    flat = torch.empty(tokens * size * sum(piece.head_count for piece in pieces), dtype=kv.dtype, device=kv.device)
    views = _views(flat, tokens, size, pieces)
    if flat.numel() and triton_support.runs_on(kv) and kv.stride(2) == 1:
        from sglang_ext_kernels.on_gpu import moving_kernels as kernel

        kernel.move_heads(kv, flat, _table(pieces, kv.device), is_split=True)
    else:
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(kv[:, piece.first_head : piece.first_head + piece.head_count])
    return views


def join_heads_(kv: torch.Tensor, flat: torch.Tensor, pieces: Sequence[HeadPiece]) -> None:
    """Write pieces, one after the other in `flat` and each [T, heads, D], to their heads of `kv` [T, H, D], in place.

    Raises ValueError for a piece that is not in `kv`, for a head in two pieces and for a `flat` of another size.
    """
    _check_pieces(kv, pieces)
    tokens, _, size = kv.shape
    heads = [head for piece in pieces for head in range(piece.first_head, piece.first_head + piece.head_count)]
    if len(set(heads)) != len(heads):
        raise ValueError(f"a head cannot come from two pieces: {list(pieces)}")
    if flat.numel() != tokens * size * len(heads):
        raise ValueError(f"{flat.numel()} elements are not {len(heads)} heads of {size} for {tokens} tokens")
    if flat.numel() and triton_support.runs_on(kv) and kv.stride(2) == 1:
        from sglang_ext_kernels.on_gpu import moving_kernels as kernel

        kernel.move_heads(kv, flat.contiguous(), _table(pieces, kv.device), is_split=False)
    else:
        for view, piece in zip(_views(flat, tokens, size, pieces), pieces, strict=True):
            kv[:, piece.first_head : piece.first_head + piece.head_count] = view


def _check_pieces(kv: torch.Tensor, pieces: Sequence[HeadPiece]) -> None:
    for piece in pieces:
        if piece.first_head < 0 or piece.head_count < 1 or piece.first_head + piece.head_count > kv.shape[1]:
            raise ValueError(f"{piece} is not in a rank with {kv.shape[1]} KV heads")


def _views(flat: torch.Tensor, tokens: int, size: int, pieces: Sequence[HeadPiece]) -> list[torch.Tensor]:
    parts = flat.split([tokens * size * piece.head_count for piece in pieces])
    return [part.view(tokens, piece.head_count, size) for part, piece in zip(parts, pieces, strict=True)]


def _table(pieces: Sequence[HeadPiece], device: torch.device) -> torch.Tensor:
    """By head that travels: where it is, heads before its piece, its place there, heads of the piece."""
    rows, before = [], 0
    for piece in pieces:
        rows += [(piece.first_head + place, before, place, piece.head_count) for place in range(piece.head_count)]
        before += piece.head_count
    return torch.tensor(rows, dtype=torch.int32).to(device, non_blocking=True)
