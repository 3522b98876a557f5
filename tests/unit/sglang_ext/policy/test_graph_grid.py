"""The nearest captured shape is the smallest that fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.policy.graph_grid import GraphGrid
from sglang_ext.policy.laps_records import GraphShape

PAPER = GraphGrid.from_product((8, 16, 32, 64, 128, 256), (1, 2, 4, 8, 16, 32, 64))


def test_the_papers_grid() -> None:
    assert len(PAPER.shapes) == 42
    assert PAPER.nearest(9, 3) == GraphShape(16, 4)
    assert PAPER.nearest(8, 1) == GraphShape(8, 1)
    assert PAPER.nearest(257, 1) is None
    assert PAPER.nearest(8, 65) is None
    assert PAPER.deepest(256) == 64
    assert PAPER.deepest(257) is None


def test_without_shapes_nothing_fits() -> None:
    assert GraphGrid().nearest(1, 1) is None
    assert GraphGrid().deepest(1) is None


@pytest.mark.parametrize("shape", [GraphShape(0, 1), GraphShape(8, 0)])
def test_an_empty_shape_is_refused(shape: GraphShape) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        GraphGrid([shape])


@given(st.sets(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=12), st.integers(1, 45), st.integers(1, 25))
def test_nearest_agrees_with_trying_all(shapes: set[tuple[int, int]], length: int, requests: int) -> None:
    grid = GraphGrid(GraphShape(*shape) for shape in shapes)
    fitting = [a * b for a, b in shapes if a >= length and b >= requests]
    found = grid.nearest(length, requests)
    if found is None:
        assert not fitting
    else:
        assert found.length_tokens >= length
        assert found.requests >= requests
        assert found.length_tokens * found.requests == min(fitting)
    assert grid.deepest(length) == max((b for a, b in shapes if a >= length), default=None)
