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

from sglang_ext.cpu.prefix_attention import is_stock_wanted

_ROWS = 128  # queries whose scores are in memory at a time


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
    new, heads, known = query.shape[0], query.shape[1], keys.shape[0]
    groups = heads // keys.shape[1]
    # [KV heads, group, …]: no key is copied for the heads that share it.
    grouped = query.view(new, keys.shape[1], groups, -1).permute(1, 2, 0, 3).float()
    keys, values = keys.permute(1, 2, 0).float(), values.permute(1, 0, 2).float()
    for start in range(0, new, _ROWS):
        stop = min(new, start + _ROWS)
        end = known - new + stop if is_causal else known
        first = 0 if window is None or not is_causal else max(0, known - new + start - window)
        scores = grouped[:, :, start:stop] @ keys[:, None, :, first:end] * scale
        if cap > 0:
            scores = torch.tanh(scores / cap) * cap
        if is_causal:
            rows = torch.arange(known - new + start, known - new + stop)[:, None]
            columns = torch.arange(first, end)[None]
            is_seen = columns <= rows
            if window is not None:
                is_seen &= columns >= rows - window
            scores = scores.masked_fill(~is_seen, -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(keys.shape[0], groups, 1, 1).expand(-1, -1, stop - start, 1)
            scores = torch.cat([scores, sink], -1)
        weights = torch.softmax(scores, -1)[..., : end - first]
        attended = weights @ values[:, None, first:end]
        output[start:stop] = attended.permute(2, 0, 1, 3).reshape(stop - start, heads, -1).to(output.dtype)


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
    is_extend = forward_batch.forward_mode.is_extend()
    new_tokens = forward_batch.extend_seq_lens.tolist() if is_extend else [1] * len(lengths)
    start = 0
    for row, tokens, new in zip(forward_batch.req_pool_indices.tolist(), lengths, new_tokens, strict=True):
        first = 0 if window is None or not is_causal else max(0, tokens - new - window)
        slots = backend.req_to_token_pool.req_to_token[row, first:tokens].long()
        if is_in_window_pool:
            slots = pool.translate_loc_from_full_to_swa(slots)
        rows = slice(start, start + new)
        start += new
        attend_(
            *(output[rows], query[rows], key_buffer[slots], value_buffer[slots], layer.scaling),
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
