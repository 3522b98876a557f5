"""Which shapes of the grid are captured, and in which order.

The largest come first: all graphs share one memory pool, a later and smaller capture fits into what an earlier and
larger one took, so the pool grows once (LAPS, 3.1, pays for each graph apart).
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.policy.laps.graph_grid import GraphShape

DEFAULT_LENGTHS_TOKENS = (8, 16, 32, 64, 128, 256)
DEFAULT_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def plan_captures(
    lengths_tokens: Sequence[int], batch_sizes: Sequence[int], max_tokens: int, max_requests: int
) -> list[GraphShape]:
    """The shapes of the product that the engine's limits of a batch allow, in the order of capture."""
    shapes = {GraphShape(length, requests) for length in lengths_tokens for requests in batch_sizes}
    fitting = [shape for shape in shapes if shape.tokens <= max_tokens and shape.requests <= max_requests]
    return sorted(fitting, key=lambda shape: (shape.tokens, shape.requests), reverse=True)
