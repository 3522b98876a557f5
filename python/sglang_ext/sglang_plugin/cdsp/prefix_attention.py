"""Attention behind a cached prefix on a CPU, at the cost of the new tokens.

SGLang's attention for CPUs computes as if the whole prompt were new. A member of a long pool gets its prompts back with
all but the last token cached, and that token would cost as much attention as the prompt did.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_ext.sequence_parallel.positioned_attention import attend_


def use_prefix_attention(backend: Any) -> None:
    """Change an engine's attention backend, if it is SGLang's for CPUs; others know prefixes."""
    if type(backend) is TorchNativeAttnBackend:
        backend._run_sdpa_forward_extend = partial(_extend, backend._run_sdpa_forward_extend)


def _extend(
    original: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    **special: Any,
) -> torch.Tensor:
    """As SGLang's, which is asked wherever there is no prefix, or anything but plain causal attention.

    `query` and `output` [tokens, heads, size], `k_cache` and `v_cache` [slots, KV heads, size].
    """
    prefixes = extend_prefix_lens.tolist()
    is_plain = causal and encoder_lens is None and query.device.type == "cpu" and query.dtype == k_cache.dtype
    if (
        not is_plain
        or not any(prefixes)
        or special.get("is_cross_attn")
        or special.get("sliding_window_size") is not None
    ):
        result: torch.Tensor = original(
            *(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
            *(extend_prefix_lens, extend_seq_lens, encoder_lens),
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            **special,
        )
        return result
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    start = 0
    for row, prefix, new in zip(req_pool_indices.tolist(), prefixes, extend_seq_lens.tolist(), strict=True):
        slots = req_to_token[row, : prefix + new]
        rows = query[start : start + new]
        out = torch.zeros(*rows.shape[:2], v_cache.shape[-1])
        lse = torch.full(rows.shape[:2], float("-inf"))
        attend_(
            out,
            lse,
            rows,
            k_cache[slots],
            v_cache[slots],
            (range(prefix, prefix + new),),
            (range(prefix + new),),
            scale,
        )
        output[start : start + new] = out
        start += new
    return output
