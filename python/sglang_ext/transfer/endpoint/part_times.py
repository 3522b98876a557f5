"""Describes when the parts of one transfer were there and had been written, and what that says of ranges of layers.

Kept only where a request is traced. Times are those of the endpoint's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

MAX_RANGES = 48  # of one transfer
MAX_RANGES_OF_TOKENS = 8  # of tokens that were computed together


class PartTime(NamedTuple):
    """Some layers of some tokens of one chunk that was offered."""

    chunk: int
    first_token: int  # place in the chunk
    token_count: int
    first_layer: int
    layer_count: int
    ready_s: float
    written_s: float


class LayerRange(NamedTuple):
    """Consecutive layers of tokens that were computed together: from the first part to be there to the last written."""

    token_count: int
    first_layer: int
    layer_count: int
    ready_s: float
    written_s: float


def layer_ranges(parts: Iterable[PartTime]) -> list[LayerRange]:
    """Return ranges of about as many parts each, by time; at most `MAX_RANGES`.

    Parts of one layer come one by one and are joined; a part of all layers is a range of its own.
    """
    together: dict[tuple[int, int, int], list[PartTime]] = {}
    for part in parts:
        if part.token_count:
            together.setdefault((part.chunk, part.first_token, part.token_count), []).append(part)
    most = max(1, min(MAX_RANGES_OF_TOKENS, MAX_RANGES // max(1, len(together))))
    ranges: list[LayerRange] = []
    for same in together.values():
        same.sort(key=lambda part: part.first_layer)
        size = -(-len(same) // most)
        ranges += [_joined(same[first : first + size]) for first in range(0, len(same), size)]
    return sorted(ranges, key=lambda layer_range: (layer_range.ready_s, layer_range.first_layer))


def _joined(parts: list[PartTime]) -> LayerRange:
    first, last = parts[0], parts[-1]
    return LayerRange(
        first.token_count,
        first.first_layer,
        last.first_layer + last.layer_count - first.first_layer,
        min(part.ready_s for part in parts),
        max(part.written_s for part in parts),
    )
