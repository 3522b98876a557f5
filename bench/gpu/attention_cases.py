"""Attention of a 7B model's shape, and what it is compared with: plain mathematics in float64, on the device."""

from __future__ import annotations

import torch

from gpu.measure import DEVICE, HAS_GPU

HEADS, KV_HEADS, HEAD_SIZE = 28, 4, 128
SCALE = HEAD_SIZE**-0.5
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32


def draw(tokens: int, heads: int) -> torch.Tensor:
    """Random numbers [tokens, heads, head size]."""
    return torch.randn(tokens, heads, HEAD_SIZE, device=DEVICE, dtype=DTYPE)


def attention_in_double(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Tq, H, D] and log-sum-exp [Tq, H] in float64; query i sees the keys at its position and before."""
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    grouped = q.double().view(tokens, kv_heads, heads // kv_heads, size)
    scores = torch.einsum("qgrd,kgd->grqk", grouped, k.double()) * size**-0.5
    scores = scores.masked_fill(k_positions[None, :] > q_positions[:, None], float("-inf"))
    out = torch.einsum("grqk,kgd->qgrd", scores.softmax(-1), v.double())
    return out.reshape(tokens, heads, size), scores.logsumexp(-1).permute(2, 0, 1).reshape(tokens, heads)
