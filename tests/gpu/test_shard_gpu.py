"""Shards of KV whose slots are on the GPU."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.long_pool.decide.sharding import KvMove
from sglang_ext.long_pool.member.shard import Shard
from support.toy_engine import LAYERS, ToyPool

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page_tokens", [1, 4])
def test_who_has_given_all_away_hands_over_nothing(page_tokens: int) -> None:
    pool = ToyPool(64, page_tokens, "cuda")
    shard = Shard(pool)
    shard.begin()
    assert shard.slots.is_cuda
    shard.extend((range(8),))
    shard.begin()
    shard.give(KvMove(0, 1, 0, 8, (range(8),)))
    shard.compact()
    slots = shard.take_slots(0)
    assert (slots.is_cuda, slots.numel(), pool.free_tokens) == (True, 0, 64)


@pytest.mark.parametrize("page_tokens", [1, 4])
def test_rows_in_no_order_are_handed_over_in_order(page_tokens: int) -> None:
    pool = ToyPool(64, page_tokens, "cuda")
    shard = Shard(pool)
    shard.begin()
    shard.extend((range(0, 24, 2), range(1, 24, 2)))
    positions = torch.tensor([*range(0, 24, 2), *range(1, 24, 2)], device="cuda").float()
    for layer in range(LAYERS):
        kv = pool.read(layer, shard.slots)
        kv[:] = positions[None, :, None, None]
        pool.write(layer, shard.slots, kv)
    slots = shard.take_slots(0)
    for layer in range(LAYERS):
        assert pool.read(layer, slots)[0, :, 0, 0].tolist() == list(range(24))
