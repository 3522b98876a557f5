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
    tokens, heads, size = q.shape
    kv_heads = k.shape[1]
    if is_causal or mask is not None or heads == kv_heads:
        out, lse = _fused_on_cpu(q.transpose(0, 1), k, v, scale, is_causal, mask)
        return out.transpose(0, 1).float(), lse.transpose(0, 1).float()
    # Heads that read the same keys become rows of one product: keys are read once, and the product is larger.
    group = heads // kv_heads
    grouped = q.view(tokens, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, size)
    out, lse = _fused_on_cpu(grouped, k, v, scale)
    out = out.view(kv_heads, group, tokens, -1).permute(2, 0, 1, 3)
    lse = lse.view(kv_heads, group, tokens).permute(2, 0, 1)
    return out.reshape(tokens, heads, -1).float(), lse.reshape(tokens, heads).float()


def attention_behind_prefix_(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> None:
    """Write to `out` [T, H, D] what the last T tokens of one prompt see of all of it, on a CPU.

    `q` [T, H, D] is of these tokens, `k` and `v` [P + T, Hkv, D] are of the prefix and of these tokens. It costs
    T (P + T/2) products where attention over the whole prompt costs (P + T)²/2: the prefix is seen whole, so only the
    new tokens' own square is causal, and the two are joined by their log-sum-exp.
    """
    prefix = k.shape[0] - q.shape[0]
    new_out, new_lse = attention_block(q, k[prefix:], v[prefix:], scale, is_causal=True)
    if prefix:
        seen_out, seen_lse = attention_block(q, k[:prefix], v[:prefix], scale)
        new_out.lerp_(seen_out, torch.sigmoid(seen_lse - new_lse)[..., None])
    out.copy_(new_out)


def _fused_on_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's own kernel, which also gives the log-sum-exp: `q` [H, Tq, D]; returns [H, Tq, Dv] and [H, Tq]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        0.0,
        is_causal,
        attn_mask=None if mask is None else mask[None, None],
        scale=scale,
    )
    return out[0], lse[0]


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
