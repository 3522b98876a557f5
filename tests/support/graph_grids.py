"""Grids of graph shapes for tests."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_ext.graphs.decide.graph_grid import GraphGrid, GraphShape


def full_grid(lengths_tokens: Iterable[int], batch_sizes: Iterable[int]) -> GraphGrid:
    """Return the grid of all these lengths with all these batch sizes."""
    sizes = tuple(batch_sizes)
    return GraphGrid(GraphShape(length, size) for length in lengths_tokens for size in sizes)
