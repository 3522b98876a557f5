"""AROUND `TorchNativeAttnBackend.forward_extend` and `forward_decode`: layers on a CPU that are not plainly causal.

SGLang's attention for CPUs has windows only where all layers share one pool of KV, caps no scores, and refuses sinks: a
Gemma 2 or an OLMo 3 got other tokens than its own, and a gpt-oss did not start. Where values have another size than
keys, as in latent attention, it computes a chunk as if its whole prefix were new. Plain layers go on to SGLang.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.cpu.draft_attention import with_drafts
from sglang_ext.cpu.fp8_kv import take_rows
from sglang_ext.cpu.prefix_attention import is_stock_wanted
from sglang_ext_kernels.block_attention import add_sinks_, windowed_block


def attend_(
    output: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    cap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    is_causal: bool = True,
) -> None:
    """Write to `output` [n, heads, value size] what the last n tokens of a sequence attend to.

    `query` is [n, heads, size], `keys` [m, KV heads, size], `values` [m, KV heads, value size]: of the last m >= n
    tokens, or of as many as the window needs. A token sees itself and `window` tokens before it (None: all). Scores
    are cap * tanh(score / cap) where `cap` is above 0. `sinks` [heads]: a score of each head that takes part in the
    softmax and has no value (gpt-oss).
    """
    new, known = query.shape[0], keys.shape[0]
    k_positions = torch.arange(known)
    q_positions = k_positions[known - new :] if is_causal else torch.full((new,), known)
    reach = window if is_causal else None
    out, lse = windowed_block(query, keys, values, q_positions, k_positions, scale, window=reach, cap=cap)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    output.copy_(out)


def add_padding(_: None, backend: Any, *arguments: Any, **options: Any) -> None:
    """AFTER `TorchNativeAttnBackend.__init__`: the length of the requests that fill a batch up.

    Data-parallel ranks with `--enable-dp-attention` compute the rest of a layer together, and each pads its batch.
    SGLang asks an attention backend for CPUs for this length under another name than the one on GPUs, and this one has
    neither.
    """
    backend.get_cpu_graph_seq_len_fill_value = _padding_tokens


def _padding_tokens() -> int:
    return 1


def run_layer(
    stock: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    sinks: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """Return what a layer attends to, in the shapes of SGLang's attention backends. `sinks` [heads] or None."""
    forward_batch = with_drafts(backend, forward_batch)
    window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
    is_in_window_pool = _is_in_window_pool(backend, layer)
    is_plain = window is None and not layer.logit_cap and sinks is None and not is_in_window_pool
    is_plain &= layer.qk_head_dim == layer.v_head_dim
    if is_plain or layer.is_cross_attention or is_stock_wanted(os.environ):
        return stock(backend, q, k, v, layer, forward_batch, save_kv_cache, **more)
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if save_kv_cache and k is not None:
        pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, backend.swa_out_cache_loc), k, v)
    query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
    output = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
    is_causal = layer.attn_type != AttentionType.ENCODER_ONLY
    key_buffer, value_buffer = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    lengths = forward_batch.seq_lens.tolist()
    is_extend = forward_batch.forward_mode.is_extend(include_draft_extend_v2=True)
    new_tokens = forward_batch.extend_seq_lens.tolist() if is_extend else [1] * len(lengths)
    start = 0
    for row, tokens, new in zip(forward_batch.req_pool_indices.tolist(), lengths, new_tokens, strict=True):
        first = 0 if window is None or not is_causal else max(0, tokens - new - window)
        slots = backend.req_to_token_pool.req_to_token[row, first:tokens].long()
        if is_in_window_pool:
            slots = pool.translate_loc_from_full_to_swa(slots)
        rows = slice(start, start + new)
        start += new
        keys, values = (take_rows(buffer, slots, query.dtype) for buffer in (key_buffer, value_buffer))
        attend_(
            *(output[rows], query[rows], keys, values, layer.scaling),
            cap=layer.logit_cap,
            window=window,
            sinks=sinks,
            is_causal=is_causal,
        )
    return output.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def _is_in_window_pool(backend: Any, layer: Any) -> bool:
    """Return whether the layer's KV lies in the pool whose rows are freed once no window needs them."""
    if not backend.use_sliding_window_kv_pool:
        return False
    is_in_it: bool = backend.token_to_kv_pool.layers_mapping[layer.layer_id][1]
    return is_in_it
