"""One block of a ring: queries of one instance against keys and values of another, with their log-sum-exp.

The log-sum-exp is what `merge_states` needs to join blocks. Grouped-query attention: query head h reads key head
h // (query heads / key heads).
"""

from __future__ import annotations

import torch

from sglang_ext_kernels import flashinfer_block


def attention_block_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain mathematics in float32, for tests.

    `q` [Tq, H, D], `k` [Tk, Hkv, D], `v` [Tk, Hkv, Dv], `visible` [Tq, Tk] bool (None: everything). Returns the output
    [Tq, H, Dv] and the log-sum-exp [Tq, H], both float32; a query that sees nothing has 0 and -inf.
    """
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("qgrd,kgd->grqk", grouped, k.float()) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.nan_to_num(lse, neginf=0.0)[..., None])
    out = torch.einsum("grqk,kgd->qgrd", weights, v.float()).reshape(tokens, heads, -1)
    return out, lse.permute(2, 0, 1).reshape(tokens, heads)


def attention_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, by a fused kernel: every query must see at least one key.

    `is_causal`: query i sees keys 0 to i, both of one length. `mask` [Tq, Tk] of `q`'s dtype is added to the scores;
    on a CUDA device there is none, `positioned_block` takes its place. Returns output and log-sum-exp in float32,
    shaped as in the reference. Raises ValueError for a mask on a CUDA device.
    """
    if q.is_cuda:
        return _on_cuda(q, k, v, scale, is_causal, mask)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads != kv_heads:
        k, v = _repeated(k, heads // kv_heads), _repeated(v, heads // kv_heads)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        0.0,
        is_causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )
    return out[0].transpose(0, 1).float(), lse[0].transpose(0, 1).float()


def _on_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, is_causal: bool, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """flashinfer where it has a kernel, else Triton's."""
    if mask is not None:
        raise ValueError("attention_block takes no mask on a CUDA device; give positions to positioned_block")
    if flashinfer_block.can_run(q, v):
        return flashinfer_block.flashinfer_block(q, k, v, scale, is_causal)
    from sglang_ext_kernels.positioned_block import default_sizes, plan_block, positioned_block

    keys = torch.arange(k.shape[0], device=q.device)
    queries = keys if is_causal else torch.full((q.shape[0],), k.shape[0], device=q.device)
    return positioned_block(q, k, v, plan_block(queries, keys, default_sizes(q.shape[-1], q.dtype)), scale)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    tokens, heads, size = x.shape
    return x[:, :, None].expand(tokens, heads, times, size).reshape(tokens, heads * times, size)
