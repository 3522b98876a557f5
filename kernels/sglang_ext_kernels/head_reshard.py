"""KV heads from tensor parallelism n to m: a rank's heads to one contiguous piece per receiver, and back.

Which heads go where is decided elsewhere (`sglang_ext.policy.handshake.head_mapping`); here pieces are runs of heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_ext_kernels import triton_support


class HeadPiece(NamedTuple):
    """Consecutive heads of a rank that travel together."""

    first_head: int  # in the rank's memory
    head_count: int


def split_heads(kv: torch.Tensor, pieces: Sequence[HeadPiece]) -> list[torch.Tensor]:
    """The pieces of `kv` [T, H, D], each contiguous [T, heads of the piece, D]; views of one new tensor.

    A head may be in several pieces. Raises ValueError for a piece that is not in `kv`.
    """
    _check(kv, pieces)
    tokens, _, size = kv.shape
    flat = torch.empty(tokens * size * sum(piece.head_count for piece in pieces), dtype=kv.dtype, device=kv.device)
    views = _views(flat, tokens, size, pieces)
    if flat.numel() and triton_support.runs_on(kv) and kv.stride(2) == 1:
        from sglang_ext_kernels.on_gpu import head_reshard as kernel

        kernel.move_heads(kv, flat, _table(pieces, kv.device), is_split=True)
    else:
        for view, piece in zip(views, pieces, strict=True):
            view.copy_(kv[:, piece.first_head : piece.first_head + piece.head_count])
    return views


def join_heads_(kv: torch.Tensor, flat: torch.Tensor, pieces: Sequence[HeadPiece]) -> None:
    """Write pieces, one after the other in `flat` and each [T, heads, D], to their heads of `kv` [T, H, D], in place.

    Raises ValueError for a piece that is not in `kv`, for a head in two pieces and for a `flat` of another size.
    """
    _check(kv, pieces)
    tokens, _, size = kv.shape
    heads = [head for piece in pieces for head in range(piece.first_head, piece.first_head + piece.head_count)]
    if len(set(heads)) != len(heads):
        raise ValueError(f"a head cannot come from two pieces: {list(pieces)}")
    if flat.numel() != tokens * size * len(heads):
        raise ValueError(f"{flat.numel()} elements are not {len(heads)} heads of {size} for {tokens} tokens")
    if flat.numel() and triton_support.runs_on(kv) and kv.stride(2) == 1:
        from sglang_ext_kernels.on_gpu import head_reshard as kernel

        kernel.move_heads(kv, flat.contiguous(), _table(pieces, kv.device), is_split=False)
    else:
        for view, piece in zip(_views(flat, tokens, size, pieces), pieces, strict=True):
            kv[:, piece.first_head : piece.first_head + piece.head_count] = view


def _check(kv: torch.Tensor, pieces: Sequence[HeadPiece]) -> None:
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
