"""The nearest captured shape is the smallest that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.graphs.decide.graph_grid import Fallback, GraphGrid, GraphShape, TokenBuckets
from support.graph_grids import full_grid

PAPER = full_grid((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64))


def test_the_papers_grid() -> None:
    assert len(PAPER.shapes) == 42
    assert PAPER.nearest(9, 4, 36) == GraphShape(16, 4)
    assert PAPER.nearest(8, 1, 8) == GraphShape(8, 1)
    assert PAPER.nearest(257, 1, 257) is None
    assert PAPER.nearest(256, 257, 512) is None
    assert PAPER.deepest(256) == 256
    assert PAPER.deepest(257) is None


def test_a_shape_holds_more_requests_when_they_are_shorter() -> None:
    # 16 tokens each on average, up to four times the batch size
    assert [GraphShape(length, 4).slots for length in (8, 16, 32, 64, 128)] == [4, 4, 8, 16, 16]
    assert PAPER.nearest(64, 16, 256) == GraphShape(64, 4)
    assert PAPER.nearest(64, 17, 256) == GraphShape(64, 8)
    assert PAPER.nearest(64, 4, 256) == GraphShape(64, 4)
    assert PAPER.nearest(60, 20, 650) == GraphShape(64, 16)


def test_without_shapes_nothing_fits() -> None:
    assert GraphGrid().nearest(1, 1, 1) is None
    assert GraphGrid().deepest(1) is None


@pytest.mark.parametrize("shape", [GraphShape(0, 1), GraphShape(8, 0)])
def test_an_empty_shape_is_refused(shape: GraphShape) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        GraphGrid([shape])


def test_the_rule_of_padding() -> None:
    assert PAPER.choose(1, 1, 1, 0) == GraphShape(8, 1)
    assert PAPER.choose(128, 2, 129, 0) == GraphShape(128, 2)  # 256 tokens are free
    assert PAPER.choose(128, 3, 257, 0) == GraphShape(128, 4)
    assert PAPER.choose(200, 8, 256, 0) == GraphShape(256, 2)  # twice the tokens
    assert PAPER.choose(200, 9, 511, 0) is Fallback.PADDING  # the next has 1024 tokens
    assert PAPER.choose(257, 1, 257, 0) is Fallback.TOO_LARGE
    assert PAPER.choose(8, 257, 257, 10**9) is Fallback.TOO_LARGE
    bounded = GraphGrid(PAPER.shapes, max_prefix_tokens=100)
    assert bounded.choose(8, 2, 16, 100) == GraphShape(8, 2)
    assert bounded.choose(8, 2, 16, 101) is Fallback.PREFIXES


def test_what_is_left_out_is_left_out_for_all_who_hold_the_grid() -> None:
    grid = full_grid((8, 16), (1, 2))
    held = grid
    grid.leave_out(GraphShape(8, 1))
    assert held.choose(8, 1, 8, 0) in {GraphShape(8, 2), GraphShape(16, 1)}
    for shape in grid.shapes:
        grid.leave_out(shape)
    grid.leave_out(GraphShape(8, 1))
    assert held.shapes == ()
    assert held.choose(8, 1, 8, 0) is Fallback.MEMORY
    assert held.choose(17, 1, 17, 0) is Fallback.TOO_LARGE


def test_a_shape_that_was_left_out_is_no_reason_for_a_batch_that_it_would_not_have_held() -> None:
    grid = GraphGrid([GraphShape(64, 2)])
    grid.leave_out(GraphShape(64, 2))
    assert grid.choose(64, 8, 128, 0) is Fallback.MEMORY
    assert grid.choose(64, 8, 129, 0) is Fallback.TOO_LARGE
    assert grid.choose(64, 9, 128, 0) is Fallback.TOO_LARGE
    assert grid.choose(65, 1, 65, 0) is Fallback.TOO_LARGE


def test_depths_are_those_of_the_shapes_or_powers_of_two() -> None:
    assert PAPER.depths(10) == [1, 2, 4, 8]
    assert full_grid((8,), (16, 32)).depths(10) == [10]
    assert GraphGrid().depths(10) == [1, 2, 4, 8, 10]


@given(
    st.sets(st.tuples(st.integers(1, 90), st.integers(1, 20)), max_size=12),
    st.lists(st.integers(1, 95), min_size=1, max_size=40),
)
def test_nearest_agrees_with_trying_all(shapes: set[tuple[int, int]], lengths: list[int]) -> None:
    grid = GraphGrid(GraphShape(*shape) for shape in shapes)
    slots = {(a, b): min(4 * b, max(b, a * b // 16)) for a, b in shapes}
    longest, requests, tokens = max(lengths), len(lengths), sum(lengths)
    fitting = [(a * b, a) for a, b in shapes if a >= longest and a * b >= tokens and slots[a, b] >= requests]
    found = grid.nearest(longest, requests, tokens)
    assert (found and (found.tokens, found.length_tokens)) == min(fitting, default=None)
    assert grid.deepest(longest) == max((slots[a, b] for a, b in shapes if a >= longest), default=None)


@given(st.integers(1, 256), st.integers(1, 64))
def test_a_full_batch_of_equal_lengths_runs_on_its_own_shape(length: int, requests: int) -> None:
    assert GraphGrid([GraphShape(length, requests)]).choose(length, requests, length * requests, 0) == (
        length,
        requests,
    )


BUCKETS = TokenBuckets((4, 8, 16, 24, 64, 512))


def test_a_bucket_holds_a_batch_of_any_lengths() -> None:
    for longest_tokens, requests, cached_tokens in ((21, 1, 0), (1, 21, 10**9), (10, 5, 7)):
        at = BUCKETS.padded_at(longest_tokens, requests, 21, cached_tokens)
        assert BUCKETS.tokens[at] == 24
        assert BUCKETS.choose(longest_tokens, requests, 21, cached_tokens) == GraphShape(24, 1)


def test_a_bucket_of_more_than_twice_the_tokens_is_not_used() -> None:
    """However few they are: only a grid takes padding up to 256 tokens as free."""
    assert BUCKETS.choose(2, 1, 2, 0) == GraphShape(4, 1)
    assert BUCKETS.choose(1, 1, 1, 0) is Fallback.PADDING
    assert BUCKETS.choose(31, 1, 31, 0) is Fallback.PADDING
    assert BUCKETS.choose(32, 1, 32, 0) == GraphShape(64, 1)
    assert BUCKETS.padded_at(31, 1, 31, 0) == BUCKETS.padded_at(1, 1, 1, 0) == -1


def test_beyond_the_largest_bucket_a_batch_runs_eagerly() -> None:
    assert BUCKETS.choose(513, 1, 513, 0) is Fallback.TOO_LARGE
    assert BUCKETS.padded_at(513, 1, 513, 0) == -1
    assert BUCKETS.tokens[BUCKETS.padded_at(512, 1, 512, 0)] == 512


def test_a_bucket_may_have_places_for_some_requests_only() -> None:
    bounded = TokenBuckets((64,), max_requests=3)
    assert bounded.padded_at(20, 3, 60, 0) == 0
    assert bounded.padded_at(15, 4, 60, 0) == -1
    assert bounded.choose(15, 4, 60, 0) is Fallback.TOO_LARGE


def test_buckets_bound_no_batch_and_sort_no_lengths() -> None:
    assert BUCKETS.depths(6) == GraphGrid().depths(6)
    assert BUCKETS.deepest(4) is None
    assert not BUCKETS.lengths_tokens
    assert {BUCKETS.bucket(length) for length in (0, 1, 8, 1000)} == {0}
