"""The least time that a prefill can take: reading what it must read, or computing what it must compute.

    floor = max(bytes / read bandwidth, operations / rate of dense bfloat16 products)

Both ceilings are measured in the run that uses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Ceilings(NamedTuple):
    """Of the device, as measured."""

    read_bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Shape:
    """A dense decoder with grouped-query attention and a gated network, without biases' few bytes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool = False
    element_bytes: int = 2

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def body_parameters(self) -> int:
        """Matrices that every token goes through."""
        attended = self.hidden * self.hidden * 2 + self.hidden * self.kv_heads * self.head_size * 2
        return self.layers * (attended + 3 * self.hidden * self.intermediate)

    @property
    def head_parameters(self) -> int:
        """The matrix that the last token of each request goes through."""
        return self.hidden * self.vocabulary

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * self.element_bytes


def prefill_bytes(shape: Shape, length_tokens: int, requests: int, prefix_tokens: int = 0) -> float:
    """Weights once, prefixes' KV read, new KV written, the rows of the embedding."""
    tokens = length_tokens * requests
    weights = (shape.body_parameters + shape.head_parameters) * shape.element_bytes
    kv = (requests * prefix_tokens + tokens) * shape.kv_bytes_per_token
    return weights + kv + tokens * shape.hidden * shape.element_bytes


def prefill_operations(shape: Shape, length_tokens: int, requests: int, prefix_tokens: int = 0) -> float:
    """Two per parameter and token; scores and weighted sums over what each token sees."""
    tokens = length_tokens * requests
    products = 2.0 * (tokens * shape.body_parameters + requests * shape.head_parameters)
    seen = requests * (length_tokens * prefix_tokens + length_tokens * (length_tokens + 1) / 2)
    return products + 4.0 * seen * shape.hidden * shape.layers


def floor_s(shape: Shape, ceilings: Ceilings, length_tokens: int, requests: int, prefix_tokens: int = 0) -> float:
    """Seconds of a batch of `requests` prompts of `length_tokens` new tokens each."""
    return max(
        prefill_bytes(shape, length_tokens, requests, prefix_tokens) / ceilings.read_bytes_per_s,
        prefill_operations(shape, length_tokens, requests, prefix_tokens) / ceilings.operations_per_s,
    )
