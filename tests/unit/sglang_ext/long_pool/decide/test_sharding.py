"""Positions of a prompt over growing groups: nothing is lost or held twice, work is even, pages stay whole."""

from __future__ import annotations

import sys
from math import ceil
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.long_pool.decide import sharding
from sglang_ext.long_pool.decide.sharding import (
    Interleaving,
    KvSegment,
    Positions,
    after_moves,
    compacted,
    count_tokens,
    gather,
    head,
    lay_out,
    positions_of,
    rebalance,
    split_positions,
    tail,
    without,
)
from support.sharding import split_chunk


def every(positions: Positions) -> list[int]:
    return [position for part in positions for position in part]


@pytest.mark.slow
@given(
    start=st.integers(0, 50),
    tokens=st.integers(1, 300),
    members=st.integers(1, 8),
    interleaving=st.sampled_from(Interleaving),
    page_tokens=st.sampled_from([1, 4, 16]),
)
def test_a_chunk_is_dealt_out_once(
    start: int, tokens: int, members: int, interleaving: Interleaving, page_tokens: int
) -> None:
    parts = split_chunk(start, tokens, members, interleaving, page_tokens)
    assert len(parts) == members
    dealt = [every(part) for part in parts]
    assert sorted(position for one in dealt for position in one) == list(range(start, start + tokens))
    assert all(one == sorted(one) for one in dealt)


def test_zigzag_by_hand() -> None:
    assert split_chunk(0, 8, 2, Interleaving.ZIGZAG) == ((range(2), range(6, 8)), (range(2, 6),))


def test_stripes_by_hand() -> None:
    assert split_chunk(10, 5, 2, Interleaving.STRIPED) == ((range(10, 15, 2),), (range(11, 15, 2),))


@pytest.mark.parametrize("interleaving", list(Interleaving))
def test_causal_work_is_even(interleaving: Interleaving) -> None:
    parts = split_chunk(0, 4000, 4, interleaving)
    work = [sum(position + 1 for position in every(part)) for part in parts]
    assert max(work) / min(work) < 1.01


def test_zigzag_cuts_at_pages() -> None:
    cuts = [part.start for member in split_chunk(32, 500, 3, Interleaving.ZIGZAG, 16) for part in member]
    assert all(cut % 16 == 0 for cut in cuts)


def test_head_and_tail() -> None:
    positions = (range(4), range(10, 20, 2))
    assert every(head(positions, 6)) == [0, 1, 2, 3, 10, 12]
    assert every(tail(positions, 6, 3)) == [3, 10, 12]
    assert every(tail(positions, 9, 9)) == every(positions)


def test_history_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="not in the group"):
        rebalance({7: (KvSegment((range(3),)),)}, [0, 1])


def test_an_even_history_stays() -> None:
    holdings = {0: (KvSegment((range(8),)),), 1: (KvSegment((range(8, 16),)),)}
    assert rebalance(holdings, [0, 1], 4) == ()


def test_one_member_shares_with_three() -> None:
    moves = rebalance({2: (KvSegment((range(64),)),)}, [2, 0, 1, 3], 16)
    assert [(move.source, move.target, move.tokens) for move in moves] == [(2, 0, 16), (2, 1, 16), (2, 3, 16)]
    assert [every(move.positions) for move in moves] == [
        list(range(48, 64)),
        list(range(32, 48)),
        list(range(16, 32)),
    ]


@st.composite
def growing_groups(draw: st.DrawFn) -> list[tuple[int, ...]]:
    order = draw(st.permutations(range(6)))
    sizes = sorted(draw(st.lists(st.integers(1, 6), min_size=1, max_size=5)))
    return [tuple(order[:size]) for size in sizes]


@pytest.mark.slow
@given(
    groups=growing_groups(),
    data=st.data(),
    interleaving=st.sampled_from(Interleaving),
    page_tokens=st.sampled_from([1, 3, 16]),
    cached_tokens=st.integers(0, 80),
)
def test_any_plan(
    groups: list[tuple[int, ...]], data: st.DataObject, interleaving: Interleaving, page_tokens: int, cached_tokens: int
) -> None:
    held = {groups[0][0]: (KvSegment((range(cached_tokens),), is_borrowed=True),)} if cached_tokens else {}
    start = cached_tokens
    for group in groups:
        before = {instance: positions_of(segments) for instance, segments in held.items()}
        moved = compacted(after_moves(held, rebalance(held, group, page_tokens)))
        amounts = [sum(segment.tokens for segment in moved.get(instance, ())) for instance in group]
        assert max(amounts) - min(amounts) <= (1 if page_tokens == 1 else 3 * page_tokens)
        tokens = data.draw(st.integers(1, 200))
        layout, held = lay_out(held, (range(start, start + tokens),), group, interleaving, page_tokens)
        for move in layout.moves:
            assert count_tokens(move.positions) == move.tokens > 0
            assert set(every(move.positions)) <= set(every(before[move.source]))
        assert sorted(p for one in layout.history for p in every(one)) == list(range(start))
        start += tokens
        assert start - 1 in every(layout.new[group.index(layout.last_token_owner)])
        assert sorted(p for segments in held.values() for p in every(positions_of(segments))) == list(range(start))


