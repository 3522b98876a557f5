"""Three fused kernels of a plain decoder, so that its captured pass is judged by its matrices and attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

EPSILON = 1e-6


@triton.jit
def _add_norm(x, residual, weight, out, epsilon, size: tl.constexpr, block: tl.constexpr, adds: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    mask = at < size
    value = tl.load(x + row * size + at, mask=mask, other=0.0).to(tl.float32)
    if adds:
        value += tl.load(residual + row * size + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + row * size + at, value.to(residual.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(value * value, 0) / size + epsilon)
    normed = value * scale * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, normed.to(out.dtype.element_ty), mask=mask)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, adds: bool) -> torch.Tensor:
    """Add `x` [T, hidden] to `residual`, in place (or put it there); return the RMS norm of the sum."""
    out = torch.empty_like(x)
    size = x.shape[1]
    _add_norm[(x.shape[0],)](x, residual, weight, out, EPSILON, size, triton.next_power_of_2(size), adds, num_warps=8)
    return out


@triton.jit
def _silu_multiply(x, out, size: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < size
    gate = tl.load(x + row * 2 * size + at, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * size + size + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, (gate / (1 + tl.exp(-gate)) * value).to(out.dtype.element_ty), mask=mask)


def silu_multiply(x: torch.Tensor) -> torch.Tensor:
    """Gate and value [T, 2 x size] to silu(gate) x value [T, size]."""
    size = x.shape[1] // 2
    out = torch.empty(x.shape[0], size, dtype=x.dtype, device=x.device)
    _silu_multiply[(x.shape[0], triton.cdiv(size, 2048))](x, out, size, 2048)
    return out


@triton.jit
def _rotate_and_store(
    qkv, angles, positions, slots, k_pool, v_pool, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half: tl.constexpr = size // 2
    at = tl.arange(0, half)
    row = qkv + token * (heads + 2 * kv_heads) * size
    if head < heads + kv_heads:
        position = tl.load(positions + token)
        cosine = tl.load(angles + position * size + at)
        sine = tl.load(angles + position * size + half + at)
        first = tl.load(row + head * size + at).to(tl.float32)
        second = tl.load(row + head * size + half + at).to(tl.float32)
        low = (first * cosine - second * sine).to(qkv.dtype.element_ty)
        high = (second * cosine + first * sine).to(qkv.dtype.element_ty)
        tl.store(row + head * size + at, low)
        tl.store(row + head * size + half + at, high)
        if head >= heads:
            target = k_pool + tl.load(slots + token) * kv_heads * size + (head - heads) * size
            tl.store(target + at, low)
            tl.store(target + half + at, high)
    else:
        target = v_pool + tl.load(slots + token) * kv_heads * size + (head - heads - kv_heads) * size
        whole = tl.arange(0, size)
        tl.store(target + whole, tl.load(row + head * size + whole))


def rotate_and_store(
    qkv: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    heads: int,
) -> None:
    """Rotate queries and keys of `qkv` [T, (H + 2 Hkv) x D] in place; put keys and values into the pools at `slots`.

    `angles` [positions, D]: cosines, then sines, float32.
    """
    _, kv_heads, size = k_pool.shape
    grid = (qkv.shape[0], heads + 2 * kv_heads)
    _rotate_and_store[grid](qkv, angles, positions, slots, k_pool, v_pool, heads, kv_heads, size, num_warps=1)
