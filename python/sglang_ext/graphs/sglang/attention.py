"""Attention of a captured pass: over static tensors, so that what varies from batch to batch is in their contents.

On a CUDA device it is a kernel of ours, started for the largest length that the shape allows, which divides prefixes
among programs where a shape would leave most of the device idle. Of larger shapes it is FlashAttention 3 over the pages
of the pool, where the engine has it (Hopper GPUs, by default) and the layer has neither window nor sinks. On a CPU,
where it serves to test everything else, it is plain mathematics.

Latent attention (MLA) is captured in the absorbed form: queries attend to the latent rows of the pool, each a key and,
in its first part, the value of all heads. SGLang would choose another form where no token is cached, which a graph
cannot. On a CUDA device it is SGLang's Triton kernel.

SGLang keeps the layers with a window of some models in a pool of their own, whose slots it frees once no window needs
them. Slots of the other pool are translated to these at the head of a pass, as its attention backends do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_ext.graphs.decide.graph_grid import GraphShape
from sglang_ext_kernels.padded_batch import PaddedBatch, Prefixes, fill_page_table_, prefixes_in_window
from sglang_ext_kernels.prefix_attention import (
    split_prefix_attention_,
    splits_of,
)

# A table of pages has a row for each request and a column for each page that the longest request may have.
MAX_TABLE_BYTES = 256 << 20


class PagedBatches:
    """Makes the tables that FlashAttention 3 reads of a batch: pages, lengths and ends of the requests, all int32."""

    def __init__(self, model_runner: Any, slots: int) -> None:
        """`slots`: requests of the largest shape."""
        self._table = model_runner.req_to_token_pool.req_to_token
        self._page_tokens = model_runner.page_size
        pages = -(-self._table.shape[1] // self._page_tokens)
        self._pages = torch.zeros(slots, pages, dtype=torch.int32, device=self._table.device)
        self._attend = flash_attention()

    def of(self, batch: PaddedBatch) -> PagedBatch:
        """The tables of one batch, computed from it: in a captured pass, by each replay."""
        pages = self._pages[: batch.rows.numel()]
        fill_page_table_(pages, self._table, batch.rows, batch.total_lens, self._page_tokens)
        return PagedBatch(self._attend, self._page_tokens, pages, batch.total_lens.int(), batch.qo_indptr.int())


class PagedBatch(NamedTuple):
    """`pages` [slots, pages at most], `lens` [slots], `ends` [slots + 1]: the running sum of new tokens."""

    attend_paged: Callable[..., torch.Tensor]
    page_tokens: int
    pages: torch.Tensor
    lens: torch.Tensor
    ends: torch.Tensor

    def attend_(
        self, out: torch.Tensor, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, longest: int, layer: Any
    ) -> None:
        """Write to `out` [T, H, D], rows of padded tokens apart, what `q` [T, H, D] sees of its request's pages.

        New keys and values must be in the pool. `longest`: the most new tokens of a request.
        """
        self.attend_paged(
            q,
            k_pool.view(-1, self.page_tokens, *k_pool.shape[1:]),
            v_pool.view(-1, self.page_tokens, *v_pool.shape[1:]),
            page_table=self.pages,
            cache_seqlens=self.lens,
            cu_seqlens_q=self.ends,
            max_seqlen_q=longest,
            softmax_scale=layer.scaling,
            softcap=layer.logit_cap,
            causal=True,
            out=out,
        )


def paged_batches(model_runner: Any, slots: int) -> PagedBatches | None:
    """None where the engine attends otherwise, or where a table of its longest requests would be too large."""
    if getattr(model_runner, "prefill_attention_backend_str", None) != "fa3" or has_latent_rows(model_runner):
        return None
    table = model_runner.req_to_token_pool.req_to_token
    if 4 * slots * (table.shape[1] // model_runner.page_size) > MAX_TABLE_BYTES:
        return None
    return PagedBatches(model_runner, slots)


def flash_attention() -> Callable[..., torch.Tensor]:
    """FlashAttention 3 over pages, as SGLang calls it."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    return flash_attn_with_kvcache  # type: ignore[no-any-return]


