"""Shards as transactions: taken back, handed over and dropped, the memory ends where it began."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.long_pool.decide.sharding import Interleaving, KvMove, KvSegment, count_tokens, head, tail
from sglang_ext.long_pool.member.kv_streams import PinnedPool
from sglang_ext.long_pool.member.ring_attention import as_tensor
from sglang_ext.long_pool.member.shard import KvPoolFullError, LayoutMismatchError, Shard
from support.pretended_device import CUDA, DeviceTensor, on_host, pretended_device
from support.sharding import split_chunk
from support.toy_engine import LAYERS, ToyPool

PAGES = pytest.mark.parametrize("page_tokens", [1, 4])


def fill(pool: ToyPool, shard: Shard) -> None:
    """KV that tells which position it is of."""
    positions = as_tensor(shard.positions).float()
    for layer in range(LAYERS):
        kv = pool.read(layer, shard.slots)
        kv[0], kv[1] = positions[:, None, None] + 1000 * layer, -positions[:, None, None]
        pool.write(layer, shard.slots, kv)


def positions_in(pool: ToyPool, slots: torch.Tensor) -> list[int]:
    """Which positions lie there; the same in every layer."""
    kv = pool.kv(slots)
    for layer in range(LAYERS):
        assert torch.equal(kv[layer, 0, :, 0, 0] - 1000 * layer, kv[0, 0, :, 0, 0])
    assert torch.equal(kv[0, 0], -kv[0, 1])
    return [int(value) for value in kv[0, 0, :, 0, 0]]


@PAGES
def test_a_chunk_that_is_taken_back(page_tokens: int) -> None:
    pool = ToyPool(64, page_tokens)
    shard = Shard(pool)
    shard.begin()
    shard.extend((range(10),))
    before, free_tokens = shard.segments, pool.free_tokens
    fill(pool, shard)
    shard.begin()
    given = KvMove(0, 1, 0, 2, tail(before[0].positions, 10, 2))
    shard.give(given)
    shard.extend((range(20, 30),))
    shard.roll_back()
    assert shard.segments == before
    assert pool.free_tokens == free_tokens
    assert positions_in(pool, shard.slots) == list(range(10))
    shard.drop()
    assert pool.free_tokens == 64


@PAGES
def test_what_was_given_is_freed_when_the_next_chunk_begins(page_tokens: int) -> None:
    pool = ToyPool(64, page_tokens)
    shard = Shard(pool)
    shard.begin()
    shard.extend((range(12),))
    shard.begin()
    shard.give(KvMove(0, 1, 0, 12, (range(12),)))
    shard.compact()
    assert (shard.segments, shard.owned_tokens) == ((), 12)
    shard.begin()
    assert (shard.owned_tokens, pool.free_tokens) == (0, 64)


def test_a_move_of_what_is_not_there_is_refused() -> None:
    shard = Shard(ToyPool(64, 1))
    shard.begin()
    shard.extend((range(8),))
    for move in (KvMove(0, 1, 1, 2, (range(6, 8),)), KvMove(0, 1, 0, 2, (range(5, 7),)), KvMove(0, 1, 0, 2, ())):
        with pytest.raises(LayoutMismatchError):
            shard.give(move)
    assert count_tokens(shard.positions) == 8


@PAGES
def test_a_full_pool_gives_nothing(page_tokens: int) -> None:
    pool = ToyPool(16, page_tokens)
    shard = Shard(pool)
    shard.begin()
    shard.extend((range(8),))
    with pytest.raises(KvPoolFullError):
        shard.extend((range(8, 20),))
    assert shard.positions == (range(8),)
    shard.roll_back()
    assert pool.free_tokens == 16


@PAGES
@pytest.mark.parametrize("cached_tokens", [0, 8])
def test_handed_over_in_order(page_tokens: int, cached_tokens: int) -> None:
    pool = ToyPool(128, page_tokens)
    prefix = pool.allocate(cached_tokens)
    shard = Shard(pool)
    if cached_tokens:
        shard.borrow((range(cached_tokens),), prefix)
    shard.begin()
    mine, others = split_chunk(cached_tokens, 40, 2, Interleaving.ZIGZAG, page_tokens)
    shard.extend(mine)
    shard.extend(others)
    fill(pool, shard)
    slots = shard.take_slots(cached_tokens)
    assert positions_in(pool, slots) == list(range(cached_tokens, cached_tokens + 40))
    assert pool.free_tokens == 128 - 40 - cached_tokens
    assert (shard.segments, shard.owned_tokens) == ((), 0)
    shard.drop()
    pool.free(slots)
    if cached_tokens:
        pool.free(prefix)
    assert pool.free_tokens == 128


@PAGES
def test_handed_over_up_to_the_first_that_is_missing(page_tokens: int) -> None:
    pool = ToyPool(128, page_tokens)
    shard = Shard(pool)
    shard.begin()
    shard.extend((range(11), range(16, 30)))
    fill(pool, shard)
    slots = shard.take_slots(0)
    assert positions_in(pool, slots) == list(range(11 - 11 % page_tokens))
    pool.free(slots)
    assert pool.free_tokens == 128


def test_too_few_whole_pages_change_nothing() -> None:
    pool = ToyPool(12, 4)
    shard = Shard(pool)
    shard.begin()
    shard.extend((range(0, 12, 2), range(1, 12, 2)))
    fill(pool, shard)
    before = shard.segments
    with pytest.raises(KvPoolFullError):
        shard.take_slots(0)
    assert shard.segments == before
    assert positions_in(pool, shard.slots) == [*range(0, 12, 2), *range(1, 12, 2)]
    shard.drop()
    assert pool.free_tokens == 12


def test_what_lies_in_whole_pages_stays_where_it_is() -> None:
    pool = ToyPool(16, 4)
    shard = Shard(pool)
    shard.begin()
    taken = shard.extend((range(8, 16), range(8)))
    fill(pool, shard)
    slots = shard.take_slots(0)
    assert positions_in(pool, slots) == list(range(16))
    assert sorted(slots.tolist()) == sorted(taken.tolist())


@pytest.mark.parametrize("holders", [2, 3])
def test_scattered_rows_are_put_in_order_in_little_room(holders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.long_pool.member.shard._PIECE_TOKENS", 8)
    pool = ToyPool(60 + 4 * (2 + holders), 4)
    shard = Shard(pool)
    shard.begin()
    for part in split_chunk(0, 60, holders, Interleaving.STRIPED, 4):
        shard.extend(part)
    fill(pool, shard)
    slots = shard.take_slots(0)
    assert positions_in(pool, slots) == list(range(60))
    assert pool.free_tokens == 4 * (2 + holders)
    pool.free(slots)
    assert pool.free_tokens == 60 + 4 * (2 + holders)


def test_rows_that_are_still_sent_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.long_pool.member.shard._PIECE_TOKENS", 8)
    inner = ToyPool(32, 4)
    pool = PinnedPool(inner)
    shard = Shard(pool)
    shard.begin()
    for part in split_chunk(0, 24, 2, Interleaving.STRIPED, 4):
        shard.extend(part)
    fill(inner, shard)
    pin, before = pool.pin(shard.slots), shard.segments
    with pytest.raises(KvPoolFullError):
        shard.take_slots(0)
    assert (shard.segments, inner.free_tokens, pool.deferred_tokens) == (before, 8, 0)
    pool.unpin(pin)
    slots = shard.take_slots(0)
    assert positions_in(inner, slots) == list(range(24))
    pool.free(slots)
    assert inner.free_tokens == 32


class DevicePool(ToyPool):
    """Hands out slots that lie on a device."""

    @property
    def device(self) -> torch.device:
        return CUDA

    def allocate(self, tokens: int) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            slots = super().allocate(tokens)
        return slots.as_subclass(DeviceTensor)

    def free(self, slots: torch.Tensor) -> None:
        assert slots.device == CUDA
        super().free(on_host(slots))

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        return super().read(layer, on_host(slots))

    def write(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        super().write(layer, on_host(slots), kv)


@PAGES
def test_who_has_given_all_away_hands_over_nothing_on_its_device(page_tokens: int) -> None:
    pool = DevicePool(64, page_tokens)
    with pretended_device() as device:
        shard = Shard(pool)
        shard.begin()
        assert shard.extend(()).device == shard.slots.device == device
        shard.extend((range(8),))
        shard.begin()
        shard.give(KvMove(0, 1, 0, 8, (range(8),)))
        shard.compact()
        assert not shard.segments
        slots = shard.take_slots(0)
        assert (slots.device, slots.numel()) == (device, 0)
    assert pool.free_tokens == 64


@PAGES
def test_rows_on_a_device_are_handed_over_in_order(page_tokens: int) -> None:
    pool = DevicePool(96, page_tokens)
    with pretended_device() as device:
        shard = Shard(pool)
        shard.begin()
        for part in split_chunk(0, 40, 2, Interleaving.STRIPED, page_tokens):
            shard.extend(part)
        fill(pool, shard)
        slots = shard.take_slots(0)
        assert slots.device == device
    assert positions_in(pool, on_host(slots)) == list(range(40))
    assert pool.free_tokens == 56


def test_borrowed_pages_are_never_freed() -> None:
    pool = ToyPool(64, 4)
    prefix = pool.allocate(8)
    shard = Shard(pool)
    shard.borrow((range(8),), prefix)
    shard.begin()
    shard.give(KvMove(0, 1, 0, 4, (range(4, 8),)))
    shard.begin()
    assert shard.segments == (KvSegment((range(4),), is_borrowed=True),)
    shard.drop()
    assert pool.free_tokens == 56


steps = st.lists(
    st.tuples(st.sampled_from(["extend", "give", "begin", "roll_back"]), st.integers(1, 30), st.integers(0, 5)),
    max_size=25,
)


@pytest.mark.slow
@settings(deadline=None)
@given(steps, st.sampled_from([1, 4]), st.sampled_from(["drop", "take_slots"]))
def test_any_history_ends_with_all_memory_free(history: list[tuple[str, int, int]], page_tokens: int, end: str) -> None:
    pool = ToyPool(256, page_tokens)
    shard = Shard(pool)
    position = 0
    before = shard.segments
    shard.begin()
    for what, number, place in history:
        if what == "extend":
            try:
                shard.extend((range(position, position + number),))
                position += number
            except KvPoolFullError:
                pass
        elif what == "give" and shard.segments:
            segment = place % len(shard.segments)
            positions = shard.segments[segment].positions
            tokens = count_tokens(positions)
            kept = max(0, tokens - number) // page_tokens * page_tokens
            if kept < tokens:
                shard.give(KvMove(0, 1, segment, tokens - kept, tail(positions, tokens, tokens - kept)))
                assert shard.segments[segment].positions == head(positions, kept)
                shard.compact()
        elif what == "begin":
            shard.begin()
            before = shard.segments
        elif what == "roll_back":
            shard.roll_back()
            assert shard.segments == before
    assert shard.owned_tokens == 256 - pool.free_tokens
    if end == "take_slots":
        before, wanted = pool.free_tokens, sorted(shard.positions, key=lambda part: part.start)
        try:
            slots = shard.take_slots(0)
        except KvPoolFullError:
            assert pool.free_tokens == before
            shard.drop()
        else:
            assert not wanted or slots.numel() <= sum(map(len, wanted))
            assert not (slots.view(-1, page_tokens)[:, 0] % page_tokens).any()
            pool.free(slots)
    else:
        shard.drop()
    assert pool.free_tokens == 256
