"""Volumes and overlaps of shards against sets of cells."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.decide.shards import (
    HeadLayout,
    HeadMove,
    KVShard,
    TokenSpan,
    are_disjoint,
    can_overlap,
    describe,
    plan_head_moves,
    shard_problem,
    unwanted_reason,
)

spans = st.builds(
    lambda start, length, step: TokenSpan(start, start + length, step),
    st.integers(0, 30),
    st.integers(1, 30),
    st.integers(1, 7),
)
shards = st.builds(
    KVShard,
    st.lists(spans, min_size=1, max_size=3).map(tuple),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
    st.booleans(),
)


def tokens_of(span: TokenSpan) -> set[int]:
    return set(range(span.start, span.stop, span.step))


def cells_of(shard: KVShard) -> set[tuple[int, int, int]]:
    tokens = set().union(*map(tokens_of, shard.tokens))
    heads = range(shard.first_head, shard.first_head + shard.head_count)
    return set(product(tokens, heads, range(shard.first_layer, shard.first_layer + shard.layer_count)))


@pytest.mark.slow
@given(spans, spans)
def test_spans_overlap_when_they_share_a_position(one: TokenSpan, other: TokenSpan) -> None:
    assert can_overlap(one, other) == bool(tokens_of(one) & tokens_of(other))


@given(shards, shards)
def test_shards_are_disjoint_when_they_share_no_cell(one: KVShard, other: KVShard) -> None:
    if cells_of(one) & cells_of(other):
        assert not are_disjoint(one, other)
    elif one.cells and other.cells:
        assert are_disjoint(one, other)


@pytest.mark.slow
@given(shards)
def test_a_shard_that_is_not_malformed_has_as_many_cells_as_its_volume(shard: KVShard) -> None:
    overlap = sum(span.token_count for span in shard.tokens) != len(set().union(*map(tokens_of, shard.tokens)))
    assert (shard_problem(shard) is None) == (not overlap and shard.cells > 0)
    if shard_problem(shard) is None:
        assert len(cells_of(shard)) == shard.cells


WHOLE = KVShard((TokenSpan(10, 20),), 2, 2, 4, 2)


@pytest.mark.slow
@given(shards, st.lists(shards, max_size=3))
def test_shards_that_are_wanted_never_add_up_to_more_than_the_whole(shard: KVShard, more: list[KVShard]) -> None:
    whole = KVShard((TokenSpan(0, 25),), 0, 3, 0, 3)
    accepted: list[KVShard] = []
    for offered in (shard, *more):
        if unwanted_reason(offered, whole, accepted) is None:
            accepted.append(offered)
    cells = [cell for offered in accepted for cell in cells_of(offered)]
    assert len(cells) == len(set(cells)) == sum(offered.cells for offered in accepted)
    assert set(cells) <= cells_of(whole)
    assert sum(offered.has_aux for offered in accepted) <= 1


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (WHOLE._replace(tokens=(TokenSpan(9, 20),)), "outside"),
        (WHOLE._replace(tokens=(TokenSpan(10, 21),)), "outside"),
        (WHOLE._replace(first_head=1), "outside"),
        (WHOLE._replace(head_count=3), "outside"),
        (WHOLE._replace(first_layer=3), "outside"),
        (WHOLE._replace(layer_count=3), "outside"),
        (WHOLE._replace(tokens=(TokenSpan(12, 12),)), "empty"),
        (WHOLE._replace(tokens=(TokenSpan(12, 14, 0),)), "empty"),
        (WHOLE._replace(tokens=(TokenSpan(-2, 14),)), "negative"),
        (WHOLE._replace(tokens=(TokenSpan(12, 14), TokenSpan(13, 15))), "overlap"),
        (WHOLE._replace(head_count=0), "empty"),
        (WHOLE._replace(first_layer=-1), "negative"),
        (WHOLE._replace(tokens=()), "empty"),
    ],
)
def test_what_does_not_fit_is_named(shard: KVShard, reason: str) -> None:
    problem = unwanted_reason(shard, WHOLE, [])
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem


def test_metadata_may_come_alone_but_once() -> None:
    aux = KVShard((), 0, 0, 0, 0, True)
    assert unwanted_reason(aux, WHOLE, [WHOLE]) is None
    assert unwanted_reason(aux, WHOLE, [aux]) == "the metadata are offered twice"


def test_a_shard_is_described_in_a_few_words() -> None:
    shard = WHOLE._replace(tokens=tuple(TokenSpan(start, start + 1) for start in range(10, 15)))
    assert describe(WHOLE) == "tokens 10-19 × heads 2-3 × layers 4-5"
    assert describe(shard) == "tokens 10-10, 11-11, 12-12 and 2 spans × heads 2-3 × layers 4-5"


POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])


@st.composite
def layouts(draw: st.DrawFn, kv_heads: int) -> HeadLayout:
    """As a GPU engine (whole numbers of heads or of replicas) or as the CPU engine (padding)."""
    tp_size = draw(st.integers(1, 16))
    if kv_heads % tp_size == 0 or tp_size % kv_heads == 0:
        return HeadLayout(kv_heads, tp_size, kv_heads)
    return HeadLayout(kv_heads, tp_size, -(-kv_heads // tp_size) * tp_size)


@given(st.data(), st.integers(1, 12))
def test_every_head_arrives_once(data: st.DataObject, kv_heads: int) -> None:
    prefill, decode = data.draw(layouts(kv_heads)), data.draw(layouts(kv_heads))
    arrived: dict[tuple[int, int], int] = {}
    for move in plan_head_moves(prefill, decode):
        assert move.head_count > 0
        for offset in range(move.head_count):
            head = move.first_head + offset
            assert prefill.first_head(move.prefill_rank) + move.source_head + offset == head
            assert head in prefill.heads(move.prefill_rank)
            key = (move.decode_rank, move.target_head + offset)
            arrived[key] = arrived.get(key, 0) + 1
    wanted = {
        (rank, head - decode.first_head(rank)): 1 for rank in range(decode.tp_size) for head in decode.heads(rank)
    }
    assert arrived == wanted


@given(st.data(), st.integers(1, 12))
def test_equal_layouts_map_each_rank_to_itself(data: st.DataObject, kv_heads: int) -> None:
    layout = data.draw(layouts(kv_heads))
    moves = plan_head_moves(layout, layout)
    assert all(move.prefill_rank == move.decode_rank and move.source_head == move.target_head for move in moves)
    assert len(moves) == sum(bool(layout.heads(rank)) for rank in range(layout.tp_size))


@given(POWERS, POWERS, POWERS)
def test_it_agrees_with_sglang_where_tensor_parallel_sizes_divide(
    kv_heads: int, prefill_tp: int, decode_tp: int
) -> None:
    """`compute_head_slice_params` of SGLang 0.5.23, which knows powers of two only in effect."""
    moves = plan_head_moves(HeadLayout(kv_heads, prefill_tp, kv_heads), HeadLayout(kv_heads, decode_tp, kv_heads))
    for move in moves:
        assert (move.source_head, move.head_count, move.target_head) == sglang_slice(
            prefill_tp, decode_tp, move.prefill_rank, move.decode_rank, kv_heads
        )


def sglang_slice(
    prefill_tp: int, decode_tp: int, prefill_rank: int, decode_rank: int, heads: int
) -> tuple[int, int, int]:
    """Its arithmetic, restated: source head, head count, target head."""
    per_source, per_target = max(1, heads // prefill_tp), max(1, heads // decode_tp)
    if prefill_tp > decode_tp:
        replicas = max(1, prefill_tp // heads)
        return 0, per_source, prefill_rank // replicas * per_source % per_target
    replicas = max(1, decode_tp // heads)
    return decode_rank // replicas * per_target % per_source, per_target, 0


def test_three_heads_on_two_ranks_of_the_cpu_engine() -> None:
    decode = HeadLayout(3, 2, 4)
    assert [list(decode.heads(rank)) for rank in range(2)] == [[0, 1], [2]]
    assert plan_head_moves(HeadLayout(3, 1, 3), decode) == (HeadMove(0, 0, 0, 2, 0, 0), HeadMove(0, 1, 2, 1, 2, 0))


def test_a_rank_of_padding_gets_nothing() -> None:
    decode = HeadLayout(3, 4, 4)
    assert len(decode.heads(3)) == 0
    assert {move.decode_rank for move in plan_head_moves(HeadLayout(3, 3, 3), decode)} == {0, 1, 2}


def test_replicas_share_the_work() -> None:
    moves = plan_head_moves(HeadLayout(2, 8, 2), HeadLayout(2, 4, 2))
    assert [move.prefill_rank for move in moves] == [0, 1, 4, 5]


@pytest.mark.parametrize("numbers", [(3, 2, 3), (0, 1, 0), (4, 0, 4), (4, 1, 3), (8, 6, 8)])
def test_layouts_that_no_engine_has_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="KV heads"):
        HeadLayout(*numbers)


def test_layouts_of_different_models_do_not_mix() -> None:
    with pytest.raises(ValueError, match="prefill has 4 KV heads, decode 8"):
        plan_head_moves(HeadLayout(4, 1, 4), HeadLayout(8, 1, 8))


def test_a_rank_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="no rank 2"):
        HeadLayout(4, 2, 4).heads(2)
