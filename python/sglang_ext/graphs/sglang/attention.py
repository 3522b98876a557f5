"""Attention of a captured pass: over static tensors, so that what varies from batch to batch is in their contents.

On a CUDA device it is SGLang's Triton kernel for prefills with a prefix, started for the largest length that the shape
allows; of shapes that would leave most of the device idle, a kernel of ours that divides the prefixes. On a CPU, where
it serves to test everything else, it is plain mathematics.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_kernels.padded_batch import PaddedBatch
from sglang_ext_kernels.prefix_attention import (
    SplitSizes,
    prefix_attention_reference,
    split_prefix_attention_,
    splits_of,
)


class CapturedAttention:
    """Takes the place of SGLang's attention backend in a forward context, for one shape."""

    def __init__(self, model_runner: Any, batch: PaddedBatch, shape: GraphShape) -> None:
        # by these names models find the pools
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._batch = batch
        self._shape = shape

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> torch.Tensor:
        """`q` [T, heads x D] of the padded batch, `k` and `v` [T, KV heads, D]; the output has the shape of `q`.

        Raises NotImplementedError for attention that is not plainly causal: the shape is not captured then.
        """
        _refuse_other_than_causal(layer, more)
        if save_kv_cache:
            # By the class: a capture in the middle of a batch writes none of that batch's layers, for which
            # `handshake/layer_streams.py` watches the pool.
            pool = self.token_to_kv_pool
            type(pool).set_kv_buffer(pool, layer, forward_batch.out_cache_loc, k, v)
        out = torch.zeros_like(q)
        shaped = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        shaped_out = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        k_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        k, v = k.view(-1, *k_pool.shape[1:]), v.view(-1, *v_pool.shape[1:])
        sizes = split_sizes(self._shape, shaped, k, v)
        if sizes is not None and not layer.logit_cap:
            split_prefix_attention_(
                shaped_out, shaped, k, v, k_pool, v_pool, self._batch, layer.scaling, self._shape.length_tokens, sizes
            )
        elif q.is_cuda:
            self._attend_as_sglang(shaped_out, shaped, k, v, k_pool, v_pool, layer)
        else:
            prefix_attention_reference(shaped_out, shaped, k, v, k_pool, v_pool, self._batch, layer.scaling)
        return out

    def _attend_as_sglang(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        layer: Any,
    ) -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        extend_attention_fwd(
            q,
            k.contiguous(),
            v.contiguous(),
            out,
            k_pool,
            v_pool,
            self._batch.qo_indptr,
            self._batch.kv_indptr,
            self._batch.kv_indices,
            None,  # no mask but the causal one
            True,
            None,
            self._shape.length_tokens,
            1.0,
            1.0,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
        )


def split_sizes(shape: GraphShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> SplitSizes | None:
    """Return how a prefix is divided for batches of a shape; None where SGLang's kernel has programs enough.

    `q` [T, H, D], `k` [T, Hkv, D], `v` [T, Hkv, Dv].
    """
    if v.shape[-1] != q.shape[-1]:
        return None
    sizes = splits_of(shape.length_tokens, shape.requests, q.shape[1], k.shape[1], q.shape[-1], q.dtype)
    return sizes if sizes.splits > 1 else None


def _refuse_other_than_causal(layer: Any, more: dict[str, Any]) -> None:
    asked = [name for name, value in more.items() if value is not None and value is not False]
    if asked:
        raise NotImplementedError(f"attention with {', '.join(sorted(asked))} is not captured")
    if (getattr(layer, "sliding_window_size", None) or -1) > -1:
        raise NotImplementedError(f"attention over a sliding window of {layer.sliding_window_size} is not captured")
    if getattr(layer, "is_cross_attention", False):
        raise NotImplementedError("cross-attention is not captured")