@given(tokens=st.integers(1, 400), members=st.integers(2, 5), page_tokens=st.sampled_from([4, 16]))
def test_only_whole_pages_change_hands(tokens: int, members: int, page_tokens: int) -> None:
    held = {0: (KvSegment((range(tokens),)),)}
    moves = rebalance(held, list(range(members)), page_tokens)
    left = tokens
    for move in moves:
        left -= move.tokens
        assert left % page_tokens == 0
    pages = ceil(tokens / page_tokens)
    most = max(sum(segment.tokens for segment in segments) for segments in after_moves(held, moves).values())
    assert most <= (ceil(pages / members) + 1) * page_tokens


def test_what_was_lost_is_dealt_out_again() -> None:
    lost = without((range(100),), (range(40), range(60, 100, 2)))
    assert lost[0] == range(40, 60)
    assert every(lost) == [*range(40, 60), *range(61, 100, 2)]
    held = {0: (KvSegment((range(40),)),), 2: (KvSegment((range(60, 100, 2),)),)}
    layout, after = lay_out(held, lost, (0, 2), Interleaving.ZIGZAG)
    assert sorted(every(layout.new[0]) + every(layout.new[1])) == every(lost)
    assert all(every(part) == sorted(every(part)) for part in layout.new)
    assert sorted(p for segments in after.values() for p in every(positions_of(segments))) == list(range(100))


@st.composite
def some_ranges(draw: st.DrawFn) -> Positions:
    parts = draw(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 30), st.integers(1, 7)), max_size=6))
    return tuple(range(start, start + count * step, step) for start, count, step in parts)


@given(positions=some_ranges(), taken=some_ranges())
def test_without_some(positions: Positions, taken: Positions) -> None:
    left = without(positions, taken)
    assert every(left) == sorted({*every(positions)} - {*every(taken)})


@given(
    tokens=st.integers(1, 2000),
    members=st.integers(2, 8),
    data=st.data(),
    first=st.sampled_from(Interleaving),
    then=st.sampled_from(Interleaving),
    page_tokens=st.sampled_from([1, 16]),
)
def test_what_was_lost_is_dealt_out_evenly(
    tokens: int, members: int, data: st.DataObject, first: Interleaving, then: Interleaving, page_tokens: int
) -> None:
    dealt = split_chunk(0, tokens, members, first, page_tokens)
    lost_members = data.draw(st.sets(st.integers(0, members - 1), min_size=1))
    kept = tuple(part for member, parts in enumerate(dealt) if member not in lost_members for part in parts)
    lost = without((range(tokens),), kept)
    others = data.draw(st.integers(1, 8))
    again = split_positions(lost, others, then, page_tokens)
    assert sorted(position for parts in again for position in every(parts)) == every(lost)
    assert all(every(parts) == sorted(every(parts)) for parts in again)
    counts = [count_tokens(parts) for parts in again]
    assert max(counts) - min(counts) <= (1 if then is Interleaving.STRIPED else 2 * page_tokens + 2)


@pytest.mark.parametrize("then", list(Interleaving))
def test_a_lost_stripe_is_one_range_and_dealt_out_in_few(then: Interleaving) -> None:
    dealt = split_chunk(0, 65_536, 4, Interleaving.STRIPED)
    lost = without((range(65_536),), (*dealt[0], *dealt[1], *dealt[3]))
    assert lost == (range(2, 65_536, 4),)
    assert max(map(len, split_positions(lost, 3, then))) <= 2


class CountedRuns(sharding._Runs):
    calls = 0

    def append(self, part: range) -> None:
        CountedRuns.calls += 1
        super().append(part)


@pytest.mark.parametrize("then", list(Interleaving))
def test_dealing_out_costs_in_proportion_to_the_ranges(then: Interleaving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbouring stripes of five are lost: no strides, a range for every two tokens."""
    monkeypatch.setattr(sharding, "_Runs", CountedRuns)
    dealt = split_chunk(0, 10_000, 5, Interleaving.STRIPED)
    lines = 0

    def count(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename == sharding.__file__ else None

    CountedRuns.calls = 0
    sys.settrace(count)
    try:
        lost = without((range(10_000),), (*dealt[0], *dealt[3], *dealt[4]))
        again = split_positions(lost, 3, then)
    finally:
        sys.settrace(None)
    assert len(lost) == 2000
    assert sum(map(len, again)) <= 4000
    assert CountedRuns.calls <= 3 * len(lost)
    assert lines <= 60 * len(lost)


def test_gathered() -> None:
    held = {
        1: (KvSegment((range(10),)), KvSegment((range(20, 30),))),
        0: (KvSegment((range(10, 20),)),),
        2: (KvSegment((range(30, 33),)),),
    }
    moves = gather(held, 0)
    assert [(move.source, move.segment, move.tokens) for move in moves] == [(1, 1, 10), (1, 0, 10), (2, 0, 3)]
    after = compacted(after_moves(held, moves))
    assert sorted(every(positions_of(after[0]))) == list(range(33))
    assert not after[1]
    assert not after[2]
