"""Volumes and overlaps of shards against sets of cells."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.handshake.shards import (
    KVShard,
    TokenSpan,
    are_disjoint,
    can_overlap,
    describe,
    why_malformed,
    why_unwanted,
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


@given(spans, spans)
def test_spans_overlap_when_they_share_a_position(one: TokenSpan, other: TokenSpan) -> None:
    assert can_overlap(one, other) == bool(tokens_of(one) & tokens_of(other))


@given(shards, shards)
def test_shards_are_disjoint_when_they_share_no_cell(one: KVShard, other: KVShard) -> None:
    if cells_of(one) & cells_of(other):
        assert not are_disjoint(one, other)
    elif one.cells and other.cells:
        assert are_disjoint(one, other)


@given(shards)
def test_a_shard_that_is_not_malformed_has_as_many_cells_as_its_volume(shard: KVShard) -> None:
    overlap = sum(span.token_count for span in shard.tokens) != len(set().union(*map(tokens_of, shard.tokens)))
    assert (why_malformed(shard) is None) == (not overlap and shard.cells > 0)
    if why_malformed(shard) is None:
        assert len(cells_of(shard)) == shard.cells


WHOLE = KVShard((TokenSpan(10, 20),), 2, 2, 4, 2)


@given(shards, st.lists(shards, max_size=3))
def test_shards_that_are_wanted_never_add_up_to_more_than_the_whole(shard: KVShard, more: list[KVShard]) -> None:
    whole = KVShard((TokenSpan(0, 25),), 0, 3, 0, 3)
    accepted: list[KVShard] = []
    for offered in (shard, *more):
        if why_unwanted(offered, whole, accepted) is None:
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
    problem = why_unwanted(shard, WHOLE, [])
    assert problem is not None
    assert reason in problem
    assert "\n" not in problem


def test_metadata_may_come_alone_but_once() -> None:
    aux = KVShard((), 0, 0, 0, 0, True)
    assert why_unwanted(aux, WHOLE, [WHOLE]) is None
    assert why_unwanted(aux, WHOLE, [aux]) == "the metadata are offered twice"


def test_a_shard_is_described_in_a_few_words() -> None:
    shard = WHOLE._replace(tokens=tuple(TokenSpan(start, start + 1) for start in range(10, 15)))
    assert describe(WHOLE) == "tokens 10-19 × heads 2-3 × layers 4-5"
    assert describe(shard) == "tokens 10-10, 11-11, 12-12 and 2 spans × heads 2-3 × layers 4-5"
