"""AROUND `TorchNativeAttnBackend._run_sdpa_forward_extend`: attention on a CPU at the cost of the new tokens.

SGLang pads the queries of each request to its whole prompt, and computes all of them: a prompt in chunks costs as if
every chunk had been the first to see its prefix, and the last token behind a cached prompt costs as much as the prompt.
This computes the rows that are new. Where a layer wants anything but plain causal attention (an encoder, a sliding
window, values of another size than keys), SGLang's own path computes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_ext.cpu.fp8_kv import take_rows
from sglang_ext_kernels.block_attention import attention_behind_prefix_

# Set to 1, an engine on a CPU computes attention as SGLang does: to compare, or to rule this module out.
STOCK_ATTENTION_VARIABLE = "SGLANG_EXT_STOCK_CPU_ATTENTION"


def is_stock_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the user leaves attention to SGLang.

    Asked at each call, not once: an engine may be forked from a process that had another environment.
    """
    return environment.get(STOCK_ATTENTION_VARIABLE) == "1"


def run_extend(
    stock: Callable[..., torch.Tensor],
    backend: Any,
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
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Write to `output` [new tokens, heads, size], and return it, what the queries of a batch attend to.

    `query` is shaped as `output`, `k_cache` and `v_cache` [slots, KV heads, size] hold the new tokens already;
    `req_to_token` [rows, tokens] has the slots of request i in row `req_pool_indices[i]`. Of its `seq_lens[i]` tokens
    the last `extend_seq_lens[i]` are new. `scaling` None: one over the square root of the head size.
    """
    is_plain = causal and not is_cross_attn and encoder_lens is None and sliding_window_size is None
    is_one_size = query.shape[-1] == k_cache.shape[-1] == v_cache.shape[-1]
    if not is_plain or not is_one_size or is_stock_wanted(os.environ):
        return stock(
            *(backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens),
            *(extend_prefix_lens, extend_seq_lens, encoder_lens),
            scaling=scaling,
            enable_gqa=enable_gqa,
            causal=causal,
            is_cross_attn=is_cross_attn,
            sliding_window_size=sliding_window_size,
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    start = 0
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, tokens, new_tokens in requests:
        rows = slice(start, start + new_tokens)
        start += new_tokens
        if not new_tokens:
            continue
        # One gather for prefix and new tokens: pages may lie anywhere in the pool.
        slots = req_to_token[row, :tokens]
        keys, values = take_rows(k_cache, slots, query.dtype), take_rows(v_cache, slots, query.dtype)
        attention_behind_prefix_(output[rows], query[rows], keys, values, scale)
    return output