class CapturedAttention:
    """Takes the place of SGLang's attention backend in a forward context, for one shape."""

    # By these names models with latent attention ask for its form (`pin_absorbed_form`).
    prefill_attention_backend_str = decode_attention_backend_str = "sglang_ext_captured"

    def __init__(
        self, model_runner: Any, batch: PaddedBatch, shape: GraphShape, paged: PagedBatches | None = None
    ) -> None:
        # by these names models find the pools
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self._batch = batch
        self._shape = shape
        self._paged = paged
        self._paged_batch: PagedBatch | None = None
        self._window_slots: torch.Tensor | None = None
        self._prefixes: dict[tuple[int | None, bool], Prefixes] = {}

    def begin(self) -> None:
        """Prepare what several layers of a pass read; part of what is captured."""
        self._paged_batch = None if self._paged is None else self._paged.of(self._batch)
        self._prefixes = {}
        if hasattr(self.token_to_kv_pool, "layers_mapping"):
            # Padding has slot 0 in both pools.
            self._window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(self._batch.cache_slots)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> torch.Tensor:
        """`q` [T, heads x D] of the padded batch, `k` [T, KV heads, D], `v` [T, KV heads, Dv]: [T, heads x Dv].

        `sinks` [heads]: scores that take part in the softmax and have no value. Raises NotImplementedError for
        attention that is not causal: the shape is not captured then.
        """
        _refuse_other_than_causal(layer, more)
        if save_kv_cache:
            self._write(layer, k, v)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        shaped = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        shaped_out = out.view(-1, layer.tp_q_head_num, layer.v_head_dim)
        k_pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_pool = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        k, v = k.view(-1, *k_pool.shape[1:]), v.view(-1, *v_pool.shape[1:])
        longest = self._shape.length_tokens
        if layer.qk_head_dim != layer.v_head_dim and q.is_cuda:
            attend_as_sglang_(shaped_out, shaped, k, v, k_pool, v_pool, self._batch, layer.scaling, longest)
            return out
        sizes = splits_of(*self._shape, shaped.shape[1], k.shape[1], shaped.shape[-1], q.dtype)
        window = layer.sliding_window_size if layer.sliding_window_size > -1 else None
        # Of a shape with programs enough, FlashAttention 3 is faster; of a smaller one it takes longer to begin.
        if sizes.splits == 1 and self._paged_batch is not None and save_kv_cache and window is None and sinks is None:
            self._paged_batch.attend_(shaped_out, shaped, k_pool, v_pool, longest, layer)
        else:
            split_prefix_attention_(
                *(shaped_out, shaped, k, v, k_pool, v_pool, self._batch, layer.scaling, longest, sizes),
                prefixes=self._prefixes_of(layer, window),
                window=window,
                cap=layer.logit_cap,
                sinks=sinks,
            )
        return out

    def _write(self, layer: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new keys and values to the layer's pool."""
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        # By the class: a capture in the middle of a batch writes none of that batch's layers, for which
        # `transfer/sglang/layer_streams.py` watches the pool.
        pool, slots = self.token_to_kv_pool, self._batch.cache_slots
        target = slots if self._window_slots is None else KVWriteLoc(slots, self._window_slots)
        type(pool).set_kv_buffer(pool, layer, target, k, v)

    def _prefixes_of(self, layer: Any, window: int | None) -> Prefixes:
        """Return what a layer reads of the prefixes; layers of one kind share it."""
        pool = self.token_to_kv_pool
        is_in_window_pool = self._window_slots is not None and pool.layers_mapping[layer.layer_id][1]
        kind = window, is_in_window_pool
        if kind not in self._prefixes:
            batch = self._batch
            prefixes = Prefixes(batch.kv_indptr, batch.kv_indices)
            if window is not None:
                prefixes = prefixes_in_window(batch, window)
            if is_in_window_pool:
                prefixes = prefixes._replace(indices=pool.translate_loc_from_full_to_swa(prefixes.indices))
            self._prefixes[kind] = prefixes
        return self._prefixes[kind]


def attend_as_sglang_(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    batch: PaddedBatch,
    scale: float,
    longest_tokens: int,
) -> None:
    """Compute `prefix_attention_reference` by SGLang's kernel, which takes values of another size than keys."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    extend_attention_fwd(
        *(q.contiguous(), k.contiguous(), v.contiguous(), out, k_pool, v_pool),
        *(batch.qo_indptr, batch.kv_indptr, batch.kv_indices),
        None,  # no mask but the causal one
        True,
        None,
        longest_tokens,
        1.0,
        1.0,
        sm_scale=scale,
    )


def has_latent_rows(model_runner: Any) -> bool:
    """Return whether the pool has latent rows in the place of keys and values."""
    return hasattr(model_runner.token_to_kv_pool, "kv_lora_rank")


def pin_absorbed_form() -> None:
    """Let models with latent attention compute its absorbed form for `CapturedAttention`."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register(
        CapturedAttention.prefill_attention_backend_str, lambda attention, forward_batch: AttnForwardMethod.MLA
    )


def _refuse_other_than_causal(layer: Any, more: dict[str, Any]) -> None:
    from sglang.srt.layers.radix_attention import AttentionType

    asked = [name for name, value in more.items() if value is not None and value is not False]
    if asked:
        raise NotImplementedError(f"attention with {', '.join(sorted(asked))} is not captured")
    if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
        raise NotImplementedError("attention that is not causal is not captured")
