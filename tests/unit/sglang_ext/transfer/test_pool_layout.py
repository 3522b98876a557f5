"""Rows of one pool and of another: the plan against copying by index, and parts of it against the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.decide.shards import KVShard, TokenSpan
from sglang_ext.transfer.pool_layout import (
    ItemBuffer,
    PoolLayout,
    RowCopy,
    StatePart,
    count_runs,
    cut_rows,
    group_by_slots,
    join_rows,
    plan_items,
    plan_rows,
    plan_states,
)


def layout(
    *,
    heads: int = 2,
    first_head: int = 0,
    layers: int = 2,
    first_layer: int = 0,
    head_bytes: int = 16,
    dtype: str = "float32",
) -> PoolLayout:
    buffers = [
        (
            ItemBuffer(100_000 * (2 * layer + 1), heads * head_bytes, 50),
            ItemBuffer(100_000 * (2 * layer + 2), heads * head_bytes // 2, 50),
        )
        for layer in range(layers)
    ]
    aux = (ItemBuffer(9_000_000, 24, 8),)
    return PoolLayout(dtype, first_layer, tuple(buffers), first_head, heads, aux, ((ItemBuffer(9_500_000, 8, 8),),))


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(numbers, np.uint32)


def test_rows_of_some_heads_of_one_layer() -> None:
    source, target = layout(heads=4, first_head=4), layout(heads=2, first_head=6)
    shard = KVShard((TokenSpan(0, 2),), 6, 2, 1, 1)
    k, v = plan_rows(source, target, shard, slots(3, 9), slots(0, 1))
    assert (k.source_address, k.source_stride, k.length_bytes) == (300_000 + 2 * 16, 64, 32)
    assert (k.target_address, k.target_stride) == (300_000, 32)
    assert (v.source_address, v.source_stride, v.length_bytes) == (400_000 + 2 * 8, 32, 16)
    assert k.total_bytes == 64


@pytest.mark.parametrize("ranges", [(1, 2, 0, 2), (0, 2, 1, 2)], ids=["heads", "layers"])
def test_rows_that_a_pool_does_not_hold_are_refused(ranges: tuple[int, int, int, int]) -> None:
    shard = KVShard((TokenSpan(0, 1),), *ranges)
    with pytest.raises(ValueError, match="source pool"):
        plan_rows(layout(), layout(heads=4, layers=4), shard, slots(1), slots(1))
    with pytest.raises(ValueError, match="target pool"):
        plan_rows(layout(heads=4, layers=4), layout(), shard, slots(1), slots(1))


def test_slots_come_in_pairs() -> None:
    shard = KVShard((TokenSpan(0, 2),), 0, 2, 0, 2)
    with pytest.raises(ValueError, match="2 source slots for 1 target slots"):
        plan_rows(layout(), layout(), shard, slots(1, 2), slots(1))
    with pytest.raises(ValueError, match="differ in number"):
        plan_items(layout().aux, layout().aux, slots(1, 2), slots(1))


def moved(copies: list[RowCopy]) -> list[tuple[int, int]]:
    """Every byte that is copied: where from and where to."""
    return [
        (copy.source_address + a * copy.source_stride + byte, copy.target_address + b * copy.target_stride + byte)
        for copy in copies
        for a, b in zip(copy.source_slots.tolist(), copy.target_slots.tolist(), strict=True)
        for byte in range(copy.length_bytes)
    ]


copies = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8), st.integers(1, 30)), max_size=5
)


@pytest.mark.slow
@given(copies, st.integers(1, 100))
def test_parts_are_the_same_bytes_and_bounded(drawn: list[tuple[list[tuple[int, int]], int]], max_bytes: int) -> None:
    whole = [
        RowCopy(
            *(1000 * index, 40, slots(*(pair[0] for pair in pairs))),
            *(5000 + 1000 * index, 50, slots(*(pair[1] for pair in pairs)), length),
        )
        for index, (pairs, length) in enumerate(drawn)
    ]
    parts = list(cut_rows(whole, max_bytes))
    assert all(0 < sum(copy.total_bytes for copy in part) <= max_bytes for part in parts)
    assert sorted(moved([copy for part in parts for copy in part])) == sorted(moved(whole))
    groups = [group for part in parts for group in group_by_slots(part)]
    assert [copy for group in groups for copy in group] == [copy for part in parts for copy in part]
    for group in groups:
        assert all(copy.source_slots is group[0].source_slots for copy in group)
        assert all(copy.target_slots is group[0].target_slots for copy in group)


def test_parts_are_as_large_as_they_may_be_and_share_slots() -> None:
    shard = KVShard((TokenSpan(0, 4),), 0, 2, 0, 2)
    rows = plan_rows(layout(), layout(), shard, slots(3, 1, 4, 9), slots(0, 1, 2, 3))
    (part,) = cut_rows(rows, 1 << 20)
    assert part == rows
    assert [len(group) for group in group_by_slots(part)] == [4]
    # Of 4 rows of 32 bytes (K) and as many of 16 (V), twice.
    assert [sum(copy.total_bytes for copy in part) for part in cut_rows(rows, 160)] == [160, 160, 64]


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (layout(dtype="bfloat16"), "KV is float32 here and bfloat16"),
        (layout(head_bytes=32), "another number of bytes"),
        (PoolLayout("float32", 0, layout().layers, 0, 2), "metadata"),
        (PoolLayout("float32", 0, layout().layers, 0, 2, layout().aux), "state"),
    ],
)
def test_pools_that_do_not_fit_each_other_are_named(peer: PoolLayout, reason: str) -> None:
    problem = layout().layout_mismatch(peer)
    assert problem is not None
    assert reason in problem


def test_pools_of_other_heads_and_layers_fit_each_other() -> None:
    assert layout().layout_mismatch(layout(heads=1, first_head=1)) is None
    assert layout().layout_mismatch(layout(first_layer=1)) is None
    assert layout(layers=4).layout_mismatch(layout(first_layer=3, layers=1)) is None


def test_a_pool_without_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="a layer or a kind of state"):
        PoolLayout("float32", 0, (), 0, 1)
    with pytest.raises(ValueError, match="equal heads"):
        PoolLayout("float32", 0, layout().layers, 0, 3)


def test_a_model_of_recurrent_layers_alone_has_states_alone() -> None:
    states = ((ItemBuffer(1 << 20, 64, 8),),)
    alone = PoolLayout("float32", 0, (), 0, 1, layout().aux, states)
    assert alone.layout_mismatch(alone) is None
    other = PoolLayout("float32", 0, (), 0, 1, layout().aux, ((ItemBuffer(1 << 20, 32, 8),),))
    assert "both need one tensor parallel size" in (alone.layout_mismatch(other) or "")


@pytest.mark.parametrize("has_aux", [False, True])
def test_states_that_are_not_cut_come_once_with_the_metadata(*, has_aux: bool) -> None:
    """Each rank brings its heads of a cut kind; only the rank of the metadata brings the other kind."""
    whole, cut = (ItemBuffer(1 << 20, 64, 8),), (ItemBuffer(1 << 21, 32, 8),)
    pool = PoolLayout("float32", 0, layout().layers, 0, 2, layout().aux, (whole, cut), (False, True))
    shard = KVShard((), 1, 1, 0, 0, has_aux, has_states=True)
    copies = plan_states(pool, pool, shard, [slots(3), slots(5)], [slots(4), slots(6)])
    from_whole = [copy for copy in copies if copy.source_address < 1 << 21]
    from_cut = [copy for copy in copies if copy.source_address >= 1 << 21]
    assert len(from_whole) == has_aux
    assert [(copy.source_address, copy.length_bytes) for copy in from_cut] == [((1 << 21) + 16, 16)]


WHOLE_BYTES = (24, 24, 48)  # of the parts of a state on all ranks
SHARED_PART = 1  # which of them each rank has all of, where one is shared
ITEMS = 8


def divided(rank: int, ranks: int, *, is_divided: bool = True, is_shared: bool = False) -> PoolLayout:
    """A rank's pool: two rows of three parts in the items of one buffer, and one part in those of another."""
    shared = [is_shared and number == SHARED_PART for number in range(len(WHOLE_BYTES))] * 2
    widths = [whole // (1 if is_whole else ranks) for whole, is_whole in zip(WHOLE_BYTES * 2, shared, strict=True)]
    rows = tuple(StatePart(sum(widths[:part]), width, shared[part]) for part, width in enumerate(widths))
    states = ((ItemBuffer(1 << 20, sum(widths), ITEMS), ItemBuffer(1 << 21, 96 // ranks, ITEMS)),)
    parts = ((rows, (StatePart(0, 96 // ranks),)),) if is_divided else ()
    return PoolLayout("float32", 0, layout().layers, 0, 2, layout().aux, states, (), parts, rank, ranks)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 3), (4, 2), (2, 2), (1, 1)])
def test_each_rank_gets_its_piece_of_each_part(prefill: int, decode: int, *, is_shared: bool) -> None:
    """Bytes are named by part, row and place in the whole; slot 3 of a source becomes slot 5 of a target. What every
    rank has comes once, from the rank that brings the metadata."""

    def names(pool: PoolLayout, slot: int) -> dict[int, tuple[int, int, int]]:
        return {
            buffer.address + slot * buffer.item_bytes + part.offset_bytes + byte: (
                index,
                number,
                (0 if part.is_on_all_ranks else pool.rank * part.length_bytes) + byte,
            )
            for index, (buffer, parts) in enumerate(zip(pool.states[0], pool.state_parts[0], strict=True))
            for number, part in enumerate(parts)
            for byte in range(part.length_bytes)
        }

    for decode_rank in range(decode):
        target, got = divided(decode_rank, decode, is_shared=is_shared), []
        for prefill_rank in range(prefill):
            source = divided(prefill_rank, prefill, is_shared=is_shared)
            # Of ranks of one number only the peer is asked for metadata, and for anything.
            has_aux = prefill_rank == decode_rank % prefill
            if prefill == decode and not has_aux:
                continue
            shard = KVShard((), 0, 1, 0, 0, has_aux, has_states=True)
            copied = moved(plan_states(source, target, shard, [slots(3)], [slots(5)]))
            mine, theirs = names(source, 3), names(target, 5)
            assert all(mine[here] == theirs[there] for here, there in copied)
            got += [there for _, there in copied]
        assert sorted(got) == sorted(names(target, 5))


def test_states_in_parts_fit_those_of_any_number_of_ranks() -> None:
    assert divided(0, 2).layout_mismatch(divided(1, 4)) is None
    whole = divided(0, 4, is_divided=False)
    assert "both need one tensor parallel size" in (divided(0, 2).layout_mismatch(whole) or "")
    assert whole.layout_mismatch(divided(1, 4, is_divided=False)) is None
    assert divided(0, 2, is_shared=True).layout_mismatch(divided(1, 4, is_shared=True)) is None
    assert "both need one tensor parallel size" in (divided(0, 2, is_shared=True).layout_mismatch(divided(1, 4)) or "")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=30))
def test_runs_are_the_pieces_of_whole_rows(pairs: list[tuple[int, int]]) -> None:
    source, target = (slots(*numbers) for numbers in zip(*pairs, strict=True))
    copy = RowCopy(1 << 20, 32, source, 1 << 30, 32, target, 32)
    assert count_runs(source, target) == len(join_rows([copy]))
