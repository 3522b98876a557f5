"""A block with its log-sum-exp against plain mathematics, and blocks joined against attention over all keys."""

from __future__ import annotations

import pytest
import torch

from sglang_ext_kernels.block_attention import attention_block, attention_block_reference, merge_states_


def tensors(q_tokens: int, k_tokens: int, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(q_tokens * 1000 + k_tokens)
    return (
        torch.randn(q_tokens, heads, 16, generator=generator),
        torch.randn(k_tokens, kv_heads, 16, generator=generator),
        torch.randn(k_tokens, kv_heads, 16, generator=generator),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize(("q_tokens", "k_tokens"), [(1, 1), (1, 33), (7, 5), (64, 129)])
def test_it_is_the_reference(heads: int, kv_heads: int, q_tokens: int, k_tokens: int) -> None:
    q, k, v = tensors(q_tokens, k_tokens, heads, kv_heads)
    for got, wanted in zip(attention_block(q, k, v, 0.25), attention_block_reference(q, k, v, 0.25), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_the_diagonal() -> None:
    q, k, v = tensors(37, 37, 4, 2)
    visible = torch.ones(37, 37, dtype=torch.bool).tril()
    wanted = attention_block_reference(q, k, v, 0.25, visible)
    for got, reference in zip(attention_block(q, k, v, 0.25, is_causal=True), wanted, strict=True):
        torch.testing.assert_close(got, reference, atol=1e-6, rtol=1e-5)


def test_bfloat16_is_merged_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in tensors(8, 8, 4, 2))
    out, lse = attention_block(q, k, v, 0.25)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_blocks_join_to_the_whole_in_any_order() -> None:
    q, k, v = tensors(9, 30, 4, 2)
    wanted, wanted_lse = attention_block_reference(q, k, v, 0.25)
    cuts = [slice(20, 30), slice(0, 7), slice(7, 20)]
    out, lse = torch.zeros(9, 4, 16), torch.full((9, 4), float("-inf"))
    for cut in cuts:
        merge_states_(out, lse, *attention_block(q, k[cut], v[cut], 0.25))
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=1e-6, rtol=1e-5)


def test_what_has_seen_nothing_stays_nothing() -> None:
    out, lse = torch.zeros(2, 1, 4), torch.full((2, 1), float("-inf"))
    merge_states_(out, lse, torch.zeros(2, 1, 4), torch.full((2, 1), float("-inf")))
    assert torch.equal(out, torch.zeros(2, 1, 4))
    assert torch.isneginf(lse).all()
