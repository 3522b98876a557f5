"""The captured prefill graphs of an instance: a grid of lengths and batch sizes, and the rule that pads a batch to one.

The scheduler's policy and the runner of the graphs ask one and the same grid, so a batch runs on the shape that it was
planned for. Where SGLang's own graphs serve prefills instead, `TokenBuckets` has their rule for the policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple

_SLOTS_FACTOR: Final = 4  # requests of a quarter of the length, on average
_SLOT_TOKENS: Final = 16


class GraphShape(NamedTuple):
    """A captured prefill graph, large enough for `requests` of `length_tokens` new tokens each.

    Tokens are packed, so it also holds more requests than that, shorter ones, up to `slots`.
    """

    length_tokens: int
    requests: int

    @property
    def tokens(self) -> int:
        """Return the tokens that a replay computes, padding included."""
        return self.length_tokens * self.requests

    @property
    def slots(self) -> int:
        """Most requests: an empty one costs the start of its attention in each layer, so there are not many."""
        return min(_SLOTS_FACTOR * self.requests, max(self.requests, self.tokens // _SLOT_TOKENS))


# Up to about this number of tokens a prefill takes the time of reading the weights, so padding is free.
FREE_TOKENS: Final = 256
# As in SGLang's own prefill graphs.
MAX_PADDING_FACTOR: Final = 2
_ANY_REQUESTS: Final = 1 << 30


class Fallback(StrEnum):
    """Describes why a batch runs on the ordinary path although there are graphs. Bounded: these are metric labels."""

    TOO_LARGE = "too_large"  # no shape of the grid holds it
    PADDING = "padding"  # the nearest shape would compute too much in vain
    PREFIXES = "prefixes"  # its cached prefixes are longer in all than the buffer for their slots
    MEMORY = "memory"  # its shape was not captured, the budget being used up
    CAPTURE = "capture"  # the capture of its shape failed
    UNSUPPORTED = "unsupported"  # the request asks for something that a captured pass does not do


class GraphGrid:
    """Captured shapes; without any, every batch runs on the ordinary kernels.

    A shape that turns out to have no room is left out in place, for everybody who holds the grid.
    `max_prefix_tokens`: of all cached prefixes of a batch; `free_tokens`: a shape of up to this size is never too
    large. Raises ValueError for an empty shape.
    """

    def __init__(
        self, shapes: Iterable[GraphShape] = (), max_prefix_tokens: float = inf, free_tokens: int = FREE_TOKENS
    ) -> None:
        self.max_prefix_tokens = max_prefix_tokens
        self.free_tokens: Final = free_tokens
        self._left_out: dict[GraphShape, Fallback] = {}
        self._use(shapes)

    def choose(self, longest_tokens: int, requests: int, new_tokens: int, cached_tokens: int) -> GraphShape | Fallback:
        """Return the shape that a batch is padded to, or the reason for none.

        `longest_tokens`: new tokens of its longest request; `new_tokens` and `cached_tokens`: of all its requests.
        """
        shape = self.nearest(longest_tokens, requests, new_tokens)
        if shape is None:
            return next(
                (
                    why
                    for left_out, why in self._left_out.items()
                    if _holds(left_out, longest_tokens, requests, new_tokens)
                ),
                Fallback.TOO_LARGE,
            )
        if shape.tokens > max(self.free_tokens, MAX_PADDING_FACTOR * new_tokens):
            return Fallback.PADDING
        return shape if cached_tokens <= self.max_prefix_tokens else Fallback.PREFIXES

    def padded_at(self, longest_tokens: int, requests: int, new_tokens: int, cached_tokens: int) -> int:
        """Choose, for frequent callers: the position in `by_tokens`, or -1: the batch runs on ordinary kernels."""
        tokens = self.tokens
        lengths = self.lengths
        slots = self.slots
        for at in range(bisect_left(tokens, new_tokens), len(tokens)):
            if lengths[at] >= longest_tokens and slots[at] >= requests:
                if tokens[at] > self.free_tokens and tokens[at] > MAX_PADDING_FACTOR * new_tokens:
                    return -1
                return at if cached_tokens <= self.max_prefix_tokens else -1
        return -1

    def bucket(self, length_tokens: int) -> int:
        """Return how many of the captured lengths are shorter than this one."""
        return self._buckets[length_tokens] if length_tokens < len(self._buckets) else len(self.lengths_tokens)

    def leave_out(self, shape: GraphShape, reason: Fallback = Fallback.MEMORY) -> None:
        """Pad no batch to this shape from now on; `choose` gives the reason for batches that it would hold."""
        if shape in self.shapes:
            self._left_out[shape] = reason
            self._use(set(self.shapes) - {shape})

    def left_out_reason(self, shape: GraphShape) -> Fallback | None:
        """None for a shape that was not."""
        return self._left_out.get(shape)

    def nearest(self, longest_tokens: int, requests: int, new_tokens: int) -> GraphShape | None:
        """The captured shape with the least padding that holds such a batch; None if none. Of two, the shorter."""
        for at in range(bisect_left(self.tokens, new_tokens), len(self.tokens)):
            if self.lengths[at] >= longest_tokens and self.slots[at] >= requests:
                return self.by_tokens[at]
        return None

    def deepest(self, length_tokens: int) -> int | None:
        """Most requests of up to `length_tokens` that a captured shape has slots for; None if none holds one."""
        at = bisect_left(self.lengths_tokens, length_tokens)
        return self._deepest[at] if at < len(self._deepest) else None

    def depths(self, max_requests: int) -> list[int]:
        """Numbers of requests that a batch can aim at: the captured ones, or powers of two."""
        if self.lengths_tokens:
            captured = sorted({shape.requests for shape in self.shapes if shape.requests <= max_requests})
            return captured or [max_requests]
        return sorted({1 << power for power in range(max_requests.bit_length())} | {max_requests})

    def _use(self, shapes: Iterable[GraphShape]) -> None:
        unique = sorted(set(shapes))
        for shape in unique:
            if shape.length_tokens < 1 or shape.requests < 1:
                raise ValueError(f"a captured shape holds at least one token of one request, got {shape}")
        self.shapes = tuple(unique)
        self.lengths_tokens = sorted({shape.length_tokens for shape in unique})
        self._deepest = [
            max(shape.slots for shape in unique if shape.length_tokens >= length) for length in self.lengths_tokens
        ]
        self.by_tokens = sorted(unique, key=lambda shape: (shape.tokens, shape.length_tokens))
        self.tokens = [shape.tokens for shape in self.by_tokens]  # of a replay; in this order, as are the next two
        self.lengths = [shape.length_tokens for shape in self.by_tokens]
        self.slots = [shape.slots for shape in self.by_tokens]
        longest_tokens = self.lengths_tokens[-1] if unique else 0
        self._buckets = [bisect_left(self.lengths_tokens, tokens) for tokens in range(longest_tokens + 1)]


class TokenBuckets(GraphGrid):
    """Graphs by number of tokens, as SGLang captures its own: a batch of any lengths is padded to the next bucket, if
    that has at most twice its tokens.

    `max_requests`: places for requests in a graph. Raises ValueError for an empty bucket.
    """

    def __init__(self, buckets_tokens: Iterable[int], max_requests: int = _ANY_REQUESTS) -> None:
        self.max_requests: Final = max_requests
        super().__init__([GraphShape(tokens, 1) for tokens in buckets_tokens], free_tokens=0)

    def _use(self, shapes: Iterable[GraphShape]) -> None:
        super()._use(shapes)
        # Lengths and numbers of requests do not decide.
        self.lengths_tokens = []
        self._deepest = []
        self._buckets = []
        self.slots = [self.max_requests] * len(self.tokens)


def _holds(shape: GraphShape, longest_tokens: int, requests: int, new_tokens: int) -> bool:
    return shape.length_tokens >= longest_tokens and shape.slots >= requests and shape.tokens >= new_tokens
