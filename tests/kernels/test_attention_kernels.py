"""The Triton kernels of attention: blocks between zigzag, striped and disordered shards, GQA, and the fused merge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_ext_kernels.block_attention import (
    BlockSizes,
    attention_block_reference,
    merge_states_,
    merge_states_reference_,
    plan_block,
    positioned_block,
    positioned_block_reference,
)

Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
SMALL = BlockSizes(16, 16)
SCALE = 0.2


def draw(
    generator: torch.Generator, q_tokens: int, k_tokens: int, heads: int = 4, kv_heads: int = 2, size: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def one(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, size, generator=generator, device=generator.device)

    return one(q_tokens, heads), one(k_tokens, kv_heads), one(k_tokens, kv_heads)


def zigzag(tokens: int, members: int, place: int) -> torch.Tensor:
    parts = torch.arange(tokens).tensor_split(2 * members)
    return torch.cat([parts[place], parts[2 * members - 1 - place]])


@pytest.fixture
def check(float32_error: float) -> Check:
    return lambda *arguments: _check(*arguments, float32_error)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_at: torch.Tensor, k_at: torch.Tensor, error: float
) -> None:
    q_at, k_at = q_at.to(q.device), k_at.to(q.device)
    got = positioned_block(q, k, v, plan_block(q_at, k_at, SMALL), SCALE)
    for a, b in zip(got, positioned_block_reference(q, k, v, q_at, k_at, SCALE), strict=True):
        torch.testing.assert_close(a, b, atol=error, rtol=1e-5)


@pytest.mark.parametrize(("mine", "theirs"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("tokens", [70, 4])
def test_zigzag_shards(check: Check, generator: torch.Generator, tokens: int, mine: int, theirs: int) -> None:
    q_at, k_at = zigzag(tokens, 2, mine), zigzag(tokens, 2, theirs)
    check(*draw(generator, q_at.numel(), k_at.numel()), q_at, k_at)


@pytest.mark.parametrize(("mine", "theirs"), [(0, 2), (2, 0), (1, 1)])
def test_striped_shards(check: Check, generator: torch.Generator, mine: int, theirs: int) -> None:
    q_at, k_at = torch.arange(100)[mine::3], torch.arange(100)[theirs::3]
    check(*draw(generator, q_at.numel(), k_at.numel()), q_at, k_at)


def test_positions_in_no_order(check: Check, generator: torch.Generator) -> None:
    order = torch.Generator().manual_seed(3)
    q_at, k_at = torch.randperm(90, generator=order)[:41], torch.randperm(90, generator=order)[:57]
    check(*draw(generator, 41, 57), q_at, k_at)


def test_a_whole_block_behind_one_that_is_not_seen(check: Check, generator: torch.Generator) -> None:
    k_at = torch.cat([torch.arange(100, 116), torch.arange(16), torch.arange(40, 56)])
    check(*draw(generator, 16, 48), torch.arange(50, 66), k_at)


def test_queries_that_see_nothing(generator: torch.Generator) -> None:
    q, k, v = draw(generator, 20, 20)
    q_at = torch.arange(10, 30, device=q.device)
    out, lse = positioned_block(q, k, v, plan_block(q_at, q_at + 10, SMALL), SCALE)
    assert torch.isneginf(lse[:10]).all()
    assert not out[:10].any()
    assert torch.isfinite(lse[10:]).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(3, 1, 64), (6, 2, 80), (4, 4, 32)])
def test_heads(check: Check, generator: torch.Generator, heads: int, kv_heads: int, size: int) -> None:
    check(*draw(generator, 33, 33, heads, kv_heads, size), torch.arange(33), torch.arange(33))


def test_strided_tensors(check: Check, generator: torch.Generator) -> None:
    q, k, v = draw(generator, 40, 40, heads=8, kv_heads=4)
    check(q[:, ::2], k[:, 1:3], v[:, 1:3], torch.arange(40), torch.arange(40))


def test_half_precision_accumulates_in_float32(generator: torch.Generator) -> None:
    # the interpreter multiplies no bfloat16
    dtype = torch.bfloat16 if generator.device.type == "cuda" else torch.float16
    q, k, v = (x.to(dtype) for x in draw(generator, 48, 48, size=64))
    at = torch.arange(48, device=q.device)
    out, lse = positioned_block(q, k, v, plan_block(at, at, SMALL), SCALE)
    wanted, wanted_lse = positioned_block_reference(q.double(), k.double(), v.double(), at, at, SCALE)
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)
    assert (out - wanted).norm() / wanted.norm() < 5e-3
    torch.testing.assert_close(lse, wanted_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("is_striped", [False, True])
def test_a_ring_is_attention_over_the_whole(generator: torch.Generator, float32_error: float, is_striped: bool) -> None:
    tokens, members = 75, 3
    q, k, v = draw(generator, tokens, tokens)
    shards = [torch.arange(tokens)[i::members] if is_striped else zigzag(tokens, members, i) for i in range(members)]
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    wanted, wanted_lse = attention_block_reference(q, k, v, SCALE, visible)
    for mine in (shard.to(q.device) for shard in shards):
        out = torch.zeros(mine.numel(), *q.shape[1:], device=q.device)
        lse = torch.full(out.shape[:2], float("-inf"), device=q.device)
        for theirs in (shard.to(q.device) for shard in shards):
            part = positioned_block(q[mine], k[theirs], v[theirs], plan_block(mine, theirs, SMALL), SCALE)
            merge_states_(out, lse, *part)
        torch.testing.assert_close(out, wanted[mine], atol=float32_error, rtol=1e-5)
        torch.testing.assert_close(lse, wanted_lse[mine], atol=float32_error, rtol=1e-5)


def test_the_plan_counts_whole_blocks_only() -> None:
    plan = plan_block(torch.tensor([100]), torch.arange(40), SMALL)
    assert (plan.by_all.tolist(), plan.by_some.tolist()) == ([2], [3])
    plan = plan_block(torch.arange(32), torch.arange(32), SMALL)
    assert (plan.by_all.tolist(), plan.by_some.tolist()) == ([0, 1], [1, 2])
    plan = plan_block(torch.arange(16), torch.arange(16, 32), SMALL)
    assert (plan.by_all.tolist(), plan.by_some.tolist()) == ([0], [0])


def test_an_empty_block_is_refused() -> None:
    with pytest.raises(ValueError, match="needs queries and keys, got 0 and 3"):
        plan_block(torch.empty(0), torch.arange(3), SMALL)


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 16), (13, 3, 64), (9, 2, 80)])
def test_the_merge_is_its_reference(
    generator: torch.Generator, float32_error: float, tokens: int, heads: int, size: int
) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    out, lse = draw(tokens, heads, size), 5 * draw(tokens, heads)
    other, other_lse = draw(tokens, heads, size), 5 * draw(tokens, heads)
    lse[::2] = float("-inf")
    out[::2] = 0
    other_lse[::3] = float("-inf")
    other[::3] = 0
    wanted, wanted_lse = out.clone(), lse.clone()
    merge_states_reference_(wanted, wanted_lse, other, other_lse)
    merge_states_(out, lse, other, other_lse)
    torch.testing.assert_close(out, wanted, atol=float32_error, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=float32_error, rtol=1e-5)


def test_the_merge_widens_half_precision_as_it_reads(generator: torch.Generator, float32_error: float) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    out, lse, other, other_lse = draw(5, 3, 64), draw(5, 3), draw(5, 3, 64).bfloat16(), draw(5, 3)
    wanted, wanted_lse = out.clone(), lse.clone()
    merge_states_reference_(wanted, wanted_lse, other.float(), other_lse)
    for merge in (merge_states_, merge_states_reference_):
        got, got_lse = out.clone(), lse.clone()
        merge(got, got_lse, other, other_lse)
        torch.testing.assert_close(got, wanted, atol=float32_error, rtol=1e-5)
        torch.testing.assert_close(got_lse, wanted_lse, atol=float32_error, rtol=1e-5)


def test_far_apart_sums_do_not_overflow(generator: torch.Generator) -> None:
    out, lse = torch.ones(1, 1, 16, device=generator.device), torch.full((1, 1), 1e4, device=generator.device)
    merge_states_(out, lse, torch.zeros_like(out), -lse)
    assert torch.equal(out, torch.ones_like(out))
    assert torch.equal(lse, torch.full_like(lse, 1e4))
