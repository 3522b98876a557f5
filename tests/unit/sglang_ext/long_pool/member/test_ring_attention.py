"""Attention between shards against plain masked attention: every layout, and ranges that no layout produces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.sharding import ChunkLayout, Interleaving, Positions, count_tokens
from sglang_ext.long_pool.member.chunk_step import StepContext, _ChunkAttention
from sglang_ext.long_pool.member.ring_attention import AttentionRule, as_tensor, attend_, visible_blocks
from sglang_ext.long_pool.member.shard import HeldRows
from sglang_ext_kernels.block_attention import add_sinks_, attention_block_reference
from support.examples import examples
from support.sharding import split_chunk

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


def check(queries: Positions, shards: list[Positions]) -> None:
    generator = torch.Generator().manual_seed(count_tokens(queries))
    q = torch.randn(count_tokens(queries), HEADS, HEAD_SIZE, generator=generator)
    ks = [torch.randn(count_tokens(one), KV_HEADS, HEAD_SIZE, generator=generator) for one in shards]
    vs = [torch.randn(count_tokens(one), KV_HEADS, HEAD_SIZE, generator=generator) for one in shards]
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], float("-inf"))
    for k, v, keys in zip(ks, vs, shards, strict=True):
        attend_(out, lse, q, k, v, queries, keys, AttentionRule(0.3))
    all_keys = torch.cat([as_tensor(one) for one in shards])
    visible = all_keys[None, :] <= as_tensor(queries)[:, None]
    wanted, wanted_lse = attention_block_reference(q, torch.cat(ks), torch.cat(vs), 0.3, visible)
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse, atol=2e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("interleaving", list(Interleaving))
@pytest.mark.parametrize("members", [1, 2, 3, 4])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 3), (0, 64), (7, 37), (128, 5), (40, 101)])
def test_every_member_of_every_layout(interleaving: Interleaving, members: int, start: int, tokens: int) -> None:
    parts = split_chunk(start, tokens, members, interleaving)
    history: Positions = (range(start),) if start else ()
    for queries in parts:
        if queries:
            check(queries, [one for one in (history, *parts) if one])


@pytest.mark.slow
@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_two_ranges(data: st.DataObject) -> None:
    def some_range() -> range:
        start, step = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 4))
        return range(start, start + step * data.draw(st.integers(1, 12)), step)

    check((some_range(),), [(some_range(),)])


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_windows_caps_and_sinks_over_shards_in_any_order(data: st.DataObject) -> None:
    """Each query sees its window of all shards, and the sinks once."""
    start, tokens = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 60))
    parts = split_chunk(start, tokens, data.draw(st.integers(1, 4)), data.draw(st.sampled_from(Interleaving)))
    queries = data.draw(st.sampled_from([part for part in parts if part]))
    history: Positions = (range(start // 2, start), range(start // 2)) if start > 1 else ()
    shards = data.draw(st.permutations([part for part in (history, *parts) if part]))
    window = data.draw(st.sampled_from([None, 0, 1, 7, 40, 500]))
    cap = data.draw(st.sampled_from([0.0, 1.5]))
    sinks = data.draw(st.sampled_from([None, torch.tensor([0.5, -1.0, 3.0, 0.0])]))
    generator = torch.Generator().manual_seed(start)
    q = torch.randn(count_tokens(queries), HEADS, HEAD_SIZE, generator=generator)
    ks = [torch.randn(count_tokens(shard), KV_HEADS, HEAD_SIZE, generator=generator) for shard in shards]
    vs = [torch.randn(count_tokens(shard), KV_HEADS, HEAD_SIZE, generator=generator) for shard in shards]
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], float("-inf"))
    for k, v, keys in zip(ks, vs, shards, strict=True):
        attend_(out, lse, q, k, v, queries, keys, AttentionRule(0.3, window, cap, sinks))
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    places = torch.cat([as_tensor(shard) for shard in shards])[None, :]
    at = as_tensor(queries)[:, None]
    visible = (places <= at) & (places >= at - (1000 if window is None else window))
    keys, values = (torch.cat(rows).repeat_interleave(HEADS // KV_HEADS, 1) for rows in (ks, vs))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * 0.3
    scores = (torch.tanh(scores / cap) * cap if cap else scores).masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(at), 1)], -1)
    weights = torch.softmax(scores, -1)[..., : places.numel()]
    torch.testing.assert_close(out, torch.einsum("hqk,khd->qhd", weights, values), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.T, torch.logsumexp(scores, -1), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("interleaving", list(Interleaving))
def test_no_layout_needs_a_mask(interleaving: Interleaving) -> None:
    for members in (2, 3, 4):
        parts = split_chunk(100, 999, members, interleaving)
        blocks = [block for queries in parts for keys in parts for block in visible_blocks(queries, keys)]
        assert not any(block.is_masked for block in blocks)


class Recorded:
    """A mesh, a pool and moves, of which only what is sent is looked at."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    @contextmanager
    def batch(self) -> Iterator[None]:
        yield

    def send(self, block: torch.Tensor, target: int, tag: int) -> Recorded:
        self.sent.append(block.shape[1])
        return self

    def receive(self, block: torch.Tensor, source: int, tag: int) -> Recorded:
        block.zero_()
        return self

    def wait(self) -> None: ...

    def start(self, layer: int) -> None: ...

    def finish(self, layer: int) -> None: ...

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, slots.numel(), KV_HEADS, HEAD_SIZE)


@pytest.mark.parametrize(("window", "sent"), [(None, 550), (50, 100), (5, 55), (0, 50)])
def test_of_a_layer_with_a_window_rows_go_round_that_the_chunk_may_see(window: int | None, sent: int) -> None:
    """The newest half of the history, 500 tokens, and half of a chunk of 100 are here."""
    history, new = ((range(500, 1000),), (range(500),)), ((range(1000, 1050),), (range(1050, 1100),))
    held = [(*old, *part) for old, part in zip(history, new, strict=True)]
    fake: Any = Recorded()
    rows = HeldRows(held[0], torch.arange(550))
    layout = ChunkLayout((0, 1), (), history, new)
    attention = _ChunkAttention(StepContext(fake, 0, 0), fake, layout, held, rows, fake, lambda layer, mark: None)
    attention.attend(0, torch.zeros(50, HEADS, HEAD_SIZE), AttentionRule(0.3, window))
    assert fake.sent == [sent]


def test_history_is_one_block() -> None:
    history = (range(10), range(20, 30), range(11, 15))
    assert len(visible_blocks((range(100, 110),), history)) == 1
