"""The captured prefill graphs of an instance: a grid of lengths and batch sizes, and the nearest one that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from sglang_ext.policy.laps_records import GraphShape


class GraphGrid:
    """Captured shapes; without any, every batch runs on the ordinary kernels. Raises ValueError for an empty shape."""

    __slots__ = ("_by_length", "lengths_tokens", "shapes")

    def __init__(self, shapes: Iterable[GraphShape] = ()) -> None:
        unique = sorted(set(shapes))
        for shape in unique:
            if shape.length_tokens < 1 or shape.requests < 1:
                raise ValueError(f"a captured shape holds at least one token of one request, got {shape}")
        self.shapes = tuple(unique)
        self.lengths_tokens = sorted({shape.length_tokens for shape in unique})
        self._by_length = {
            length: [shape.requests for shape in unique if shape.length_tokens == length]
            for length in self.lengths_tokens
        }

    @classmethod
    def from_product(cls, lengths_tokens: Iterable[int], batch_sizes: Iterable[int]) -> GraphGrid:
        """The full grid of these lengths and batch sizes."""
        sizes = tuple(batch_sizes)
        return cls(GraphShape(length, size) for length in lengths_tokens for size in sizes)

    def nearest(self, length_tokens: int, requests: int) -> GraphShape | None:
        """The captured shape with the least padding that holds `requests` of up to `length_tokens`; None if none."""
        best: GraphShape | None = None
        for length in self.lengths_tokens[bisect_left(self.lengths_tokens, length_tokens) :]:
            if best is not None and length * requests >= best.length_tokens * best.requests:
                break
            sizes = self._by_length[length]
            at = bisect_left(sizes, requests)
            if at < len(sizes) and (best is None or length * sizes[at] < best.length_tokens * best.requests):
                best = GraphShape(length, sizes[at])
        return best

    def deepest(self, length_tokens: int) -> int | None:
        """Most requests of up to `length_tokens` that a captured shape holds; None if none holds one."""
        sizes = (shape.requests for shape in self.shapes if shape.length_tokens >= length_tokens)
        return max(sizes, default=None)
